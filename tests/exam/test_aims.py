"""What was aimed at, met or missed: by the rows that cut the same patches."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from benchmarks.exam.aims import aims_lines
from benchmarks.exam.plots import _floor, _points
from benchmarks.exam.results import NO_PATCH, SUPERVISED, UNTRAINED, Finding, Results, RowName

from examined_eyes import auroc_of
from octjepa.metrics.bootstrap import Draws

FINE, COARSE = (4, 8, 8), (4, 16, 16)
KEY = "token_lesion/token_ap/30"
PEOPLE = np.array([f"p{number:03d}" for number in range(60)])
TRUTH = np.arange(60) % 2 == 0


def add(results: Results, name: str, patch: tuple[int, int, int], task: str, metric: str, seed: int = 0) -> None:
    """A figure that is 1 for `mae`, and less for other rows, least for fine patches."""
    noise = {"mae": 0.0}.get(name, 6.0 if patch == FINE else 2.0)
    scores = TRUTH + noise * np.random.default_rng(seed).normal(size=60)
    labels = 1 if task == "real_fluid" else 30
    one = auroc_of(TRUTH, scores, Draws(PEOPLE.tolist(), 50, 0), PEOPLE)
    results.add(RowName(name, patch, seed), task, [Finding(task, metric, labels, one)], {"run": "x", "views": 10})


@pytest.mark.parametrize("patch", [FINE, COARSE])
def test_an_encoder_is_compared_with_the_rows_that_cut_its_patches(patch: tuple[int, int, int], tmp_path: Path) -> None:
    results = Results(tmp_path)
    for one in (FINE, COARSE):
        for name in (UNTRAINED, "intensity"):
            add(results, name, one, "token_lesion", "token_ap")
    add(results, "mae", patch, "token_lesion", "token_ap")
    twin = results.value(RowName(UNTRAINED, patch), KEY)
    assert twin is not None
    assert twin != results.value(RowName(UNTRAINED, FINE if patch == COARSE else COARSE), KEY)
    aim, figure, verdict = aims_lines(results, "mae")[0]
    assert aim.startswith("token AP from 30 eyes: 3 times random initialisation")
    assert figure == f"1.000 / {twin:.3f} = {1 / twin:.2f}"
    assert verdict == "missed"  # it is not three times as high
    assert sorted(_points(results, {"mae"}, KEY)) == [(10, twin), (10, 1.0)]
    assert _floor(results, "intensity", KEY) == results.value(RowName("intensity", FINE), KEY)


def test_a_row_that_cuts_no_patches_is_compared_with_all(tmp_path: Path) -> None:
    results = Results(tmp_path)
    add(results, "mae", COARSE, "real_fluid", "dice")
    add(results, SUPERVISED, NO_PATCH, "real_fluid", "dice")
    lines = {aim: verdict for aim, _, verdict in aims_lines(results, "mae")}
    assert lines["real fluid, Dice: above a U-Net, every seed"] == "met"
    assert lines["real fluid, Dice: above random initialisation, every seed"] == "missing"


def test_the_twin_is_compared_by_its_better_pooling_too(tmp_path: Path) -> None:
    results, tasks = Results(tmp_path), ("eye_lesion", "eye_lesion_centered")
    add(results, "mae", FINE, tasks[0], "auroc")
    draws, noise = Draws(PEOPLE.tolist(), 50, 0), np.random.default_rng(1).normal(size=60)
    for task, spread in zip(tasks, (6.0, 2.0), strict=True):
        one = auroc_of(TRUTH, TRUTH + spread * noise, draws, PEOPLE)
        results.add(RowName(UNTRAINED, FINE), task, [Finding(task, "auroc", 30, one)], {"run": "x"})
    twin, better = (results.value(RowName(UNTRAINED, FINE), f"{task}/auroc/30") for task in tasks)
    assert twin is not None
    assert better is not None
    assert twin < better
    figures = {
        aim: figure for aim, figure, _ in aims_lines(results, "mae") if "random initialisation" in aim and "+" in figure
    }
    assert [figure[:6] for figure in figures.values()] == [f"{1 - twin:+.3f}", f"{1 - better:+.3f}"]
    assert "zones_centered" in list(figures)[1]
