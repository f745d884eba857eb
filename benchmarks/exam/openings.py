"""The record of the sealed cohort: it is opened once, and a second opening is known to everybody."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from octjepa.errors import UsageError
from octjepa.files import write_json
from octjepa.train.run_folder import code_and_versions


def open_seal(out: Path, again: bool) -> None:
    """Records that the sealed cohort was opened. Raises UsageError for a second time that was not asked for."""
    record = out / "openings.json"
    openings = json.loads(record.read_text(encoding="utf-8")) if record.is_file() else []
    if openings and not again:
        raise UsageError(
            f"the sealed cohort was opened on {openings[-1]['date']} ({record}): figures of a second opening are no "
            "longer of people that nobody has looked at. --again opens it, and the record says so"
        )
    out.mkdir(parents=True, exist_ok=True)
    openings.append({"date": datetime.now(UTC).isoformat(timespec="seconds"), **code()})
    write_json(record, openings)


def code() -> dict[str, Any]:
    """Hash of the code that measures."""
    return {"code": code_and_versions()["code_hash"][:12]}
