"""Several pretraining runs beside each other: curves on one axis, last figures, what differs between their recipes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from octjepa.report.contents import Training
from octjepa.report.figures.curves import best_baseline, compared_charts


def compare_runs(runs: Sequence[Training]) -> dict[str, Any]:
    """{charts, runs, labels, differences, different_data} of at least two runs."""
    labels = run_labels(runs)
    return {
        "charts": compared_charts([(label, run.lines) for label, run in zip(labels, runs, strict=True)]),
        "runs": [_last_figures(label, run) for label, run in zip(labels, runs, strict=True)],
        "labels": labels,
        "differences": recipe_differences(
            [flat(run.recipe.model_dump(mode="json")) if run.recipe else {} for run in runs]
        ),
        "different_data": len({run.about.get("data_hash") for run in runs}) > 1,
    }


def run_labels(runs: Sequence[Training]) -> list[str]:
    """The name of each run's folder, with a number where two have the same one."""
    names = [run.path.name for run in runs]
    return [f"{name} ({position + 1})" if names.count(name) > 1 else name for position, name in enumerate(names)]


def _last_figures(label: str, run: Training) -> dict[str, Any]:
    updates, validations = run.lines_with("train/loss"), run.lines_with("val/loss")
    last: Mapping[str, Any] = validations[-1] if validations else {}
    return {
        "label": label,
        "updates": updates[-1]["update"] if updates else 0,
        "loss": last.get("val/loss"),
        "cosine": last.get("val/cosine"),
        "baseline": best_baseline("val/baseline/", validations),
        "rankme": last.get("val/rankme"),
    }


def flat(settings: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Nested settings as {"model.size": "small", ...}."""
    found: dict[str, str] = {}
    for key, value in settings.items():
        if isinstance(value, Mapping):
            found |= flat(value, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = str(value)
    return found


def recipe_differences(recipes: Sequence[Mapping[str, str]]) -> list[tuple[str, list[str]]]:
    """(key, value of each recipe) of keys whose values differ; an absent key is "-"."""
    keys = list(dict.fromkeys(key for recipe in recipes for key in recipe))
    rows = [(key, [recipe.get(key, "-") for recipe in recipes]) for key in keys]
    return [(key, values) for key, values in rows if len(set(values)) > 1]
