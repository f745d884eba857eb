"""Volumes that cannot be read while training: each is quarantined once, for all ranks, and the run goes on without it.

Another volume of the order stands in for it (`octjepa.views.loader.Stream`). Too many, and the run ends.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable
from pathlib import Path

from octjepa.errors import OctjepaError
from octjepa.ingest.reasons import ledger_row
from octjepa.train.runtime import Runtime

_MOST_LOST = 0.2  # of the training volumes
_log = logging.getLogger(__name__)


class Unread:
    """`note` takes what the ranks' loaders could not read at one update."""

    def __init__(self, out: Path, volumes: int) -> None:
        self._out, self._volumes = out, volumes
        self._known: set[str] = set()

    def note(self, found: Iterable[tuple[str, str]], runtime: Runtime) -> list[str]:
        """All ranks' unreadable volumes of this update, and a quarantine row for each new one.

        Raises OctjepaError when more than a fifth of the training volumes is lost.
        """
        told = dict(json.loads(word) for word in runtime.gather(json.dumps(pair) for pair in found))
        new = {name: why for name, why in sorted(told.items()) if name not in self._known}
        self._known |= set(new)
        if runtime.rank == 0:
            for name, why in new.items():
                _log.warning("volume %s cannot be read; others stand in for it: %s", name, why)
            with (self._out / "quarantine.jsonl").open("a", encoding="utf-8") as file:
                for name, why in new.items():
                    file.write(json.dumps(ledger_row(name, "", "train", "unreadable_file", why)) + "\n")
        if len(self._known) > _MOST_LOST * self._volumes:
            raise OctjepaError(
                f"{len(self._known)} of {self._volumes} training volumes cannot be read, the last: "
                f"{next(reversed(told.values()))}. Is the store's disk or bucket there? Mend it and go on with --resume"
            )
        return sorted(told)
