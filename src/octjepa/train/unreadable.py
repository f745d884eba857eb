"""Volumes that cannot be read while training: each is quarantined once, for all ranks, and the run goes on without it.

Another volume of the order stands in for it (`octjepa.views.loader.TrainingDataset`). Too many, and the run ends.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from octjepa.distributed.runtime import Runtime
from octjepa.errors import OctjepaError
from octjepa.files import Journal
from octjepa.ingest.reasons import quarantine_record

_MOST_LOST = 0.2  # of the training volumes
_log = logging.getLogger(__name__)


class Unread:
    """`note` takes what the ranks' loaders could not read at one update; `lines` are the run's journal so far."""

    def __init__(self, out: Path, volumes: int, lines: Iterable[Mapping[str, Any]] = ()) -> None:
        self._ledger, self._volumes = Journal(out / "quarantine.jsonl"), volumes
        self._known = {name for line in lines for name in line.get("unread", ())}

    def note(self, found: Iterable[tuple[str, str]], runtime: Runtime) -> list[str]:
        """All ranks' unreadable volumes of this update, and a quarantine row for each new one.

        Raises OctjepaError when more than a fifth of the training volumes is lost.
        """
        told = dict(json.loads(word) for word in runtime.all_gather(json.dumps(pair) for pair in found))
        new = {name: why for name, why in sorted(told.items()) if name not in self._known}
        self._known |= set(new)
        if runtime.rank == 0 and new:
            written = {row["file"] for row in self._ledger.read() if row["stage"] == "train"}  # before a kill, too
            for name, why in new.items():
                _log.warning("volume %s cannot be read; others stand in for it: %s", name, why)
                if name not in written:
                    self._ledger.append(quarantine_record(name, "", "train", "unreadable_file", why))
        if len(self._known) > _MOST_LOST * self._volumes:
            raise OctjepaError(
                f"{len(self._known)} of {self._volumes} training volumes cannot be read, the last: "
                f"{next(reversed(told.values()))}. Is the store's disk or bucket there? Mend it and go on with --resume"
            )
        return sorted(told)
