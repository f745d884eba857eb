"""A checkpoint folder `step-NNNNNNNN/`: written whole or not at all, and verified file by file when read.

Files are written into a hidden neighbour, each flushed to disk, the manifest with their checksums last; one rename
then makes the folder appear. A crash or a full disk leaves the hidden neighbour, which the next write clears away.
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

from octjepa.errors import CheckpointError, WrongCheckpointError

MANIFEST = "manifest.json"
BEST = "best.json"
SCHEMA = 1


def write_folder(
    parent: Path, update: int, tensors: Mapping[str, Mapping[str, Tensor]], about: Mapping[str, Any]
) -> Path:
    """Writes `{file: {name: tensor}}` and a manifest holding `about` as `parent/step-<update>`.

    Raises CheckpointError when the disk refuses; what was there before stays as it was.
    """
    final = parent / f"step-{update:08d}"
    hidden = parent / f".{final.name}.partial"
    try:
        parent.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(hidden, ignore_errors=True)
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


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest of a checkpoint folder, after its schema. Raises WrongCheckpointError (none), CheckpointError."""
    path = folder / MANIFEST
    if not path.is_file():
        raise WrongCheckpointError(f"{folder} is no checkpoint: it holds no {MANIFEST}")
    try:
        manifest: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        if manifest["schema"] != SCHEMA:
            raise CheckpointError(f"{path} has schema {manifest['schema']}, this version of octjepa reads {SCHEMA}")
        whole = isinstance(manifest["update"], int) and all(file["sha256"] for file in manifest["files"].values())
    except (ValueError, KeyError, TypeError, AttributeError):
        whole = False
    if not whole:
        raise CheckpointError(
            f"{path} is damaged: it cannot be read as a manifest. Remove {folder.name} to go on from an earlier one."
        )
    return manifest


def read_tensors(folder: Path, name: str) -> dict[str, Tensor]:
    """The tensors of one file of a checkpoint, after its checksum. Raises CheckpointError when damaged."""
    expected = read_manifest(folder)["files"].get(name)
    path = folder / name
    if expected is None or not path.is_file():
        raise CheckpointError(f"checkpoint {folder} lacks {name}")
    if _sha256(path) != expected["sha256"]:
        raise CheckpointError(
            f"{path} is damaged: its checksum is not the manifest's. Remove {folder.name} to go on from an earlier one."
        )
    with safe_open(path, framework="pt") as file:
        return {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 -- no mapping


def list_folders(parent: Path) -> list[Path]:
    """Complete checkpoints under `parent`, oldest first."""
    return sorted(path for path in parent.glob("step-*") if (path / MANIFEST).is_file())


def prune(parent: Path, keep_last: int) -> None:
    """Removes all but the last `keep_last` checkpoints and the best one."""
    found = best(parent)
    for folder in list_folders(parent)[:-keep_last]:
        if found is None or folder.name != found["checkpoint"]:
            shutil.rmtree(folder)


def best(parent: Path) -> dict[str, Any] | None:
    """{"checkpoint", "score"} of the best checkpoint by the online probe; None where none was judged."""
    try:
        found = json.loads((parent / BEST).read_text(encoding="utf-8"))
        return {"checkpoint": str(found["checkpoint"]), "score": float(found["score"])}
    except (OSError, ValueError, KeyError, TypeError):
        return None


def note_best(parent: Path, update: int, score: float) -> None:
    """Keeps in mind that the checkpoint of `update` is the best so far, if its score is; NaN never is."""
    known = best(parent)
    if math.isnan(score) or (known is not None and known["score"] >= score):
        return
    text = json.dumps({"checkpoint": f"step-{update:08d}", "score": score})
    hidden = parent / f".{BEST}.partial"
    try:
        hidden.write_text(text, encoding="utf-8")
        hidden.replace(parent / BEST)
    except OSError as error:
        raise CheckpointError(f"could not write {parent / BEST}: {_why(error)}") from None


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
