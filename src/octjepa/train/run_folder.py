"""The run folder: the recipe, the hashes of code and data, the devices; and the summary at the end."""

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
from octjepa.config import load_run_recipe, science_hash, to_yaml
from octjepa.errors import UsageError, WrongCheckpointError
from octjepa.files import read_json_lines, read_json_object, write_atomic, write_json
from octjepa.recipe import Recipe
from octjepa.remote import is_remote
from octjepa.store import Store

SUMMARY = "summary.json"
_RUN_FILE = "run.json"
_SAVED_FILE = "saved.json"
_log = logging.getLogger(__name__)
_VERSIONED = ("octjepa", "torch", "numpy", "scipy", "pydicom", "safetensors", "scikit-learn")


def open_run(
    out: Path,
    checkpoint_dir: Location | None,
    recipe: Recipe,
    store: Store,
    volume_ids: Sequence[str],
    devices: Mapping[str, Any],
    resume: bool,
    cohort: Mapping[str, Any],
) -> None:
    """Writes recipe.yaml and run.json (with `devices`, what the run takes of its machine, and `cohort`) of a new run.

    Raises UsageError when `out` holds a run and `resume` is false, or none and it is true, or `checkpoint_dir` holds
    another run's checkpoints; WrongCheckpointError when the run was started with another recipe.
    """
    exists = (out / _RUN_FILE).is_file()
    if exists and not resume:
        raise UsageError(f"{out} already holds a run: add --resume to continue with it, or give another --out")
    if resume and not exists:
        raise UsageError(f"{out} holds no run to resume: leave --resume out to start one there")
    if exists:
        check_recipe(out, recipe)
    if checkpoint_dir is not None and not (exists and isinstance(checkpoint_dir, str)):
        check_writable(checkpoint_dir, out, "checkpoint.dir")
    if exists:
        return
    if checkpoint_dir is not None and list_checkpoints(checkpoint_dir):
        raise UsageError(f"{checkpoint_dir} already holds checkpoints of another run: give another checkpoint.dir")
    out.mkdir(parents=True, exist_ok=True)
    write_atomic(out / "recipe.yaml", lambda file: file.write(to_yaml(recipe).encode()))
    quarantine = "".join(json.dumps(entry) + "\n" for entry in store.quarantine)
    write_atomic(out / "quarantine.jsonl", lambda file: file.write(quarantine.encode()))
    about = {
        "name": recipe.name,
        "science_hash": science_hash(recipe),
        "contract_hash": science_hash(recipe.preprocessing),
        "data_hash": data_hash(store, volume_ids),
        "chunks_hash": chunks_hash(store, volume_ids, recipe),
        "volumes": len(volume_ids),
        **code_and_versions(),
        "devices": devices,
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "store": store.location if is_remote(store.location) else os.path.relpath(store.path, out),
        **cohort,
    }
    write_json(out / _RUN_FILE, about)


def forget_run(out: Path) -> None:
    """Removes what `open_run` wrote of a new run that could not start."""
    for name in (_RUN_FILE, "recipe.yaml", "quarantine.jsonl"):
        (out / name).unlink(missing_ok=True)


def record_checkpoint_dir(out: Path, recipe: Recipe) -> None:
    """Makes recipe.yaml name the folder of checkpoints of a run that was resumed with another one."""
    path = out / "recipe.yaml"
    recorded = load_run_recipe(path)
    if recorded.checkpoint.dir != recipe.checkpoint.dir:
        checkpoint = recorded.checkpoint.model_copy(update={"dir": recipe.checkpoint.dir})
        text = to_yaml(recorded.model_copy(update={"checkpoint": checkpoint}))
        write_atomic(path, lambda file: file.write(text.encode()))


def code_and_versions() -> dict[str, Any]:
    """Hash of this package's code, versions of it and of what its results depend on."""
    versions = {name: version(name) for name in _VERSIONED} | {"python": platform.python_version()}
    return {"code_hash": code_hash(), "versions": versions}


def record_code_change(out: Path, update: int) -> None:
    """Logs, and records in run.json, that a run continues from `update` with other code or libraries."""
    about, now = read_run_file(out / _RUN_FILE), code_and_versions()
    before = about.get("continued", [about])[-1]
    changed = [
        f"{name} {before['versions'].get(name)} -> {version}"
        for name, version in now["versions"].items()
        if before["versions"].get(name) != version
    ]
    if before["code_hash"] != now["code_hash"]:
        changed.append(f"code of octjepa {before['code_hash'][:12]} -> {now['code_hash'][:12]}")
    if not changed:
        return
    _log.warning(
        "%s continues from update %d WITH OTHER CODE than it began with: %s. Its weights may differ from those of an "
        "unbroken run; run.json keeps both",
        out,
        update,
        ", ".join(changed),
    )
    write_json(out / _RUN_FILE, {**about, "continued": [*about.get("continued", []), {"from_update": update, **now}]})


def recorded_precision(out: Path, resume: bool) -> str | None:
    """The precision in which the run that resumes in `out` began; None for a new run. Raises RecipeError: damaged."""
    if not resume or not (out / _RUN_FILE).is_file():
        return None
    return load_run_recipe(out / "recipe.yaml").train.precision


def check_recipe(out: Path, recipe: Recipe) -> None:
    """Raises WrongCheckpointError naming every field in which the run's recipe differs from `recipe`."""
    started = load_run_recipe(out / "recipe.yaml")
    if science_hash(started) != science_hash(recipe):
        changed = "\n  ".join(differences(started, recipe))
        raise WrongCheckpointError(
            f"run {out} was started with another recipe and cannot be resumed by {recipe.name}:\n  {changed}\n"
            "Give the recipe it was started with, or start a new run with another --out."
        )


def check_data(out: Path, store: Store, volume_ids: Sequence[str], recipe: Recipe) -> None:
    """Raises UsageError when a resumed run would see other volumes than it began with, or the same in another form."""
    started = read_run_file(out / _RUN_FILE)
    hashes = data_hash(store, volume_ids), chunks_hash(store, volume_ids, recipe)
    if (started.get("data_hash"), started.get("chunks_hash")) != hashes:
        raise UsageError(
            f"store {store.location} no longer holds the {started.get('volumes')} training volumes that run {out} "
            f"began with ({len(volume_ids)} now, or other contents): resume with that store, split as it was, or start "
            "a new run"
        )


def is_finished(out: Path) -> bool:
    """Whether the run wrote its summary (`train.summary`)."""
    return (out / SUMMARY).is_file()


def reached_update(out: Path) -> int:
    """The last update in metrics.jsonl; 0 without one."""
    journal = out / "metrics.jsonl"
    return max((line["update"] for line in read_json_lines(journal)), default=0) if journal.is_file() else 0


def record_saved(out: Path, update: int, checkpoint: Location) -> None:
    """Records that the run wrote `checkpoint`, so that a resume notices when it is gone."""
    write_json(out / _SAVED_FILE, {"update": update, "checkpoint": str(checkpoint)})


def last_saved(out: Path) -> dict[str, Any] | None:
    """The last record of `record_saved`; None before the first checkpoint."""
    return read_run_file(out / _SAVED_FILE) if (out / _SAVED_FILE).is_file() else None


def read_run_file(path: Path) -> dict[str, Any]:
    """A JSON file of a run folder. Raises OctjepaError: damaged."""
    return read_json_object(path, "start a new run with another --out")


def data_hash(store: Store, volume_ids: Sequence[str]) -> str:
    """Hash of the contents of the volumes trained on, in order."""
    contents = store.table.set_index("volume_id")["content_hash"]
    return hashlib.sha256("".join(contents.loc[list(volume_ids)]).encode()).hexdigest()


def chunks_hash(store: Store, volume_ids: Sequence[str], recipe: Recipe) -> str:
    """Hash of what the store made of these contents (a corrected spacing changes it), and of what balances them."""
    columns = ["chunk_hash"] + (["device", "site"] if recipe.data.balance != "none" else [])
    volumes = store.table.set_index("volume_id").reindex(index=list(volume_ids), columns=columns)
    return hashlib.sha256("\n".join("\t".join(map(str, row)) for row in volumes.to_numpy()).encode()).hexdigest()


def code_hash() -> str:
    """Hash of the package's own source files."""
    root = Path(__file__).resolve().parent.parent
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()
