"""Differences between rows of the study: paired by person on the same draws, and only once every seed is there."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from benchmarks.study.one import COPIES
from benchmarks.study.pairs import pairs, read_pairs, told_interval, write_pairs
from benchmarks.study.plan import Chosen, Settings
from benchmarks.study.results import Results, row

METRIC, PEOPLE = "lesion_auroc_macro", 180


def put(results: Results, runs: Path, arm: str, seed: int, value: float, copies: np.ndarray, eyes: str = "e") -> None:
    run = f"{arm}-{seed}"
    results.add(run, {"ended": "now", "eyes_hash": eyes}, [row(arm, seed, METRIC, value, None, None, 360, run)])
    (runs / run).mkdir(parents=True)
    np.savez(runs / run / COPIES, **{METRIC: copies.astype(np.float32)})


def found_of(pair: tuple[str, str | None], given: list[dict[str, object]]) -> dict[str, object] | None:
    return next((one for one in given if (one["arm"], one["minus"]) == pair), None)


def test_a_difference_is_paired_by_person_and_waits_for_every_seed(tmp_path: Path) -> None:
    rng, settings = np.random.default_rng(0), Settings(seeds=(0, 1, 2))
    people = rng.normal(0, 0.03, 2000)  # who was drawn moves both arms alike
    results, runs = Results(tmp_path), tmp_path / "runs"
    for seed, (ours, theirs) in enumerate([(0.70, 0.65), (0.71, 0.66), (0.69, 0.64)]):
        assert pairs(results, runs, settings, Chosen(), PEOPLE) == []
        put(results, runs, "vjepa", seed, ours, ours + people + rng.normal(0, 0.001, 2000))
        put(results, runs, "untrained", seed, theirs, theirs + people + rng.normal(0, 0.001, 2000))
    write_pairs(tmp_path, pairs(results, runs, settings, Chosen(), PEOPLE))
    made = read_pairs(tmp_path)
    both, alone = found_of(("vjepa", "untrained"), made), found_of(("vjepa", None), made)
    assert both is not None
    assert alone is not None
    assert both["value"] == pytest.approx(0.05)
    assert both["high"] - both["low"] < 0.01 < 0.1 < alone["high"] - alone["low"]  # type: ignore[operator]
    assert both["recipe_high"] - both["recipe_low"] > both["high"] - both["low"]  # type: ignore[operator]
    assert (both["n_people"], both["seeds"]) == (PEOPLE, 3)
    low, high = both["recipe_low"], both["recipe_high"]
    assert told_interval(made, "vjepa", "untrained", METRIC) == f" ({low:.3f} to {high:.3f})"
    assert told_interval(made, "mae", "untrained", METRIC) == ""


def test_runs_on_other_eyes_are_not_compared(tmp_path: Path) -> None:
    results, copies = Results(tmp_path), np.linspace(0.6, 0.7, 200)
    for arm, eyes in (("vjepa", "these"), ("untrained", "others")):
        for seed in (0, 1):
            put(results, tmp_path / "runs", arm, seed, 0.65, copies, eyes)
    with pytest.raises(Exception, match="label"):
        pairs(results, tmp_path / "runs", Settings(seeds=(0, 1)), Chosen(), PEOPLE)


def test_a_finalist_is_compared_with_the_main_row_at_the_main_rows_seeds(tmp_path: Path) -> None:
    settings, chosen = Settings(seeds=(0, 1), ablation_seeds=(0,)), Chosen("mae", "vjepa", ("masks_runs",))
    results, copies = Results(tmp_path), np.linspace(0.6, 0.7, 200)
    for seed in (0, 1):
        put(results, tmp_path / "runs", "vjepa", seed, 0.65, copies)
        assert (
            found_of(("vjepa:masks_runs:full", "vjepa"), pairs(results, tmp_path / "runs", settings, chosen, 9)) is None
        )
        put(results, tmp_path / "runs", "vjepa:masks_runs:full", seed, 0.66, copies + 0.01)
    made = found_of(("vjepa:masks_runs:full", "vjepa"), pairs(results, tmp_path / "runs", settings, chosen, PEOPLE))
    assert made is not None
    assert (made["seeds"], round(made["value"], 4)) == (2, 0.01)  # type: ignore[call-overload]
