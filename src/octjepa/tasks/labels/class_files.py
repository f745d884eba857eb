"""Write the class of every voxel of a scan as NIfTI and as a DICOM Segmentation, both in the order of the scan's file.

In: codes `[N, R, C]` in the order of the volume that was read, and the names of the codes 1, 2, ... Out: the paths of
the files, and notes on what was not written and why.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

import numpy as np
from jaxtyping import UInt8

from octjepa.errors import UsageError, install_command
from octjepa.ingest.source_file import SourceFile
from octjepa.read.file_order import FileOrder
from octjepa.tasks.labels.dicom_seg import write_segmentation
from octjepa.tasks.labels.label_files import UNLABELLED
from octjepa.tasks.nifti import write_nifti
from octjepa.volume import OCTVolume

Forms = Sequence[Literal["nifti", "dicom"]]


@dataclass(frozen=True)
class ClassFiles:
    """The files of a scan, None if one was not written, and why."""

    nifti: str | None
    dicom: str | None
    notes: tuple[str, ...]


def file_order(volume: OCTVolume) -> tuple[FileOrder, str]:
    """(the order of the file that `volume` was read from, "").

    If the reader moved voxels in a way that loses the order of the file: (the order of `volume`, a note that says so).
    """
    try:
        return FileOrder.of(volume.notes, volume.shape[0]), ""
    except UsageError:
        why = "label files are in the reader's order, not the file's"
        return FileOrder(), f"the reader sorted, turned or dropped B-scans: {why}"


def missing_library(scan_format: str, forms: Forms) -> str:
    """A note that DICOM Segmentations of a scan of this format need a library that is not installed; "" otherwise."""
    if "dicom" not in forms or scan_format != "dicom" or _has_highdicom():
        return ""
    return f"no DICOM Segmentations: they need highdicom: {install_command('segment')}"


def write_classes(
    stem: Path,
    codes: UInt8[np.ndarray, "N R C"],
    classes: Sequence[str],
    volume: OCTVolume,
    source: SourceFile,
    forms: Forms,
    is_adapted: bool = False,
) -> ClassFiles:
    """Writes `STEM.nii.gz` and, of a DICOM scan, `STEM.dcm`, as far as `forms` names them.

    Both files of an earlier call are removed first, so that no file of another result stays next to the new one. The
    caller has claimed both in the record of the folder. Codes of 255 ("not labelled") are background in a DICOM
    Segmentation. `is_adapted`: an adapted network made `codes`. Raises OctjepaError: the disk refuses.
    """
    nifti_path, dicom_path = (stem.with_name(f"{stem.name}{ending}") for ending in (".nii.gz", ".dcm"))
    for path in (nifti_path, dicom_path):
        path.unlink(missing_ok=True)
    order, moved = file_order(volume)
    notes = [moved] if moved else []
    in_file_order = np.ascontiguousarray(order.voxels(codes))
    nifti = dicom = None
    if "nifti" in forms:
        write_nifti(nifti_path, in_file_order, volume.spacing_mm, order)
        nifti = str(nifti_path)
    if "dicom" in forms and volume.format == "dicom":
        inside = np.where(in_file_order == UNLABELLED, np.uint8(0), in_file_order)
        if _has_highdicom():
            why = _no_dicom(inside, source, is_in_file_order=not moved)
            if not why:
                try:
                    write_segmentation(dicom_path, inside, classes, volume.spacing_mm, source.path, is_adapted)
                    dicom = str(dicom_path)
                except UsageError:
                    why = "its frames cannot be referenced (frames were left out, or the header lacks identifiers)"
            if why:
                notes.append(f"no DICOM Segmentation: {why}")
    return ClassFiles(nifti, dicom, tuple(notes))


def _has_highdicom() -> bool:
    return find_spec("highdicom") is not None


def _no_dicom(codes: UInt8[np.ndarray, "N R C"], source: SourceFile, is_in_file_order: bool) -> str:
    """The reason not to write a DICOM Segmentation; "" if it can be written."""
    if not codes.any():
        return "no class was found in any voxel, and the format needs at least one frame"
    if not isinstance(source.location, Path) or not source.location.is_file():
        return "the scan is not a single file on a disk"
    return "" if is_in_file_order else "voxels were moved when the scan was read"
