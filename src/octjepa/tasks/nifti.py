"""Volumes in the geometry of a scan as NIfTI files, by SimpleITK (extra `segment`)."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import numpy as np
from jaxtyping import Shaped

from octjepa.errors import OctjepaError, UsageError, install_command
from octjepa.files import write_by_name


def write_nifti(path: Path, values: Shaped[np.ndarray, "N R C"], spacing_mm: tuple[float, float, float]) -> None:
    """Writes `values`: B-scans, depth and columns are the third, second and first axis of the file.

    spacing_mm: (dz, dy, dx). The file appears whole or not at all. Raises UsageError naming the extra where SimpleITK
    is not installed, OctjepaError where it cannot write.
    """
    try:
        itk = import_module("SimpleITK")
    except ImportError:
        raise UsageError(f"writing NIfTI needs SimpleITK: {install_command('segment')}") from None
    image = itk.GetImageFromArray(np.ascontiguousarray(values))
    image.SetSpacing(tuple(reversed(spacing_mm)))
    try:
        write_by_name(path, lambda temporary: itk.WriteImage(image, str(temporary), useCompression=True))
    except RuntimeError:  # ITK's, which names a line of its source
        raise OctjepaError(f"cannot write {path}: SimpleITK failed. Is the disk full?") from None
