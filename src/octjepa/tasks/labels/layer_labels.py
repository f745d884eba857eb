"""Boundaries and lesions as other programs write them: MATLAB, HEYEX, eyepy and arrays.

In: a file. Out: `LayerLabels`: rows of up to eight boundaries and masks of lesions, B-scans in the file's order.

| file | what is read |
|---|---|
| `.mat` | Duke, macular oedema: `manualLayers1` [boundary, column, B-scan], `manualFluid1` [depth, column, B-scan] |
| `.mat` | Duke, AMD: `layerMaps` [B-scan, column, 3]; others: `layers`, `fluid` as in .npz |
| `.xml` | `SegLine`s of a HEYEX export |
| `.eye` | layers and voxel maps of eyepy and EyeLab |
| `.npz` | `layers` [B-scan, 8, column] or `rows` [8, B-scan, column], `fluid` [B-scan, depth, column] |

A boundary is the first row of the layer below it. Columns without a row are not labelled, and neither is the fluid in
them. `layers` and `rows` may have their first two axes exchanged. If both are equally long, the axis along which rows
ascend is that of the boundaries. If rows ascend along both or none, the order above holds.
"""

from __future__ import annotations

import json
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from typing import Any, Final

import numpy as np
from jaxtyping import Float, UInt8

from octjepa.errors import UsageError, VolumeRejected
from octjepa.layers import BOUNDARIES, LAYERS
from octjepa.read.memory_budget import budget_bytes
from octjepa.tasks.labels.layer_names import boundary_index, layer_edges

UNLABELLED: Final = 255  # or outside the scan
LAYER_CLASSES: Final = tuple(name for name, _, _ in LAYERS[1:])
_DUKE_AMD: Final = ("ilm", "rpe", "bm")
_INVALID_ROW: Final = 1e6  # HEYEX writes 3e38 where a line has no point
_NPZ_ARRAYS: Final = ("layers", "rows", "fluid")
_ORDERS: Final = ("[boundary, B-scan, column]", "[B-scan, boundary, column]")
_LAYERS_AXES: Final = (1, 0)  # of `layers`, the documented one first


@dataclass(frozen=True, eq=False)
class LayerLabels:
    """Labels of one scan. `boundaries_px` is in the order of `BOUNDARIES`, NaN where unknown, or None without layers.

    `masks` holds for each name 0, 1 (marked) or 255 (not labelled).
    """

    boundaries_px: Float[np.ndarray, "8 N C"] | None = None
    masks: Mapping[str, UInt8[np.ndarray, "N R C"]] = field(default_factory=dict)

    @property
    def names(self) -> tuple[str, ...]:
        """Names of classes: layers, then masks."""
        return (*(LAYER_CLASSES if self.boundaries_px is not None else ()), *self.masks)

    @property
    def has_vitreous_on_top(self) -> bool:
        """Whether the file holds boundaries, and these lie in the order of the eye: the vitreous is on top."""
        if self.boundaries_px is None:
            return False
        rows = [float(np.nanmean(row)) for row in self.boundaries_px if np.isfinite(row).any()]
        return len(rows) > 1 and rows[0] < rows[-1]

    def turned(self, depth: int) -> LayerLabels:
        """The labels upside down, in an image of `depth` rows."""
        rows = None if self.boundaries_px is None else (depth - 1 - self.boundaries_px).astype(np.float32)
        return LayerLabels(rows, {name: mask[:, ::-1] for name, mask in self.masks.items()})

    def codes(self, shape: tuple[int, int, int]) -> UInt8[np.ndarray, "N R C"]:
        """Class of every voxel by `names`; masks take precedence over layers. Raises ValueError: another shape."""
        codes = np.zeros(shape, np.uint8)
        is_known = np.ones((shape[0], 1, shape[2]), bool)
        if self.boundaries_px is not None:
            rows = self.boundaries_px
            if rows.shape != (8, shape[0], shape[2]):
                raise ValueError(f"boundaries of {rows.shape[1]} B-scans and {rows.shape[2]} columns")
            depth = np.arange(shape[1])[None, :, None]
            is_known = np.isfinite(rows).any(0)[:, None]
            codes[:] = UNLABELLED
            codes[(depth < rows[0][:, None]) | (depth >= rows[7][:, None])] = 0  # a comparison with NaN is false
            for code, (_, upper, lower) in enumerate(LAYERS[1:], start=1):
                codes[(depth >= rows[upper][:, None]) & (depth < rows[lower][:, None])] = code
        first = len(self.names) - len(self.masks) + 1
        for code, mask in enumerate(self.masks.values(), start=first):
            if mask.shape != shape:
                raise ValueError(f"a mask of {' x '.join(map(str, mask.shape))} voxels")
            stated = bool((mask == UNLABELLED).any())
            codes[(mask == 1) & (is_known | stated)] = code
            codes[mask == UNLABELLED] = UNLABELLED
        return codes


def has_layers(arrays: Any) -> bool:
    """Whether the arrays of an .npz are layers or fluid as described above."""
    return any(name in arrays for name in _NPZ_ARRAYS)


def read_layers(file: Path) -> LayerLabels:
    """The labels of a .mat, .xml or .eye file. Raises UsageError: damaged, or without labels."""
    readers = {".mat": _read_mat, ".xml": _read_heyex, ".eye": _read_eyepy}
    try:
        labels = readers[file.suffix.lower()](file)
    except VolumeRejected as error:
        raise UsageError(f"{file} cannot be read as labels: {error}") from None
    if labels.boundaries_px is None and not labels.masks:
        raise UsageError(f"{file} holds no labels: expected layers or fluid (docs/segment.md lists the names)")
    return labels


def layers_of_arrays(arrays: Any, file: Path) -> LayerLabels:
    """The labels of an .npz with `layers`, `rows` or `fluid`. Raises UsageError: other axes, unknown names."""
    boundaries = None
    names = np.ravel(next((arrays[name] for name in ("layer_names", "names") if name in arrays), BOUNDARIES))
    for name, axes in (("layers", _LAYERS_AXES), ("rows", (0, 1))):
        if name in arrays:
            boundaries = _boundaries(arrays[name], [str(item) for item in names], f"{file}: `{name}`", axes)
    masks = {}
    if "fluid" in arrays:
        masks["fluid"] = _mask(arrays["fluid"], f"{file}: `fluid`")
    return LayerLabels(boundaries, masks)


def _boundaries(
    values: np.ndarray, names: Sequence[str], where: str, axes: Sequence[int] = (0,)
) -> Float[np.ndarray, "8 N C"]:
    """Rows of the boundaries `names` in B-scans, sorted into `BOUNDARIES`.

    axes: those of the first two axes of `values` that may be of the boundaries, the documented one first.
    """
    values = np.asarray(values, np.float32)
    possible = [axis for axis in axes if values.ndim == 3 and values.shape[axis] == len(names)]
    if not possible:
        raise UsageError(
            f"{where} has the shape {values.shape}: expected {len(names)} boundaries ({', '.join(names)}) of "
            f"{' or '.join(_ORDERS[axis] for axis in axes)}"
        )
    values = np.where(np.isfinite(values) & (np.abs(values) < _INVALID_ROW), values, np.nan)
    ascending = [axis for axis in possible if _rows_ascend(values, names, axis)]
    values = np.moveaxis(values, (ascending if len(ascending) == 1 else possible)[0], 0)
    values[:, (values == 0).all((0, 2))] = np.nan  # B-scans without grades are filled with zeros in some files
    out = np.full((8, *values.shape[1:]), np.nan, np.float32)
    found_any = False
    for name, rows in zip(names, values, strict=True):
        index = boundary_index(name)
        if index is not None:
            found_any = True
            out[index] = np.where(np.isfinite(out[index]), out[index], rows)
    if not found_any:
        raise UsageError(f"{where} names {', '.join(names)}: expected at least one of {', '.join(BOUNDARIES)}")
    return out


def _rows_ascend(values: np.ndarray, names: Sequence[str], axis: int) -> bool:
    """Whether no row is above that of the boundary before it, if the boundaries `names` are along `axis`."""
    index = {at: boundary for at, name in enumerate(names) if (boundary := boundary_index(name)) is not None}
    steps = np.diff(values.take(sorted(index, key=index.__getitem__), axis), axis=axis)
    return not bool((steps < 0).any())


def _mask(values: np.ndarray, where: str) -> UInt8[np.ndarray, "N R C"]:
    """0, 1 and 255 of a mask whose marked voxels are not zero and whose unlabelled voxels are NaN or 255."""
    if values.ndim != 3:
        raise UsageError(f"{where} has {values.ndim} axes: expected B-scans, depth, columns")
    numbers = np.asarray(values, np.float32)
    unknown = ~np.isfinite(numbers)
    several = bool(((numbers != 0) & (numbers != UNLABELLED) & ~unknown).any())
    if several:  # without other numbers, 255 means "marked" in many programs
        unknown |= numbers == UNLABELLED
    return np.where(unknown, UNLABELLED, np.where(numbers != 0, 1, 0)).astype(np.uint8)


def _read_mat(file: Path) -> LayerLabels:
    from octjepa.read.formats.matlab import read_arrays

    arrays = read_arrays(file, ("manualLayers1", "manualFluid1", "layerMaps", "layers", "fluid", "layer_names"))
    boundaries, masks = None, {}
    if "manualLayers1" in arrays:  # [boundary, column, B-scan]
        boundaries = _boundaries(arrays["manualLayers1"].transpose(0, 2, 1), BOUNDARIES, f"{file}: `manualLayers1`")
    elif "layerMaps" in arrays:  # [B-scan, column, boundary]
        boundaries = _boundaries(arrays["layerMaps"].transpose(2, 0, 1), _DUKE_AMD, f"{file}: `layerMaps`")
    elif "layers" in arrays:
        boundaries = _boundaries(arrays["layers"], BOUNDARIES, f"{file}: `layers`", _LAYERS_AXES)
    if "manualFluid1" in arrays:  # [depth, column, B-scan]
        masks["fluid"] = _mask(arrays["manualFluid1"].transpose(2, 0, 1), f"{file}: `manualFluid1`")
    elif "fluid" in arrays:
        masks["fluid"] = _mask(arrays["fluid"], f"{file}: `fluid`")
    return LayerLabels(boundaries, masks)


def _read_heyex(file: Path) -> LayerLabels:
    from octjepa.read.formats.vendor.heyex_xml import read_lines

    lines, columns = read_lines(file)
    names = list(dict.fromkeys(name for bscan in lines for name in bscan))
    if not names:
        return LayerLabels()
    values = np.full((len(names), len(lines), columns), np.nan, np.float32)
    for index, bscan in enumerate(lines):
        for name, rows in bscan.items():
            if len(rows) != columns:
                raise UsageError(f"{file}: line {name} of B-scan {index + 1} has {len(rows)} points, not {columns}")
            values[names.index(name), index] = rows
    return LayerLabels(_boundaries(values, names, f"{file}: its SegLines"))


def _read_eyepy(file: Path) -> LayerLabels:
    boundaries, masks = None, {}
    try:
        with zipfile.ZipFile(file) as archive:
            if (layers := _eyepy_arrays(archive, "layers", "layer_heights", file)) is not None:
                boundaries = _boundaries(*layers, f"{file}: its layers")
            if (voxels := _eyepy_arrays(archive, "voxels", "voxel_maps", file)) is not None:
                masks = {name: _mask(mask, f"{file}: {name}") for mask, name in zip(*voxels, strict=True)}
    except (zipfile.BadZipFile, zlib.error, EOFError, ValueError, KeyError, OSError) as error:
        raise UsageError(f"{file} cannot be read as annotations of eyepy ({type(error).__name__})") from None
    return LayerLabels(boundaries, masks)


def _eyepy_arrays(archive: zipfile.ZipFile, kind: str, name: str, file: Path) -> tuple[np.ndarray, list[str]] | None:
    """(arrays `[K, ...]`, their names) of one kind of annotation, or None.

    Raises ValueError: too large. UsageError: not as many names as arrays.
    """
    stored = f"annotations/{kind}/{name}.npy"
    if stored not in archive.namelist():
        return None
    if archive.getinfo(stored).file_size > budget_bytes():
        raise ValueError("larger than the memory budget")
    values = np.load(BytesIO(archive.read(stored)), allow_pickle=False)
    described = json.loads(archive.read(f"annotations/{kind}/meta.json"))
    expected = f"{len(values)} objects with a `name`" if values.ndim else "an array for each name"
    if not isinstance(described, list) or not all(isinstance(item, dict) for item in described):
        raise UsageError(f"{file}: annotations/{kind}/meta.json is not a list of objects: expected {expected}")
    if not values.ndim or len(described) != len(values):
        raise UsageError(f"{file}: annotations/{kind}/meta.json describes {len(described)} arrays: expected {expected}")
    return values, [str(item.get("name", "")) for item in described]


def boundaries_of_codes(codes: UInt8[np.ndarray, "N R C"], names: Sequence[str]) -> Float[np.ndarray, "8 N C"] | None:
    """Boundaries at the edges of labelled layers; None if no class is a layer.

    An edge that touches another class that is not a layer (fluid), or unlabelled voxels, says nothing about the
    boundary. Where two layers give one boundary more than two rows apart, it is unknown.
    """
    count, depth, columns = codes.shape
    layers = {code: edges for code, name in enumerate(names, 1) if (edges := layer_edges(name)) != (None, None)}
    if not layers:
        return None
    hidden = np.zeros(256, bool)
    hidden[[code for code in range(1, 256) if code not in layers]] = True  # 255 is unlabelled
    out = np.full((8, count, columns), np.nan, np.float32)
    position = np.indices((count, columns))
    for code, (upper, lower) in layers.items():
        inside = codes == code
        present = inside.any(1)
        top, bottom = inside.argmax(1), depth - 1 - inside[:, ::-1].argmax(1)
        for index, row, beyond, offset in ((upper, top, top - 1, -0.5), (lower, bottom, bottom + 1, 0.5)):
            if index is None:
                continue
            within = (beyond >= 0) & (beyond < depth)
            outside = codes[position[0], beyond.clip(0, depth - 1), position[1]]
            rows = np.where(present & within & ~hidden[outside], row + offset, np.nan)
            both = np.isfinite(out[index]) & np.isfinite(rows)
            apart = both & (np.abs(out[index] - rows) > 2)
            out[index] = np.where(np.isfinite(out[index]), out[index], rows)
            out[index][apart] = np.nan
    return out
