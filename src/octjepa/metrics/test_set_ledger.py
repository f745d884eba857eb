"""How often a test set was looked at. A figure chosen among many looks is too good, and nobody remembers the looks.

One line per look is added to a file named after the hash of the test volumes and their labels (`labels.test_set_hash`),
in a folder that the user names; kept beside the label table it counts for everyone who shares the table. A line holds
when, which command, the target, and hashes of what was measured: no person, no label. Reusing a test set to choose
makes its figures optimistic (Dwork et al. 2015, The reusable holdout); the ledger does not forbid it, it says it.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float

from octjepa.errors import UsageError
from octjepa.metrics.findings import Findings

SUFFIX = ".uses.jsonl"
FOLDER = "octjepa_test_uses"


@dataclass(frozen=True)
class TestSetUse:
    """looks: of this test set, this one included. measured: different things measured on it in all of them.

    again: how many of this look's were measured before. file: where it stands.
    """

    target: str
    looks: int
    measured: int
    again: int
    file: Path

    def plain(self) -> dict[str, Any]:
        """For JSON."""
        return {"target": self.target, "looks": self.looks, "measured": self.measured, "file": str(self.file)}


def reuse_warning(many: Sequence[TestSetUse]) -> str:
    """One sentence on the test sets that were looked at before; "" where none was."""
    again = [
        f"{uses.target} for the {_ordinal(uses.looks)} time ({uses.measured} different rows measured on it so far)"
        for uses in many
        if uses.looks > 1
    ]
    if not again:
        return ""
    return (
        f"test sets are used again: {', '.join(again)}. What was chosen after an earlier look was chosen on test "
        "labels: its figure is too good"
    )


def _ordinal(number: int) -> str:
    ending = "th" if 10 <= number % 100 <= 20 else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{ending}"


def default_folder(labels: Path) -> Path:
    """The folder of the ledger where none was named: beside the label table."""
    return labels.parent / FOLDER


def check_writable(folder: Path) -> None:
    """Finds out before the work whether a look can be written down. Raises UsageError."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(_refused(folder, error)) from None
    if not os.access(folder, os.W_OK):
        raise UsageError(f"the ledger of test uses in {folder} may not be written: name another folder with --ledger")


def fingerprint(features: Float[np.ndarray, "rows features"], probe: str) -> str:
    """What tells one thing measured from another: the features themselves, and the probe that reads them."""
    return f"{hashlib.sha256(np.ascontiguousarray(features).data).hexdigest()} {probe}"


def record_uses(
    folder: Path, command: str, test_sets: Mapping[str, str], measured: Mapping[str, Sequence[str]], found: Findings
) -> None:
    """Records a look at the test set of every target, and says in `found` how often each was used.

    test_sets, measured: by target, as in `record_use`. To be called before anything is predicted on test people. Raises
    UsageError as `record_use` does.
    """
    many = [record_use(folder, test_set, name, command, measured[name]) for name, test_set in test_sets.items()]
    found.uses = [one.plain() for one in many]
    again = reuse_warning(many)
    if again:
        found.add_fault("test_used_before", again)


def record_use(folder: Path, test_set: str, target: str, command: str, measured: Sequence[str]) -> TestSetUse:
    """Writes a look down, before its figures are shown, and says how many there were.

    test_set: `labels.test_set_hash`. measured: the `fingerprint` of each thing measured. Raises UsageError: a ledger
    that was damaged or cannot be written: a look that is not counted must not happen.
    """
    check_writable(folder)
    file = folder / f"{test_set[:32]}{SUFFIX}"
    before = _read(file)
    keys = sorted({hashlib.sha256(one.encode()).hexdigest()[:16] for one in measured})
    line = {
        "when": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": command,
        "target": target,
        "rows": len(measured),
        "measured": keys,
    }
    try:
        with file.open("a", encoding="utf-8") as opened:
            opened.write(json.dumps(line) + "\n")
            opened.flush()
            os.fsync(opened.fileno())
    except OSError as error:
        raise UsageError(_refused(file, error)) from None
    known = {key for look in before for key in look}
    return TestSetUse(target, len(before) + 1, len(known | set(keys)), len(known & set(keys)), file)


def _refused(place: Path, error: OSError) -> str:
    return f"the ledger of test uses {place} cannot be written ({error.strerror}): name another folder with --ledger"


def _read(file: Path) -> list[list[str]]:
    """The keys measured in each look so far."""
    if not file.is_file():
        return []
    try:
        return [list(json.loads(line)["measured"]) for line in file.read_text(encoding="utf-8").splitlines() if line]
    except (ValueError, KeyError, TypeError):
        raise UsageError(
            f"the ledger of test uses {file} is damaged: looks at this test set can no longer be counted. Restore it "
            "from a copy, or move it away and say in your report that the count starts anew"
        ) from None
