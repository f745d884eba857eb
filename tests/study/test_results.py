"""Results are a flat list of figures, kept whole, and the best arm is chosen on validation people."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from benchmarks.study.aims import aims
from benchmarks.study.page import page, write_page
from benchmarks.study.plan import ABLATIONS, LATENT, Chosen, Settings, all_entries
from benchmarks.study.results import Results, best_arm, check, chosen, row

from octjepa.errors import OctjepaError

ROOT = Path(__file__).resolve().parents[2]
ABOUT = {"ended": "2026-01-01T00:00:00+00:00"}


def add(results: Results, arm: str, seed: int, metric: str, value: float, run: str = "r") -> None:
    results.add(run, ABOUT, [row(arm, seed, metric, value, value - 0.1, value + 0.1, 10, run)])


def test_a_newer_figure_takes_the_place_of_the_older_and_its_run_is_forgotten(tmp_path: Path) -> None:
    results = Results(tmp_path)
    add(results, "vjepa", 0, "layer_dice", 0.5, "old")
    add(results, "vjepa", 0, "lesion_dice", 0.3, "other")
    add(results, "vjepa", 0, "layer_dice", 0.7, "new")
    again = Results(tmp_path)
    assert again.values("vjepa", "layer_dice") == {0: 0.7}
    assert set(again.runs) == {"other", "new"} == again.done()
    assert json.loads((tmp_path / "results.json").read_text())[0] == {
        "arm": "vjepa", "seed": 0, "metric": "layer_dice", "value": 0.7, "low": pytest.approx(0.6),
        "high": pytest.approx(0.8), "n": 10, "run": "new",
    }  # fmt: skip


def test_what_is_not_finite_is_null() -> None:
    assert row("a", 0, "m", float("nan"), None, float("inf"), 3, "r")["value"] is None
    assert row("a", 0, "m", 0.5, None, float("inf"), 3, "r")["high"] is None


@pytest.mark.parametrize(
    ("change", "told"),
    [({"n": "3"}, "n holds '3'"), ({"value": True}, "value"), ({"more": 1}, "exactly the fields"), ({}, "twice")],
)
def test_damaged_results_are_refused_by_name(tmp_path: Path, change: dict[str, object], told: str) -> None:
    good = row("a", 0, "m", 0.5, None, None, 3, "r")
    (tmp_path / "results.json").write_text(json.dumps([good, {**good, **change}]))
    with pytest.raises(OctjepaError, match=told):
        Results(tmp_path)


def test_the_best_arm_is_that_of_validation_people_once_every_seed_is_there(tmp_path: Path) -> None:
    results = Results(tmp_path)
    for seed, (ours, theirs) in enumerate([(0.8, 0.7), (0.6, 0.75)]):
        add(results, "vjepa", seed, "lesion_auroc_macro_val", ours, f"a{seed}")
        add(results, "mae", seed, "lesion_auroc_macro", 0.99, f"t{seed}")
        assert best_arm(results, ["vjepa", "mae"], [0, 1]) is None
        add(results, "mae", seed, "lesion_auroc_macro_val", theirs, f"b{seed}")
    assert best_arm(results, ["vjepa", "mae"], [0, 1]) == "mae"
    assert best_arm(results, ["vjepa", "mae"], [0]) == "vjepa"


def test_ablations_are_of_the_best_arm_that_predicts_features(tmp_path: Path) -> None:
    results, settings = Results(tmp_path), Settings(seeds=(0,))
    for arm, value in {"vjepa": 0.6, "vjepa_dense": 0.7, "normalized_mse": 0.5}.items():
        assert chosen(results, settings) == Chosen()
        add(results, arm, 0, "lesion_auroc_macro_val", value, arm)
    assert chosen(results, settings) == Chosen(None, "vjepa_dense")
    add(results, "mae", 0, "lesion_auroc_macro_val", 0.9, "mae")
    assert chosen(results, settings) == Chosen("mae", "vjepa_dense")
    assert "mae" not in LATENT


def test_what_validation_people_prefer_with_every_seed_goes_on_to_the_main_budget(tmp_path: Path) -> None:
    results, settings = Results(tmp_path), Settings(seeds=(0, 1), ablation_seeds=(0, 1))
    for arm in ("vjepa", "vjepa_dense", "normalized_mse"):
        for seed in (0, 1):
            add(results, arm, seed, "lesion_auroc_macro_val", 0.8 if arm == "vjepa" else 0.7, f"{arm}{seed}")
    gains = {"masks_runs": (0.01, 0.02), "masks_blocks": (0.2, -0.01), "sigreg": (0.1, 0.0)}
    for seed in (0, 1):
        for word in ABLATIONS:
            assert chosen(results, settings).finalists == ()
            value = 0.6 + 0.1 * seed + gains.get(word, (-0.1, -0.1) if word != "reference" else (0, 0))[seed]
            add(results, f"vjepa:{word}", seed, "lesion_auroc_macro_val", value, f"{word}{seed}")
            add(results, f"vjepa:{word}", seed, "lesion_auroc_macro", 0.99, f"{word}{seed}")  # tells, does not choose
    known = chosen(results, settings)
    assert known == Chosen(None, "vjepa", ("masks_runs",))
    entries = [entry for entry in all_entries(settings, known, real=False) if entry.group == "finalist"]
    assert [(entry.arm, entry.seed, entry.budget) for entry in entries] == [
        ("vjepa:masks_runs:full", seed, settings.budget) for seed in (0, 1)
    ]
    assert entries[0].overrides[1:] == ABLATIONS["masks_runs"]
    add(results, "vjepa:masks_runs:full", 0, "lesion_auroc_macro", 0.7, "full")
    assert "| vjepa:masks_runs:full | 0.700 (" in page(results, settings)


def test_an_aim_is_met_or_missed_once_every_seed_is_there_and_in_doubt_where_they_differ(tmp_path: Path) -> None:
    def verdict(name: str) -> str:
        return next(line for line in aims(results, [], "vjepa", [0, 1], [0, 1]).splitlines() if name in line)

    results = Results(tmp_path)
    add(results, "vjepa", 0, "lesion_auroc_macro", 0.95, "a")
    assert verdict("frozen") == "| vjepa, frozen: lesion AUROC | 0.950 | at least 0.90 | 1 of 2 seeds |"
    add(results, "vjepa", 1, "lesion_auroc_macro", 0.87, "b")
    assert verdict("frozen").endswith("| 0.910 [0.870, 0.950] | at least 0.90 | met, not by every seed |")
    for seed, value in enumerate((0.85, 0.84)):
        add(results, "mae", seed, "lesion_auroc_macro", value, f"m{seed}")
        add(results, "untrained", seed, "lesion_auroc_macro", value - 0.1, f"u{seed}")
    assert verdict("minus mae").endswith("| 0.065 [0.030, 0.100] | at least 0.05 | met, not by every seed |")
    assert verdict("untrained").endswith("| 0.745 [0.740, 0.750] | at most 0.65 | missed |")
    assert verdict("third of them").endswith("| missing | at most 0.01 | 0 of 2 seeds |")


def test_the_page_names_what_is_missing_and_shows_spread_over_seeds(tmp_path: Path) -> None:
    results = Results(tmp_path)
    for seed, value in enumerate((0.6, 0.7, 0.8)):
        add(results, "vjepa", seed, "lesion_auroc_macro", value, f"r{seed}")
    write_page(results, Settings(), tmp_path)
    text = (tmp_path / "README.md").read_text()
    assert "| vjepa | 0.700 [0.600, 0.800] | missing |" in text
    assert "| mae | missing |" in text
    assert "| majority |" in text
    assert "Not run yet:** vjepa, vjepa_dense" in text  # it lacks its other figures
    assert text.count("| r1 |") == 1
    assert (tmp_path / "lesions.svg").read_text().count("<circle") == 3


def test_an_ablation_stands_beside_the_reference_of_its_own_seed(tmp_path: Path) -> None:
    results, settings = Results(tmp_path), Settings(seeds=(0,))
    for arm in ("vjepa", "vjepa_dense", "normalized_mse", "mae"):
        add(results, arm, 0, "lesion_auroc_macro_val", 0.8 if arm == "vjepa" else 0.7, arm)
    for seed, (reference, changed) in enumerate([(0.6, 0.7), (0.9, 0.85)]):
        add(results, "vjepa:reference", seed, "lesion_auroc_macro", reference, f"r{seed}")
        add(results, "vjepa:tokens_all", seed, "lesion_auroc_macro", changed, f"a{seed}")
    write_page(results, settings, tmp_path)
    row = next(line for line in (tmp_path / "README.md").read_text().splitlines() if "| vjepa:tokens_all |" in line)
    assert row == "| vjepa:tokens_all | 0 | missing | +0.025 [-0.050, +0.100] | missing | missing |"


def test_the_committed_results_keep_the_contract_and_the_page_is_theirs() -> None:
    folder = ROOT / "docs" / "study"
    results = Results(folder)
    check(results.rows, "docs/study")
    assert {one["run"] for one in results.rows} <= set(results.runs)
    assert (folder / "README.md").read_text(encoding="utf-8") == page(results, Settings())
