"""A Zarr folder of version 2, with the metadata of OME-Zarr (NGFF 0.4) or without, as one scan.

The format is read here, without a library: `.zarray` states shape, chunks and type, and each chunk is a file of raw,
zlib or gzip bytes. OME-Zarr states the spacing of the axes z, y, x. A chunk that is absent would be filled with a
constant by other readers, and is an error here.
"""

from __future__ import annotations

import itertools
import math
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from octjepa.parsing import Malformed, parse_json_object
from octjepa.read.formats.sequence import MIN_FRAMES
from octjepa.read.intensity import check_size, to_uint8
from octjepa.read.links import check_inside
from octjepa.read.memory_budget import GZIP, ZLIB, array_bytes, inflate
from octjepa.read.raw_scan import AxisSpacing, FrameGeometry, RawScan, StoredAxes
from octjepa.reasons import rejection

MARKS = (".zgroup", ".zarray", "zarr.json")
_LIMIT_BYTES = 1 << 20
_UNIT_MM = {"millimeter": 1.0, "micrometer": 0.001, "meter": 1000.0, "nanometer": 1e-6}
_COMPRESSORS = {"zlib": ZLIB, "gzip": GZIP}


@dataclass(frozen=True)
class _Layout:
    """The checked fields of `.zarray`; `container` names the deflate container, None for raw chunks."""

    folder: Path
    shape: tuple[int, int, int]
    chunks: tuple[int, int, int]
    dtype: np.dtype
    container: int | None
    separator: str


def is_zarr(names: object) -> bool:
    """Whether a folder whose files are called `names` is a Zarr group or array."""
    return not {*MARKS}.isdisjoint(names)  # type: ignore[arg-type]


def _metadata(path: Path, root: Path) -> Mapping[str, Any]:
    """Raises VolumeRejected broken_header."""
    check_inside(path, root)
    try:
        with path.open("rb") as file:
            return parse_json_object(file.read(_LIMIT_BYTES))
    except (OSError, Malformed):
        raise rejection("broken_header", f"its {path.name} is absent or cannot be read as JSON") from None


def _image(path: Path) -> tuple[str, AxisSpacing]:
    """(the name of the array at full resolution, its spacing) by the attributes of an OME-Zarr group.

    The image's scale multiplies that of the array, as in every resolution of NGFF 0.4.
    Raises VolumeRejected broken_header.
    """
    if not (path / ".zattrs").is_file():
        return "0", (None, None, None)
    attributes = _metadata(path / ".zattrs", path)
    try:
        image = attributes["multiscales"][0]
        name = str(image["datasets"][0]["path"])
        axes = [axis if isinstance(axis, dict) else {} for axis in image.get("axes", [])]
        levels = [level.get("coordinateTransformations", []) for level in (image["datasets"][0], image)]
        scales = [transform["scale"] for level in levels for transform in level if "scale" in transform]
        values = [math.prod(map(float, factors)) for factors in zip(*scales, strict=True)]
    except (KeyError, IndexError, TypeError, ValueError):
        raise rejection("broken_header", "its attributes do not describe an OME-Zarr image") from None
    units = [_UNIT_MM.get(str(axis.get("unit", ""))) for axis in axes]
    if len(values) != 3 or len(units) != 3:
        return name, (None, None, None)
    z, y, x = (None if unit is None else value * unit for value, unit in zip(values, units, strict=True))
    return name, (z, y, x)


def _layout(folder: Path, root: Path) -> _Layout:
    """Raises VolumeRejected: broken_header, unsupported_pixels, no_decoder, size_implausible, too_few_frames."""
    facts = _metadata(folder / ".zarray", root)
    try:
        shape, chunks = tuple(map(int, facts["shape"])), tuple(map(int, facts["chunks"]))
        dtype = np.dtype(str(facts["dtype"]))
        compressor, filters, order = facts.get("compressor"), facts.get("filters"), facts.get("order", "C")
        separator = str(facts.get("dimension_separator", "."))
        name = "" if compressor is None else str(compressor["id"])
    except (KeyError, TypeError, ValueError):
        raise rejection("broken_header", "its .zarray lacks shape, chunks, dtype or compressor") from None
    if len(shape) != 3 or len(chunks) != 3:
        raise rejection("unsupported_pixels", f"an array of {len(shape)} axes; expected slice, depth, column")
    if dtype.kind not in "uif" or dtype.itemsize > 8 or order != "C" or separator not in (".", "/"):
        raise rejection("unsupported_pixels", "values that are not numbers, or chunks in another order than C")
    if filters or (name and name not in _COMPRESSORS):
        raise rejection("no_decoder", "chunks with a filter or compressor other than zlib and gzip: write it with zlib")
    check_size(shape, dtype.itemsize)
    check_size(chunks, dtype.itemsize)
    if shape[0] < MIN_FRAMES:
        raise rejection("too_few_frames", f"{shape[0]} B-scans; a volume needs {MIN_FRAMES} at least")
    return _Layout(folder, shape, chunks, dtype, _COMPRESSORS.get(name), separator)


def _chunk(layout: _Layout, index: tuple[int, ...], root: Path) -> np.ndarray:
    """The values of one chunk. Raises VolumeRejected: frames_missing, truncated, size_implausible."""
    path = layout.folder / layout.separator.join(map(str, index))
    needed = array_bytes(layout.chunks, layout.dtype.itemsize)
    check_inside(path, root)
    try:
        with path.open("rb") as file:
            raw = file.read(needed + (1 << 20))  # a deflate stream can be a little longer than its content
    except FileNotFoundError:
        raise rejection("frames_missing", f"the chunk {'/'.join(map(str, index))} is absent") from None
    if layout.container is not None:
        try:
            raw = inflate(raw, "a chunk", layout.container, needed)
        except zlib.error:
            raise rejection("truncated", "a chunk cannot be unpacked") from None
    if len(raw) != needed:
        raise rejection("truncated", f"a chunk holds {len(raw)} bytes of {needed}")
    return np.frombuffer(raw, layout.dtype).reshape(layout.chunks)


def read_zarr(path: Path) -> RawScan:
    """A Zarr folder: an OME-Zarr image, or a single array.

    Raises VolumeRejected: unknown_format, broken_header, unsupported_pixels, no_decoder, frames_missing, truncated,
    size_implausible, too_few_frames, path_escapes.
    """
    if (path / "zarr.json").is_file():
        raise rejection("unknown_format", "a Zarr folder of version 3; expected version 2 (zarr_format=2)")
    name, spacing_mm = (".", (None, None, None)) if (path / ".zarray").is_file() else _image(path)
    layout = _layout(path / name, path)
    values = np.empty(layout.shape, layout.dtype)
    counts = [-(-length // step) for length, step in zip(layout.shape, layout.chunks, strict=True)]
    for index in itertools.product(*map(range, counts)):
        region = tuple(
            slice(number * step, min((number + 1) * step, length))
            for number, step, length in zip(index, layout.chunks, layout.shape, strict=True)
        )
        part = tuple(slice(0, inside.stop - inside.start) for inside in region)
        values[region] = _chunk(layout, index, path)[part]
    notes: list[str] = []
    pixels = to_uint8(values if values.dtype.isnative else values.astype(values.dtype.newbyteorder("=")), notes)
    axes = StoredAxes(convention="DHW", spacing_mm=spacing_mm)
    return RawScan("zarr", pixels, FrameGeometry.unknown(len(pixels)), notes=tuple(notes), axes=axes)
