"""NumPy's .npy and .npz, and what archives of named arrays (.npz, .mat) share.

Pickled objects are never loaded; headers are read before values. The convention for an array without names of its axes
is [slice, depth, column]; content has to agree with it. One member of a compressed .npz cannot be read in part.

The scan of an archive is the array of a known name, or the only one with three axes. Single numbers and texts become
labels, or person, eye, device and spacing if they are called so. Personal data are listed by field and left out.
"""

from __future__ import annotations

import math
import re
import struct
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from io import BytesIO
from pathlib import Path
from tokenize import TokenError
from typing import IO, Any, Literal, NamedTuple, get_args

import numpy as np

from octjepa.errors import VolumeRejected
from octjepa.read.formats.axes import axes_word
from octjepa.read.formats.sequence import MIN_FRAMES
from octjepa.read.identity import parse_laterality
from octjepa.read.intensity import check_size, to_uint8
from octjepa.read.memory_budget import DEFLATE_RATIO, array_bytes, check_memory
from octjepa.read.personal_data import is_placeholder
from octjepa.read.raw_scan import AxisSpacing, FrameGeometry, HeaderFields, RawScan, StoredAxes
from octjepa.reasons import rejection
from octjepa.volume import Pattern

_LAYOUT = "DHW"
_HEADER_LIMIT = 10_000  # NumPy's own, of a header that it parses as a Python literal
# FairVision has 200 x 200 x 200 `oct_bscans`, Duke's DME set `images` of height x width x B-scan.
SCAN_NAMES = ("oct_bscans", "bscans", "oct", "volume", "images", "image", "pixels", "data", "img", "vol")
# Arrays of a label file (docs/segment.md, Labels), also of a second grader (`layers2`), and those that octjepa adds to
# its boundaries. A file that holds no other arrays of two axes or more has labels of a scan, and no scan.
_LABEL_NAMES = re.compile(r"(layers|rows|fluid|labels)\d*")
_WITH_LABELS = ("um", "expected_error_um", "expected_error_px")
_PICTURE = 32  # samples that a B-scan has along either axis, at least
MAX_MEMBERS = 1024  # arrays in one archive
_MAGIC, _VERSIONS = b"\x93NUMPY", ((1, 0), (2, 0), (3, 0))
_MAX_TEXT_BYTES = 1024  # of a member; 256 characters of four bytes
_PIECE_BYTES = 1 << 20
_MAX_VALUES = 8  # a vector of this many values at most becomes labels, one per value
_FIELDS = {
    "person_id": ("person_id", "patient_id", "patientid", "subject_id", "participant_id", "pid"),
    "laterality": ("laterality", "eye", "image_laterality"),
    "model": ("device", "scanner", "manufacturers_model_name"),
    "manufacturer": ("manufacturer",),
    "visit": ("visit", "study_uid", "study_date", "scan_date", "visit_date"),
}
_PERSONAL = {
    "PatientName": ("name", "patient_name", "patientname", "first_name", "last_name", "surname"),
    "PatientBirthDate": ("dob", "birth_date", "birthdate", "date_of_birth", "birth_day", "birthday"),
    "OtherPatientIDs": ("mrn", "ssn", "medical_record_number", "accession", "accession_number"),
    "PatientAddress": ("address", "street", "zip", "zipcode", "city"),
    "PatientTelephoneNumbers": ("phone", "telephone", "email"),
}
_COMPARED = {"PatientName": "person_name", "PatientBirthDate": "birth_date"}  # only to see whether the id repeats it
_DEMOGRAPHIC = {
    "PatientAge": ("age",),
    "PatientSex": ("sex", "gender", "male", "female"),
    "EthnicGroup": ("race", "ethnicity", "hispanic"),
}
_SPACING = ("spacing_mm", "voxel_spacing_mm")
# Words of classes: diagnoses, stages, grades, groups. A text of other words may name a person and is left out.
_CLASS_TEXT = """
    normal healthy control controls disease diseased abnormal positive negative yes no true false present absent none
    mild moderate severe early intermediate late advanced very low medium high grade stage level class type group
    suspected suspect confirmed definite possible questionable gradable ungradable unknown other mixed untreated treated
    amd armd dry wet neovascular nonneovascular exudative atrophic geographic atrophy ga cnv mnv drusen drusenoid pcv
    rap diabetic diabetes retinopathy dr npdr pdr dme dmo csme proliferative nonproliferative non referable vision
    threatening macular macula edema oedema cystoid cme csc cscr csr central
    serous chorioretinopathy rvo brvo crvo rao
    occlusion vein artery retinal glaucoma poag pacg oag ntg ocular hypertension oht myopia myopic pathologic hole mh
    erm epiretinal membrane vmt vma vid traction schisis retinoschisis fluid irf srf ped hemorrhage haemorrhage scar
    fibrosis cataract uveitis stargardt rp retinitis pigmentosa dystrophy
    male female m f man woman asian black white hispanic latino caucasian african american native pacific islander
    od os ou right left train training val validation test fold of and or with without the to
"""
_CLASS_WORDS = frozenset(_CLASS_TEXT.split())
_IDENTIFYING = re.compile(
    r"patient|person|subject|name|operator|physician|doctor|nurse|hospital|clinic(?!al)|institut|mail|phone|address"
    r"|birth|[dy]ob$|mrn|ssn|passport|insur|contact|comment|remark|note|free_?text|(^|_)id$|(?<!fl)uid"
    r"|(?<!candi)date(?!d)|timestamp|initials|zip|post(al)?_?code"
)
# Numbers that registers and hospitals give a person. `visit_number` and `lesion_no` are ordinary labels.
_PERSON_NUMBER = re.compile(
    r"nhs|medicare|medicaid|uhid|accession|(^|_)record$"
    r"|((^|_)(case|chart|exam|file|folder|id|reg|study|tax)|account|card|health|hospital|identity|insurance|member"
    r"|national|patient|person|record|registration|security|subject)_?(id|no|nr|num|number)$"
)
_LABEL_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,39}")


@dataclass(frozen=True)
class ArrayMetadata:
    """The facts that the small members of an archive describe."""

    header: HeaderFields = field(default_factory=HeaderFields)
    spacing_mm: AxisSpacing = (None, None, None)
    labels: Mapping[str, float | str] = field(default_factory=dict)
    personal: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    axes: str = ""
    pattern: Pattern | None = None


def _squeezed(shape: Sequence[int]) -> tuple[int, ...]:
    return tuple(length for length in shape if length != 1)


def _has_channels(shape: Sequence[int]) -> bool:
    """Whether an array is D x 3 x H x W or D x H x W x 3, as programs store B-scans for networks of colour images."""
    squeezed = _squeezed(shape)
    return len(squeezed) == 4 and (squeezed[1] == 3 or squeezed[3] == 3) and min(squeezed[2], squeezed[0]) > 3


def is_single_b_scan(shape: Sequence[int]) -> bool:
    """Whether an array of two axes is large enough for a picture, and no table."""
    return len(shape) == 2 and min(shape) >= _PICTURE


def single_b_scan(shape: Sequence[int]) -> VolumeRejected:
    """The refusal of an array that is one B-scan."""
    sizes = " x ".join(map(str, shape))
    return rejection("too_few_frames", f"one B-scan of {sizes}; a volume needs {MIN_FRAMES} at least")


def _check_not_labels(shapes: Mapping[str, Sequence[int]]) -> None:
    """Raises VolumeRejected not_structural_oct: all large arrays are labels of a scan."""
    names = [name for name, shape in shapes.items() if len(_squeezed(shape)) > 1]
    labels = [name for name in names if _LABEL_NAMES.fullmatch(name.lower())]
    if labels and all(name in labels or name.lower() in _WITH_LABELS for name in names):
        raise rejection("not_structural_oct", f"labels of a scan ({', '.join(sorted(labels)[:4])}), and no scan")


def scan_member(shapes: Mapping[str, Sequence[int]]) -> str:
    """The name of the array that is the scan.

    Raises VolumeRejected: no_pixel_data, unsupported_pixels, not_structural_oct.
    """
    _check_not_labels(shapes)
    volumes = {name: shape for name, shape in shapes.items() if len(_squeezed(shape)) == 3 or _has_channels(shape)}
    by_name = [name for scan_name in SCAN_NAMES for name in volumes if name.lower() == scan_name]
    if by_name or len(volumes) == 1:
        return next(iter(by_name or volumes))
    if not volumes:
        single = next((shape for shape in map(_squeezed, shapes.values()) if is_single_b_scan(shape)), None)
        if single:
            raise single_b_scan(single)
        raise rejection("no_pixel_data", f"{len(shapes)} arrays, none of three axes (slice, depth, column)")
    listed = ", ".join(sorted(" x ".join(map(str, shape)) for shape in volumes.values())[:4])
    raise rejection(
        "unsupported_pixels", f"{len(volumes)} arrays of three axes ({listed}); name the scan one of {SCAN_NAMES}"
    )


def is_small(shape: Sequence[int], itemsize: int = 8) -> bool:
    """Whether an array of `shape` is a number, a short text or a short vector; a text is one value of many bytes."""
    return len(_squeezed(shape)) <= 1 and 0 <= math.prod(shape) <= _MAX_VALUES and itemsize <= _MAX_TEXT_BYTES


def check_members(count: int) -> None:
    """Raises VolumeRejected unsupported_pixels for an archive of so many arrays that it is a data set, and no scan."""
    if count > MAX_MEMBERS:
        raise rejection("unsupported_pixels", f"{count} arrays in one archive; a scan has {MAX_MEMBERS} at most")


def _plain(value: object) -> float | str | None:
    """A number or a short text; None for what is neither."""
    if isinstance(value, bytes):
        value = value.decode("utf-8", "replace")
    if isinstance(value, str):
        text = value.strip()
        return text if 0 < len(text) <= 64 and text.isprintable() else None
    if isinstance(value, bool | int | float | np.number | np.bool_) and not isinstance(value, np.complexfloating):
        number = float(value)
        return number if np.isfinite(number) else None
    return None


def _is_class(text: str) -> bool:
    """Whether a text consists of words of `_CLASS_WORDS`, numbers of three digits at most and single letters."""
    parts = re.findall(r"[^\W\d_]+|\d+", text.lower())
    return bool(parts) and all(
        part in _CLASS_WORDS or (part.isdecimal() and len(part) <= 3) or (len(part) == 1 and part.isascii())
        for part in parts
    )


def _text(values: list[object]) -> str:
    """The only value as text, a whole number with all its digits; "" for several values or none."""
    value = values[0] if len(values) == 1 else None
    if isinstance(value, int):
        return str(int(value))  # a float holds 53 bits, and an id may have more
    plain = _plain(value)
    if isinstance(plain, float):
        return str(int(plain)) if plain.is_integer() else repr(plain)
    return plain or ""


def _role(key: str, names: Mapping[str, Sequence[str]]) -> str:
    return next((role for role, aliases in names.items() if key in aliases), "")


def _is_usable(role: str, text: str) -> bool:
    """Whether a text states the fact: an eye, or no placeholder. One that does not is replaced by another member's."""
    return parse_laterality(text) is not None if role == "laterality" else not is_placeholder(text)


def array_metadata(small: Mapping[str, np.ndarray], shapes: Mapping[str, Sequence[int]]) -> ArrayMetadata:
    """`small` are the members that `is_small` admits, `shapes` those of all numeric members, the scan's included.

    Raises VolumeRejected broken_header: a spacing of another shape, axes by other names.
    """
    header: dict[str, Any] = {}
    spacing_mm: AxisSpacing = (None, None, None)
    axes = ""
    pattern: Pattern | None = None
    labels: dict[str, float | str] = {}
    personal: list[str] = []
    for name, array in small.items():
        key, values = name.lower(), np.asarray(array).ravel().tolist()
        if key in _SPACING:
            if len(values) != 3 or not all(isinstance(value, int | float) for value in values):
                raise rejection("broken_header", "its spacing_mm is not three numbers (slice, depth, column)")
            spacing_mm = (float(values[0]), float(values[1]), float(values[2]))
        elif key in ("pattern", "scan_pattern"):
            pattern = next(
                (pattern_name for pattern_name in get_args(Pattern) if pattern_name in _text(values).lower()), None
            )
        elif key == "axes":
            axes = axes_word(",".join(map(str, values)))
            if not axes:
                raise rejection("broken_header", "its axes are not slice, depth and column in some order")
        elif field_name := _role(key, _PERSONAL):
            personal.append(field_name)
            if field_name in _COMPARED:
                role = _COMPARED[field_name]
                header[role] = f"{header.get(role, '')} {_text(values)}".strip()
        elif role := _role(key, _FIELDS):
            text = _text(values)
            if text and not _is_usable(role, header.get(role, "")):
                header[role] = text
        elif _PERSON_NUMBER.search(key):
            personal.append("OtherPatientIDs")
        elif _IDENTIFYING.search(key):
            continue  # patient, fullname, operator, hospital, email_address, exam_date: what narrows a person down
        elif _LABEL_NAME.fullmatch(name) and array.dtype.kind in "biufSU":
            personal += [field_name] if (field_name := _role(key, _DEMOGRAPHIC)) else []
            for index, value in enumerate(values):
                plain = _plain(value)
                if plain is None or (isinstance(plain, str) and not _is_class(plain)):
                    continue  # the text may name the person
                labels[name if len(values) == 1 else f"{name}_{index}"] = plain
    others = sum(len(_squeezed(shape)) == 3 for shape in shapes.values()) - 1
    notes = (f"arrays_left_out={others}",) if others > 0 else ()
    return ArrayMetadata(
        HeaderFields(**header), spacing_mm, labels, tuple(dict.fromkeys(personal)), notes, axes, pattern
    )


def array_scan(format: str, values: np.ndarray, metadata: ArrayMetadata, layout: str) -> RawScan:
    """The scan of an array whose axes of length 1 do not count; `layout` is the format's convention of axes.

    Raises VolumeRejected: unsupported_pixels, not_structural_oct, too_few_frames.
    """
    values = values.reshape(_squeezed(values.shape) or (1,))
    if is_single_b_scan(values.shape):
        raise single_b_scan(values.shape)
    notes = list(metadata.notes)
    if _has_channels(values.shape):
        first, *others = np.moveaxis(values, 1 if values.shape[1] == 3 else 3, 0)  # three times [D, H, W]
        if not all(np.array_equal(first, other) for other in others):
            raise rejection("unsupported_pixels", "three different channels: a colour image, not intensities")
        values = first
        notes.append("rgb_to_grey")
    if values.ndim != 3:
        raise rejection("unsupported_pixels", f"an array of {values.ndim} axes; expected three (slice, depth, column)")
    pixels = to_uint8(values, notes)
    return RawScan(
        format,
        pixels,
        FrameGeometry.unknown(len(pixels)),
        metadata.header,
        spacing_mm=metadata.spacing_mm,
        notes=tuple(notes),
        pattern=metadata.pattern,
        labels=metadata.labels,
        personal=metadata.personal,
        axes=StoredAxes(convention=layout, stated=metadata.axes),
    )


class _Header(NamedTuple):
    """A .npy header: where the values begin in their stream, and what they are."""

    shape: tuple[int, ...]
    fortran_order: bool
    dtype: np.dtype
    offset: int

    @property
    def data_bytes(self) -> int:
        """Bytes of all values."""
        return array_bytes(self.shape, self.dtype.itemsize)


def _read_header(file: IO[bytes]) -> _Header:
    """The header of a .npy stream, which is read up to its values. Raises VolumeRejected broken_header.

    NumPy reads as many bytes as the header's length field says, up to 4 GiB, before it compares them with a limit. Here
    the length is compared first.
    """
    magic = file.read(8)
    version = tuple(magic[6:8])
    length_kind = "<H" if version == (1, 0) else "<I"
    length_bytes = file.read(struct.calcsize(length_kind))
    try:
        (length,) = struct.unpack(length_kind, length_bytes)
        if not magic.startswith(_MAGIC) or version not in _VERSIONS or length > _HEADER_LIMIT:
            raise ValueError("no header of a known version and length")
        text = BytesIO(length_bytes + file.read(length))
        read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        shape, fortran_order, dtype = read(text, max_header_size=_HEADER_LIMIT)
    except (ValueError, EOFError, SyntaxError, TypeError, TokenError, RecursionError, MemoryError, struct.error):
        raise rejection("broken_header", "the header of the array cannot be parsed") from None
    return _Header(shape, fortran_order, dtype, 8 + len(length_bytes) + length)


def _check_header(header: _Header, value_bytes: int, packed_bytes: int, ratio: int) -> None:
    """`value_bytes` follow the header, stored in `packed_bytes`, each of which unpacks to `ratio` bytes at most.

    Raises VolumeRejected: unsupported_pixels, size_implausible, truncated.
    """
    if header.dtype.hasobject:
        raise rejection("unsupported_pixels", "an array of Python objects, which are never loaded")
    check_size(header.shape, header.dtype.itemsize)
    if value_bytes < header.data_bytes:
        raise rejection("truncated", f"{value_bytes} bytes of values, {header.data_bytes} expected")
    check_memory(header.data_bytes, "its values", packed_bytes, ratio)


def read_npy(path: Path) -> RawScan:
    """An array of three axes.

    Raises VolumeRejected: broken_header, unsupported_pixels, not_structural_oct, size_implausible, truncated,
    too_few_frames.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        header = _read_header(file)
        _check_header(header, size - header.offset, size, 1)
        # Not mapped: the pixels would change, or the program end, when the file is written again.
        buffer = np.empty(header.data_bytes, np.uint8)
        if file.readinto(buffer.data) < len(buffer):
            raise rejection("truncated", "the file became shorter while it was read")
    order: Literal["F", "C"] = "F" if header.fortran_order else "C"
    values = np.ndarray(header.shape, header.dtype, buffer, order=order)
    return array_scan("npy", values, ArrayMetadata(), _LAYOUT)


def _ratio(entry: zipfile.ZipInfo) -> int:
    """Bytes that a byte of a member unpacks to at most. Raises NotImplementedError: not a method that NumPy writes."""
    if entry.compress_type == zipfile.ZIP_STORED:
        return 1
    if entry.compress_type == zipfile.ZIP_DEFLATED:
        return DEFLATE_RATIO
    raise NotImplementedError("a compression that NumPy does not write")


def _member_header(archive: zipfile.ZipFile, entry: zipfile.ZipInfo) -> _Header:
    _ratio(entry)
    with archive.open(entry) as file:
        return _read_header(file)


def _member_values(archive: zipfile.ZipFile, entry: zipfile.ZipInfo, header: _Header) -> np.ndarray:
    """The values of a member whose header was checked. Raises EOFError: the member is shorter; BadZipFile."""
    buffer = np.empty(header.data_bytes, np.uint8)
    with archive.open(entry) as file:
        file.read(header.offset)
        filled = 0
        while filled < len(buffer) and (piece := file.read(min(_PIECE_BYTES, len(buffer) - filled))):
            buffer[filled : filled + len(piece)] = np.frombuffer(piece, np.uint8)
            filled += len(piece)
        if filled < len(buffer):
            raise EOFError("the member ends early")
        file.read(1)  # to the end of the member, where its checksum is compared with what was read
    order: Literal["F", "C"] = "F" if header.fortran_order else "C"
    return np.ndarray(header.shape, header.dtype, buffer, order=order)


def check_npz(path: Path) -> None:
    """Checks an archive that is not a scan (labels, truth) before `np.load` allocates what its headers declare.

    Raises VolumeRejected: size_implausible, truncated, broken_header, unsupported_pixels. OSError, BadZipFile,
    NotImplementedError: no archive that NumPy writes.
    """
    with zipfile.ZipFile(path) as archive:
        entries = archive.infolist()
        check_members(len(entries))
        total = 0
        for entry in entries:
            header = _member_header(archive, entry)
            if header.dtype.hasobject:
                raise rejection("unsupported_pixels", "an array of Python objects, which are never loaded")
            total += header.data_bytes
            check_memory(total, "its arrays")
            check_memory(header.data_bytes, "its arrays", entry.compress_size, _ratio(entry), is_scan=False)


def read_npz(path: Path) -> RawScan:
    """The scan of an archive, with labels from its small members.

    Raises VolumeRejected: truncated, broken_header, no_pixel_data, unsupported_pixels, not_structural_oct,
    size_implausible, too_few_frames.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            entries = {entry.filename[:-4]: entry for entry in archive.infolist() if entry.filename.endswith(".npy")}
            check_members(len(entries))
            headers = {name: _member_header(archive, entry) for name, entry in entries.items()}
            shapes = {name: header.shape for name, header in headers.items()}
            scan = scan_member(shapes)
            entry, header = entries[scan], headers[scan]
            _check_header(header, entry.file_size - header.offset, entry.compress_size, _ratio(entry))
            small = {
                name: _member_values(archive, entries[name], header)
                for name, header in headers.items()
                if name != scan and is_small(header.shape, header.dtype.itemsize) and not header.dtype.hasobject
            }
            metadata = array_metadata(small, shapes)
            values = _member_values(archive, entry, headers[scan])
    except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, RuntimeError, ValueError, OSError):
        raise rejection(
            "truncated", "the archive ends early, is damaged, or is packed in a way nothing here reads"
        ) from None
    return array_scan("npz", values, metadata, _LAYOUT)
