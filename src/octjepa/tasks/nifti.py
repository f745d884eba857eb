"""Write volumes in the geometry of a scan as NIfTI files, with nibabel."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from jaxtyping import Shaped

from octjepa.files import write_by_name


def write_nifti(path: Path, values: Shaped[np.ndarray, "N R C"], spacing_mm: tuple[float, float, float]) -> None:
    """Writes `values`: B-scans, depth and columns are the third, second and first axis of the file.

    spacing_mm: (dz, dy, dx). `path` ends in .nii or .nii.gz. Either the complete file appears or none.
    Raises OctjepaError if the file cannot be written.
    """
    import nibabel

    dz, dy, dx = spacing_mm
    affine = np.diag([-dx, -dy, dz, 1.0])  # columns to the left, depth to the back: what ITK calls no rotation
    image = nibabel.Nifti1Image(np.ascontiguousarray(values).transpose(2, 1, 0), affine)
    image.header.set_xyzt_units("mm")
    write_by_name(path, lambda temporary: nibabel.save(image, temporary))
