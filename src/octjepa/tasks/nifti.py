"""Volumes in the geometry of a scan as NIfTI files, by SimpleITK (extra `segment`)."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import numpy as np
from jaxtyping import Shaped

from octjepa.errors import UsageError, install_command


def write_nifti(path: Path, values: Shaped[np.ndarray, "N R C"], spacing_mm: tuple[float, float, float]) -> None:
    """Writes `values`: B-scans, depth and columns are the third, second and first axis of the file.

    spacing_mm: (dz, dy, dx). Raises UsageError naming the extra where SimpleITK is not installed.
    """
    try:
        itk = import_module("SimpleITK")
    except ImportError:
        raise UsageError(f"writing NIfTI needs SimpleITK: {install_command('segment')}") from None
    image = itk.GetImageFromArray(np.ascontiguousarray(values))
    image.SetSpacing(tuple(reversed(spacing_mm)))
    itk.WriteImage(image, str(path), useCompression=True)
