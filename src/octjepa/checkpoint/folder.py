"""A checkpoint folder `step-NNNNNNNN/`: written atomically, and verified file by file when read.

Files are written into a hidden folder next to it, each flushed to disk, the manifest with their checksums last; one
rename then makes the folder appear. A crash leaves the hidden folder, which the next write removes.
A bucket has no rename: the folder is written on this disk and uploaded with its manifest last; a folder without a
manifest is not a checkpoint.
"""

from __future__ import annotations

import hashlib
import json
import logging
import math
import os
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from octjepa.checkpoint.location import (
    MANIFEST,
    Location,
    child,
    has_file,
    local_file,
    location_name,
    remove,
    split_folders,
    staging_folder,
    upload,
)
from octjepa.checkpoint.tensor_file import read_safetensors
from octjepa.errors import CheckpointError, WrongCheckpointError
from octjepa.parsing import read_object

SCHEMA = 1
Loaded = TypeVar("Loaded")
_log = logging.getLogger(__name__)


def write_folder(
    parent: Location, update: int, tensors: Mapping[str, Mapping[str, Tensor]], about: Mapping[str, Any]
) -> Location:
    """Writes `{file: {name: tensor}}` and a manifest holding `about` as `parent/step-<update>`.

    Raises CheckpointError when the disk or the bucket refuses; what was there before stays as it was.
    """
    if isinstance(parent, str):
        with staging_folder() as local:
            written = write_folder(local, update, tensors, about)
            final = child(parent, location_name(written))
            upload(Path(written), str(final))
        return final
    final = parent / f"step-{update:08d}"
    hidden = parent / f".{final.name}.partial"
    try:
        parent.mkdir(parents=True, exist_ok=True)
        for abandoned in parent.glob(".step-*.partial"):
            with suppress(OSError):
                _remove(abandoned)
        hidden.mkdir()
        files = {}
        metadata = {"octjepa": json.dumps({"schema": SCHEMA, **about})}
        for name, content in tensors.items():
            path = hidden / name
            save_file({key: value.detach().contiguous().cpu() for key, value in content.items()}, path, metadata)
            _flush(path)
            files[name] = {"sha256": _sha256(path), "bytes": path.stat().st_size}
        manifest = {"schema": SCHEMA, "update": update, **about, "files": files}
        (hidden / MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")
        _flush(hidden / MANIFEST)
        _flush(hidden)
        if final.exists() or final.is_symlink():  # the same update of the same run, written before a kill
            _remove(final)
        hidden.rename(final)
        _flush(parent)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(hidden, ignore_errors=True)
        raise CheckpointError(
            f"could not write checkpoint {final}: {_reason(error)}. Earlier checkpoints are untouched. "
            f"Free space and continue with --resume, or copy {parent} to another disk and give the copy as "
            "checkpoint.dir."
        ) from None
    return final


def _remove(path: Path) -> None:
    """Removes a folder with its contents, or a link without its target. Raises OSError."""
    if path.is_symlink():
        path.unlink()
    else:
        shutil.rmtree(path)


def read_manifest(folder: Location) -> dict[str, Any]:
    """The manifest of a checkpoint folder. Raises WrongCheckpointError (there is none), CheckpointError (damaged)."""
    if not has_file(folder, MANIFEST):
        raise WrongCheckpointError(f"{folder} is not a checkpoint: it holds no {MANIFEST}")
    try:
        with local_file(folder, MANIFEST) as path:
            manifest = read_object(path)
        check_schema(manifest["schema"], f"{folder}/{MANIFEST}")
        valid = isinstance(manifest["update"], int) and all(file["sha256"] for file in manifest["files"].values())
    except (ValueError, KeyError, TypeError, AttributeError):
        valid = False
    if not valid:
        raise CheckpointError(
            f"{folder}/{MANIFEST} is damaged: it cannot be read as a manifest. Remove {location_name(folder)} to "
            "continue "
            "from an earlier one."
        )
    return manifest


def check_schema(schema: int, where: str) -> None:
    """Raises CheckpointError if this octjepa does not read the schema of the checkpoint or weights file `where`."""
    if schema != SCHEMA:
        older = "use the octjepa that wrote it (export takes its weights), or train again"
        way_out = "update octjepa" if schema > SCHEMA else older
        raise CheckpointError(f"{where} has schema {schema}, this octjepa reads {SCHEMA}: {way_out}")


def read_tensors(folder: Location, name: str) -> dict[str, Tensor]:
    """The tensors of one file of a checkpoint, after its checksum. Raises CheckpointError when damaged."""
    expected = read_manifest(folder)["files"].get(name)
    if expected is None or not has_file(folder, name):
        raise CheckpointError(f"checkpoint {folder} lacks {name}")
    with local_file(folder, name) as path:
        if _sha256(path) != expected["sha256"]:
            raise CheckpointError(
                f"{folder}/{name} is damaged: its checksum is not the manifest's. Remove {location_name(folder)} to "
                "continue from an earlier checkpoint."
            )
        return read_safetensors(path, f"{folder}/{name}")[0]


def list_checkpoints(parent: Location) -> list[Location]:
    """Complete checkpoints under `parent`, oldest first."""
    return split_folders(parent)[0]


def load_newest(parent: Location, load: Callable[[Location], Loaded]) -> Loaded | None:
    """The result of `load` for the newest checkpoint under `parent`; None if there is no checkpoint.

    A damaged checkpoint is logged, and the previous checkpoint is loaded. Raises CheckpointError if none is whole, and
    WrongCheckpointError as `load` does.
    """
    checkpoints = list_checkpoints(parent)
    for checkpoint in reversed(checkpoints):
        try:
            return load(checkpoint)
        except WrongCheckpointError:
            raise
        except CheckpointError as error:
            if checkpoint == checkpoints[0]:
                raise
            name = location_name(checkpoint)
            _log.warning("%s NOT USED: %s Training resumes from the checkpoint before it", name, error)
    return None


def best_checkpoint(parent: Location) -> Location | None:
    """The checkpoint with the highest `score` in its manifest, the later of equals; None if none has one."""
    scored = [(score, folder) for folder in list_checkpoints(parent) if (score := _score(folder)) is not None]
    return max(scored, key=lambda pair: (pair[0], location_name(pair[1])))[1] if scored else None


def _score(folder: Location) -> float | None:
    try:
        score = read_manifest(folder).get("score")
    except CheckpointError:
        return None  # damaged: reported when it is loaded
    return float(score) if isinstance(score, int | float) and math.isfinite(score) else None


def prune(parent: Location, keep_last: int, keep_every: int | None = None, newest: int | None = None) -> None:
    """Removes all checkpoints except the `keep_last` newest, the best, and those of every `keep_every`-th update.

    Incomplete checkpoints older than the newest, left by killed uploads, are removed too. Those of updates after
    `newest` stay and do not count: they are damaged, and the run has continued from an earlier one.
    """
    complete, incomplete = split_folders(parent)
    if newest is not None:
        complete = [checkpoint for checkpoint in complete if update_number(checkpoint) <= newest]
    best = best_checkpoint(parent) if len(complete) > keep_last else None
    abandoned = [
        checkpoint for checkpoint in incomplete if complete and location_name(checkpoint) < location_name(complete[-1])
    ]
    for folder in complete[:-keep_last] + abandoned:
        permanent = folder in complete and keep_every is not None and update_number(folder) % keep_every == 0
        if folder != best and not permanent:
            remove(folder)


def remove_later(parent: Location, update: int) -> None:
    """Removes the checkpoints of updates after `update`, because the run has returned to `update`."""
    for folder in list_checkpoints(parent):
        if update_number(folder) > update:
            remove(folder)


def update_number(folder: Location) -> int:
    """The update in a checkpoint's name."""
    return int(location_name(folder).removeprefix("step-"))


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _reason(error: Exception) -> str:
    return (error.strerror or str(error)) if isinstance(error, OSError) else str(error)
