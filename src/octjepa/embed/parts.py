"""The folder of parts next to an embedding table: locked while the table is made, read when it is joined, then removed.

A part holds the features of some volumes and is written whole, so that a run that was stopped continues with the next.
"""

from __future__ import annotations

import glob
import shutil
from collections.abc import Sequence
from contextlib import ExitStack, nullcontext
from pathlib import Path
from zipfile import BadZipFile

import numpy as np

from octjepa.errors import LINK, OctjepaError, UsageError
from octjepa.locks import file_lock, writer_lock

PART_VOLUMES = 64  # what a kill can cost, and what a rank takes at a time


def parts_folder(out: Path, key: str) -> Path:
    """Where the parts of the table `out` go; `key` is that of the job (`shard.job_key`)."""
    return out.parent.resolve() / f".{out.name}.{key[:12]}.parts"


def lock_outputs(locks: ExitStack, out: Path, tokens: Path | None, parts: Path) -> None:
    """Takes the locks of all that is written. Raises UsageError: another process writes there, or it is a link."""
    locks.enter_context(file_lock(out))
    if tokens is not None:
        locks.enter_context(writer_lock(tokens))
    if parts.is_symlink():
        raise UsageError(f"{parts} {LINK}")
    parts.mkdir(exist_ok=True)


def read_part(path: Path, volume_ids: Sequence[str], blocks: Sequence[str]) -> dict[str, np.ndarray]:
    """The arrays of a part by name, `blocks` among them.

    Raises OctjepaError: damaged, or not the part of these volumes.
    """
    try:
        with path.open("rb") as opened, np.load(opened, allow_pickle=False) as file:
            arrays = dict(file)
    except (OSError, ValueError, BadZipFile) as error:
        raise OctjepaError(f"{path} is damaged ({error}): delete it and run the same command again") from None
    if not {*blocks, "token_count"} <= set(arrays):
        raise OctjepaError(f"{path} was written by another octjepa: delete it and run the same command again")
    if arrays["volume_id"].tolist() != list(volume_ids):
        raise OctjepaError(f"{path} holds other volumes than requested: delete it and run the same command again")
    return arrays


def remove_parts(out: Path) -> None:
    """Removes the parts of the job that is done, and of others that were given up."""
    for folder in out.parent.glob(f".{glob.escape(out.name)}.*.parts"):
        shutil.rmtree(folder, ignore_errors=True)


def discard_leftovers(out: Path, tokens: Path | None = None) -> None:
    """Removes what an embedding that was killed right after it wrote the table `out` left next to it and in `tokens`.

    Raises UsageError where another process writes them.
    """
    if any(out.parent.glob(f".{glob.escape(out.name)}.*")):
        with file_lock(out), nullcontext() if tokens is None else writer_lock(tokens):
            remove_parts(out)
