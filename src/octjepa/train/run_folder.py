"""The run folder: what was asked, with which code and data, on what; and its summary at the end."""

from __future__ import annotations

import hashlib
import json
import os
import platform
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

from octjepa.config import science_hash, to_yaml
from octjepa.errors import UsageError
from octjepa.recipe import Recipe
from octjepa.store import Store
from octjepa.train.runtime import Runtime

_VERSIONED = ("octjepa", "torch", "numpy", "scipy", "pydicom", "safetensors", "scikit-learn")


def open_run(
    out: Path, recipe: Recipe, store: Store, volume_ids: Sequence[str], runtime: Runtime, resume: bool
) -> None:
    """Writes recipe.yaml and run.json. Raises UsageError when `out` holds a run without `resume`, or none with it."""
    there = (out / "run.json").is_file()
    if there and not resume:
        raise UsageError(f"{out} already holds a run: add --resume to go on with it, or give another --out")
    if resume and not there:
        raise UsageError(f"{out} holds no run to resume: leave --resume out to start one there")
    out.mkdir(parents=True, exist_ok=True)
    if there:
        return
    write_atomic(out / "recipe.yaml", to_yaml(recipe))
    about = {
        "name": recipe.name,
        "science_hash": science_hash(recipe),
        "contract_hash": science_hash(recipe.preprocessing),
        "data_hash": data_hash(store, volume_ids),
        "code_hash": code_hash(),
        "volumes": len(volume_ids),
        "versions": {name: version(name) for name in _VERSIONED} | {"python": platform.python_version()},
        "devices": runtime.describe(),
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "store": os.path.relpath(store.path, out),
    }
    write_json(out / "run.json", about)
    store_quarantine = "".join(json.dumps(row) + "\n" for row in store.quarantine)
    write_atomic(out / "quarantine.jsonl", store_quarantine)


def check_data(out: Path, store: Store, volume_ids: Sequence[str]) -> None:
    """Raises UsageError when a resumed run would see other volumes than it began with."""
    begun = json.loads((out / "run.json").read_text(encoding="utf-8"))
    if begun["data_hash"] != data_hash(store, volume_ids):
        raise UsageError(
            f"store {store.path} no longer holds the {begun['volumes']} training volumes that run {out} began with "
            f"({len(volume_ids)} now, or other contents): resume with that store, or start a new run"
        )


def data_hash(store: Store, volume_ids: Sequence[str]) -> str:
    """Hash of the contents of the volumes trained on, in order."""
    contents = store.table.set_index("volume_id")["content_hash"]
    return hashlib.sha256("".join(contents[volume_id] for volume_id in volume_ids).encode()).hexdigest()


def code_hash() -> str:
    """Hash of the package's own source files."""
    root = Path(__file__).resolve().parent.parent
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    write_atomic(path, json.dumps(dict(value), indent=1) + "\n")


def write_atomic(path: Path, text: str) -> None:
    hidden = path.with_name(f".{path.name}.partial")
    hidden.write_text(text, encoding="utf-8")
    hidden.rename(path)
