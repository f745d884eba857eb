"""Counts the uses of a test set, because a result that was chosen among many uses is too good.

One line per use is added to a file named after the hash of the test volumes and their labels
(`targets.test_set_hash`), in a folder that the user names; next to the label table it counts for everyone who shares
the table. A line holds when, which command, the target, and hashes of what was measured: no person, no label. Reusing a
test set to choose makes its results optimistic (Dwork et al. 2015, The reusable holdout); the ledger does not forbid
it, it reports it.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float

from octjepa.errors import UsageError
from octjepa.metrics.findings import Findings, TestSetUse
from octjepa.parsing import LINES_BYTES, parse_json_object, read_limited

SUFFIX = ".uses.jsonl"
FOLDER = "octjepa_test_uses"


def reuse_warning(uses: Sequence[TestSetUse]) -> str:
    """One sentence on the test sets that were used before; "" if none was."""
    again = [
        f"{use.target} for the {_ordinal(use.looks)} time ({use.measured} different rows measured on it so far)"
        for use in uses
        if use.looks > 1
    ]
    if not again:
        return ""
    return (
        f"test sets are used again: {', '.join(again)}. What was chosen after an earlier look was chosen on test "
        "labels: its metric is too good"
    )


def _ordinal(number: int) -> str:
    ending = "th" if 10 <= number % 100 <= 20 else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{ending}"


def default_folder(labels: Path) -> Path:
    """The folder of the ledger if none was named: next to the label table."""
    return labels.parent / FOLDER


def check_writable(folder: Path) -> None:
    """Makes the ledger's folder. Raises UsageError where a use cannot be written there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise _write_error(folder, error) from None
    if not os.access(folder, os.W_OK):
        raise UsageError(f"the ledger of test uses in {folder} may not be written: name another folder with --ledger")


def fingerprint(features: Float[np.ndarray, "volumes features"], probe: str) -> str:
    """Identifies an evaluated predictor: a hash of its features, and the name of the probe."""
    return f"{hashlib.sha256(np.ascontiguousarray(features).data).hexdigest()} {probe}"


def record_uses(
    folder: Path,
    command: str,
    test_sets: Mapping[str, str],
    measured: Mapping[str, Sequence[str]],
    findings: Findings,
) -> None:
    """Records a use of the test set of every target, and reports in `findings` how often each was used.

    test_sets, measured: by target, as in `record_use`. To be called before anything is predicted on test people. Raises
    UsageError as `record_use` does.
    """
    uses = [record_use(folder, test_set, name, command, measured[name]) for name, test_set in test_sets.items()]
    findings.uses = uses
    warning = reuse_warning(uses)
    if warning:
        findings.add_fault("test_used_before", warning)


def record_use(folder: Path, test_set: str, target: str, command: str, measured: Sequence[str]) -> TestSetUse:
    """Appends a line for a new use, before its results are shown, and counts the uses by what they measured.

    test_set: `targets.test_set_hash`. measured: the `fingerprint` of each thing measured. A command that measures the
    same things again, such as one that was killed and repeated, is the same use. Raises UsageError: a ledger that was
    damaged or cannot be written; a use that is not counted must not happen.
    """
    check_writable(folder)
    file = folder / f"{test_set[:32]}{SUFFIX}"
    keys = sorted({hashlib.sha256(identity.encode()).hexdigest()[:16] for identity in measured})
    line = {"command": command, "target": target, "rows": len(measured), "measured": keys}
    try:
        handle = os.open(file, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW, 0o666)
        try:
            with suppress(OSError):  # some network disks know no locks
                fcntl.flock(handle, fcntl.LOCK_EX)
            uses = _read(file)
            if not any(_is_same_use(use, line) for use in uses):
                _append(handle, {"when": datetime.now(UTC).isoformat(timespec="seconds"), **line})
        finally:
            os.close(handle)
    except OSError as error:
        raise _write_error(file, error) from None
    distinct = {(use.get("command"), use.get("target"), tuple(use["measured"])) for use in [*uses, line]}
    return TestSetUse(target, len(distinct), len({key for *_, looked_at in distinct for key in looked_at}), file)


def _is_same_use(use: Mapping[str, Any], line: Mapping[str, Any]) -> bool:
    """Whether a recorded use measured the same things for the same target by the same command."""
    return all(use.get(key) == line[key] for key in ("command", "target", "measured"))


def _append(handle: int, line: Mapping[str, Any]) -> None:
    """Adds a line, or nothing where the disk is full: half a line would make the ledger a damaged one."""
    size = os.fstat(handle).st_size
    content = (json.dumps(line) + "\n").encode()
    try:
        if os.write(handle, content) < len(content):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        os.fsync(handle)
    except OSError:
        os.ftruncate(handle, size)
        raise


def _write_error(path: Path, error: OSError) -> UsageError:
    return UsageError(
        f"the ledger of test uses {path} cannot be written ({error.strerror}): name another folder with --ledger"
    )


def _read(file: Path) -> list[dict[str, Any]]:
    """The lines of all uses so far."""
    if not file.is_file():
        return []
    try:
        uses = [parse_json_object(line) for line in read_limited(file, LINES_BYTES).splitlines() if line]
        return [{**use, "measured": list(use["measured"])} for use in uses]
    except (ValueError, KeyError, TypeError):
        raise UsageError(
            f"the ledger of test uses {file} is damaged, so the uses of this test set can no longer be counted. "
            "Restore the ledger from a copy, or move it away and say in your report that the count starts again"
        ) from None
