"""Tables of figures by subgroup: a column of the labels (sex, bands of age) or of the volumes, every encoder beside."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from octjepa.metrics.scores import PRIMARY_METRIC


def subgroup_tables(scored: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """A table for every target and column, in the target's primary metric.

    {target, column, metric, names: headings, rows: [{group, people, results}], left_out: {group: reason}}; `results`
    are in the order of `names`, None where a result does not exist.
    """
    tables: dict[tuple[str, str, str], list[Mapping[str, Any]]] = {}
    for one in scored:
        if one["metric"] in PRIMARY_METRIC.values():
            tables.setdefault((one["target"], one["column"], one["metric"]), []).append(one)
    made = []
    for (target, column, metric), members in tables.items():
        groups = {group: figure for one in members for group, figure in one["groups"].items()}
        rows = [
            {"group": group, "people": figure["n_people"], "results": [one["groups"].get(group) for one in members]}
            for group, figure in sorted(groups.items())
        ]
        names = [_heading(one, members) for one in members]
        left_out = {group: reason for one in members for group, reason in one["left_out"].items()}
        made.append(
            {"target": target, "column": column, "metric": metric, "names": names, "rows": rows, "left_out": left_out}
        )
    return made


def _heading(one: Mapping[str, Any], members: Sequence[Mapping[str, Any]]) -> str:
    """The name of a result, with its probe where the name stands there twice (an encoder frozen and tuned)."""
    twice = [other["name"] for other in members].count(one["name"]) > 1
    return f"{one['name']} ({one['probe']})" if twice else str(one["name"])
