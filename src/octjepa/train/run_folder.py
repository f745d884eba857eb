"""The run folder: what was asked, with which code and data, on what; and its summary at the end."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import platform
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from octjepa.checkpoint.folder import list_checkpoints
from octjepa.checkpoint.location import Location, check_writable
from octjepa.checkpoint.state import differences
from octjepa.config import load_recipe, science_hash, to_yaml
from octjepa.distributed.runtime import Runtime
from octjepa.errors import UsageError, WrongCheckpointError
from octjepa.files import read_json_lines, read_json_object, write_atomic, write_json
from octjepa.recipe import Recipe
from octjepa.remote import is_remote
from octjepa.store import Store

SUMMARY = "summary.json"
_ABOUT = "run.json"
_SAVED = "saved.json"
_log = logging.getLogger(__name__)
_VERSIONED = ("octjepa", "torch", "numpy", "scipy", "pydicom", "safetensors", "scikit-learn")


def open_run(
    out: Path,
    saves: Location | None,
    recipe: Recipe,
    store: Store,
    volume_ids: Sequence[str],
    runtime: Runtime,
    resume: bool,
    cohort: Mapping[str, Any],
) -> None:
    """Writes recipe.yaml and run.json (with `cohort`) of a new run, whose checkpoints will lie in `saves`.

    Raises UsageError when `out` holds a run and `resume` is false, or none and it is true, or `saves` holds another
    run's checkpoints; WrongCheckpointError when the run was begun with another recipe.
    """
    there = (out / _ABOUT).is_file()
    if there and not resume:
        raise UsageError(f"{out} already holds a run: add --resume to go on with it, or give another --out")
    if resume and not there:
        raise UsageError(f"{out} holds no run to resume: leave --resume out to start one there")
    if there:
        check_recipe(out, recipe)
        return
    if saves is not None:
        check_writable(saves)
    if saves is not None and list_checkpoints(saves):
        raise UsageError(f"{saves} already holds checkpoints of another run: give another checkpoint.dir")
    out.mkdir(parents=True, exist_ok=True)
    write_atomic(out / "recipe.yaml", lambda file: file.write(to_yaml(recipe).encode()))
    ledger = "".join(json.dumps(row) + "\n" for row in store.quarantine)
    write_atomic(out / "quarantine.jsonl", lambda file: file.write(ledger.encode()))
    about = {
        "name": recipe.name,
        "science_hash": science_hash(recipe),
        "contract_hash": science_hash(recipe.preprocessing),
        "data_hash": data_hash(store, volume_ids),
        "chunks_hash": chunks_hash(store, volume_ids, recipe),
        "volumes": len(volume_ids),
        **code_and_versions(),
        "devices": runtime.describe(),
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "store": store.location if is_remote(store.location) else os.path.relpath(store.path, out),
        **cohort,
    }
    write_json(out / _ABOUT, about)


def code_and_versions() -> dict[str, Any]:
    """Hash of this package's code, versions of it and of what its figures depend on."""
    versions = {name: version(name) for name in _VERSIONED} | {"python": platform.python_version()}
    return {"code_hash": code_hash(), "versions": versions}


def note_other_code(out: Path, update: int) -> None:
    """A run that goes on from `update` with other code or libraries says so, and run.json keeps both."""
    about, now = _read_json(out / _ABOUT), code_and_versions()
    before = about.get("continued", [about])[-1]
    changed = [
        f"{name} {before['versions'].get(name)} -> {one}"
        for name, one in now["versions"].items()
        if before["versions"].get(name) != one
    ]
    if before["code_hash"] != now["code_hash"]:
        changed.append(f"code of octjepa {before['code_hash'][:12]} -> {now['code_hash'][:12]}")
    if not changed:
        return
    _log.warning(
        "%s goes on from update %d WITH OTHER CODE than it began with: %s. Its weights may differ from those of an "
        "unbroken run; run.json keeps both",
        out, update, ", ".join(changed),
    )  # fmt: skip
    write_json(out / _ABOUT, {**about, "continued": [*about.get("continued", []), {"from_update": update, **now}]})


def check_recipe(out: Path, recipe: Recipe) -> None:
    """Raises WrongCheckpointError naming every field in which the run's recipe differs from `recipe`."""
    begun = load_recipe(out / "recipe.yaml")
    if science_hash(begun) != science_hash(recipe):
        changed = "\n  ".join(differences(begun, recipe))
        raise WrongCheckpointError(
            f"run {out} was begun with another recipe and cannot be resumed by {recipe.name}:\n  {changed}\n"
            "Give the recipe it was begun with, or start anew with another --out."
        )


def check_data(out: Path, store: Store, volume_ids: Sequence[str], recipe: Recipe) -> None:
    """Raises UsageError when a resumed run would see other volumes than it began with, or the same in another form."""
    begun, chunks = _read_json(out / _ABOUT), chunks_hash(store, volume_ids, recipe)
    # the first runs did not note the hash of their chunks
    if begun.get("data_hash") != data_hash(store, volume_ids) or begun.get("chunks_hash", chunks) != chunks:
        raise UsageError(
            f"store {store.location} no longer holds the {begun.get('volumes')} training volumes that run {out} began "
            f"with ({len(volume_ids)} now, or other contents): resume with that store, or start a new run"
        )


def read_summary(out: Path) -> dict[str, Any] | None:
    """What a finished run said of itself; None while it is not finished."""
    return _read_json(out / SUMMARY) if (out / SUMMARY).is_file() else None


def reached_update(out: Path) -> int:
    """The last update in the run's journal; 0 without one."""
    journal = out / "metrics.jsonl"
    return max((line["update"] for line in read_json_lines(journal)), default=0) if journal.is_file() else 0


def note_saved(out: Path, update: int, checkpoint: Location) -> None:
    """The run has written `checkpoint`: should it be gone one day, a resume knows that it was there."""
    write_json(out / _SAVED, {"update": update, "checkpoint": str(checkpoint)})


def last_saved(out: Path) -> dict[str, Any] | None:
    """What `note_saved` noted last; None before the first checkpoint."""
    return _read_json(out / _SAVED) if (out / _SAVED).is_file() else None


def _read_json(path: Path) -> dict[str, Any]:
    return read_json_object(path, "start the run anew with another --out")


def data_hash(store: Store, volume_ids: Sequence[str]) -> str:
    """Hash of the contents of the volumes trained on, in order."""
    contents = store.table.set_index("volume_id")["content_hash"]
    return hashlib.sha256("".join(contents[volume_id] for volume_id in volume_ids).encode()).hexdigest()


def chunks_hash(store: Store, volume_ids: Sequence[str], recipe: Recipe) -> str:
    """Hash of what the store made of these contents (a corrected spacing changes it), and of what balances them."""
    columns = ["chunk_hash"] + (["device", "site"] if recipe.data.balance != "none" else [])
    rows = store.table.set_index("volume_id").reindex(index=list(volume_ids), columns=columns)
    return hashlib.sha256("\n".join("\t".join(map(str, row)) for row in rows.to_numpy()).encode()).hexdigest()


def code_hash() -> str:
    """Hash of the package's own source files."""
    root = Path(__file__).resolve().parent.parent
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()
