"""Probe rows as a forest plot: per target and metric a group of rows, each a point with its 95 % interval.

The drawing is part of the table, so every interval stands beside its figures and can be read without seeing it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

from octjepa.metrics.findings import BASELINES

_CHANCE = {"auroc": 0.5, "auroc_ovr": 0.5}
_WITHIN_ONE = ("auroc", "auprc", "accuracy", "f1", "dice", "ece")
_WIDTH, _HEIGHT = 360.0, 18.0


@dataclass(frozen=True)
class ForestRow:
    name: str
    ours: bool
    probe: str
    pool: str
    value: float | None
    low: float | None
    high: float | None
    n: int | None
    drawing: Markup


@dataclass(frozen=True)
class ForestGroup:
    """One target under one metric; `axis` is the drawing of the scale that its rows share.

    `difference` is the target's own {difference, low, high}, trained minus untrained; for reading, not for picking.
    """

    target: str
    metric: str
    rows: tuple[ForestRow, ...]
    axis: Markup
    difference: Mapping[str, Any] | None


def forest(rows: Sequence[Mapping[str, Any]], comparisons: Sequence[Mapping[str, Any]] = ()) -> list[ForestGroup]:
    """Groups by metric and target, macro targets first; within a group the encoder before those that know nothing.

    `comparisons` are paired differences under the probe and pool of `rows`.
    """
    differences = {(_text(one, "metric"), _text(one, "target")): one for one in comparisons}
    scales = {metric: _scale(metric, [r for r in rows if _text(r, "metric") == metric]) for metric in _metrics(rows)}
    keys = sorted({(_text(row, "metric"), _text(row, "target")) for row in rows}, key=_macro_first)
    groups = []
    for metric, target in keys:
        mine = [row for row in rows if (_text(row, "metric"), _text(row, "target")) == (metric, target)]
        mine.sort(key=lambda row: (not _ours(row), _rank(str(row["name"])), _text(row, "probe"), _text(row, "pool")))
        scale = scales[metric]
        groups.append(
            ForestGroup(
                target,
                metric,
                tuple(_row(row, metric, scale) for row in mine),
                _axis(scale, _CHANCE.get(metric)),
                differences.get((metric, target)),
            )
        )
    return groups


def headline(rows: Sequence[Mapping[str, Any]], paired: Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
    """The rows under the probe, pool and metric of the paired comparison, which was named before the test was seen.

    Baselines without a pool stand beside them. Without a paired comparison nothing was named, and every row is kept.
    """
    if not paired or not all(paired.get(key) for key in ("probe", "pool", "metric")):
        return list(rows)
    return [
        row
        for row in rows
        if row.get("metric") == paired["metric"]
        and row.get("pool") in (paired["pool"], "none")
        and row.get("probe") in (paired["probe"], "constant")
    ]


def _metrics(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    return sorted({_text(row, "metric") for row in rows})


def _macro_first(key: tuple[str, str]) -> tuple[str, bool, str]:
    metric, target = key
    return metric, "macro" not in target, target


def _ours(row: Mapping[str, Any]) -> bool:
    """Whether it is what the page is about: an encoder, unless the row says itself."""
    return bool(row.get("ours", str(row["name"]) not in BASELINES))


def _rank(name: str) -> int:
    return BASELINES.index(name) + 1 if name in BASELINES else 0


def _text(row: Mapping[str, Any], key: str) -> str:
    return str(row.get(key) or "")


def finite(value: Any) -> float | None:
    """The figure, or None where there is none (null or not finite)."""
    return float(value) if value is not None and math.isfinite(float(value)) else None


def _scale(metric: str, rows: Sequence[Mapping[str, Any]]) -> tuple[float, float]:
    """The range that every row of a metric is drawn on; tenths around the data."""
    values = [v for row in rows for key in ("value", "low", "high") if (v := finite(row.get(key))) is not None]
    values += [_CHANCE[metric]] if metric in _CHANCE else []
    if not values:
        return 0.0, 1.0
    low, high = math.floor(10 * min(values)) / 10, math.ceil(10 * max(values)) / 10
    if any(word in metric for word in _WITHIN_ONE):
        low, high = max(low, 0.0), min(high, 1.0)
    return (low, high) if high > low else (low - 0.1, high + 0.1)


def _x(value: float, scale: tuple[float, float]) -> float:
    low, high = scale
    return 6 + (_WIDTH - 12) * (value - low) / (high - low)


def _row(row: Mapping[str, Any], metric: str, scale: tuple[float, float]) -> ForestRow:
    name = str(row["name"])
    ours = _ours(row)
    value, low, high = (finite(row.get(key)) for key in ("value", "low", "high"))
    parts = []
    if (chance := _CHANCE.get(metric)) is not None:
        parts.append(f'<path class="chance" d="M{_x(chance, scale):.1f} 0v{_HEIGHT:g}"/>')
    middle = _HEIGHT / 2
    if low is not None and high is not None:
        a, b = _x(low, scale), _x(high, scale)
        parts.append(f'<path class="whisker" d="M{a:.1f} {middle - 3:g}v6m0 -3H{b:.1f}m0 -3v6"/>')
    if value is not None:
        x = _x(value, scale)
        shape = (
            f"M{x:.1f} {middle - 6:g}l6 6l-6 6l-6 -6z"
            if ours
            else f"M{x - 4:.1f} {middle:g}a4 4 0 1 0 8 0a4 4 0 1 0 -8 0"
        )
        parts.append(f'<path class="point" d="{shape}"/>')
    drawing = _svg("".join(parts), "ours" if ours else "baseline")
    n = None if row.get("n") is None else int(row["n"])
    return ForestRow(
        name,
        ours,
        _text(row, "probe"),
        _text(row, "pool"),
        value,
        low,
        high,
        n,
        drawing,
    )


def _axis(scale: tuple[float, float], chance: float | None) -> Markup:
    low, high = scale
    step = 0.1 if high - low <= 0.55 else 0.2 if high - low <= 1.1 else (high - low) / 4
    ticks = [low + step * i for i in range(int((high - low) / step + 1e-6) + 1)]
    words = "".join(f'<text x="{_x(tick, scale):.1f}" y="13" text-anchor="middle">{tick:.1f}</text>' for tick in ticks)
    mark = f'<path class="chance" d="M{_x(chance, scale):.1f} 16v2"/>' if chance is not None else ""
    return _svg(words + mark, "axis")


def _svg(inner: str, css: str) -> Markup:
    return Markup(  # only numbers and fixed words enter
        f'<svg class="forest {css}" aria-hidden="true" viewBox="0 0 {_WIDTH:g} {_HEIGHT:g}">{inner}</svg>'
    )


@dataclass(frozen=True)
class Difference:
    """A paired difference, on the same people; `what` says of what."""

    what: str
    value: float | None
    low: float | None
    high: float | None
    n_people: int
    drawing: Markup | None


def difference(what: str, pair: Mapping[str, Any]) -> Difference:
    """`pair` as results.json holds it, drawn."""
    value, low, high = (finite(pair.get(key)) for key in ("difference", "low", "high"))
    drawing = None if value is None else difference_drawing(value, low, high)
    return Difference(what, value, low, high, int(pair["n_people"]), drawing)


def difference_drawing(difference: float, low: float | None, high: float | None) -> Markup:
    """The paired difference on its own scale, zero marked."""
    values = [v for v in (difference, low, high, 0.0) if v is not None]
    reach = max(0.05, math.ceil(20 * max(abs(v) for v in values)) / 20)
    scale = (-reach, reach)
    parts = [f'<path class="chance" d="M{_x(0, scale):.1f} 0v{_HEIGHT:g}"/>']
    middle = _HEIGHT / 2
    if low is not None and high is not None:
        parts.append(
            f'<path class="whisker" d="M{_x(low, scale):.1f} {middle - 3:g}v6m0 -3H{_x(high, scale):.1f}m0 -3v6"/>'
        )
    x = _x(difference, scale)
    parts.append(f'<path class="point" d="M{x:.1f} {middle - 6:g}l6 6l-6 6l-6 -6z"/>')
    parts += [
        f'<text x="{_x(v, scale):.1f}" y="29" text-anchor="{anchor}">{v:+.2f}</text>'
        for v, anchor in ((-reach, "start"), (reach, "end"))
    ]
    parts.append(f'<text x="{_x(0, scale):.1f}" y="29" text-anchor="middle">0</text>')
    return Markup(
        f'<svg class="forest ours difference" aria-hidden="true" viewBox="0 0 {_WIDTH:g} 34">{"".join(parts)}</svg>'
    )
