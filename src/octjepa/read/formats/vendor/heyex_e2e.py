"""Heidelberg's database export (.e2e): a tree of patients, studies, series and slices, read with eyepy.

eyepy 0.21 names the pieces. Its faults are avoided: its index follows jumps that can lead back (a damaged file never
ends), so the chain of directories is checked here first; its `volumes` drop a series without layer lines, or with a
slice missing, so the slices are read one after the other; it reads the mantissa of a pixel with its bits reversed, up
to 38 of 255 intensities off, as oct-converter 0.7 does; and it gives no spacing.

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
from octjepa.read.anatomy import other_part
from octjepa.read.devices import named_model
from octjepa.read.formats import import_extra
from octjepa.read.formats.vendor import (
    check_length,
    check_shape,
    decode_frames,
    file_size,
    filled_fields,
    line_geometry,
    member_names,
    more_scans,
)
from octjepa.read.intensity import heyex_display
from octjepa.read.raw_scan import AxisSpacing, HeaderFields, RawScan
from octjepa.reasons import error_origin, rejection

MM_PER_DEGREE = 0.2896
MAKE = "Heidelberg Engineering"
_FILE_HEADER, _DIRECTORY, _ENTRY, _CONTAINER, _IMAGE_HEADER = 36, 52, 44, 60, 20
_CLEARLY = 1.5  # times the difference between rows in the true size, in the other one
_CIRCLE, _STAR = 2, 5
_BSCAN_IMAGE = 35652097
_SETUP = 13  # of a study: texts of application and camera, zero-terminated


def _check_directories(path: Path) -> None:
    """Follows the directories as eyepy does: it stops at a position without a directory, and never if one leads back.

    The last directory of a sound file ends in empty entries, and so leads to the file's start, which holds none.
    Raises VolumeRejected: broken_header, truncated.
    """
    size = file_size(path)
    at, visited = _FILE_HEADER + _DIRECTORY, set[int]()
    with path.open("rb") as file:
        if file.read(4) != b"CMDb":
            raise rejection("broken_header", "no CMDb mark at the start: no .e2e, or one of several joined databases")
        while at not in visited:
            file.seek(at)
            head = file.read(_DIRECTORY)
            entries = struct.unpack_from("<I", head, 36)[0] if len(head) == _DIRECTORY else 0
            marked, last = head.startswith(b"MDbDir"), at + _DIRECTORY + (entries - 1) * _ENTRY
            if not entries or last + _ENTRY > size:
                if marked or not visited:
                    raise rejection("truncated", "the file ends within a directory")
                return
            file.seek(last)
            visited.add(at)
            _, start, length = struct.unpack("<3I", file.read(12))
            at = start + length + _CONTAINER
            if marked and at > size:
                check_length(at, size)
    raise rejection("broken_header", "the directories form a loop")


@dataclass(frozen=True)
class _Database:
    """An open file: eyepy's reader, its module of formats, the file's size."""

    reader: Any
    formats: Any
    size: int

    def content(self, folder: Any) -> bytes:
        """A folder's bytes. Raises VolumeRejected truncated if they are not all in the file."""
        check_length(folder.start + _CONTAINER + folder.size, self.size)
        folder.file_object.seek(folder.start + _CONTAINER)
        content: bytes = folder.file_object.read(folder.size)  # eyepy's own keeps every image in memory
        return content

    def parse_first(self, folders: list[Any], layout: Any) -> Any:
        """The first folder by a layout of eyepy's formats, None if there is no folder."""
        return layout.parse(self.content(folders[0])) if folders else None

    def is_bscan(self, image: Any) -> bool:
        """Whether an image folder holds a B-scan, not a localizer. Raises VolumeRejected truncated."""
        check_length(image.start + _CONTAINER + _IMAGE_HEADER, self.size)
        image.file_object.seek(image.start + _CONTAINER + 4)
        return int.from_bytes(image.file_object.read(4), "little") == _BSCAN_IMAGE

    def series(self) -> list[_Series]:
        """All series that hold B-scans. Raises VolumeRejected not_structural_oct."""
        result = []
        kinds = self.formats.TypesEnum
        for tree in self.reader.series:
            slices = []
            for piece in tree.slices.values():
                metas = piece.folders.get(kinds.bscanmeta, [])
                scans = [image for image in piece.folders.get(kinds.image, []) if self.is_bscan(image)]
                if metas and scans:
                    slices.append((self.formats.type10004_format.parse(self.content(metas[0])), scans[0]))
            if slices:
                result.append(_Series(tree, sorted(slices, key=lambda entry: int(entry[0].aktImage))))
        if not result:
            raise rejection("not_structural_oct", "no series in the file holds a B-scan")
        return result


@dataclass(frozen=True)
class _Series:
    """One series of the tree with its B-scans: (position on the fundus, folder of the image), in order of position."""

    tree: Any
    slices: list[tuple[Any, Any]]


@contextmanager
def _opened(path: Path) -> Iterator[_Database]:
    """The database after the file was checked; what eyepy raises becomes broken_header."""
    import_extra("eyepy", "vendor")
    formats = import_extra("eyepy.io.he.e2e_format", "vendor")
    _check_directories(path)
    try:
        with import_extra("eyepy.io.he.e2e_reader", "vendor").HeE2eReader(path) as reader:
            yield _Database(reader, formats, file_size(path))
    except (VolumeRejected, MemoryError):
        raise
    except Exception as error:  # construct raises what the bytes made of its parsers
        raise rejection("broken_header", error_origin(error)) from None


def members(path: Path) -> tuple[str, ...]:
    """The scans in the file, "1", "2", ..., in order of their series number. Raises VolumeRejected."""
    with _opened(path) as database:
        return member_names(len(database.series()))


def _decode_image(content: bytes, exchanged: bool = False) -> UInt8[np.ndarray, "H W"]:
    """A B-scan from unsigned 16-bit floats: 6 bits of exponent, 10 of mantissa.

    `exchanged` takes the stated depth for the columns and the reverse. Raises ValueError for a size that is not that of
    the content.
    """
    _, _, count, depth, columns = struct.unpack_from("<5I", content)
    if exchanged:
        depth, columns = columns, depth
    if count != depth * columns or _IMAGE_HEADER + count * 2 > len(content):
        raise ValueError("an image whose size is not that of its content")
    check_shape(1, depth, columns)
    codes = np.frombuffer(content, "<u2", count, _IMAGE_HEADER).reshape(depth, columns)
    return heyex_display(np.ldexp(1 + (codes & 1023) / 1024, (codes >> 10).astype(np.int32) - 63))


def _is_exchanged(content: bytes, meta: Any) -> bool:
    """Whether an image states its depth and columns the wrong way round, where the B-scan's metadata say the reverse.

    In its true size, pixels of neighbouring rows are alike; in the other one every row begins at another column.
    Raises VolumeRejected header_contradicts_pixels where the pixels do not decide.
    """
    _, _, _, depth, columns = struct.unpack_from("<5I", content)
    if depth == columns or (int(meta.size_y), int(meta.size_x)) != (columns, depth):
        return False
    stated, other = (_row_difference(_decode_image(content, exchanged)) for exchanged in (False, True))
    if max(stated, other) < _CLEARLY * min(stated, other):
        raise rejection(
            "header_contradicts_pixels",
            f"a B-scan is {depth} x {columns} by its image and {columns} x {depth} by its metadata, and its pixels do "
            "not tell which is right",
        )
    return other < stated


def _row_difference(frame: UInt8[np.ndarray, "H W"]) -> float:
    """Mean absolute difference between a row and the next, of means of eight columns, against speckle."""
    columns = frame.shape[1] // 8 * 8
    means = frame[:, :columns].reshape(len(frame), -1, 8).mean(axis=2)
    return float(np.abs(np.diff(means, axis=0)).mean()) + 1e-6


def _header(series: _Series, database: _Database) -> tuple[HeaderFields, tuple[str, ...]]:
    """(header fields, names of the filled fields of personal data)."""
    formats, tree = database.formats, series.tree
    kinds = formats.TypesEnum
    eyes = tree.folders.get(kinds.laterality, [])
    eye = database.content(eyes[0])[14:15] if eyes else b""
    texts = database.parse_first(tree._folders_for(tree, kinds.scanpattern), formats.type9000_format)
    of_study = tree.study.folders if tree.study else {}
    device = database.parse_first(of_study.get(kinds.device, []), formats.type9001_format)
    setups = [database.content(folder).decode("utf-16-le", "ignore") for folder in of_study.get(_SETUP, [])[:1]]
    words = [*(device.text if device else ()), *(text for setup in setups for text in setup.split("\0"))]
    structure = database.parse_first(tree.folders.get(kinds.examined_structure, []), formats.type9005_format)
    people = tree.patient.folders.get(kinds.patient, []) if tree.patient else []
    person = database.parse_first(people, formats.type9_format)
    person_name = f"{person.surname.strip()} {person.firstname.strip()}".strip() if person else ""
    # The birth date's coding is disputed among readers of .e2e; only the one form that all know is taken.
    birth_date = str(person.birthdate) if person and 18800000 < person.birthdate < 22000000 else ""
    number = tree.patient.id if tree.patient else None
    visit = str(series.slices[0][0].acquisitionTime)[:10]
    header = HeaderFields(
        person_id=(person.patient_id.strip() if person else "") or ("" if number is None else f"heyex-{number}"),
        person_name=person_name,
        birth_date=birth_date,
        sex=person.sex.strip("\0 ") if person else "",
        laterality=eye.decode("ascii", "replace"),
        manufacturer=MAKE,
        model=named_model(words, MAKE, "Spectralis"),
        region=other_part(" ".join(structure.text)) if structure else "",
        protocol=str(texts.text[0]).strip("\0 ").lower() if texts and len(texts.text) else "",
        visit=visit,
    )
    personal = {
        "PatientName": person_name,
        "PatientBirthDate": person is not None and person.birthdate,
        "PatientSex": person is not None and person.sex.strip("\0 "),
        "StudyDate": visit,
    }
    return header, filled_fields(personal)


def _spacing(meta: Any) -> AxisSpacing:
    """(slice, depth, column) mm of a B-scan; the column by the standard eye, the slice by the B-scans' positions."""
    length = float(np.hypot(meta.end_x - meta.start_x, meta.end_y - meta.start_y))
    column = length * MM_PER_DEGREE / meta.imgSizeWidth if length and meta.imgSizeWidth else None
    return None, float(meta.scale_y) or None, column


def read_e2e(path: Path, member: str = "") -> RawScan:
    """One scan of an .e2e file; without `member` the first, with a note of how many more there are.

    Raises VolumeRejected: broken_header, truncated, not_structural_oct, too_few_frames, frames_broken, frames_missing,
    header_contradicts_pixels, size_implausible, no_decoder.
    """
    with _opened(path) as database:
        scans = database.series()
        series = scans[int(member or 1) - 1]
        metas = [meta for meta, _ in series.slices]
        if metas[0].scan_pattern == _CIRCLE:
            raise rejection("too_few_frames", f"a circle scan: {len(metas)} B-scan, no volume")
        images = [folder for _, folder in series.slices]
        middle = len(images) // 2
        try:
            exchanged = _is_exchanged(database.content(images[middle]), metas[middle])
        except (ValueError, struct.error):
            exchanged = False  # a damaged image, which decoding reports
        pixels, gaps = decode_frames(
            len(images),
            lambda index: _decode_image(database.content(images[index]), exchanged),
            (ValueError, struct.error),
        )
        header, personal = _header(series, database)
    promised = int(metas[0].n_bscans)
    if promised > len(metas):
        raise rejection("frames_missing", f"the file holds {len(metas)} B-scans; its series had {promised}")
    starts = np.array([[meta.start_x, meta.start_y] for meta in metas]) * MM_PER_DEGREE  # [D, 2]
    ends = np.array([[meta.end_x, meta.end_y] for meta in metas]) * MM_PER_DEGREE
    return RawScan(
        format="heidelberg_e2e",
        pixels=pixels,
        frame_geometry=line_geometry(starts, ends),
        header=header,
        spacing_mm=_spacing(metas[0]),
        uncertain=("slice", "column"),
        pattern="radial" if metas[0].scan_pattern == _STAR else None,
        notes=(
            "fourth_root_display",
            "degrees_by_standard_eye",
            *(("size_by_metadata",) if exchanged else ()),
            *gaps,
            *more_scans(member, len(scans)),
        ),
        personal=personal,
    )
