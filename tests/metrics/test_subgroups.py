"""A group that is served worse is seen; one that cannot be measured is named."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn.metrics import roc_auc_score

from octjepa.evaluate.subgroups import subgroup_scores
from octjepa.metrics.bootstrap import Draws
from octjepa.metrics.scores import Predictions


def _made(n: int = 400) -> tuple[Predictions, np.ndarray, list[str]]:
    rng = np.random.default_rng(0)
    group = np.array(["a", "b"])[np.arange(n) // 2 % 2]
    truth = rng.permutation(np.arange(n) % 2)
    score = np.where(group == "a", 2.5, 0.3) * truth + rng.normal(size=n)
    both = np.stack([-score, score], 1)
    return Predictions(truth, both, both), group, [str(index // 2) for index in range(n)]


def test_groups_and_the_scaled_figure_by_hand() -> None:
    predicted, group, people = _made()
    found = subgroup_scores("auroc", predicted, group, Draws(people, 300, 0), people, "h")
    whole = roc_auc_score(predicted.truth, predicted.scores[:, 1])
    parts = {
        name: roc_auc_score(predicted.truth[group == name], predicted.scores[group == name, 1]) for name in ("a", "b")
    }
    assert {name: one.value for name, one in found.groups.items()} == pytest.approx(parts)
    expected = whole / (1 + sum(abs(whole - one) for one in parts.values()))
    assert found.scaled.value == pytest.approx(expected)
    assert found.scaled.interval().low < expected < found.scaled.interval().high < whole
    assert found.groups["a"].interval().low > found.groups["b"].interval().high
    assert found.left_out == {}


@pytest.mark.parametrize("metric", ["r2", "quadratic_kappa", "mean_absolute_error", "ece"])
def test_figures_that_inequality_could_flatter_are_not_scaled(metric: str) -> None:
    """R2 of -1.4 in unequal groups, divided by how unequal, would look better than -1.7 in equal ones."""
    predicted, group, people = _made()
    if metric in ("r2", "mean_absolute_error"):
        predicted = Predictions(predicted.truth.astype(float), predicted.scores[:, 1:], predicted.scores[:, 1:])
    found = subgroup_scores(metric, predicted, group, Draws(people, 20, 0), people, "h")
    assert set(found.groups) == {"a", "b"}
    assert found.scaled is None


def test_groups_that_cannot_be_measured_are_named() -> None:
    predicted, group, people = _made()
    group = group.astype("<U9")
    group[:4] = "tiny"
    group[np.flatnonzero(predicted.truth == 1)[-30:]] = ""
    found = subgroup_scores("auroc", predicted, group, Draws(people, 50, 0), people, "h")
    assert set(found.groups) == {"a", "b"}
    assert found.left_out["tiny"].startswith("2 test people")
    assert "classes are missing" in found.left_out["unknown"]
    one = subgroup_scores("auroc", predicted, np.array(["a"] * 400), Draws(people, 50, 0), people, "h")
    assert one.scaled is None
