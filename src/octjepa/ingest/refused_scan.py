"""Scans that a command on files could not use: what `convert`, `segment` and `predict` report of them."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from octjepa.errors import OctjepaError, VolumeRejected, is_out_of_memory
from octjepa.reasons import REASONS, action_for
from octjepa.record import Record


@dataclass(frozen=True)
class RefusedScan(Record):
    """A scan without a result. `reason` is a code of `octjepa.reasons`, or one that only the command knows."""

    scan: str
    reason: str
    detail: str
    to_do: str

    @property
    def text(self) -> str:
        """The refusal in one line."""
        return f"{self.scan}: {self.reason}: {'; '.join(filter(None, [self.detail, self.to_do]))}"

    @classmethod
    def of(cls, scan: str, reason: str, detail: str) -> RefusedScan:
        """A scan refused for a `reason` of `octjepa.reasons`, which says what the user can do if `detail` does not."""
        return cls(scan, reason, detail, action_for(reason, detail))


class WithoutResult(OctjepaError, ABC):
    """A scan was read, and its result could not be written. The next scan may have one."""

    @abstractmethod
    def refusal(self, scan: str) -> RefusedScan:
        """The entry of `scan` among the refused scans."""


@contextmanager
def collect_refusals(refused: list[RefusedScan], shown: Callable[[], str]) -> Iterator[None]:
    """Work on one scan inside. If it fails, the scan is added to `refused`, and the caller reads the next one.

    shown: the scan's name in lists, without what identifies the person. It is called after the failure. Other errors
    are raised.
    """
    try:
        yield
    except VolumeRejected as error:
        refused.append(RefusedScan.of(shown(), error.reason, error.detail))
    except WithoutResult as error:
        refused.append(error.refusal(shown()))
    except (MemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        refused.append(RefusedScan.of(shown(), "size_implausible", "it does not fit into memory"))


def lost_share(refused: Sequence[RefusedScan], successes: int) -> float:
    """Lost scans divided by lost scans and `successes`; a refused scan is lost unless its reason says otherwise."""
    lost = sum(scan.reason not in REASONS or REASONS[scan.reason].lost for scan in refused)
    return lost / max(lost + successes, 1)
