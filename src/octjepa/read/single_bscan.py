"""A single B-scan: a picture (PNG, JPEG, TIFF, BMP) or a DICOM file of one frame.

In: a file. Out: `BScan`, 8-bit pixels with the vitreous on top, and its spacing if the file states it, or an
`OCTVolume` of one slice for the store. Pictures state no spacing. Unlike a volume, a B-scan may have an unknown
spacing: what is measured in it is then in pixels, and if a physical scale is needed, the picture is assumed to be
2 mm deep and 6 mm wide, with a note.
"""

from __future__ import annotations

import os
import warnings
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePath
from typing import Final, Literal

import numpy as np
from jaxtyping import UInt8
from PIL import Image

from octjepa.errors import UsageError, VolumeRejected, counted
from octjepa.notes import unique_notes
from octjepa.read.anatomy import other_part
from octjepa.read.devices import check_images_retina
from octjepa.read.dicom import read_single_frame
from octjepa.read.formats import recognise
from octjepa.read.formats.images import read_image, without_masks
from octjepa.read.formats.sequence import IMAGE_SUFFIXES, PICTURE_FORMATS, natural_key
from octjepa.read.geometry import is_plausible, stated_spacing_fault
from octjepa.read.identity import identify, with_person
from octjepa.read.links import leads_out
from octjepa.read.manifest import ManifestRow, find_row
from octjepa.read.orientation import is_upside_down
from octjepa.read.personal_data import StatedPerson, mask_path
from octjepa.read.raw_scan import HeaderFields
from octjepa.read.written_results import LAYERS, result_files
from octjepa.reasons import error_origin, rejection
from octjepa.time_limit import SECONDS_PER_FILE, time_limit
from octjepa.volume import OCTVolume

BSCAN_SUFFIXES: Final = (*IMAGE_SUFFIXES, ".dcm", ".dicom")
_DESCRIPTION: Final = 270  # a tag of TIFF
_LEAST: Final = 32  # rows and columns of a B-scan
ASSUMED_MM: Final = (2.0, 6.0)  # depth and width of a picture without a spacing
SLICE_MM: Final = 0.1  # without meaning: a B-scan has no neighbour
ASSUMED_NOTE: Final = "spacing_assumed"


@dataclass(frozen=True, eq=False)
class BScan:
    """One B-scan. `spacing_mm` (depth, column) is None if the file does not state it.

    `header` is what a DICOM file states, and `personal` names the fields of personal data in it.
    """

    pixels: UInt8[np.ndarray, "H W"]
    spacing_mm: tuple[float, float] | None
    notes: tuple[str, ...] = ()
    header: HeaderFields = field(default_factory=HeaderFields)
    personal: tuple[str, ...] = ()

    @property
    def person(self) -> StatedPerson:
        """The person that the file states, to mask the name in paths."""
        return StatedPerson(self.header.person_name, self.header.birth_date, self.header.sex)


def read_bscan(path: Path, seconds: float = SECONDS_PER_FILE) -> BScan:
    """Reads a single B-scan within `seconds`.

    Raises VolumeRejected (a code of `octjepa.reasons`), UsageError: no such file.
    """
    if not path.is_file():
        if path.is_dir():
            _file_names(path)  # raises for a folder that `find_bscans` could not list
        raise UsageError(f"no file at {path}: expected a B-scan")
    try:
        with warnings.catch_warnings(), time_limit(seconds):
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
        return replace(bscan, pixels=pixels, notes=(*bscan.notes, "turned_upright"))
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
    return BScan(scan.pixels[0], (depth_mm, column_mm) if is_known else None, scan.notes, scan.header, scan.personal)


def read_bscan_volume(
    path: Path,
    row: ManifestRow | None = None,
    spacing_mm: tuple[float, float, float] | None = None,
    dataset_path: PurePath | None = None,
    people: list[StatedPerson] | None = None,
    seconds: float = SECONDS_PER_FILE,
) -> OCTVolume:
    """Reads a single B-scan as a volume of one slice, whose pattern is "line". Arguments as in `reader.read_volume`.

    Without any spacing the picture is assumed to measure `ASSUMED_MM` (note `spacing_assumed`). A manifest's spacing
    that no B-scan has is passed over (note `spacing_implausible_manifest`). The name of a picture serves as its visit,
    so that labels can name each picture. Raises as `read_bscan`, and VolumeRejected not_retina.
    """
    row = row or (find_row(path) if dataset_path is None else None)
    bscan = read_bscan(path, seconds)
    if people is not None:
        people.append(bscan.person)
    dataset_path = dataset_path or path
    header = bscan.header
    if path.suffix.lower() in IMAGE_SUFFIXES:
        header = replace(header, visit=dataset_path.stem)
    identity = identify(header, dataset_path, row)
    if part := other_part(f"{identity.protocol} {identity.region}"):
        raise rejection("not_retina", f"its protocol or region says {part}; expected the retina")
    check_images_retina(identity.device)
    height, width = bscan.pixels.shape
    stated = None if row is None else row.pixel_spacing_mm
    fault = "" if stated is None else stated_spacing_fault((SLICE_MM, *stated), (1, height, width))
    sources = {
        "option": None if spacing_mm is None else spacing_mm[1:],
        "header": bscan.spacing_mm,
        "manifest": None if fault else stated,
        "assumed": (ASSUMED_MM[0] / height, ASSUMED_MM[1] / width),
    }
    source, spacing = next((name, spacing) for name, spacing in sources.items() if spacing is not None)
    is_assumed = source == "assumed"
    implausible = ["spacing_implausible_manifest"] if fault else []
    volume = OCTVolume(
        pixels=bscan.pixels[None],
        spacing_mm=(SLICE_MM, *spacing),
        provenance={"slice": "assumed", "depth": source, "column": source},
        person_id=identity.person_id,
        device=identity.device,
        laterality=identity.laterality,
        laterality_source=identity.laterality_source,
        pattern="line",
        uncertain=("slice", "depth", "column") if is_assumed else ("slice",),
        sop_instance_uid=identity.sop_instance_uid,
        protocol=identity.protocol,
        region=identity.region,
        visit=identity.visit,
        site=identity.site,
        format="dicom" if path.suffix.lower() not in IMAGE_SUFFIXES else "image",
        personal=bscan.personal,
        notes=unique_notes([*identity.notes, *bscan.notes, *([*implausible, ASSUMED_NOTE] if is_assumed else [])]),
        source=mask_path(dataset_path.as_posix(), header.person_name, header.birth_date),
    )
    return with_person(volume, header)


def parse_bscan_spacing(text: str) -> tuple[float, float]:
    """Parses "0.0039,0.0117" to (depth, column) in mm. Raises UsageError: not two plausible numbers."""
    try:
        depth_mm, column_mm = map(float, text.split(","))
    except ValueError:
        raise UsageError(
            f"spacing {text!r}: expected depth,column in mm for single B-scans, such as 0.0039,0.0117"
        ) from None
    if fault := stated_spacing_fault((SLICE_MM, depth_mm, column_mm)):
        raise UsageError(f"spacing {text!r}: {fault}; expected depth,column in mm")
    return depth_mm, column_mm


def parse_image_spacing(text: str) -> tuple[float, float, float] | Literal["file"]:
    """`parse_bscan_spacing` in the form of `reader.parse_spacing`, with a slice spacing that has no meaning."""
    return "file" if text.strip() == "file" else (SLICE_MM, *parse_bscan_spacing(text))


def is_picture(path: Path) -> bool:
    """Whether a file is a picture of one page, which cannot be a volume."""
    if not path.is_file() or path.suffix.lower() not in IMAGE_SUFFIXES:
        return False
    try:
        with Image.open(path, formats=PICTURE_FORMATS) as image:
            description = str(getattr(image, "tag_v2", {}).get(_DESCRIPTION, ""))
            return getattr(image, "n_frames", 1) == 1 and "images=" not in description  # as ImageJ writes stacks
    except Exception:  # what Pillow makes of damaged bytes; the reader says what is wrong
        return False


def _file_names(folder: Path) -> list[str]:
    """The names of the files in a folder that are not hidden. Raises VolumeRejected unreadable_folder."""
    try:
        return [file.name for file in folder.iterdir() if file.is_file() and not file.name.startswith(".")]
    except OSError as error:
        raise rejection("unreadable_folder", error.strerror or str(error)) from None


def find_bscans(source: Path) -> list[Path]:
    """The files of single B-scans: `source` itself, or the pictures and DICOM files below a folder, in natural order.

    Masks next to their pictures, results of octjepa, hidden files, and links that lead out of the folder are left out.
    A folder below `source` that cannot be listed is one of the paths: `read_bscan` refuses it and says why, and the
    others are read. Raises UsageError: no such path, or no file below it.
    """
    if source.is_file():
        return [source]
    if not source.is_dir():
        raise UsageError(f"no file or folder at {source}")
    files: list[Path] = []
    unreadable: list[Path] = []
    for folder in sorted({source, *(Path(parent, name) for parent, folders, _ in os.walk(source) for name in folders)}):
        try:
            names = _file_names(folder)
        except VolumeRejected:
            if folder.parent not in unreadable:  # what is in a folder without permission is refused with it
                unreadable.append(folder)
            continue
        if LAYERS in names:
            continue
        results = result_files(names)
        names = [name for name in names if name not in results]
        names = [name for name in without_masks(names) if name.lower().endswith(BSCAN_SUFFIXES)]
        files += [folder / name for name in sorted(names, key=natural_key) if not leads_out(folder / name, source)]
    if not files:
        count_text = f"; {counted(len(unreadable), 'folder')} cannot be listed" if unreadable else ""
        raise UsageError(f"no B-scan in {source}: expected files that end in {', '.join(BSCAN_SUFFIXES)}{count_text}")
    return [*files, *unreadable]
