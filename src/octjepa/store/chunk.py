"""The files of one volume: pixels, and beside them its geometry, written whole or not at all."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from zipfile import BadZipFile

import numpy as np

from octjepa.errors import MORE_FILES, MachineRefuses, OctjepaError
from octjepa.files import replace_folder, write_new_folder
from octjepa.store.canonical import CanonicalVolume

_TO_DO = {
    errno.ENOMEM: "use fewer processes or a smaller batch, or give the machine more memory",
    errno.EMFILE: MORE_FILES,
    errno.ENFILE: "end other programs on this machine, or let the administrator raise fs.file-max",
    errno.EACCES: "let its owner give you the right to read it",
    errno.EPERM: "let its owner give you the right to read it",
    errno.EIO: "look after the disk, and whether it is still connected",
    errno.ESTALE: "look whether the network disk is still there, and mount it anew",
    errno.ETIMEDOUT: "look whether the network disk is still there",
}  # where the machine refuses, not the volume
_ELSE = "look after the disk or network that it lies on"
_AMISS = (None, errno.ENOENT, errno.ENOTDIR, errno.EISDIR)  # no such file; NumPy's own errors have no number


class DamagedVolume(OctjepaError):
    """The files of a volume are absent, or were read and are not what was written."""


@contextmanager
def reading_chunk(name: str) -> Iterator[None]:
    """Around the reading of the chunk `name`. Raises MachineRefuses with the cause, or DamagedVolume."""
    try:
        yield
    except (OSError, ValueError, KeyError, EOFError, BadZipFile) as error:
        if isinstance(error, OSError) and error.errno not in _AMISS:
            to_do = _TO_DO.get(error.errno or 0, _ELSE)
            told = f"{name} cannot be read: {error.strerror}. The volume is not at fault: {to_do}"
            raise MachineRefuses(told) from None
        raise DamagedVolume(f"{name} is damaged ({error}): delete it and ingest again") from None


def stage_chunk(folder: Path, volume: CanonicalVolume) -> Path:
    """Writes pixels and geometry of one volume into a hidden folder beside `folder`, for `replace_folder` to rename."""
    return write_new_folder(
        folder.parent,
        {
            "pixels.npy": lambda file: np.save(file, volume.pixels, allow_pickle=False),
            "geometry.npz": lambda file: np.savez(file, allow_pickle=False, **volume.geometry()),
        },
    )


def save_chunk(folder: Path, volume: CanonicalVolume) -> None:
    """Pixels and geometry of one volume, whole or not at all, in the place of what was there."""
    replace_folder(stage_chunk(folder, volume), folder)


@lru_cache(maxsize=4096)
def geometry_of(path: Path, mtime_ns: int) -> tuple[np.ndarray, np.ndarray]:
    """Band and shifts of a chunk: a few kilobytes whose archive costs more to open than the pixels' memory map.

    `mtime_ns` is the archive's, so that a chunk that was made anew is read anew.
    """
    with path.open("rb") as file, np.load(file, allow_pickle=False) as geometry:
        return geometry["band"], geometry["shifts"]
