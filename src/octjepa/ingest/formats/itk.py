"""What NIfTI and MetaImage share: SimpleITK (extra `formats`), header before voxels, and what its spacing is worth."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from octjepa.ingest.formats import library
from octjepa.ingest.formats.intensity import check_size
from octjepa.ingest.raw_scan import AxisSpacing
from octjepa.ingest.reasons import rejection


def known_mm(spacing: tuple[float, ...]) -> AxisSpacing:
    """Spacing of the stored axes; None for 1, the value of those who know none. Header floats have seven digits."""
    a, b, c = (None if mm == 1.0 or not np.isfinite(mm) or mm <= 0 else round(float(mm), 7) for mm in spacing)
    return a, b, c


def read_itk(path: Path, reader_name: str) -> tuple[np.ndarray, tuple[float, ...]]:
    """(values of the three axes, the last in the file first; spacing in the same order). Raises VolumeRejected:
    unsupported_pixels, size_implausible, broken_header, no_decoder.
    """
    itk = library("SimpleITK", "formats")
    itk.ProcessObject.GlobalWarningDisplayOff()  # its warnings quote paths
    reader = itk.ImageFileReader()
    reader.SetFileName(str(path))
    reader.SetImageIO(reader_name)
    try:
        reader.ReadImageInformation()
        size = reader.GetSize()
        if reader.GetNumberOfComponents() != 1 or any(length > 1 for length in size[3:]):
            raise rejection("unsupported_pixels", f"{reader.GetNumberOfComponents()} values a voxel; expected one grey")
        check_size(size, 1)
        values = itk.GetArrayFromImage(reader.Execute())
        spacing = reader.GetSpacing()[:3][::-1]
    except RuntimeError:  # its message names the path
        raise rejection("broken_header", "SimpleITK cannot read it: header or voxels are damaged") from None
    return values.reshape(values.shape[-3:]), spacing
