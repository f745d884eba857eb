"""Training over its updates as small line charts: loss, cosine, learning rate, EMA momentum, gradient norm.

Drawn by matplotlib into SVG whose colours are the page's own variables, so one figure serves light and dark.
"""

from __future__ import annotations

import io
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float
from markupsafe import Markup, escape

_BINS = 240  # more points than that no screen tells apart; each bin shows its mean and its range
# Stand-ins that matplotlib writes into the SVG, and what the page puts in their place.
_INK, _RULE, _LINE, _SECOND = "#010203", "#010204", "#010205", "#010206"
_ON_PAGE = {_INK: "currentColor", _RULE: "var(--rule)", _LINE: "var(--ours)", _SECOND: "var(--other)"}
PAGE_COLOURS = {"ink": _INK, "rule": _RULE, "line": _LINE, "other": _SECOND}  # for figures that `inline` takes


@dataclass(frozen=True)
class Chart:
    key: str
    title: str
    reading: str
    logarithmic: bool = False
    validation: str | None = None


CHARTS = (
    Chart("train/loss", "Loss", "Falls while the model learns; its level means nothing without the baselines below.",
          validation="val/loss"),
    Chart("train/cosine", "Cosine with the hidden features",
          "Rises towards 1. A sudden jump to 1 is collapse, not skill.", validation="val/cosine"),
    Chart("train/lr", "Learning rate", "Rises once, then falls to its floor."),
    Chart("train/ema_momentum", "EMA momentum of the target", "Rises to its final value: the target slows down."),
    Chart("train/grad_norm", "Gradient norm, unclipped", "Spikes are unusual batches; a steady rise is trouble.",
          logarithmic=True),
    Chart("monitor/rankme_tissue", "Effective rank of tissue features (RankMe)",
          "Near 1 the features have collapsed to one direction."),
    Chart("monitor/layer_accuracy", "Layers told apart by nearest mean (chance 0.2)",
          "The online probe: the best checkpoint is its highest point after warm-up."),
    Chart("monitor/position_share_tissue", "Variance that place alone explains",
          "Near 1 the features tell where a token lies and not what is there."),
    Chart("volumes_per_second", "Volumes per second", "Dips are waits for data or for the machine."),
)  # fmt: skip

TUNING_CHARTS = (
    Chart("loss", "Loss", "Where that of validation people rises again, labels are learnt by heart.",
          validation="val_loss"),
    Chart("blocks", "Blocks of the encoder that learn", "The heads alone, then the last blocks, then everything."),
    Chart("lr", "Learning rate of the heads", "Rises once, then falls to its floor."),
    Chart("grad_norm", "Gradient norm, unclipped", "Spikes are unusual batches; a steady rise is trouble.",
          logarithmic=True),
)  # fmt: skip


def binned(
    x: Float[np.ndarray, " n"], y: Float[np.ndarray, " n"], bins: int = _BINS
) -> tuple[Float[np.ndarray, " b"], Float[np.ndarray, " b"], Float[np.ndarray, " b"], Float[np.ndarray, " b"]]:
    """(x, mean, lowest, highest) in at most `bins` runs of neighbouring points."""
    edges = np.linspace(0, len(x), min(bins, len(x)) + 1).round().astype(int)
    starts = edges[:-1]
    count = np.diff(edges)
    return (
        np.add.reduceat(x, starts) / count,
        np.add.reduceat(y, starts) / count,
        np.minimum.reduceat(y, starts),
        np.maximum.reduceat(y, starts),
    )


def training_charts(
    updates: Sequence[Mapping[str, Any]],
    validations: Sequence[Mapping[str, Any]],
    monitored: Sequence[Mapping[str, Any]] = (),
    wanted: Sequence[Chart] = CHARTS,
) -> list[tuple[Chart, Markup]]:
    """A chart for every quantity that the journal holds; one that it lacks is left out."""
    charts = []
    for chart in wanted:
        series = _series(monitored if chart.key.startswith("monitor/") else updates, chart.key)
        if len(series[0]):
            later = _series(validations, chart.validation) if chart.validation else None
            charts.append((chart, _draw(chart, series, later)))
    return charts


def _series(lines: Sequence[Mapping[str, Any]], key: str) -> tuple[np.ndarray, np.ndarray]:
    pairs = [(line["update"], line[key]) for line in lines if key in line and np.isfinite(line[key])]
    values = np.array(pairs, dtype=np.float64).reshape(-1, 2)
    return values[:, 0], values[:, 1]


def _draw(chart: Chart, series: tuple[np.ndarray, np.ndarray], later: tuple[np.ndarray, np.ndarray] | None) -> Markup:
    import matplotlib as mpl
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

    with mpl.rc_context({"svg.fonttype": "none", "svg.hashsalt": chart.key, "text.parse_math": False, "font.size": 9}):
        figure = Figure(figsize=(4.6, 2.3), layout="constrained")
        FigureCanvasSVG(figure)
        axes = figure.add_subplot()
        x, mean, low, high = binned(*series)
        if (high > low).any():
            axes.fill_between(x, low, high, color=_LINE, alpha=0.18, linewidth=0)
        axes.plot(x, mean, color=_LINE, linewidth=1.6)
        if later is not None and len(later[0]):
            axes.plot(*later, color=_SECOND, marker="D", markersize=4.5, linestyle=":", linewidth=1.2)
        if chart.logarithmic and mean.min() > 0:
            axes.set_yscale("log")
            axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 2.0, 5.0)))
            axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
            axes.yaxis.set_minor_formatter(NullFormatter())
        else:
            axes.yaxis.set_major_locator(MaxNLocator(5))
        axes.xaxis.set_major_locator(MaxNLocator(6, integer=True))
        axes.grid(axis="y", color=_RULE, linewidth=0.8)
        axes.set_axisbelow(True)
        axes.tick_params(colors=_INK, length=0, which="both")
        axes.set_xlabel("update", color=_INK)
        for spine in axes.spines.values():
            spine.set_visible(False)
        stream = io.StringIO()
        empty = dict.fromkeys(("Creator", "Date", "Format", "Type"))
        figure.savefig(stream, format="svg", transparent=True, metadata=empty)
    return inline(stream.getvalue(), f"{chart.title} over updates", chart.key)


def inline(svg: str, alt: str, name: str) -> Markup:
    """matplotlib's SVG file as an element of the page: its own ids, the page's colours and font, no outside names."""
    body = svg[svg.index("<svg") :]
    head = re.match(r"<svg[^>]*viewBox=\"([^\"]+)\"[^>]*>", body)
    if head is None:
        raise ValueError("the figure has no viewBox")
    body = re.sub(r"<metadata>.*?</metadata>", "", body[head.end() :], flags=re.DOTALL)
    prefix = re.sub(r"\W", "-", name)
    body = re.sub(r'\bid="', f'id="{prefix}-', body)
    body = re.sub(r'(href="#|url\(#)', rf"\g<1>{prefix}-", body)
    body = body.replace("xlink:href", "href")
    body = re.sub(r"font-family:[^;\"]*;?", "", body)
    body = re.sub(r"font: ([\d.]+px)[^;\"]*", r"font-size: \1", body)
    for stand_in, colour in _ON_PAGE.items():
        body = body.replace(stand_in, colour)
    title = escape(alt)
    return Markup(
        f'<svg class="chart" role="img" aria-label="{title}" viewBox="{head[1]}"><title>{title}</title>{body}'
    )
