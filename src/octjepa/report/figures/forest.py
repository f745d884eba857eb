"""Probe results as a forest plot: per target and metric a group, each result a point with its 95 % interval.

The drawing is part of the table, so every interval is next to its value and can be read without seeing it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from markupsafe import Markup

from octjepa.evaluate.results import Paired, ProbePaired, Row
from octjepa.metrics.findings import BASELINES

CHANCE = {"auroc": 0.5, "concordance": 0.5, "auroc_ovr": 0.5, "quadratic_kappa": 0.0, "r2": 0.0}
_WITHIN_ONE = ("auroc", "auprc", "accuracy", "f1", "dice", "ece")
_WIDTH, _HEIGHT = 360.0, 18.0


@dataclass(frozen=True)
class ForestRow:
    """A result, whether it is the page's own encoder, and its drawing."""

    result: Row
    ours: bool
    drawing: Markup


@dataclass(frozen=True)
class ForestGroup:
    """One target under one metric; `axis` is the drawing of the scale that its rows share.

    `difference` is the target's own paired difference; to be read, not to choose by.
    """

    target: str
    metric: str
    rows: tuple[ForestRow, ...]
    axis: Markup
    difference: Paired | None


@dataclass(frozen=True)
class Difference:
    """A paired difference on the same people, drawn; `what` names both sides."""

    what: str
    value: float | None
    low: float | None
    high: float | None
    n_people: int | None
    drawing: Markup | None


def is_encoder(result: Row) -> bool:
    """Whether a result is of an encoder, not of a baseline."""
    return result.name.partition(":")[0] not in BASELINES


def forest(
    results: Sequence[Row],
    comparisons: Sequence[Paired] = (),
    ordered: bool = False,
    ours: Callable[[Row], bool] = is_encoder,
) -> list[ForestGroup]:
    """Groups by metric and target, macro targets first; within a group the encoder before the baselines.

    comparisons: paired differences under the probe and pool of `results`. ordered: keep the order of `results`, each
    group on a separate scale. ours: whether the page is about a result.
    """
    differences = {(pair.metric, pair.target): pair for pair in comparisons}
    groups: dict[tuple[str, str], list[Row]] = {}
    for result in results:
        groups.setdefault((result.metric, result.target), []).append(result)
    by_metric = {
        metric: _scale(metric, [result for result in results if result.metric == metric]) for metric, _ in groups
    }

    def row_order(result: Row) -> tuple[Any, ...]:
        rank = BASELINES.index(result.name) + 1 if result.name in BASELINES else 0
        return not ours(result), rank, result.probe, result.pool

    drawn = []
    for (metric, target), members in groups.items() if ordered else sorted(groups.items(), key=_macro_first):
        scale = _scale(metric, members) if ordered else by_metric[metric]
        members = members if ordered else sorted(members, key=row_order)
        rows = tuple(_row(result, CHANCE.get(metric), scale, ours(result)) for result in members)
        axis = _axis(scale, CHANCE.get(metric))
        drawn.append(ForestGroup(target, metric, rows, axis, differences.get((metric, target))))
    return drawn


def planned_results(results: Sequence[Row], paired: ProbePaired | None) -> list[Row]:
    """The results under the probe, pool and metric of the paired comparison, which was fixed before the test was read.

    Baselines without a pool are among them. Without a paired comparison nothing was fixed, and all are returned.
    """
    if paired is None or not (paired.probe and paired.pool and paired.metric):
        return list(results)
    return [
        result
        for result in results
        if result.metric == paired.metric
        and result.pool in (paired.pool, "none")
        and result.probe in (paired.probe, "constant")
    ]


def paired_difference(what: str, pair: Paired) -> Difference:
    """`pair`, drawn."""
    value, low, high = (finite(number) for number in (pair.difference, pair.low, pair.high))
    drawing = None if value is None else _draw_difference({"value": value, "low": low, "high": high})
    return Difference(what, value, low, high, pair.n_people, drawing)


def finite(value: Any) -> float | None:
    """The value, or None if there is none (null or not finite)."""
    return float(value) if value is not None and math.isfinite(float(value)) else None


def _macro_first(group: tuple[tuple[str, str], Any]) -> tuple[str, bool, str]:
    metric, target = group[0]
    return metric, "macro" not in target, target


def _scale(metric: str, results: Sequence[Row]) -> tuple[float, float]:
    """The range on which results of a metric are drawn: tenths around the data."""
    values = [
        number
        for result in results
        for value in (result.value, result.low, result.high)
        if (number := finite(value)) is not None
    ]
    values += [CHANCE[metric]] if metric in CHANCE else []
    if not values:
        return 0.0, 1.0
    low, high = math.floor(10 * min(values)) / 10, math.ceil(10 * max(values)) / 10
    if any(word in metric for word in _WITHIN_ONE):
        low, high = max(low, 0.0), min(high, 1.0)
    return (low, high) if high > low else (low - 0.1, high + 0.1)


def _x(value: float, scale: tuple[float, float]) -> float:
    low, high = scale
    return 6 + (_WIDTH - 12) * (value - low) / (high - low)


def _row(result: Row, chance: float | None, scale: tuple[float, float], ours: bool) -> ForestRow:
    figures = {"value": finite(result.value), "low": finite(result.low), "high": finite(result.high)}
    marks = _chance_line(chance, scale) + _interval(figures, scale, ours)
    return ForestRow(
        replace(result, value=figures["value"], low=figures["low"], high=figures["high"]),
        ours,
        _drawing(marks, "ours" if ours else "baseline"),
    )


def _chance_line(chance: float | None, scale: tuple[float, float]) -> str:
    return "" if chance is None else f'<path class="chance" d="M{_x(chance, scale):.1f} 0v{_HEIGHT:g}"/>'


def _interval(figures: Mapping[str, float | None], scale: tuple[float, float], diamond: bool = True) -> str:
    """A whisker from low to high and a point at the value, each if it is known."""
    value, low, high = figures["value"], figures["low"], figures["high"]
    middle, marks = _HEIGHT / 2, ""
    if low is not None and high is not None:
        marks += f'<path class="whisker" d="M{_x(low, scale):.1f} {middle - 3:g}v6m0 -3H{_x(high, scale):.1f}m0 -3v6"/>'
    if value is not None:
        x = _x(value, scale)
        circle = f"M{x - 4:.1f} {middle:g}a4 4 0 1 0 8 0a4 4 0 1 0 -8 0"
        marks += f'<path class="point" d="{f"M{x:.1f} {middle - 6:g}l6 6l-6 6l-6 -6z" if diamond else circle}"/>'
    return marks


def _axis(scale: tuple[float, float], chance: float | None) -> Markup:
    low, high = scale
    step = 0.1 if high - low <= 0.55 else 0.2 if high - low <= 1.1 else (high - low) / 4
    ticks = [low + step * number for number in range(int((high - low) / step + 1e-6) + 1)]
    marks = "".join(_label(tick, scale, 13, f"{tick:.1f}") for tick in ticks)
    if chance is not None:
        marks += f'<path class="chance" d="M{_x(chance, scale):.1f} 16v2"/>'
    return _drawing(marks, "axis")


def _draw_difference(figures: Mapping[str, float | None]) -> Markup:
    """A difference on a separate scale with zero in the middle."""
    largest = max(abs(figure) for figure in figures.values() if figure is not None)
    reach = max(0.05, math.ceil(20 * largest) / 20)
    scale = (-reach, reach)
    marks = _chance_line(0, scale) + _interval(figures, scale)
    marks += _label(-reach, scale, 29, f"{-reach:+.2f}", "start") + _label(reach, scale, 29, f"{reach:+.2f}", "end")
    return _drawing(marks + _label(0, scale, 29, "0"), "ours difference", 34)


def _label(value: float, scale: tuple[float, float], y: int, text: str, anchor: str = "middle") -> str:
    return f'<text x="{_x(value, scale):.1f}" y="{y}" text-anchor="{anchor}">{text}</text>'


def _drawing(inner: str, css: str, height: float = _HEIGHT) -> Markup:
    return Markup(  # only numbers and fixed words enter
        f'<svg class="forest {css}" aria-hidden="true" viewBox="0 0 {_WIDTH:g} {height:g}">{inner}</svg>'
    )
