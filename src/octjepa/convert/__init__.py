"""Writes scans of any format that octjepa reads as NIfTI, DICOM, TIFF or Zarr, with spacing, eye and provenance."""

from __future__ import annotations
