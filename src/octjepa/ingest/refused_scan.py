"""Scans that a command on files could not use: what `convert` and `segment` report of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from octjepa.reasons import REASONS
from octjepa.record import Record


@dataclass(frozen=True)
class RefusedScan(Record):
    """A scan without a result. `reason` is a code of `octjepa.reasons`, or one that only the command knows."""

    scan: str
    reason: str
    detail: str
    to_do: str

    @classmethod
    def of(cls, scan: str, reason: str, detail: str) -> RefusedScan:
        """A scan refused for a `reason` of `octjepa.reasons`, which also says what the user can do."""
        return cls(scan, reason, detail, REASONS[reason].action)


def lost_share(refused: Sequence[RefusedScan], successes: int) -> float:
    """Lost scans divided by lost scans and `successes`; a refused scan is lost unless its reason says otherwise."""
    lost = sum(scan.reason not in REASONS or REASONS[scan.reason].lost for scan in refused)
    return lost / max(lost + successes, 1)
