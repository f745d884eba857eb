"""Boundaries that the user corrected by hand in the viewer, saved as labels that `octjepa segment adapt` reads.

In: the eight boundaries of one B-scan, as the page sends them. Out: `ID_boundaries.npz` in one folder, which the user
named on the command line, with ID the volume id:

    rows        float32 [8, B-scans, columns], fractional rows in the order of the file's B-scans; NaN in every B-scan
                that was not saved
    names       the eight boundaries, from above
    spacing_mm  slice, depth, column
    source      who made the labels

It is the form of `NAME_boundaries.npz` that `octjepa segment` writes, with labels in the corrected B-scans only. All
that comes from the page is checked before anything is written, and nothing is written outside of the folder.
"""

from __future__ import annotations

import re
import threading
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from typing import Final

import numpy as np
from jaxtyping import Float

from octjepa.errors import OctjepaError, UsageError
from octjepa.files import write_atomic
from octjepa.layers import BOUNDARIES
from octjepa.locks import file_lock
from octjepa.read.file_order import FileOrder
from octjepa.read.written_results import BOUNDARY_FILE
from octjepa.tasks.labels.label_files import SOURCE
from octjepa.tasks.segmenter.retained_layers import RetainedLayers
from octjepa.volume import OCTVolume

_ID: Final = re.compile(r"[0-9A-Za-z_-]{1,80}")
_MADE_BY: Final = "corrected by hand in octjepa view"
_TOLERANCE_PX: Final = 0.05  # a boundary may lie so far above its upper neighbour, because rows are sent rounded
_LEAST_COLUMNS: Final = 16  # with fewer `octjepa segment adapt` does not learn from a B-scan

Rows = list[list[float | None]]


class Corrections:
    """The corrections in `folder`. Its methods may be called from threads."""

    def __init__(self, folder: Path) -> None:
        """Makes the folder. Raises UsageError: it cannot be made, or it is a file."""
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            reason = error.strerror or type(error).__name__
            raise UsageError(f"--corrections {folder} cannot be made ({reason}): name a folder for labels") from None
        self.folder = folder.resolve()
        self._lock = threading.Lock()

    def slices(self, volume_id: str, volume: OCTVolume) -> list[int]:
        """The B-scans of `volume` that were saved. Raises UsageError: their file is damaged or not of the viewer."""
        with self._lock:
            rows = self._read(volume_id, volume)
        return [] if rows is None else _labelled(rows)

    def applied(self, volume_id: str, volume: OCTVolume, layers: RetainedLayers) -> RetainedLayers:
        """`layers` with the saved rows in place of those of the network. Raises UsageError as `slices` does."""
        with self._lock:
            rows = self._read(volume_id, volume)
        if rows is None:
            return layers
        is_saved = np.isfinite(rows)
        return replace(
            layers,
            boundaries_px=np.where(is_saved, rows, layers.boundaries_px),
            expected_error_um=np.where(is_saved, np.float32(0), layers.expected_error_um),
        )

    def save(self, volume_id: str, volume: OCTVolume, number: int, boundaries: object) -> list[int]:
        """Saves the boundaries of B-scan `number` and returns all B-scans that are saved.

        `boundaries` comes from the page: eight lists with a row for each column, None for a column without a row.
        Raises IndexError: no such B-scan. UsageError: not such lists, rows outside of the B-scan or in another order,
        or the file cannot be written, is not one of the viewer, or another process writes it.
        """
        if not 0 <= number < volume.shape[0]:
            raise IndexError(number)
        checked = _checked(boundaries, volume)
        with self._changing(volume_id):
            rows = self._read(volume_id, volume)
            if rows is None:
                rows = np.full((8, volume.shape[0], volume.shape[2]), np.nan, np.float32)
            rows[:, number] = checked
            self._write(volume_id, volume, rows)
        return _labelled(rows)

    def remove(self, volume_id: str, volume: OCTVolume, number: int) -> list[int]:
        """Removes the labels of B-scan `number` and returns those that are left. Raises as `save` does."""
        if not 0 <= number < volume.shape[0]:
            raise IndexError(number)
        with self._changing(volume_id):
            rows = self._read(volume_id, volume)
            if rows is None:
                return []
            rows[:, number] = np.nan
            if _labelled(rows):
                self._write(volume_id, volume, rows)
            else:
                self._file(volume_id).unlink(missing_ok=True)
        return _labelled(rows)

    @contextmanager
    def _changing(self, volume_id: str) -> Iterator[None]:
        """Holds the file of a volume while it is read, changed and written. Raises UsageError.

        The lock lasts for one change, not for the session, so that two viewers can share a folder.
        """
        try:
            with self._lock, file_lock(self._file(volume_id)):
                yield
        except OctjepaError as error:
            raise UsageError(str(error).replace(f"{self.folder}/", "")) from None

    def _file(self, volume_id: str) -> Path:
        """The file of a volume. Raises UsageError: an id that is not a plain word, or a link in place of the file."""
        if not _ID.fullmatch(volume_id):
            raise UsageError("the volume id of the store is not a plain word: its corrections cannot be saved")
        path = self.folder / f"{volume_id}{BOUNDARY_FILE}"
        if path.is_symlink():
            raise UsageError(f"{path.name} in the folder of --corrections is a link: remove it")
        return path

    def _read(self, volume_id: str, volume: OCTVolume) -> Float[np.ndarray, "8 D W"] | None:
        """Rows in the order of `volume`; None without a file."""
        path = self._file(volume_id)
        try:
            with path.open("rb") as stream, np.load(stream, allow_pickle=False) as file:
                source, rows = str(file[SOURCE]), np.asarray(file["rows"], np.float32)
        except FileNotFoundError:
            return None
        except (OSError, KeyError, ValueError, EOFError, zipfile.BadZipFile):
            raise UsageError(_foreign(path)) from None
        if not source.startswith(_MADE_BY) or rows.shape != (8, volume.shape[0], volume.shape[2]):
            raise UsageError(_foreign(path))
        return np.ascontiguousarray(FileOrder.of(volume.notes, volume.shape[0]).ascans(rows))

    def _write(self, volume_id: str, volume: OCTVolume, rows: Float[np.ndarray, "8 D W"]) -> None:
        arrays = {
            "rows": FileOrder.of(volume.notes, volume.shape[0]).ascans(rows),
            "names": np.array(BOUNDARIES),
            "spacing_mm": np.array(volume.spacing_mm),
            SOURCE: np.array(f"{_MADE_BY} {version('octjepa')}"),
        }
        write_atomic(self._file(volume_id), lambda file: np.savez_compressed(file, **arrays))  # type: ignore[arg-type]


def _foreign(path: Path) -> str:
    return (
        f"{path.name} in the folder of --corrections is damaged or was not written by the viewer for this scan: "
        "name another folder"
    )


def _labelled(rows: Float[np.ndarray, "8 D W"]) -> list[int]:
    return [int(number) for number in np.flatnonzero(np.isfinite(rows).any((0, 2)))]


def _checked(boundaries: object, volume: OCTVolume) -> Float[np.ndarray, "8 W"]:
    """The boundaries of a B-scan as an array. Raises UsageError."""
    _, height, columns = volume.shape
    if not isinstance(boundaries, list) or len(boundaries) != len(BOUNDARIES):
        raise UsageError(f"expected {len(BOUNDARIES)} boundaries, each a list of rows")
    out = np.full((len(BOUNDARIES), columns), np.nan, np.float32)
    for index, (name, line) in enumerate(zip(BOUNDARIES, boundaries, strict=True)):
        if not isinstance(line, list) or len(line) != columns:
            raise UsageError(f"{name}: expected a list of {columns} rows, one for each column")
        for column, value in enumerate(line):
            if value is None:
                continue
            if isinstance(value, bool) or not isinstance(value, int | float):
                raise UsageError(f"{name}, column {column + 1}: expected a number or null")
            if not -0.5 <= value <= height - 0.5:  # also NaN
                raise UsageError(f"{name}, column {column + 1}: the row is outside of the {height} rows of the scan")
            out[index, column] = value
    with np.errstate(invalid="ignore"):
        above = np.fmax.accumulate(out, axis=0)[:-1]  # the lowest of the boundaries above
        crossed = np.argwhere(out[1:] < above - _TOLERANCE_PX)
    if len(crossed):
        index, column = (int(number) for number in crossed[0])
        raise UsageError(f"{BOUNDARIES[index + 1]}, column {column + 1}: it lies above {BOUNDARIES[index]}")
    if np.isfinite(out).any(0).sum() < min(_LEAST_COLUMNS, columns):
        raise UsageError(f"fewer than {_LEAST_COLUMNS} columns have a boundary: nothing could be learned from them")
    return out
