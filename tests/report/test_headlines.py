"""Headline results: the words follow the numbers, and the strongest baseline is among them."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from octjepa.cli.output import comparison_lines
from octjepa.evaluate.results import Paired, ProbePaired, Row
from octjepa.report.headlines import TRAINED, TUNED, paired_headline, pretext_headline, strongest_baseline_headline
from octjepa.report.sections import learned_and_trivial_predictors

BASELINES = {"val/baseline/constant": 0.3, "val/baseline/position_mean": 0.5, "val/baseline/copy_nearest": 0.4}


def test_beating_every_predictor_is_reported_with_the_best_of_them() -> None:
    headline = pretext_headline({"val/cosine": 0.61, **BASELINES})
    assert headline.verdict == "good"
    assert "It beats all 3" in headline.sentence
    assert "0.500" in headline.sentence


def test_one_unbeaten_predictor_is_enough_to_fail() -> None:
    headline = pretext_headline({"val/cosine": 0.45, **BASELINES})
    assert headline.verdict == "bad"
    assert "It does not beat position mean." in headline.sentence


@pytest.mark.parametrize("validation", [None, {"val/cosine": 0.5}, {"val/cosine": float("nan"), **BASELINES}])
def test_nothing_is_claimed_without_figures(validation: dict[str, float] | None) -> None:
    assert pretext_headline(validation).verdict == "none"


@pytest.mark.parametrize(
    ("low", "high", "verdict"),
    [(0.001, 0.1, "good"), (0.0, 0.1, "open"), (-0.1, 0.0, "open"), (-0.1, -0.001, "bad"), (None, None, "open")],
)
def test_the_verdict_turns_where_the_interval_meets_zero(low: float | None, high: float | None, verdict: str) -> None:
    headline = paired_headline(Paired(difference=0.05, low=low, high=high), TRAINED)
    assert headline.verdict == verdict
    assert ("excludes zero" in headline.sentence) == (verdict in ("good", "bad"))


@pytest.mark.parametrize(
    ("low", "lower_is_better", "verdict", "words"),
    [
        (0.01, False, "good", "The tuned encoder scores higher than"),
        (0.01, True, "bad", "scores higher than a linear probe on the same encoder frozen, and less is better,"),
        (-0.1, False, "open", "does not show that tuning helped"),
        (-0.1, True, "open", "does not show that tuning helped"),
    ],
)
def test_of_some_metrics_less_is_better(low: float, lower_is_better: bool, verdict: str, words: str) -> None:
    headline = paired_headline(Paired(difference=0.05, low=low, high=0.2), TUNED, lower_is_better)
    assert (headline.title, headline.verdict) == ("Tuned minus frozen", verdict)
    assert words in headline.sentence


def test_few_test_people_conclude_nothing() -> None:
    pair = Paired(difference=0.3, low=0.2, high=0.4, n_people=6)
    headline = paired_headline(pair, TRAINED)
    assert (headline.verdict, headline.too_few_people) == ("open", True)
    assert "6 test people cannot show whether training helped" in headline.sentence
    assert paired_headline(replace(pair, n_people=20), TRAINED).verdict == "good"


def test_a_predictor_that_diverged_has_no_bar_and_comes_last() -> None:
    for diverged in (math.nan, math.inf, -math.inf):
        values: dict[str, float] = {"val/cosine": diverged, **BASELINES, "val/baseline/constant": -0.2}
        shown = [(row.name, row.share) for row in learned_and_trivial_predictors(values)]
        assert shown == [("position_mean", 0.5), ("copy_nearest", 0.4), ("constant", 0.0), ("learned", 0.0)]


def test_a_tie_is_not_reported_as_a_win() -> None:
    centred = {"val_centred/loss": 0.6317, "val_centred/baseline_loss/position_mean": 0.6323}
    sentence = pretext_headline({"val/cosine": 0.61, **BASELINES, **centred}).sentence
    assert "as good as the best of them: loss 0.632 against 0.632" in sentence
    better = pretext_headline({"val/cosine": 0.61, **BASELINES, **centred, "val_centred/loss": 0.5}).sentence
    assert "also beats them: loss 0.500 against 0.632" in better


def test_no_difference_is_not_a_zero() -> None:
    for missing in (None, Paired()):
        assert paired_headline(missing, TRAINED).verdict == "none"


@pytest.mark.parametrize(("centred", "word"), [(0.2, "also beats them"), (0.9, "does not beat them")])
def test_the_centred_figures_stand_beside_the_drawn_ones(centred: float, word: str) -> None:
    drawn = {"val/cosine": 0.9, "val/baseline/position_mean": 0.5}
    found = pretext_headline({**drawn, "val_centred/loss": centred, "val_centred/baseline_loss/position_mean": 0.4})
    assert f"With every view centred it {word}: loss" in found.sentence
    assert "centred" not in pretext_headline(drawn).sentence


def probe_rows(intensity: float, untrained: float = 0.7) -> list[Row]:
    figures = (("small", "linear", "mean", 0.9), ("untrained", "linear", "mean", untrained))
    figures += (("intensity", "linear", "none", intensity), ("majority", "constant", "none", 0.5))
    return [Row(name, "macro", probe, pool, "auroc", value) for name, probe, pool, value in figures]


PAIRED = ProbePaired("small", "macro", "auroc", difference=0.2, probe="linear", pool="mean")


def test_a_stronger_baseline_than_the_untrained_one_has_a_headline_of_its_own() -> None:
    (worse,) = strongest_baseline_headline(probe_rows(intensity=0.941), PAIRED)
    assert (worse.title, worse.figure, worse.verdict) == ("Trained minus intensity", "−0.041", "bad")
    assert "The strongest baseline is intensity with 0.941; the trained encoder has 0.900." in worse.sentence
    (better,) = strongest_baseline_headline(probe_rows(intensity=0.8), PAIRED)
    assert (better.figure, better.verdict) == ("+0.100", "open")
    assert "No interval of their difference was measured" in better.sentence
    assert strongest_baseline_headline(probe_rows(intensity=0.6), PAIRED) == []
    assert strongest_baseline_headline(probe_rows(intensity=0.8), None) == []


def test_page_and_terminal_compare_rows_of_the_same_probe_and_pooling() -> None:
    """A baseline that is stronger with another probe or pooling was the page's claim and not the terminal's."""
    rows = probe_rows(intensity=0.8)
    (intensity,) = (row for row in rows if row.name == "intensity")
    others = [
        replace(intensity, probe="knn", pool="mean", value=0.97),
        replace(intensity, pool="mean_std_max", value=0.96),
        replace(intensity, probe="knn", value=0.95),
    ]
    (headline,) = strongest_baseline_headline([*others, *rows], PAIRED)
    assert headline.figure == "+0.100"
    (_, *columns), line = comparison_lines([row.to_json() for row in [*others, *rows]], ["auroc"], PAIRED.to_json())
    assert line[1 + columns.index("intensity")] == "0.800"


def test_a_measured_difference_to_the_strongest_baseline_is_used() -> None:
    pair = replace(PAIRED, reference="intensity", difference=0.1, low=0.02, high=0.18)
    (headline,) = strongest_baseline_headline(probe_rows(intensity=0.8), PAIRED, [pair])
    assert (headline.figure, headline.verdict) == ("+0.100", "good")
    assert "scores higher than intensity, the strongest baseline, by 0.100" in headline.sentence
