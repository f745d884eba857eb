"""Writes an array of voxels as NIfTI, TIFF or Zarr with its spacing: pixels of a scan, or codes of its layers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from jaxtyping import UInt8

from octjepa.files import write_by_name

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
