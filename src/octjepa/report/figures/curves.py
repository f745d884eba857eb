"""Training over its updates as small line charts: loss, cosine, learning rate, EMA momentum, gradient norm."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float
from markupsafe import Markup

from octjepa.report.figures import svg

# Okabe and Ito 2008: distinct also for the colour-blind, on light and on dark pages.
_RUN_COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
_RUN_STYLES = ("-", "--", ":", "-.")
_BINS = 240  # no screen shows more points; each bin shows its mean and its range


@dataclass(frozen=True)
class Chart:
    """A quantity of the journal over updates, and how to read it; `validation` is its key on held-out people.

    The axis starts at `floor` (None: at the data), unless values are below it. `chance` is what guessing reaches.
    `baseline` is the prefix of the trivial predictors' keys, of which the best is drawn.
    """

    key: str
    title: str
    caption: str
    logarithmic: bool = False
    validation: str | None = None
    floor: float | None = 0.0
    chance: float | None = None
    baseline: str | None = None


CHARTS = (
    Chart(
        "train/loss",
        "Loss",
        "Falls while the model learns; its level means nothing without the baselines below.",
        validation="val/loss",
        baseline="val/baseline_loss/",
    ),
    Chart(
        "train/cosine",
        "Cosine with the hidden features",
        "Rises towards 1. A sudden jump to 1 is collapse, not skill.",
        validation="val/cosine",
        baseline="val/baseline/",
    ),
    Chart("train/lr", "Learning rate", "Rises once, then falls to its final value."),
    Chart(
        "train/ema_momentum",
        "EMA momentum of the target",
        "Rises to its final value: the target slows down.",
        floor=None,
    ),
    Chart(
        "train/grad_norm",
        "Gradient norm, unclipped",
        "Spikes are unusual batches; a steady rise is trouble.",
        logarithmic=True,
    ),
    Chart(
        "monitor/rankme_tissue",
        "Effective rank of tissue features (RankMe)",
        "Near 1 the features have collapsed to one direction.",
    ),
    Chart(
        "monitor/layer_accuracy",
        "Layers classified by nearest mean (chance 0.2)",
        "The online probe: the best checkpoint is its highest point after warm-up.",
        chance=0.2,
    ),
    Chart(
        "monitor/position_share_tissue",
        "Variance that position explains",
        "Near 1 the features encode where a token is and not what it shows.",
    ),
    Chart("volumes_per_second", "Volumes per second", "Dips are waits for data or for the machine."),
)

TUNING_CHARTS = (
    Chart(
        "loss", "Loss", "Where the loss of validation people rises again, the network overfits.", validation="val_loss"
    ),
    Chart("blocks", "Trainable blocks of the encoder", "First the heads, then the last blocks, then all blocks."),
    Chart("lr", "Learning rate of the heads", "Rises once, then falls to its final value."),
    Chart(
        "grad_norm",
        "Gradient norm, unclipped",
        "Spikes are unusual batches; a steady rise is trouble.",
        logarithmic=True,
    ),
)


def binned(
    x: Float[np.ndarray, " n"], y: Float[np.ndarray, " n"], bins: int = _BINS
) -> tuple[Float[np.ndarray, " b"], Float[np.ndarray, " b"], Float[np.ndarray, " b"], Float[np.ndarray, " b"]]:
    """(x, mean, lowest, highest) in at most `bins` runs of neighbouring points."""
    edges = np.linspace(0, len(x), min(bins, len(x)) + 1).round().astype(int)
    starts, counts = edges[:-1], np.diff(edges)
    return (
        np.add.reduceat(x, starts) / counts,
        np.add.reduceat(y, starts) / counts,
        np.minimum.reduceat(y, starts),
        np.maximum.reduceat(y, starts),
    )


def training_charts(
    updates: Sequence[Mapping[str, Any]],
    validations: Sequence[Mapping[str, Any]],
    monitored: Sequence[Mapping[str, Any]] = (),
    charts: Sequence[Chart] = CHARTS,
) -> list[tuple[Chart, Markup]]:
    """A drawing for each of `charts` whose quantity the journal holds."""
    drawings = []
    for chart in charts:
        series = _series(monitored if chart.key.startswith("monitor/") else updates, chart.key)
        if len(series[0]):
            validation = _series(validations, chart.validation) if chart.validation else None
            drawings.append((chart, _draw(chart, series, validation, _best_baseline(chart, validations))))
    return drawings


def compared_charts(runs: Sequence[tuple[str, Sequence[Mapping[str, Any]]]]) -> list[tuple[Chart, Markup]]:
    """A drawing for each of `CHARTS` that at least two of `runs`, (label, lines of the journal), hold."""
    drawings = []
    for chart in CHARTS:
        series = [(label, _series(lines, chart.validation or chart.key)) for label, lines in runs]
        held = [(label, points) for label, points in series if len(points[0])]
        if len(held) > 1:
            drawings.append((chart, _draw_compared(chart, held)))
    return drawings


def _draw_compared(chart: Chart, runs: Sequence[tuple[str, tuple[np.ndarray, np.ndarray]]]) -> Markup:
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    colours = svg.PAGE_COLOURS
    with svg.page_style(f"compared {chart.key}", 9):
        figure = Figure(figsize=(4.6, 2.6), layout="constrained")
        axes = figure.add_subplot()
        lowest = []
        for number, (label, series) in enumerate(runs):
            x, mean, _, _ = binned(*series)
            style = _RUN_STYLES[number // len(_RUN_COLOURS) % len(_RUN_STYLES)]
            axes.plot(
                x,
                mean,
                label=label,
                color=_RUN_COLOURS[number % len(_RUN_COLOURS)],
                linestyle=style,
                linewidth=1.6,
                marker="D" if len(x) < 12 else None,
                markersize=3.5,
            )
            lowest.append(float(mean.min()))
        if chart.logarithmic and min(lowest) > 0:
            axes.set_yscale("log")
        elif chart.floor is not None:
            axes.set_ylim(bottom=min(chart.floor, *lowest))
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
        axes.grid(axis="y", color=colours["rule"], linewidth=0.8)
        axes.set_axisbelow(True)
        axes.tick_params(colors=colours["ink"], length=0, which="both")
        axes.set_xlabel("update", color=colours["ink"])
        figure.legend(loc="outside upper left", ncols=2, frameon=False, labelcolor=colours["ink"], fontsize=8)
        for spine in axes.spines.values():
            spine.set_visible(False)
        return svg.figure_svg(figure, f"{chart.title} over updates, run by run", f"compared {chart.key}")


def _best_baseline(chart: Chart, validations: Sequence[Mapping[str, Any]]) -> float | None:
    return None if chart.baseline is None else best_baseline(chart.baseline, validations)


def best_baseline(prefix: str, validations: Sequence[Mapping[str, Any]]) -> float | None:
    """The value of the best trivial predictor at the last validation; None if none was measured.

    `prefix` is that of their keys: `val/baseline/` or `val/baseline_loss/`.
    """
    if not validations:
        return None
    curves = [
        float(value)
        for key, value in validations[-1].items()
        if key.startswith(prefix) and value is not None and np.isfinite(value)
    ]
    if not curves:
        return None
    return min(curves) if "loss" in prefix else max(curves)


def _series(lines: Sequence[Mapping[str, Any]], key: str) -> tuple[np.ndarray, np.ndarray]:
    pairs = [(line["update"], line[key]) for line in lines if key in line and np.isfinite(line[key])]
    values = np.array(pairs, dtype=np.float64).reshape(-1, 2)
    return values[:, 0], values[:, 1]


def _draw(
    chart: Chart,
    series: tuple[np.ndarray, np.ndarray],
    validation: tuple[np.ndarray, np.ndarray] | None,
    baseline: float | None = None,
) -> Markup:
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

    colours = svg.PAGE_COLOURS
    with svg.page_style(chart.key, 9):
        figure = Figure(figsize=(4.6, 2.3), layout="constrained")
        axes = figure.add_subplot()
        x, mean, low, high = binned(*series)
        if (high > low).any():
            axes.fill_between(x, low, high, color=colours["line"], alpha=0.18, linewidth=0)
        axes.plot(x, mean, color=colours["line"], linewidth=1.6)
        if validation is not None and len(validation[0]):
            axes.plot(*validation, color=colours["other"], marker="D", markersize=4.5, linestyle=":", linewidth=1.2)
        for level, name in ((chart.chance, "chance"), (baseline, "best trivial predictor")):
            if level is not None:
                axes.axhline(level, color=colours["ink"], linewidth=1.0, linestyle="--")
                label = axes.annotate(
                    name,
                    (1, level),
                    (0, 3),
                    xycoords=("axes fraction", "data"),
                    textcoords="offset points",
                    ha="right",
                    color=colours["ink"],
                    fontsize=8,
                )
                label.set_in_layout(False)
        if chart.logarithmic and mean.min() > 0:
            axes.set_yscale("log")
            axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
            axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
            axes.yaxis.set_minor_formatter(NullFormatter())
        else:
            axes.yaxis.set_major_locator(MaxNLocator(5))
            if chart.floor is not None:
                axes.set_ylim(bottom=min(chart.floor, float(low.min())))  # last: it ends the scaling to what is drawn
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
        axes.grid(axis="y", color=colours["rule"], linewidth=0.8)
        axes.set_axisbelow(True)
        axes.tick_params(colors=colours["ink"], length=0, which="both")
        axes.set_xlabel("update", color=colours["ink"])
        for spine in axes.spines.values():
            spine.set_visible(False)
        return svg.figure_svg(figure, f"{chart.title} over updates", chart.key)
