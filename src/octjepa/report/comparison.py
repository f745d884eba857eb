"""Several pretraining runs next to each other: curves on one axis, last values, what differs between their recipes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

from octjepa.report.contents import Training
from octjepa.report.figures.curves import Chart, best_baseline, compared_charts


@dataclass(frozen=True)
class LastValues:
    """A run's updates so far, and the values of its last validation; None without a validation.

    baseline: cosine of the best trivial predictor.
    """

    label: str
    updates: int
    loss: float | None
    cosine: float | None
    baseline: float | None
    rankme: float | None


@dataclass(frozen=True)
class RunComparison:
    """Several runs next to each other.

    charts: of the curves, as drawings. labels: of the runs. differences: (key, value in each recipe) of recipe keys
    that differ. different_data: whether the runs had different training volumes.
    """

    charts: Sequence[tuple[Chart, Markup]]
    runs: tuple[LastValues, ...]
    labels: list[str]
    differences: list[tuple[str, list[str]]]
    different_data: bool


def compare_runs(runs: Sequence[Training]) -> RunComparison:
    """The comparison of at least two runs."""
    labels = run_labels(runs)
    return RunComparison(
        charts=compared_charts([(label, run.lines) for label, run in zip(labels, runs, strict=True)]),
        runs=tuple(_last_values(label, run) for label, run in zip(labels, runs, strict=True)),
        labels=labels,
        differences=recipe_differences(
            [flat(run.recipe.model_dump(mode="json")) if run.recipe else {} for run in runs]
        ),
        different_data=len({run.about.get("data_hash") for run in runs}) > 1,
    )


def run_labels(runs: Sequence[Training]) -> list[str]:
    """The name of each run's folder, with a number where two have the same one."""
    names = [run.path.name for run in runs]
    return [f"{name} ({position + 1})" if names.count(name) > 1 else name for position, name in enumerate(names)]


def _last_values(label: str, run: Training) -> LastValues:
    updates, validations = run.lines_with("train/loss"), run.lines_with("val/loss")
    last: Mapping[str, Any] = validations[-1] if validations else {}
    return LastValues(
        label,
        updates[-1]["update"] if updates else 0,
        last.get("val/loss"),
        last.get("val/cosine"),
        best_baseline("val/baseline/", validations),
        last.get("val/rankme"),
    )


def flat(settings: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Nested settings as {"model.size": "small", ...}."""
    values: dict[str, str] = {}
    for key, value in settings.items():
        if isinstance(value, Mapping):
            values |= flat(value, f"{prefix}{key}.")
        else:
            values[f"{prefix}{key}"] = str(value)
    return values


def recipe_differences(recipes: Sequence[Mapping[str, str]]) -> list[tuple[str, list[str]]]:
    """(key, value of each recipe) of keys whose values differ; an absent key is "-"."""
    keys = list(dict.fromkeys(key for recipe in recipes for key in recipe))
    rows = [(key, [recipe.get(key, "-") for recipe in recipes]) for key in keys]
    return [(key, values) for key, values in rows if len(set(values)) > 1]
