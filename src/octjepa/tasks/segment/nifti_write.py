"""Codes as NIfTI in the geometry of the scan's file, by SimpleITK (extra `segment`)."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import numpy as np
from jaxtyping import UInt8

from octjepa.errors import UsageError
from octjepa.extras import to_install


def write_nifti(path: Path, codes: UInt8[np.ndarray, "N R C"], spacing_mm: tuple[float, float, float]) -> None:
    """B-scans, rows, columns lie along the third, second and first axis of the file. 255 is "outside"."""
    try:
        itk = import_module("SimpleITK")
    except ImportError:
        raise UsageError(f"writing NIfTI needs SimpleITK: {to_install('segment')}") from None
    image = itk.GetImageFromArray(np.ascontiguousarray(codes))
    image.SetSpacing(tuple(reversed(spacing_mm)))
    itk.WriteImage(image, str(path), useCompression=True)
