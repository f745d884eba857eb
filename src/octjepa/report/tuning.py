"""What a fine-tuning alone puts on the page: its rows, and the tuned encoder minus each of what stands beside it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from octjepa.report.figures import forest
from octjepa.report.gather import ProbeContents, TuningContents

TUNED = "tuned"  # the probe of a tuned network's rows
_AGAINST = {
    "frozen": "a linear probe on the same encoder frozen",
    "best_baseline": "{0}, the best baseline on these very people, which favours it",
    "tuned_from_scratch": "the same network tuned from its first weights",
}


def rows(tuning: TuningContents, probe: ProbeContents) -> list[dict[str, Any]]:
    """The rows under the metric of each target's paired differences; the tuned encoder is `ours`."""
    named = {(pair["target"], pair["metric"]) for pair in tuning.paired}
    return [
        {**row, "ours": row["name"] == tuning.about.get("encoder") and row.get("probe") == TUNED}
        for row in probe.rows
        if (row.get("target"), row.get("metric")) in named
    ]


def against_frozen(paired: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    return [pair for pair in paired if pair["against"] == "frozen"]


def differences(paired: Sequence[Mapping[str, Any]]) -> list[forest.Difference]:
    """In the order in which they were measured."""
    return [
        forest.difference(
            f"{pair['target']} {pair['metric']}, tuned minus "
            + _AGAINST.get(pair["against"], "{0}").format(pair["reference"]),
            pair,
        )
        for pair in paired
    ]
