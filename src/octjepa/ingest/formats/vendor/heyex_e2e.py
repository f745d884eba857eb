"""Heidelberg's database export (.e2e): a tree of patients, studies, series and slices, read with eyepy.

eyepy 0.21 names the pieces. What it does wrong is gone round: its index follows jumps that can lead back (a damaged
file never ends), so the chain of directories is walked here first; a series without layer lines, or with a slice
missing, is dropped in silence by its `volumes`, so the slices are asked for one by one; it reads the mantissa of a
pixel with its bits turned round, up to 38 of 255 grey levels off, as oct-converter 0.7 does; and it gives no spacing.

Across, a Spectralis .e2e holds angles only. Degrees become millimetres by the standard eye's 0.2896 mm, eyepy's
constant, a few per cent from what HEYEX makes of the eye's own curvature: slice and column spacing are uncertain.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import UInt8

from octjepa.errors import VolumeRejected
from octjepa.ingest.formats import library
from octjepa.ingest.formats.vendor.bounds import check_length, check_shape, file_size, line_facts, mend
from octjepa.ingest.formats.vendor.intensity import heyex_grey
from octjepa.ingest.raw_scan import HeaderFields, RawScan
from octjepa.ingest.reasons import error_origin, rejection

MM_PER_DEGREE = 0.2896
_FILE_HEADER, _DIRECTORY, _ENTRY, _CONTAINER, _IMAGE_HEADER = 36, 52, 44, 60, 20
_CIRCLE, _STAR = 2, 5
_BSCAN_IMAGE = 35652097


def check_directories(path: Path) -> None:
    """Follows the directories as eyepy will, which stops where no directory is and never where one leads back.

    The last directory of a sound file ends in empty entries and so leads to the file's start, where none is.
    Raises VolumeRejected: broken_header, truncated.
    """
    size = file_size(path)
    at, seen = _FILE_HEADER + _DIRECTORY, set[int]()
    with path.open("rb") as file:
        if file.read(4) != b"CMDb":
            raise rejection("broken_header", "no CMDb mark at the start: no .e2e, or one of several joined databases")
        while at not in seen:
            file.seek(at)
            head = file.read(_DIRECTORY)
            entries = struct.unpack_from("<I", head, 36)[0] if len(head) == _DIRECTORY else 0
            marked, last = head.startswith(b"MDbDir"), at + _DIRECTORY + (entries - 1) * _ENTRY
            if not entries or last + _ENTRY > size:
                if marked or not seen:
                    raise rejection("truncated", "the file ends in its first directory, or in one that lists it on")
                return
            file.seek(last)
            seen.add(at)
            _, start, length = struct.unpack("<3I", file.read(12))
            at = start + length + _CONTAINER
            if marked and at > size:
                check_length(at, size)
    raise rejection("broken_header", "a directory that leads back to where the reading was")


@dataclass(frozen=True)
class _Series:
    """One series of the tree with its B-scans: (place on the fundus, folder of the image) each, in order of place."""

    tree: Any
    slices: list[tuple[Any, Any]]


def _bounded(folder: Any, size: int) -> bytes:
    """A folder's bytes. Raises VolumeRejected truncated where they are not all in the file."""
    check_length(folder.start + _CONTAINER + folder.size, size)
    folder.file_object.seek(folder.start + _CONTAINER)
    content: bytes = folder.file_object.read(folder.size)  # eyepy's own keeps every image in memory
    return content


def _kind(image: Any, size: int) -> int:
    """What an image folder holds: a B-scan, a localizer. Raises VolumeRejected truncated."""
    check_length(image.start + _CONTAINER + _IMAGE_HEADER, size)
    image.file_object.seek(image.start + _CONTAINER + 4)
    return int.from_bytes(image.file_object.read(4), "little")


def _series(reader: Any, formats: Any, size: int) -> list[_Series]:
    """All series that hold B-scans. Raises VolumeRejected not_structural_oct."""
    found = []
    kinds = formats.TypesEnum
    for tree in reader.series:
        slices = []
        for piece in tree.slices.values():
            metas, images = piece.folders.get(kinds.bscanmeta, []), piece.folders.get(kinds.image, [])
            scans = [image for image in images if _kind(image, size) == _BSCAN_IMAGE]
            if metas and scans:
                slices.append((formats.type10004_format.parse(_bounded(metas[0], size)), scans[0]))
        if slices:
            found.append(_Series(tree, sorted(slices, key=lambda entry: int(entry[0].aktImage))))
    if not found:
        raise rejection("not_structural_oct", "no series in the file holds a B-scan")
    return found


@contextmanager
def _opened(path: Path) -> Iterator[tuple[Any, Any]]:
    """(eyepy's reader, its module of formats) after the file was checked; what eyepy raises becomes broken_header."""
    library("eyepy", "vendor")
    formats = library("eyepy.io.he.e2e_format", "vendor")
    check_directories(path)
    try:
        with library("eyepy.io.he.e2e_reader", "vendor").HeE2eReader(path) as reader:
            yield reader, formats
    except (VolumeRejected, MemoryError):
        raise
    except Exception as error:  # construct raises what the bytes made of its parsers
        raise rejection("broken_header", error_origin(error)) from None


def members(path: Path) -> tuple[str, ...]:
    """The scans in the file, "1", "2", ..., in order of their series number."""
    with _opened(path) as (reader, formats):
        return tuple(str(number + 1) for number in range(len(_series(reader, formats, file_size(path)))))


def _image(content: bytes) -> UInt8[np.ndarray, "H W"]:
    """A B-scan from unsigned 16-bit floats: 6 bits of exponent, 10 of mantissa.

    Raises ValueError for a size that is not that of the content.
    """
    _, _, count, rows, columns = struct.unpack_from("<5I", content)
    if count != rows * columns or _IMAGE_HEADER + count * 2 > len(content):
        raise ValueError("an image whose size is not that of its content")
    check_shape(1, rows, columns)
    codes = np.frombuffer(content, "<u2", count, _IMAGE_HEADER).reshape(rows, columns)
    return heyex_grey(np.ldexp(1 + (codes & 1023) / 1024, (codes >> 10).astype(np.int32) - 63))


def _pixels(series: _Series, size: int) -> tuple[np.ndarray, tuple[str, ...]]:
    """(pixels [F, H, W], notes). Raises VolumeRejected frames_broken."""
    pixels: np.ndarray | None = None
    broken: list[int] = []
    fault = ""
    for index, (_, folder) in enumerate(series.slices):
        try:
            image = _image(_bounded(folder, size))
            if pixels is None:
                check_shape(len(series.slices), *image.shape)
                pixels = np.zeros((len(series.slices), *image.shape), np.uint8)
            pixels[index] = image
        except (ValueError, struct.error) as error:
            broken.append(index)
            fault = fault or error_origin(error)
    if pixels is None:
        raise rejection("frames_broken", f"none of {len(series.slices)} B-scans decodes; {fault}")
    return pixels, mend(pixels, broken, fault)


def _text(tree: Any, kind: Any, index: int, size: int, formats: Any) -> str:
    folders = tree._folders_for(tree, kind)
    if not folders:
        return ""
    texts = formats.type9000_format.parse(_bounded(folders[0], size)).text
    return str(texts[index]).strip("\0 ") if index < len(texts) else ""


def _said(series: _Series, formats: Any, size: int) -> tuple[HeaderFields, tuple[str, ...]]:
    kinds, tree = formats.TypesEnum, series.tree
    eyes = tree.folders.get(kinds.laterality, [])
    eye = _bounded(eyes[0], size)[14:15] if eyes else b""
    people = tree.patient.folders.get(kinds.patient, []) if tree.patient else []
    person = formats.type9_format.parse(_bounded(people[0], size)) if people else None
    name = f"{person.surname.strip()} {person.firstname.strip()}".strip() if person else ""
    # The birth date's coding is disputed among readers of .e2e; only the one form that all know is taken.
    born = str(person.birthdate) if person and 18800000 < person.birthdate < 22000000 else ""
    number = tree.patient.id if tree.patient else None
    visit = str(series.slices[0][0].acquisitionTime)[:10]
    held = {
        "PatientName": name,
        "PatientBirthDate": person is not None and person.birthdate,
        "PatientSex": person is not None and person.sex.strip("\0 "),
        "StudyDate": visit,
    }
    said = HeaderFields(
        person_id=(person.patient_id.strip() if person else "") or ("" if number is None else f"heyex-{number}"),
        person_name=name,
        birth_date=born,
        laterality=eye.decode("ascii", "replace"),
        manufacturer="Heidelberg Engineering",
        model="Spectralis",
        protocol=_text(tree, kinds.scanpattern, 0, size, formats).lower(),
        visit=visit,
    )
    return said, tuple(field for field, value in held.items() if value)


def _spacing(metas: list[Any]) -> tuple[float | None, float | None, float | None]:
    """(slice, depth, column) mm; slice and column by the standard eye."""
    first = metas[0]
    wide = float(np.hypot(first.end_x - first.start_x, first.end_y - first.start_y))
    column = wide * MM_PER_DEGREE / first.imgSizeWidth if wide and first.imgSizeWidth else None
    return None, float(first.scale_y) or None, column


def read_e2e(path: Path, member: str = "") -> RawScan:
    """One scan of an .e2e file; without `member` the first, with a note of how many more there are.

    Raises VolumeRejected: broken_header, truncated, not_structural_oct, too_few_frames, frames_broken,
    size_implausible, no_decoder.
    """
    size = file_size(path)
    with _opened(path) as (reader, formats):
        found = _series(reader, formats, size)
        series = found[int(member or 1) - 1]
        metas = [meta for meta, _ in series.slices]
        if metas[0].scan_pattern == _CIRCLE:
            raise rejection("too_few_frames", f"a circle scan: {len(metas)} B-scan, no volume")
        pixels, gaps = _pixels(series, size)
        said, personal = _said(series, formats, size)
    starts = np.array([[meta.start_x, meta.start_y] for meta in metas]) * MM_PER_DEGREE
    ends = np.array([[meta.end_x, meta.end_y] for meta in metas]) * MM_PER_DEGREE
    notes = ["fourth_root_display", "degrees_by_standard_eye", *gaps]
    promised = int(metas[0].n_bscans)
    if promised > len(metas):
        raise rejection("frames_missing", f"{len(metas)} B-scans in the file, its series was of more")
    if not member and len(found) > 1:
        notes.append(f"more_scans_in_file={len(found) - 1}")
    return RawScan(
        format="heidelberg_e2e",
        pixels=pixels,
        frame_geometry=line_facts(starts, ends),
        header=said,
        spacing_mm=_spacing(metas),
        uncertain=("slice", "column"),
        pattern="radial" if metas[0].scan_pattern == _STAR else None,
        notes=tuple(notes),
        personal=personal,
    )
