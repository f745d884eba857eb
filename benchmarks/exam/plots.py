"""Plots of the exam: figures against the views that an encoder was pretrained on, floors as lines."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from benchmarks.svg import save_svg

from octjepa.config import load_recipe

from .results import UNTRAINED, Results, RowName
from .settings import RECIPE
from .training import Plan, first_plan, read_plans

if TYPE_CHECKING:
    from matplotlib.axes import Axes

CURVES = (
    ("token_lesion/token_ap/30", "token AP, 30 eyes"),
    ("eye_lesion_centered/auroc/30", "AUROC of an eye, 30 people"),
    ("eye_lesion_centered/auroc/all", "AUROC of an eye, all people"),
    ("surfaces/error_um/30", "error of surfaces in um, 30 eyes"),
    ("severity/r2_central_thickness_um/100", "R2 of central thickness, 100"),
    ("same_eye/top_1/0", "same eye, top-1"),
)
FLOORS = {"intensity": "--", "raw_patches": ":"}


def plot_compute(results: Results, path: Path) -> None:
    """A panel for each of `CURVES`: a mark for each run at its views, its untrained twins at the left."""
    from matplotlib.figure import Figure

    curves = _curves(results)
    figure = Figure(figsize=(10, 6), layout="constrained")
    for axes, (key, heading) in zip(figure.subplots(2, 3).flat, CURVES, strict=True):
        for number, (name, encoders) in enumerate(curves.items()):
            points = sorted(_points(results, encoders, key))
            if any(views for views, _ in points):
                views, values = np.array(points).T
                axes.plot(views, values, "os^DvP*X"[number % 8], color=f"C{number}", label=name)
                means = [values[views == one].mean() for one in np.unique(views)]
                axes.plot(np.unique(views), means, color=f"C{number}", lw=1)
        for number, (plan, first) in enumerate(_started()):
            _plot_started(axes, results, plan, first, key, f"C{len(curves) + number}")
        for floor, style in FLOORS.items():
            value = _floor(results, floor, key)
            if value is not None:
                axes.axhline(value, color="0.4", ls=style, lw=1, label=floor)
        axes.set_title(heading, fontsize="medium")
        axes.set_xscale("symlog", linthresh=10_000)
        axes.set_xlabel("views (0: random initialisation)")
        axes.set_xlim(-2_000, 1_000_000)
        axes.set_xticks([0, 10_000, 100_000], ["0", "10,000", "100,000"])
    labels: dict[str, Any] = {}
    for axes in figure.get_axes():
        labels |= {label: handle for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    if labels:
        figure.legend(list(labels.values()), list(labels), loc="outside lower center", ncols=5)
    save_svg(figure, path)


def _started() -> list[tuple[Plan, Plan]]:
    """Encoders read by all tasks that begin with the weights of another one, and that one."""
    found = [(plan, first_plan(plan)) for plan in read_plans() if plan.cohort == "phantoms"]
    return [(plan, first) for plan, first in found if first is not None]


def _plot_started(axes: Axes, results: Results, plan: Plan, first: Plan, key: str, color: str) -> None:
    """Marks at the views of both runs, and a broken line from the runs that they begin with."""
    values = [value for _, value in _points(results, {plan.name}, key, twins=False)]
    before = [value for _, value in _points(results, {first.name}, key, twins=False)]
    if not values:
        return
    views = first.views + plan.views
    axes.plot([views] * len(values), values, "*", color=color, label=plan.name)
    if before:
        axes.plot([first.views, views], [np.mean(before), np.mean(values)], color=color, lw=1, ls=(0, (4, 3)))


def _curves(results: Results) -> dict[str, set[str]]:
    """Encoders by curve: those that differ in updates or precision alone share one, named by the shortest name.

    What starts from another run's weights has seen their views, too: `_plot_started` draws it.
    """
    started = {plan.name for plan in read_plans() if plan.start is not None}
    by_recipe: dict[tuple[str, ...], set[str]] = {}
    for entry in results.entries:
        if entry.views and entry.name not in started:
            recipe = tuple(one for one in entry.overrides or () if not one.startswith("train.precision="))
            by_recipe.setdefault(recipe, set()).add(entry.name)
    return dict(sorted((min(names, key=len), names) for names in by_recipe.values()))


def _points(results: Results, encoders: set[str], key: str, twins: bool = True) -> list[tuple[int, float]]:
    """(views, value) of each run of the encoders of a curve, and with `twins` of the untrained ones at 0."""
    found: dict[str, tuple[int, float]] = {}
    names = encoders | ({UNTRAINED, *(f"{UNTRAINED}:{name}" for name in encoders)} if twins else set())
    patches = {entry.patch for entry in results.entries if entry.name in encoders}
    for entry in results.entries:
        if entry.name not in names or entry.patch not in patches:
            continue
        value = results.value(entry.row_name, key)
        if value is not None:
            found[entry.row] = (entry.views or 0, value)
    return list(found.values())


def _floor(results: Results, floor: str, key: str) -> float | None:
    """The figure of a floor, of the patches that the exam's recipe cuts."""
    return results.value(RowName(floor, load_recipe(RECIPE).tokens.patch_size, 0), key)
