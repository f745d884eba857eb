"""A checkpoint folder `step-NNNNNNNN/`: written whole or not at all, and verified file by file when read.

Files are written into a hidden neighbour, each flushed to disk, the manifest with their checksums last; one rename
then makes the folder appear. A crash leaves the hidden neighbour, which the next write clears away.
In a bucket there is no rename: the folder is written on this disk, then goes up with its manifest last, and a folder
without a manifest is none.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from octjepa.checkpoint.location import Place, below, folders, holds, local_folder, name_of, opened, remove, upload
from octjepa.errors import CheckpointError, WrongCheckpointError

MANIFEST = "manifest.json"
SCHEMA = 1


def write_folder(
    parent: Place, update: int, tensors: Mapping[str, Mapping[str, Tensor]], about: Mapping[str, Any]
) -> Place:
    """Writes `{file: {name: tensor}}` and a manifest holding `about` as `parent/step-<update>`.

    Raises CheckpointError when the disk or the bucket refuses; what was there before stays as it was.
    """
    if isinstance(parent, str):
        with local_folder() as local:
            made = write_folder(local, update, tensors, about)
            final = below(parent, name_of(made))
            upload(Path(made), str(final), last=MANIFEST)
        return final
    final = parent / f"step-{update:08d}"
    hidden = parent / f".{final.name}.partial"
    try:
        parent.mkdir(parents=True, exist_ok=True)
        for left in parent.glob(".step-*.partial"):
            shutil.rmtree(left, ignore_errors=True)
        hidden.mkdir()
        files = {}
        metadata = {"octjepa": json.dumps(dict(about))}
        for name, content in tensors.items():
            path = hidden / name
            save_file({key: value.detach().contiguous().cpu() for key, value in content.items()}, path, metadata)
            _flush(path)
            files[name] = {"sha256": _sha256(path), "bytes": path.stat().st_size}
        manifest = {"schema": SCHEMA, "update": update, **about, "files": files}
        (hidden / MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")
        _flush(hidden / MANIFEST)
        _flush(hidden)
        if final.exists():  # the same update of the same run, written before a kill
            shutil.rmtree(final)
        hidden.rename(final)
        _flush(parent)
    except (OSError, SafetensorError) as error:
        shutil.rmtree(hidden, ignore_errors=True)
        raise CheckpointError(
            f"could not write checkpoint {final}: {_why(error)}. Earlier checkpoints are untouched. "
            "Free space or give another checkpoint.dir, then go on with --resume."
        ) from None
    return final


def read_manifest(folder: Place) -> dict[str, Any]:
    """The manifest of a checkpoint folder, after its schema. Raises WrongCheckpointError (none), CheckpointError."""
    if not holds(folder, MANIFEST):
        raise WrongCheckpointError(f"{folder} is no checkpoint: it holds no {MANIFEST}")
    try:
        with opened(folder, MANIFEST) as path:
            manifest: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if manifest["schema"] != SCHEMA:
            raise CheckpointError(
                f"{folder}/{MANIFEST} has schema {manifest['schema']}, this version of octjepa reads {SCHEMA}"
            )
        whole = isinstance(manifest["update"], int) and all(file["sha256"] for file in manifest["files"].values())
    except (ValueError, KeyError, TypeError, AttributeError):
        whole = False
    if not whole:
        raise CheckpointError(
            f"{folder}/{MANIFEST} is damaged: it cannot be read as a manifest. Remove {name_of(folder)} to go on "
            "from an earlier one."
        )
    return manifest


def read_tensors(folder: Place, name: str) -> dict[str, Tensor]:
    """The tensors of one file of a checkpoint, after its checksum. Raises CheckpointError when damaged."""
    expected = read_manifest(folder)["files"].get(name)
    if expected is None or not holds(folder, name):
        raise CheckpointError(f"checkpoint {folder} lacks {name}")
    with opened(folder, name) as path:
        if _sha256(path) != expected["sha256"]:
            raise CheckpointError(
                f"{folder}/{name} is damaged: its checksum is not the manifest's. Remove {name_of(folder)} to go on "
                "from an earlier one."
            )
        with safe_open(path, framework="pt") as file:
            return {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 -- no mapping


def list_folders(parent: Place) -> list[Place]:
    """Complete checkpoints under `parent`, oldest first."""
    return folders(parent, MANIFEST, "step-")[0]


def best(parent: Place) -> Place | None:
    """The checkpoint with the highest `score` in its manifest, the later of equals; None where none was judged."""
    judged = [(score, folder) for folder in list_folders(parent) if (score := _score(folder)) is not None]
    return max(judged, key=lambda pair: (pair[0], name_of(pair[1])))[1] if judged else None


def _score(folder: Place) -> float | None:
    try:
        score = read_manifest(folder).get("score")
    except CheckpointError:
        return None  # damaged: it is judged when somebody asks for it by name
    return float(score) if isinstance(score, int | float) and math.isfinite(score) else None


def prune(parent: Place, keep_last: int, keep_every: int | None = None) -> None:
    """Removes all complete checkpoints but the newest, the best and every `keep_every`-th update's, and what a killed
    upload left before the newest."""
    whole, torn = folders(parent, MANIFEST, "step-")
    kept = best(parent) if len(whole) > keep_last else None
    for folder in whole[:-keep_last] + [one for one in torn if whole and name_of(one) < name_of(whole[-1])]:
        stays = folder in whole and keep_every is not None and update_of(folder) % keep_every == 0
        if folder != kept and not stays:
            remove(folder, MANIFEST)


def remove_after(parent: Place, update: int) -> None:
    """Removes the checkpoints of later updates: the run went back, and they are of what it took back."""
    for folder in list_folders(parent):
        if update_of(folder) > update:
            remove(folder, MANIFEST)


def update_of(folder: Place) -> int:
    """The update that a checkpoint's name tells."""
    return int(name_of(folder).removeprefix("step-"))


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _why(error: Exception) -> str:
    return (error.strerror or str(error)) if isinstance(error, OSError) else str(error)
