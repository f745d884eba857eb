"""The masks of a recipe, drawn: one sample of each family on a real volume, and the statistics of many as a chart.

The sample is that of the centred view of one volume, drawn by the code that training uses, with a copy of the recipe in
which the other families have weight 0. The validation sample may be cropped and flipped: its masks would lie next to
the tissue of the centred view.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

import numpy as np
from jaxtyping import Int
from markupsafe import Markup

from octjepa.files import write_atomic, write_json
from octjepa.locks import writer_lock
from octjepa.recipe import Recipe
from octjepa.report.figures import svg
from octjepa.report.figures.eyes import central_slice
from octjepa.train.mask_metrics import RatioInterval
from octjepa.train.mask_statistics import (
    MIX,
    FamilyStatistics,
    MaskStatistics,
    MaskSummary,
    measure_store,
    measure_synthetic,
    single_family,
    summary,
)
from octjepa.views import geometry
from octjepa.views.sample import draw_sample

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from octjepa.store import Store
    from octjepa.volume import CanonicalVolume

FAMILIES = {
    "tubes": "Tubes: rectangles through every B-scan, so no hole can be filled from the slice next to it.",
    "blocks": "Blocks: boxes of limited depth along the slow axis.",
    "runs": "Runs: whole runs of neighbouring B-scans.",
    "random": "Random: tokens hidden independently of each other, as a masked autoencoder does.",
}
UNSELECTED, CONTEXT, TARGET, HIDDEN = range(4)
_CSS = ("tok-unselected", "tok-context", "tok-target", "tok-hidden")
_OPACITY = {"target": 0.85, "context": 0.4, "left_out": 0.12}  # of one colour: prints, and needs no legend of hues
_PAPER = {"ink": "black", "rule": "0.85", "line": "#0a5ea8", "other": "#b8500a"}


@dataclass(frozen=True)
class MaskPicture:
    """One family on one volume: a picture per slab of B-scans, and the number of tokens in each state."""

    family: str
    sentence: str
    slabs: tuple[Markup, ...]
    counts: dict[str, int]
    in_use: bool


def mask_states(volume: CanonicalVolume, recipe: Recipe, family: str) -> Int[np.ndarray, "d h w"]:
    """UNSELECTED, CONTEXT, TARGET or HIDDEN for every token of the centred view, in a fixed sample under `family`."""
    centred = {"crop": False, "flip_slow": 0.0, "flip_fast": 0.0, "rotation_degrees": 0.0, "zoom": 0.0}
    drawn = single_family(recipe, family).model_copy(update={"views": recipe.views.model_copy(update=centred)})
    sample = draw_sample(volume, drawn, None).sample
    state = np.full(recipe.grid_tokens, UNSELECTED)
    state[sample.grid_index] = HIDDEN
    state[sample.grid_index[sample.context]] = CONTEXT
    state[sample.grid_index[sample.target]] = TARGET
    return state.reshape(recipe.grid)


def mask_picture(volume: CanonicalVolume, recipe: Recipe, family: str) -> MaskPicture:
    """The masks of `family` on the centred view of `volume`."""
    preprocessing = recipe.preprocessing
    view = geometry.apply_transform(
        np.asarray(volume.pixels), geometry.center_crop(preprocessing), preprocessing.image_size
    )
    states = mask_states(volume, recipe, family)
    thick, high, wide = recipe.tokens.patch_size
    slabs = []
    for number, slab in enumerate(states):
        first = number * thick
        overlays = [
            svg.cells(slab == state, (high, wide), css, inset=0.0 if state == UNSELECTED else 0.6)
            for state, css in enumerate(_CSS)
        ]
        visible, predicted = (int(np.count_nonzero(slab == state)) for state in (CONTEXT, TARGET))
        alt = f"{family}, B-scans {first + 1} to {first + thick}: {visible} tokens seen, {predicted} predicted"
        slabs.append(svg.scan(view[central_slice(volume, recipe, number)], alt, overlays))
    names = {"seen": CONTEXT, "predicted": TARGET, "hidden": HIDDEN, "left out": UNSELECTED}
    counts = {name: int(np.count_nonzero(states == state)) for name, state in names.items()}
    return MaskPicture(family, FAMILIES[family], tuple(slabs), counts, getattr(recipe.masks, family) > 0)


@dataclass(frozen=True)
class MaskReport(MaskSummary):
    """The summary, and the files with all statistics and their chart."""

    report: str = ""
    figure: str = ""
    KEYS: ClassVar[tuple[str, ...]] = (
        *("report", "figure", "samples", "exact", "biased", "targets_on_tissue", "targets_far", "copy_nearest"),
    )


def report_masks(recipe: Recipe, store: Store | None, volume_ids: Sequence[str] | None, folder: Path) -> MaskReport:
    """Measures the masks of `recipe` on `volume_ids` of `store`, or without a store on simulated tissue bands.

    Writes `masks.json` and `masks.png` into `folder`, created if absent. Raises UsageError where `folder` is a file, or
    another process writes to it.
    """
    import matplotlib as mpl
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    with writer_lock(folder):
        measured = measure_synthetic(recipe) if store is None else measure_store(recipe, store, volume_ids or ())
        write_json(folder / "masks.json", measured.to_json())
        with mpl.rc_context({"font.size": 8}):
            figure = _statistics_figure(measured, _PAPER)
        FigureCanvasAgg(figure)
        write_atomic(folder / "masks.png", lambda file: figure.savefig(file, format="png", dpi=150, facecolor="white"))
    return MaskReport(**vars(summary(measured)), report=str(folder / "masks.json"), figure=str(folder / "masks.png"))


def mask_chart(measured: MaskStatistics) -> Markup:
    """The statistics of `mask_statistics.measure` as an element of the page."""
    alt = "How often each position is hidden, how far targets are from visible tokens, how well copying does"
    with svg.page_style("mask-report", 8):
        return svg.figure_svg(_statistics_figure(measured, svg.PAGE_COLOURS), alt, "mask-report")


def _statistics_figure(measured: MaskStatistics, colours: Mapping[str, str]) -> Figure:
    from matplotlib.figure import Figure

    families = measured.families
    figure = Figure(figsize=(9.2, 4.6), layout="constrained")
    panels = figure.subplots(2, 3)
    for panel, (axis, coverage) in zip(panels[0], families[MIX].coverage.items(), strict=True):
        _draw_coverage(panel, axis, coverage, colours)
    _draw_bias(panels[1][0], families, colours)
    _draw_distance(panels[1][1], families, measured.far_steps, colours)
    _draw_copying(panels[1][2], families, colours)
    for panel in panels.flat:
        panel.tick_params(colors=colours["ink"], length=0)
        panel.title.set_color(colours["ink"])
        panel.xaxis.label.set_color(colours["ink"])
        for spine in panel.spines.values():
            spine.set_visible(False)
    return figure


def _draw_coverage(panel: Axes, axis: str, coverage: Mapping[str, list[float]], colours: Mapping[str, str]) -> None:
    """Stacked shares: target, then hidden without being a target (blank), context, and left out on top."""
    bottom = np.zeros(len(coverage["target"]))
    blank = 1 - sum(np.array(coverage[part]) for part in _OPACITY)
    for part, opacity in _OPACITY.items():
        label = part.replace("_", " ")
        panel.bar(
            range(len(bottom)),
            coverage[part],
            bottom=bottom,
            width=0.9,
            color=colours["line"],
            alpha=opacity,
            label=label,
        )
        bottom = bottom + coverage[part] + (blank if part == "target" else 0)
    panel.set_title(f"positions along {axis}")
    panel.set_ylim(0, 1.25)
    panel.set_yticks([0, 0.5, 1])
    panel.set_xlabel("token")
    if axis == "slice":
        panel.legend(fontsize=7, frameon=False, labelcolor=colours["ink"], loc="upper center", ncols=3)


def _draw_bias(panel: Axes, families: Mapping[str, FamilyStatistics], colours: Mapping[str, str]) -> None:
    """Hiding rate of edges (diamonds) and of the middle (circles) over the mean; 1 is fair."""
    rates = {f"{name}, {axis}": bias for name in FAMILIES for axis, bias in families[name].bias.items()}
    for y, bias in enumerate(rates.values()):
        _draw_estimate(panel, bias.edge, y + 0.15, "D", 3.5, colours["other"])
        _draw_estimate(panel, bias.centre, y - 0.15, "o", 3.5, colours["line"])
    _label_rows(panel, list(rates), 1, colours)
    panel.set_xlabel("diamond: edge, circle: middle")
    panel.set_title("hiding rate over its mean")


def _draw_distance(
    panel: Axes, families: Mapping[str, FamilyStatistics], far: float, colours: Mapping[str, str]
) -> None:
    """From a target to its nearest visible token: 5th to 95th percentile, tick at the median, circle at the mean."""
    for y, name in enumerate(FAMILIES):
        steps = families[name].distance.steps
        panel.plot([steps.p5, steps.p95], [y, y], color=colours["line"], linewidth=1.5)
        panel.plot(steps.median, y, marker="|", markersize=11, color=colours["line"])
        panel.plot(steps.mean, y, marker="o", markersize=4, color=colours["line"])
    _label_rows(panel, list(FAMILIES), far, colours)
    panel.set_xlim(left=0)
    panel.set_xlabel("token steps: 5 to 95 %, median, mean")
    panel.set_title("target to nearest visible token")


def _draw_copying(panel: Axes, families: Mapping[str, FamilyStatistics], colours: Mapping[str, str]) -> None:
    """Error of the copied patch in normalised pixels; the line is the error of predicting zero."""
    panel.set_title("error of copying that token")
    if families[MIX].copy_nearest is None:
        panel.set_xticks([])
        panel.set_yticks([])
        panel.text(0.5, 0.5, "no pixels without a store", ha="center", transform=panel.transAxes, color=colours["ink"])
        return
    for y, name in enumerate(FAMILIES):
        copied = families[name].copy_nearest
        assert copied is not None  # as of the mix
        _draw_estimate(panel, copied.error, y - 0.12, "o", 4, colours["line"])
        _draw_estimate(panel, copied.brightness_unexplained, y + 0.12, "D", 4, colours["other"])
    _label_rows(panel, list(FAMILIES), 1, colours)
    panel.set_xlim(left=0)
    panel.set_xlabel("circle: pixels, diamond: brightness")


def _draw_estimate(panel: Axes, estimate: RatioInterval, y: float, marker: str, size: float, colour: str) -> None:
    if estimate.value is None:
        return
    if estimate.low is not None and estimate.high is not None:
        panel.plot([estimate.low, estimate.high], [y, y], color=colour, linewidth=1.2)
    panel.plot(estimate.value, y, marker=marker, markersize=size, color=colour, linestyle="")


def _label_rows(panel: Axes, labels: list[str], mark: float, colours: Mapping[str, str]) -> None:
    """One label per row from the top, and a vertical line at `mark`."""
    panel.axvline(mark, color=colours["rule"], zorder=0)
    panel.set_yticks(range(len(labels)), labels)
    panel.set_ylim(len(labels) - 0.5, -0.5)
