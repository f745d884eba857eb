"""The record of the sealed cohort: it is opened once, and a second opening is known to everybody."""

from __future__ import annotations

import hashlib
import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from octjepa.errors import UsageError
from octjepa.files import write_json
from octjepa.train.run_folder import code_and_versions

RECORD = "openings.json"


def open_seal(out: Path, again: bool, seed: int, run: str, weights: str) -> None:
    """Records that a sealed cohort is opened for an encoder; an opening that was interrupted goes on, with the same.

    seed: of the cohort's people. run, weights: the encoder's run, and the hash of what it left. Raises UsageError for a
    second opening of the same people that was not requested, such as one for another encoder or with other code.
    """
    everything, now = _openings(out), {"seed": seed, "run": run, "weights": weights, **code()}
    openings = [one for one in everything if one["seed"] == seed]
    same = bool(openings) and all(openings[-1].get(name, value) == value for name, value in now.items())
    if same and "ended" not in openings[-1]:  # older records lack what is not compared here
        return
    if openings and not again:
        raise UsageError(
            f"the sealed cohort was opened on {openings[-1]['date']} ({out / RECORD}): figures of a second opening are "
            "no longer of people that nobody has looked at. --again opens it, and the record says so"
        )
    out.mkdir(parents=True, exist_ok=True)
    write_json(out / RECORD, [*everything, {"date": _now(), **now}])


def close_seal(out: Path) -> None:
    """Records that everything was read: the next opening is another one."""
    openings = _openings(out)
    openings[-1]["ended"] = _now()
    write_json(out / RECORD, openings)


def described(out: Path) -> list[str]:
    """When the sealed cohort was opened, and as far as it is recorded for which encoder, a line each."""
    return [_described(one) for one in _openings(out)]


def _described(opening: dict[str, Any]) -> str:
    parts = [opening["date"], f"people of seed {opening['seed']}"]
    if "run" in opening:
        parts.append(f"for `{opening['run']}` (weights {opening['weights']})")
    parts.append(f"code {opening['code']}")
    if "exam_code" in opening:
        parts.append(f"code of the exam {opening['exam_code']}")
    return ", ".join([*parts, f"read until {opening['ended']}" if "ended" in opening else "interrupted"])


def _openings(out: Path) -> list[dict[str, Any]]:
    path = out / RECORD
    return list(json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else []


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def code() -> dict[str, Any]:
    """Hashes of the code that measures: of the package, and of the exam with its recipes."""
    folder, digest = Path(__file__).parent, hashlib.sha256()
    for path in sorted([*folder.glob("*.py"), *folder.glob("*.yaml")]):
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return {"code": code_and_versions()["code_hash"][:12], "exam_code": digest.hexdigest()[:12]}
