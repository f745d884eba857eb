"""Sentences and figures: the words follow the numbers, a missing number is a dash, a path is cut."""

from __future__ import annotations

from pathlib import Path

import pytest

from octjepa.report import wording

BASELINES = {"val/baseline/constant": 0.3, "val/baseline/position_mean": 0.5, "val/baseline/copy_nearest": 0.4}


def test_beating_every_predictor_is_said_with_the_best_of_them() -> None:
    finding = wording.pretext({"val/cosine": 0.61, **BASELINES})
    assert finding.verdict == "good"
    assert "It beats all 3" in finding.sentence
    assert "0.500" in finding.sentence


def test_one_unbeaten_predictor_is_enough_to_fail() -> None:
    finding = wording.pretext({"val/cosine": 0.45, **BASELINES})
    assert finding.verdict == "bad"
    assert "It does not beat position mean." in finding.sentence


@pytest.mark.parametrize("validation", [None, {"val/cosine": 0.5}, {"val/cosine": float("nan"), **BASELINES}])
def test_nothing_is_claimed_without_figures(validation: dict[str, float] | None) -> None:
    assert wording.pretext(validation).verdict == "none"


@pytest.mark.parametrize(
    ("low", "high", "verdict"),
    [(0.001, 0.1, "good"), (0.0, 0.1, "open"), (-0.1, 0.0, "open"), (-0.1, -0.001, "bad"), (None, None, "open")],
)
def test_the_verdict_turns_where_the_interval_meets_zero(low: float | None, high: float | None, verdict: str) -> None:
    finding = wording.paired({"difference": 0.05, "low": low, "high": high})
    assert finding.verdict == verdict
    assert ("excludes zero" in finding.sentence) == (verdict in ("good", "bad"))


@pytest.mark.parametrize(
    ("low", "lower_is_better", "verdict", "said"),
    [
        (0.01, False, "good", "The tuned encoder scores higher than"),
        (0.01, True, "bad", "scores higher than a linear probe on the same encoder frozen, and less is better,"),
        (-0.1, False, "open", "does not show that tuning helped"),
        (-0.1, True, "open", "does not show that tuning helped"),
    ],
)
def test_of_some_metrics_less_is_better(low: float, lower_is_better: bool, verdict: str, said: str) -> None:
    finding = wording.tuned({"difference": 0.05, "low": low, "high": 0.2}, lower_is_better)
    assert (finding.title, finding.verdict) == ("Tuned minus frozen", verdict)
    assert said in finding.sentence


def test_no_difference_is_not_a_zero() -> None:
    for missing in (None, {}, {"difference": None}):
        assert wording.paired(missing).verdict == "none"
    assert wording.number(None) == wording.number(float("nan")) == "–"
    assert wording.number(-0.0421) == "−0.042"


def test_paths_are_cut_to_their_last_part() -> None:
    root = Path("/srv/someone/demo")
    told = wording.without_paths(
        "/srv/someone/demo/run lacks it; see /data/share/eyes/a.dcm, 1/2 and C:\\data\\b.dcm", root
    )
    assert told == "demo/run lacks it; see …/a.dcm, 1/2 and …/b.dcm"
    assert wording.file_name("tree/1001/a.dcm") == "tree/1001/a.dcm"
    assert wording.file_name("/x/y/z/1001/a.dcm") == "…/z/1001/a.dcm"
    assert wording.file_name("/x/y/z/1001/a.dcm", "/x/y") == "z/1001/a.dcm"


def test_durations() -> None:
    assert [wording.duration(s) for s in (None, 3.21, 75, 3725)] == ["–", "3.2 s", "1 min 15 s", "1 h 02 min"]


@pytest.mark.parametrize(("centred", "word"), [(0.2, "also"), (0.9, "not")])
def test_the_centred_figures_stand_beside_the_drawn_ones(centred: float, word: str) -> None:
    drawn = {"val/cosine": 0.9, "val/baseline/position_mean": 0.5}
    found = wording.pretext({**drawn, "val_centred/loss": centred, "val_centred/baseline_loss/position_mean": 0.4})
    assert f"With every view centred it does so {word}: loss" in found.sentence
    assert "centred" not in wording.pretext(drawn).sentence
