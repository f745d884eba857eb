"""The record of the sealed cohort: it is opened once, and a second opening is known to everybody."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from octjepa.errors import UsageError
from octjepa.files import write_json
from octjepa.train.run_folder import code_and_versions

RECORD = "openings.json"


def open_seal(out: Path, again: bool) -> None:
    """Records that the sealed cohort is opened; an opening that was interrupted goes on, with the same code.

    Raises UsageError for a second opening that was not asked for.
    """
    openings = _openings(out)
    if openings and "ended" not in openings[-1] and openings[-1]["code"] == code()["code"]:
        return
    if openings and not again:
        raise UsageError(
            f"the sealed cohort was opened on {openings[-1]['date']} ({out / RECORD}): figures of a second opening are "
            "no longer of people that nobody has looked at. --again opens it, and the record says so"
        )
    out.mkdir(parents=True, exist_ok=True)
    write_json(out / RECORD, [*openings, {"date": _now(), **code()}])


def close_seal(out: Path) -> None:
    """Records that everything was read: the next opening is another one."""
    openings = _openings(out)
    openings[-1]["ended"] = _now()
    write_json(out / RECORD, openings)


def described(out: Path) -> list[str]:
    """When the sealed cohort was opened, a line each."""
    return [
        f"{one['date']}, code {one['code']}, " + (f"read until {one['ended']}" if "ended" in one else "interrupted")
        for one in _openings(out)
    ]


def _openings(out: Path) -> list[dict[str, Any]]:
    path = out / RECORD
    return list(json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else []


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def code() -> dict[str, Any]:
    """Hash of the code that measures."""
    return {"code": code_and_versions()["code_hash"][:12]}
