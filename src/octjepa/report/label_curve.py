"""How a probe's figure falls with fewer labels: the reading that `paired` named, at each number of labelled people."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def label_curve(
    labelled: Mapping[str, Mapping[str, Any]], rows: Sequence[Mapping[str, Any]], paired: Mapping[str, Any] | None
) -> dict[str, Any] | None:
    """Of every encoder and baseline its result at each number of people, and with all labels last; None for no curve.

    {target, metric, columns: headings, rows: [{name, results}]}; a result that does not exist is None. A baseline
    without a pool is read by the probe of `paired`.
    """
    if not labelled or not paired or not paired.get("probe"):
        return None
    columns = {f"{count} people": found.get("rows", ()) for count, found in labelled.items()} | {"all": rows}

    def reading(row: Mapping[str, Any]) -> bool:
        same = all(row.get(key) == paired.get(key) for key in ("target", "metric", "probe"))
        return same and row.get("pool") in (paired.get("pool"), "none")

    found = {
        heading: {str(row["name"]): dict(row) for row in some if reading(row)} for heading, some in columns.items()
    }
    names = list(found["all"])
    if not any(found[heading] for heading in found if heading != "all"):
        return None
    return {
        "target": paired.get("target", ""),
        "metric": paired.get("metric", ""),
        "columns": list(columns),
        "rows": [{"name": name, "results": [found[heading].get(name) for heading in columns]} for name in names],
    }
