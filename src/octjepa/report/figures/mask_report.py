"""The mask report as one figure: coverage along each axis, bias, distances and copying, family by family.

Enters what `octjepa.report.mask_statistics` measured; leaves a PNG beside its JSON (`octjepa plan --masks`), or an
element of the page in the page's own colours.
"""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from markupsafe import Markup

from octjepa.errors import UsageError
from octjepa.files import write_json
from octjepa.recipe import Recipe
from octjepa.report.figures import curves

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from octjepa.store import Store

FAMILIES = ("tubes", "blocks", "runs")
_SHADES = {
    "target": 0.85,
    "context": 0.4,
    "left_out": 0.12,
}  # opacity of one colour: prints, and needs no legend of hues
_PAPER = {"ink": "black", "rule": "0.85", "line": "#0a5ea8", "other": "#b8500a"}


def report_masks(recipe: Recipe, store: Store | None, volume_ids: Sequence[str] | None, folder: Path) -> dict[str, Any]:
    """Measures the masks of `recipe` on `volume_ids` of `store`, without one on made-up tissue bands.

    Writes `masks.json` and `masks.png` into `folder`, made if absent; returns where they are and the few figures of
    `mask_measure.summary`. Raises UsageError where `folder` is a file.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    from octjepa.report.mask_statistics import measure_store, measure_synthetic, summary

    if folder.exists() and not folder.is_dir():
        raise UsageError(f"{folder} is a file: give --masks the name of a folder")
    folder.mkdir(parents=True, exist_ok=True)  # before the work: a place that cannot be written to is told at once
    measured = measure_synthetic(recipe) if store is None else measure_store(recipe, store, volume_ids or ())
    write_json(folder / "masks.json", measured)
    figure = _draw(measured, _PAPER)
    FigureCanvasAgg(figure)
    figure.savefig(folder / "masks.png", dpi=150, facecolor="white")
    return {"report": str(folder / "masks.json"), "figure": str(folder / "masks.png"), **summary(measured)}


def mask_chart(measured: Mapping[str, Any]) -> Markup:
    """The figure as an element of the page."""
    import matplotlib as mpl
    from matplotlib.backends.backend_svg import FigureCanvasSVG

    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": "masks", "text.parse_math": False}):
        figure = _draw(measured, curves.PAGE_COLOURS)
        FigureCanvasSVG(figure)
        stream = io.StringIO()
        empty = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(stream, format="svg", transparent=True, metadata=empty)
    return curves.inline(
        stream.getvalue(), "How often each place is hidden, how far targets lie, how well copying does", "mask-report"
    )


def _draw(measured: Mapping[str, Any], colours: Mapping[str, str]) -> Figure:
    import matplotlib as mpl
    from matplotlib.figure import Figure

    families = measured["families"]
    with mpl.rc_context({"font.size": 8}):
        figure = Figure(figsize=(9.2, 4.6), layout="constrained")
        panels = figure.subplots(2, 3)
        for panel, (axis, coverage) in zip(panels[0], families["mix"]["coverage"].items(), strict=True):
            _coverage(panel, axis, coverage, colours)
        _bias(panels[1][0], families, colours)
        _distance(panels[1][1], families, measured["far_steps"], colours)
        _copying(panels[1][2], families, colours)
        for panel in panels.flat:
            panel.tick_params(colors=colours["ink"], length=0)
            panel.title.set_color(colours["ink"])
            panel.xaxis.label.set_color(colours["ink"])
            for spine in panel.spines.values():
                spine.set_visible(False)
    return figure


def _coverage(panel: Axes, axis: str, coverage: Mapping[str, list[float]], colours: Mapping[str, str]) -> None:
    """Bars of shares, target below, then hidden but not asked for (blank), context, and places left out on top."""
    parts = ("target", "context", "left_out")
    bottom = [0.0] * len(coverage["target"])
    rest = [1 - sum(at) for at in zip(*(coverage[part] for part in parts), strict=True)]
    for part in parts:
        panel.bar(
            range(len(bottom)),
            coverage[part],
            bottom=bottom,
            width=0.9,
            color=colours["line"],
            alpha=_SHADES[part],
            label=part.replace("_", " "),
        )
        bottom = [a + b for a, b in zip(bottom, coverage[part], strict=True)]
        if part == "target":
            bottom = [a + b for a, b in zip(bottom, rest, strict=True)]
    panel.set_title(f"places along {axis}")
    panel.set_ylim(0, 1.25)
    panel.set_yticks([0, 0.5, 1])
    panel.set_xlabel("token")
    if axis == "slice":
        panel.legend(fontsize=7, frameon=False, labelcolor=colours["ink"], loc="upper center", ncols=3)


def _bias(panel: Axes, families: Mapping[str, Any], colours: Mapping[str, str]) -> None:
    """Hiding rate of edges (diamonds) and of the middle (circles) over the mean; 1 is fair."""
    labels: list[str] = []
    for name in FAMILIES:
        for axis, bias in families[name]["bias"].items():
            row = len(labels)
            for part, marker, colour, shift in (("edge", "D", "other", 0.15), ("centre", "o", "line", -0.15)):
                one = bias[part]
                if one["value"] is None:
                    continue
                if one["low"] is not None:
                    panel.plot([one["low"], one["high"]], [row + shift] * 2, color=colours[colour], linewidth=1.2)
                panel.plot(
                    one["value"], row + shift, marker=marker, markersize=3.5, color=colours[colour], linestyle=""
                )
            labels.append(f"{name}, {axis}")
    panel.axvline(1, color=colours["rule"], zorder=0)
    panel.set_yticks(range(len(labels)), labels)
    panel.invert_yaxis()
    panel.set_xlabel("diamond: edge, circle: middle")
    panel.set_title("hiding rate over its mean")


def _distance(panel: Axes, families: Mapping[str, Any], far: float, colours: Mapping[str, str]) -> None:
    """From a target to its nearest visible token: 5th to 95th percentile, tick at the median, circle at the mean."""
    for row, name in enumerate(FAMILIES):
        one = families[name]["distance"]["steps"]
        panel.plot([one["p5"], one["p95"]], [row, row], color=colours["line"], linewidth=1.5)
        panel.plot(one["median"], row, marker="|", markersize=11, color=colours["line"])
        panel.plot(one["mean"], row, marker="o", markersize=4, color=colours["line"])
    panel.axvline(far, color=colours["rule"], zorder=0)
    panel.set_yticks(range(len(FAMILIES)), FAMILIES)
    panel.set_ylim(len(FAMILIES) - 0.5, -0.5)
    panel.set_xlim(left=0)
    panel.set_xlabel("token steps: 5 to 95 %, median, mean")
    panel.set_title("target to nearest seen token")


def _copying(panel: Axes, families: Mapping[str, Any], colours: Mapping[str, str]) -> None:
    """Error of the copied patch in normalised pixels; the line is the guess that says nothing."""
    panel.set_title("error of copying that token")
    if "copy_nearest" not in families["mix"]:
        panel.set_xticks([])
        panel.set_yticks([])
        panel.text(0.5, 0.5, "no pixels without a store", ha="center", transform=panel.transAxes, color=colours["ink"])
        return
    for row, name in enumerate(FAMILIES):
        copied = families[name]["copy_nearest"]
        for part, marker, colour, shift in (
            ("error", "o", "line", -0.12),
            ("brightness_unexplained", "D", "other", 0.12),
        ):
            one = copied[part]
            if one["low"] is not None:
                panel.plot([one["low"], one["high"]], [row + shift] * 2, color=colours[colour], linewidth=1.2)
            panel.plot(one["value"], row + shift, marker=marker, markersize=4, color=colours[colour], linestyle="")
    panel.axvline(1, color=colours["rule"], zorder=0)
    panel.set_yticks(range(len(FAMILIES)), FAMILIES)
    panel.set_ylim(len(FAMILIES) - 0.5, -0.5)
    panel.set_xlim(left=0)
    panel.set_xlabel("circle: pixels, diamond: brightness")
