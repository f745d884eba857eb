"""Write volumes in the geometry of a scan as NIfTI files, with nibabel."""

from __future__ import annotations

from pathlib import Path
from typing import Final

import numpy as np
from jaxtyping import Shaped

from octjepa.files import write_by_name
from octjepa.read.file_order import FileOrder

_READERS_ORDER: Final = FileOrder()


def write_nifti(
    path: Path,
    values: Shaped[np.ndarray, "N R C"],
    spacing_mm: tuple[float, float, float],
    order: FileOrder = _READERS_ORDER,
) -> None:
    """Writes `values`: B-scans, depth and columns are the third, second and first axis of the file.

    spacing_mm: (dz, dy, dx). order: the order of `values`, by default that of the reader. The affine follows it, so a
    voxel has the same place in space in both orders. `path` ends in .nii or .nii.gz. Either the complete file appears
    or none. Raises OctjepaError if the file cannot be written.
    """
    import nibabel

    dz, dy, dx = spacing_mm
    affine = np.diag([-dx, -dy, dz, 1.0])  # columns to the left, depth to the back: what ITK calls no rotation
    for axis, step, count in ((0, order.column_step, values.shape[2]), (2, order.slice_step, values.shape[0])):
        if step < 0:  # the first voxel of a reversed axis is the last one of the reader's order
            affine[axis, 3] = affine[axis, axis] * (count - 1)
            affine[axis, axis] = -affine[axis, axis]
    image = nibabel.Nifti1Image(np.ascontiguousarray(values).transpose(2, 1, 0), affine)
    image.header.set_xyzt_units("mm")
    write_by_name(path, lambda temporary: nibabel.save(image, temporary))
