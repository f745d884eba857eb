"""A single B-scan: a picture (PNG, JPEG, TIFF, BMP) or a DICOM file of one frame.

In: a file. Out: `BScan`, 8-bit pixels with the vitreous on top, and its spacing if the file states it. Pictures state
none. Unlike a volume, a B-scan may have an unknown spacing; what is measured in it is then in pixels.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import numpy as np
from jaxtyping import UInt8
from PIL import Image

from octjepa.errors import UsageError, VolumeRejected
from octjepa.read.dicom import read_single_frame
from octjepa.read.formats import recognise
from octjepa.read.formats.images import read_image, without_masks
from octjepa.read.formats.sequence import IMAGE_SUFFIXES, natural_key
from octjepa.read.geometry import is_plausible
from octjepa.read.links import leads_out
from octjepa.read.orientation import is_upside_down
from octjepa.read.personal_data import StatedPerson
from octjepa.reasons import error_origin, rejection
from octjepa.time_limit import SECONDS_PER_FILE, time_limit

DICOM_SUFFIXES: Final = (".dcm", ".dicom")
_DESCRIPTION: Final = 270  # a tag of TIFF
_LEAST: Final = 32  # rows and columns of a B-scan


@dataclass(frozen=True, eq=False)
class BScan:
    """One B-scan. `spacing_mm` (depth, column) is None if the file does not state it.

    `person` is whom the file states, to mask the name in paths.
    """

    pixels: UInt8[np.ndarray, "H W"]
    spacing_mm: tuple[float, float] | None
    notes: tuple[str, ...] = ()
    person: StatedPerson = field(default_factory=StatedPerson)


def read_bscan(path: Path) -> BScan:
    """Reads a single B-scan. Raises VolumeRejected (a code of `octjepa.reasons`), UsageError: no such file."""
    if not path.is_file():
        raise UsageError(f"no file at {path}: expected a B-scan")
    try:
        with warnings.catch_warnings(), time_limit(SECONDS_PER_FILE):
            warnings.simplefilter("ignore")
            bscan = _read_picture(path) if path.suffix.lower() in IMAGE_SUFFIXES else _read_dicom(path)
    except (VolumeRejected, MemoryError):
        raise
    except Exception as error:  # a damaged header may hold anything; it must not end the run
        raise rejection("reader_failed", error_origin(error)) from error
    height, width = bscan.pixels.shape
    if height < _LEAST or width < _LEAST:
        raise rejection("unsupported_pixels", f"{height} x {width} pixels: expected a B-scan of {_LEAST} at least")
    if np.ptp(bscan.pixels) == 0:
        raise rejection("no_tissue", "all pixels are equal")
    if is_upside_down(bscan.pixels[None]):
        pixels = np.ascontiguousarray(bscan.pixels[::-1])
        return BScan(pixels, bscan.spacing_mm, (*bscan.notes, "turned_upright"), bscan.person)
    return bscan


def _read_picture(path: Path) -> BScan:
    pixels, notes = read_image(path)
    return BScan(pixels, None, notes)


def _read_dicom(path: Path) -> BScan:
    format = recognise(path)
    if format != "dicom":
        raise rejection("unknown_format", "neither a picture nor a DICOM file: expected a single B-scan")
    scan = read_single_frame(path)
    stated = scan.pixel_spacing_mm or tuple(map(float, scan.frame_geometry.spacing_mm[0]))
    depth_mm, column_mm = stated
    is_known = is_plausible("depth", depth_mm) and is_plausible("column", column_mm)
    person = StatedPerson(scan.header.person_name, scan.header.birth_date, scan.header.sex)
    return BScan(scan.pixels[0], (depth_mm, column_mm) if is_known else None, scan.notes, person)


def is_picture(path: Path) -> bool:
    """Whether a file is a picture of one page, which cannot be a volume."""
    if not path.is_file() or path.suffix.lower() not in IMAGE_SUFFIXES:
        return False
    try:
        with Image.open(path) as image:
            description = str(getattr(image, "tag_v2", {}).get(_DESCRIPTION, ""))
            return getattr(image, "n_frames", 1) == 1 and "images=" not in description  # as ImageJ writes stacks
    except Exception:  # what Pillow makes of damaged bytes; the reader says what is wrong
        return False


def find_bscans(source: Path) -> list[Path]:
    """The files of single B-scans: `source` itself, or the pictures and DICOM files below a folder, in natural order.

    Masks next to their pictures, hidden files, and links that lead out of the folder are left out. Raises UsageError:
    no such path, or none below it.
    """
    if source.is_file():
        return [source]
    if not source.is_dir():
        raise UsageError(f"no file or folder at {source}")
    files: list[Path] = []
    for folder in sorted({source, *(item for item in source.rglob("*") if item.is_dir())}):
        names = [file.name for file in folder.iterdir() if file.is_file() and not file.name.startswith(".")]
        names = [name for name in without_masks(names) if name.lower().endswith((*IMAGE_SUFFIXES, *DICOM_SUFFIXES))]
        files += [folder / name for name in sorted(names, key=natural_key) if not leads_out(folder / name, source)]
    if not files:
        endings = ", ".join((*IMAGE_SUFFIXES, *DICOM_SUFFIXES))
        raise UsageError(f"no B-scan in {source}: expected files that end in {endings}")
    return files
