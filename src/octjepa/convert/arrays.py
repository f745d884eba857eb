"""Writes an array of voxels as NIfTI, TIFF or Zarr with its spacing: pixels of a scan, or codes of its layers."""

from __future__ import annotations

import shutil
import zlib
from pathlib import Path

import numpy as np
from jaxtyping import UInt8

from octjepa.errors import OctjepaError
from octjepa.files import replace_folder, write_by_name, write_json

_CHUNK_BYTES = 4 << 20
AXES_OF_ARRAYS = "slice,depth,column"  # what the reader of octjepa sees, the first axis of a NIfTI being its last


def write_tiff(path: Path, values: UInt8[np.ndarray, "D H W"], spacing_mm: tuple[float, float, float]) -> None:
    """Writes an ImageJ stack with a page for each B-scan. ImageJ and Fiji show it in mm.

    Raises OctjepaError if the file cannot be written.
    """
    import tifffile

    dz, dy, dx = spacing_mm
    write_by_name(
        path,
        lambda temporary: tifffile.imwrite(
            temporary,
            values,
            imagej=True,
            resolution=(1 / dx, 1 / dy),
            metadata={"axes": "ZYX", "spacing": dz, "unit": "mm"},
        ),
    )


def write_zarr(path: Path, values: UInt8[np.ndarray, "D H W"], spacing_mm: tuple[float, float, float]) -> None:
    """Writes a folder in Zarr version 2 with the metadata of OME-Zarr (NGFF 0.4), a zlib chunk for a few B-scans.

    Either the complete folder appears or none. Raises OctjepaError if a file cannot be written.
    """
    slices, depth, columns = values.shape
    chunk = max(1, min(slices, _CHUNK_BYTES // (depth * columns)))
    new = path.with_name(f".new-{path.name}")
    shutil.rmtree(new, ignore_errors=True)
    array = new / "0"
    image = {
        "version": "0.4",
        "name": path.stem,
        "axes": [{"name": name, "type": "space", "unit": "millimeter"} for name in "zyx"],
        "datasets": [{"path": "0", "coordinateTransformations": [{"type": "scale", "scale": list(spacing_mm)}]}],
    }
    try:
        array.mkdir(parents=True)
        write_json(new / ".zgroup", {"zarr_format": 2})
        write_json(new / ".zattrs", {"multiscales": [image]})
        facts = {
            "zarr_format": 2,
            "shape": [slices, depth, columns],
            "chunks": [chunk, depth, columns],
            "dtype": "|u1",
            "compressor": {"id": "zlib", "level": 1},
            "fill_value": 0,
            "filters": None,
            "order": "C",
            "dimension_separator": "/",
        }
        write_json(array / ".zarray", facts)
        for number, first in enumerate(range(0, slices, chunk)):
            part = np.zeros((chunk, depth, columns), np.uint8)
            part[: slices - first] = values[first : first + chunk]
            target = array / str(number) / "0"
            target.mkdir(parents=True)
            (target / "0").write_bytes(zlib.compress(part.tobytes(), 1))
        replace_folder(new, path)
    except OSError as error:
        raise OctjepaError(f"{path} could not be written: {error.strerror or error}") from error
    finally:
        shutil.rmtree(new, ignore_errors=True)
