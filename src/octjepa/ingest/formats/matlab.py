"""MATLAB's .mat: up to version 7 by SciPy, version 7.3 by h5py (extra `formats`). Only plain numeric arrays are read.

Classes, function handles and links to other files are passed over. An array called `images` is that of Duke's DME set:
height x width x B-scan.
"""

from __future__ import annotations

import zlib
from pathlib import Path
from typing import Any

import numpy as np

from octjepa.ingest.formats import library
from octjepa.ingest.formats.axes import oriented
from octjepa.ingest.formats.intensity import check_size, to_grey
from octjepa.ingest.formats.mat5 import check_lengths
from octjepa.ingest.formats.members import Small, is_small, left_out, scan_member, small_members
from octjepa.ingest.raw_scan import FrameGeometry, RawScan
from octjepa.ingest.reasons import rejection

_ITEM_BYTES = {
    "int8": 1, "uint8": 1, "int16": 2, "uint16": 2, "int32": 4, "uint32": 4, "single": 4,
    "double": 8, "int64": 8, "uint64": 8, "logical": 1,
}  # fmt: skip
_TEXT = "char"
# What SciPy's and h5py's parsers make of damaged bytes.
_DAMAGED = (
    ValueError, TypeError, OSError, KeyError, IndexError, NotImplementedError, EOFError, OverflowError, RuntimeError,
    zlib.error,
)  # fmt: skip


def _read_old(path: Path) -> tuple[str, np.ndarray, Small]:
    from scipy.io import loadmat, whosmat

    check_lengths(path)
    listed = [(name, shape, kind) for name, shape, kind in whosmat(path) if kind in _ITEM_BYTES or kind == _TEXT]
    numeric = {name: shape for name, shape, kind in listed if kind != _TEXT}
    name = scan_member(numeric)
    check_size(numeric[name], next(_ITEM_BYTES[kind] for other, _, kind in listed if other == name))
    others = [other for other, shape, kind in listed if other != name and (kind == _TEXT or is_small(shape))]
    # With chars as texts a char array of one row becomes one short text.
    found = loadmat(path, variable_names=[name, *others], chars_as_strings=True)
    small = small_members({other: found[other] for other in others if is_small(found[other].shape)})
    small.notes = tuple(left_out(numeric))
    return name, found[name], small


def _h5_arrays(file: Any, h5py: Any) -> dict[str, Any]:
    """The datasets at the top of an HDF5 file that lie in the file itself."""
    links = {name: file.get(name, getlink=True) for name in file}
    here = {name: file[name] for name, link in links.items() if isinstance(link, h5py.HardLink)}
    return {
        name: data
        for name, data in here.items()
        if isinstance(data, h5py.Dataset) and not data.external and not data.is_virtual and data.dtype.kind in "biuf"
    }


def _read_hdf5(path: Path) -> tuple[str, np.ndarray, Small]:
    h5py = library("h5py", "formats")
    with h5py.File(path, "r") as file:
        arrays = _h5_arrays(file, h5py)
        shapes = {name: data.shape for name, data in arrays.items()}
        name = scan_member(shapes)
        check_size(arrays[name].shape, arrays[name].dtype.itemsize)
        texts = {other for other, data in arrays.items() if data.attrs.get("MATLAB_class") == b"char"}
        small = small_members(
            {
                other: np.array("".join(map(chr, data[()].ravel()))) if other in texts else data[()]
                for other, data in arrays.items()
                if other != name and (is_small(data.shape) or (other in texts and data.size <= 64))
            }
        )
        small.notes = tuple(left_out(shapes))
        # MATLAB writes the first axis last.
        return name, np.asarray(arrays[name][()]).T, small


def read_mat(path: Path) -> RawScan:
    """Raises VolumeRejected: broken_header, no_pixel_data, unsupported_pixels, size_implausible, axes_ambiguous,
    no_decoder."""
    with path.open("rb") as file:
        head = file.read(1024)
    hdf5 = head.startswith((b"MATLAB 7.3", b"\x89HDF\r\n\x1a\n"))
    try:
        name, values, small = (_read_hdf5 if hdf5 else _read_old)(path)
    except _DAMAGED:
        raise rejection("truncated", "its arrays cannot be read: the file ends early or is damaged") from None
    values = values.reshape([length for length in values.shape if length != 1])
    notes = list(small.notes)
    grey = to_grey(values, notes)
    pixels, spacing_mm = oriented(grey, (None, None, None), notes, "HWD" if name == "images" else "")
    if any(small.spacing_mm):
        spacing_mm = small.spacing_mm
    return RawScan(
        "mat", pixels, FrameGeometry.unknown(len(pixels)), small.header, spacing_mm=spacing_mm, notes=tuple(notes),
        labels=small.labels, personal=small.personal,
    )  # fmt: skip
