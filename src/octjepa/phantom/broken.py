"""Deliberately broken files, one kind after the other, for trying what a reader does with them.

Each is made from an eye of its own (a person beyond the cohort), so that no good file has a broken twin.
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import Final

from pydicom.dataset import Dataset

KINDS: Final = ("truncated", "zero_bytes", "html_page", "no_pixel_data", "resource_fork", "wrong_spacing")
_HTML = b"<!DOCTYPE html>\n<html><head><title>403 Forbidden</title></head><body><h1>403 Forbidden</h1></body></html>\n"
# The head of an AppleDouble file, which macOS leaves as ._name next to name.
_APPLE_DOUBLE = bytes.fromhex("00051607 00020000") + b"Mac OS X        " + bytes(58)


def write_broken(path: Path, dataset: Dataset, kind: str) -> Path:
    """Writes `dataset` to `path`, broken in the way `kind` of `KINDS`; returns the path that was written."""
    if kind == "resource_fork":
        path = path.with_name(f"._{path.name}")
        path.write_bytes(_APPLE_DOUBLE)
        return path
    if kind == "no_pixel_data":
        del dataset.PixelData
    elif kind == "wrong_spacing":
        _spoil_spacing(dataset)
    buffer = io.BytesIO()
    dataset.save_as(buffer, enforce_file_format=True)
    content = buffer.getvalue()
    if kind == "truncated":
        content = content[: len(content) * 3 // 5]
    elif kind == "zero_bytes":
        content = b""
    elif kind == "html_page":
        content = _HTML
    path.write_bytes(content)
    return path


def _spoil_spacing(dataset: Dataset) -> None:
    """Every source of spacing in the header becomes 1 mm or nothing, as converters that know no spacing write it."""
    measures = dataset.SharedFunctionalGroupsSequence[0].PixelMeasuresSequence[0]
    measures.PixelSpacing = ["1", "1"]
    measures.SliceThickness = "1"
    for group in dataset.PerFrameFunctionalGroupsSequence:
        group.PlanePositionSequence[0].ImagePositionPatient = []
