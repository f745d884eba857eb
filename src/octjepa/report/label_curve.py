"""How a probe's metric falls with fewer labels: the probe and pooling that `paired` named, at each number of labelled
people.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from octjepa.evaluate.results import ProbePaired, Row, WithFewerLabels


@dataclass(frozen=True)
class LabelCurveRow:
    """The results of an encoder or baseline in the order of the columns; None if there is none."""

    name: str
    results: tuple[Row | None, ...]


@dataclass(frozen=True)
class LabelCurve:
    """How a metric falls with fewer labels. columns: headings, from few people to all labels."""

    target: str
    metric: str
    columns: list[str]
    rows: tuple[LabelCurveRow, ...]


def label_curve(
    labelled: Mapping[str, WithFewerLabels], rows: Sequence[Row], paired: ProbePaired | None
) -> LabelCurve | None:
    """Of every encoder and baseline its result at each number of people, and with all labels last; None for no curve.

    A baseline without a pool is read by the probe of `paired`.
    """
    if not labelled or paired is None or not paired.probe:
        return None
    columns: dict[str, Sequence[Row]] = {f"{count} people": fewer.rows for count, fewer in labelled.items()}
    columns["all"] = rows

    def reading(row: Row) -> bool:
        same = (row.target, row.metric, row.probe) == (paired.target, paired.metric, paired.probe)
        return same and row.pool in (paired.pool, "none")

    by_heading = {
        heading: {row.name: row for row in heading_rows if reading(row)} for heading, heading_rows in columns.items()
    }
    names = list(by_heading["all"])
    if not any(by_heading[heading] for heading in by_heading if heading != "all"):
        return None
    curves = tuple(LabelCurveRow(name, tuple(by_heading[heading].get(name) for heading in columns)) for name in names)
    return LabelCurve(paired.target, paired.metric, list(columns), curves)
