"""The files of one volume: pixels, and beside them its geometry, written whole or not at all."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import numpy as np

from octjepa.store.canonical import CanonicalVolume
from octjepa.store.disk import swap_in, write_new_folder


def stage_chunk(folder: Path, volume: CanonicalVolume) -> Path:
    """Pixels and geometry of one volume in a hidden folder beside `folder`, for `swap_in` to put in its place."""
    return write_new_folder(
        folder.parent,
        {
            "pixels.npy": lambda file: np.save(file, volume.pixels, allow_pickle=False),
            "geometry.npz": lambda file: np.savez(file, allow_pickle=False, **volume.geometry()),
        },
    )


def write_chunk(folder: Path, volume: CanonicalVolume) -> None:
    """Pixels and geometry of one volume, whole or not at all, in the place of what was there."""
    swap_in(stage_chunk(folder, volume), folder)


@lru_cache(maxsize=4096)
def geometry_of(path: Path, mtime_ns: int) -> tuple[np.ndarray, np.ndarray]:
    """Band and shifts of a chunk: a few kilobytes whose archive costs more to open than the pixels' memory map.

    `mtime_ns` is the archive's, so that a chunk that was made anew is read anew.
    """
    with np.load(path, allow_pickle=False) as geometry:
        return geometry["band"], geometry["shifts"]
