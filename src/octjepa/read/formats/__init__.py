"""The file formats that octjepa reads: how a file is recognised, and which function makes a `RawScan` of it.

A path, a file or a folder of B-scan images, gives the format's name, or its `RawScan`. A package adds a format by an
entry point of the group `octjepa.readers` that names a `Format`. Readers are imported when a file of theirs is read.
Errors are VolumeRejected, with `no_decoder` where the library of an extra is not installed.
"""

from __future__ import annotations

import re
import struct
import zlib
from collections.abc import Callable, Sequence
from functools import cache
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

from octjepa.errors import install_command
from octjepa.read.dicom import lacks_preamble
from octjepa.read.dicom_series import series_in
from octjepa.read.formats.axes import with_axes
from octjepa.read.formats.sequence import sequences
from octjepa.read.formats.sidecar import with_sidecar
from octjepa.read.formats.zarr import is_zarr
from octjepa.read.links import text_beside
from octjepa.read.raw_scan import AxisSpacing, RawScan
from octjepa.reasons import rejection
from octjepa.registry import Registry

Signature = Callable[[Path, bytes], bool]
_HEAD_BYTES = 1024
_HERE = "octjepa.read.formats"


class Format(NamedTuple):
    """`matches` checks a path and its first 1,024 bytes; `suffixes` decide if no signature matches."""

    name: str
    suffixes: tuple[str, ...]
    matches: Signature
    reader: str  # "module:function", a function of the path
    multi_scan: bool = False  # a file may hold several scans: the reader takes a member, its module lists `members`
    experimental: bool = False  # no file of a real device has proved the reader: built files alone have


FORMATS: Registry[Format] = Registry("file format", "octjepa.readers")


def _mark(*marks: bytes, at: int = 0) -> Signature:
    return lambda _, head: head[at:].startswith(marks)


def _is_dicom(_: Path, head: bytes) -> bool:
    """By its mark, or by its first element where the preamble is missing: reading it says so."""
    return head[128:132] == b"DICM" or lacks_preamble(head)


def _is_nifti(_: Path, head: bytes) -> bool:
    """NIfTI-1 and NIfTI-2, of one file or of two, plain or gzipped."""
    if head.startswith(b"\x1f\x8b"):
        try:
            head = zlib.decompressobj(31).decompress(head, 348)
        except zlib.error:
            return False
    return head[344:348] in (b"n+1\0", b"ni1\0") or head[4:8] in (b"n+2\0", b"ni2\0")


def _is_metaimage(_: Path, head: bytes) -> bool:
    """A text header that begins with one of the fields MetaIO writes first."""
    key, mark, _value = head.partition(b"\n")[0].partition(b"=")
    return mark == b"=" and key.strip() in (b"ObjectType", b"NDims", b"Comment")


def _is_npz(_: Path, head: bytes) -> bool:
    """A ZIP archive whose first member is called .npy."""
    if not head.startswith(b"PK\x03\x04") or len(head) < 30:
        return False
    return head[30 : 30 + struct.unpack_from("<H", head, 26)[0]].endswith(b".npy")


_DESCRIPTION = (270, 2)  # a tag, and the type of a text
_LONGEST_DESCRIPTION = 1 << 16
_MAX_TAGS = 4096
_IMAGEJ_STACK = re.compile(rb"ImageJ=[^\0]*?^images=(?!0*1\b)\d+", re.MULTILINE)


def _is_multi_page_tiff(path: Path, head: bytes) -> bool:
    """A TIFF, classic or big, with a second page, or with one page and the description of an ImageJ stack.

    A file whose page table is beyond its end counts, because it was cut.
    """
    order = {b"II": "<", b"MM": ">"}.get(head[:2], "")
    if not order or len(head) < 16 or struct.unpack_from(order + "H", head, 2)[0] not in (42, 43):
        return False
    big = struct.unpack_from(order + "H", head, 2)[0] == 43
    count_kind, entry_bytes, offset_kind = ("Q", 20, "Q") if big else ("H", 12, "I")
    offset = struct.unpack_from(order + offset_kind, head, 8 if big else 4)[0]
    size = path.stat().st_size
    with path.open("rb") as file:
        if offset + struct.calcsize(count_kind) > size:
            return True
        file.seek(offset)
        entries = struct.unpack(order + count_kind, file.read(struct.calcsize(count_kind)))[0]
        offset = file.tell() + entry_bytes * entries
        if offset + struct.calcsize(offset_kind) > size:
            return True
        table_at = file.tell()
        file.seek(offset)
        if struct.unpack(order + offset_kind, file.read(struct.calcsize(offset_kind)))[0] != 0:
            return True
        if big or entries > _MAX_TAGS:
            return False
        file.seek(table_at)
        table = file.read(entry_bytes * entries)
        for tag, kind, count, at in struct.iter_unpack(order + "HHII", table):
            if (tag, kind) == _DESCRIPTION and 8 < count < _LONGEST_DESCRIPTION and at + count <= size:
                file.seek(at)
                return _IMAGEJ_STACK.match(file.read(count)) is not None
        return False


_ZEISS_NAME = re.compile(r"(^|_)(cube_(z|raw)|FlowCube_z|hidef_(z|raw)|hd\w*|lslo|iris)\.img$", re.IGNORECASE)
_ZEISS_BYTES = (512 * 128 * 1024, 200 * 200 * 1024)


def _is_zeiss(path: Path, _: bytes) -> bool:
    """By the name that a Cirrus gives, or by the size of its cubes: other formats as well, call their values .img."""
    if path.suffix.lower() != ".img":
        return False
    return _ZEISS_NAME.search(path.name) is not None or path.stat().st_size in _ZEISS_BYTES


_HEYEX_ROOT = re.compile(rb"<HEDX|<BODY[\s>]")


def _is_heyex_xml(path: Path, head: bytes) -> bool:
    """The root element of a HEYEX export in UTF-8 or UTF-16; anonymisers leave the BODY that is in it."""
    match = _HEYEX_ROOT.search(head.replace(b"\0", b""))
    return match is not None and (match[0] == b"<HEDX" or path.suffix.lower() == ".xml")


_is_bioptigen = _mark(b"FRAMEHEADER", at=10)


def _is_optovue(path: Path, head: bytes) -> bool:
    return path.suffix.lower() == ".oct" and not _is_bioptigen(path, head) and text_beside(path) is not None


_BUILT_IN = (
    Format("dicom", (".dcm", ".dicom", ".dic", ".ima"), _is_dicom, "octjepa.read.dicom:read_dicom"),
    Format("dicom_series", (), lambda *_: False, "octjepa.read.dicom_series:read_dicom_series", True),
    Format("nifti", (".nii", ".nii.gz"), _is_nifti, f"{_HERE}.nifti:read_nifti"),
    Format("metaimage", (".mhd", ".mha"), _is_metaimage, f"{_HERE}.metaimage:read_metaimage"),
    Format("npy", (".npy",), _mark(b"\x93NUMPY"), f"{_HERE}.arrays:read_npy"),
    Format("npz", (".npz",), _is_npz, f"{_HERE}.arrays:read_npz"),
    Format("mat", (".mat",), _mark(b"MATLAB 5.0 MAT-file", b"MATLAB 7.3 MAT-file"), f"{_HERE}.matlab:read_mat"),
    Format("tiff", (".tif", ".tiff"), _is_multi_page_tiff, f"{_HERE}.images:read_tiff"),
    Format(
        "heidelberg_vol",
        (".vol",),
        _mark(b"HSF-OCT", b"ep-v"),
        f"{_HERE}.vendor.heidelberg_vol:read_vol",
        experimental=True,
    ),
    Format("heyex_xml", (".xml",), _is_heyex_xml, f"{_HERE}.vendor.heyex_xml:read_xml", True),
    Format(
        "heidelberg_e2e",
        (".e2e",),
        _mark(b"CMDb", b"E2EMultipleVolumeFile"),
        f"{_HERE}.vendor.heyex_e2e:read_e2e",
        True,
        True,
    ),
    Format("topcon", (".fda", ".fds"), _mark(b"FOCT"), f"{_HERE}.vendor.topcon:read_topcon", experimental=True),
    Format("zeiss_img", (".img",), _is_zeiss, f"{_HERE}.vendor.headerless:read_zeiss", experimental=True),
    Format("bioptigen_oct", (), _is_bioptigen, f"{_HERE}.vendor.bioptigen:read_bioptigen", True, True),
    Format("optovue_oct", (".oct",), _is_optovue, f"{_HERE}.vendor.headerless:read_optovue", True, True),
    Format("zarr", (".zarr",), lambda *_: False, f"{_HERE}.zarr:read_zarr"),
    Format("images", (), lambda path, _: path.is_dir(), f"{_HERE}.images:read_images"),
)
for _format in _BUILT_IN:
    FORMATS.register(_format.name)(_format)
_CONTENT_ONLY = ("tiff", "heyex_xml", "zeiss_img")  # other files have these suffixes as well: content and name decide
_ALLOWED_BESIDE_IMAGES = ("nifti", "metaimage", "npy", "npz", "mat", "tiff")  # masks of the same scan


@cache
def all_formats() -> tuple[Format, ...]:
    """Every format, the built-in formats first, in the order in which their signatures are checked."""
    built_in = [format.name for format in _BUILT_IN]
    return tuple(FORMATS.get(name) for name in dict.fromkeys((*built_in, *FORMATS.names())))


def suffixes(multi_scan_only: bool = False) -> frozenset[str]:
    """The suffixes of all formats, or of those whose files may hold several scans."""
    return frozenset(
        suffix for format in all_formats() if format.multi_scan or not multi_scan_only for suffix in format.suffixes
    )


def recognise(path: Path) -> str | None:
    """The format of a file or folder, by content first, by suffix second; None where octjepa reads no such thing.

    Raises VolumeRejected unreadable_file.
    """
    if path.is_dir():
        names = sorted(child.name for child in path.iterdir() if child.is_file())
        if is_zarr(names):
            return "zarr"
        return "images" if is_scan_folder(path, names) else "dicom_series" if series_in(path, names) else None
    try:
        with path.open("rb") as file:
            head = file.read(_HEAD_BYTES)
    except OSError as error:
        raise rejection("unreadable_file", error.strerror or str(error)) from None
    for format in all_formats():
        if format.matches(path, head):
            return format.name
    name = path.name.lower()
    candidates = (format for format in all_formats() if format.name not in _CONTENT_ONLY)
    return next((format.name for format in candidates if name.endswith(format.suffixes)), None)


def is_experimental(format: str) -> bool:
    """Whether built files alone have proved the reader of a format, or of its variants ("topcon_fda" of "topcon")."""
    return any(
        known_format.experimental for known_format in all_formats() if f"{format}_".startswith(f"{known_format.name}_")
    )


def is_scan_folder(folder: Path, names: Sequence[str]) -> bool:
    """Whether `folder`, whose files are called `names`, holds its B-scans as images, and no DICOM or vendor file.

    By names alone where the folder is not on this disk. A folder of several sequences counts: its reader reports what
    is wrong with it.
    """
    image_sequences = sequences(names)
    if not image_sequences:
        return False
    first = folder / image_sequences[0][0][1]
    if first.suffix.lower() in FORMATS.get("tiff").suffixes and first.is_file() and recognise(first) == "tiff":
        return False  # every file is a scan
    excluded = [format for format in all_formats() if format.name not in _ALLOWED_BESIDE_IMAGES]
    excluded_suffixes = tuple(suffix for format in excluded for suffix in format.suffixes)
    for name in names:
        path = folder / name
        if name.startswith(".") or not (name.lower().endswith(excluded_suffixes) or not path.suffix):
            continue
        if not path.is_file():
            if path.suffix:
                return False
        elif recognise(path) not in (None, *_ALLOWED_BESIDE_IMAGES):
            return False
    return True


def companion_names(name: str) -> tuple[str, ...]:
    """Possible names of files that belong to a scan called `name`: its JSON, voxels and text; () for DICOM."""
    lower = name.lower()
    if not lower.endswith(tuple(suffixes())) or lower.endswith(FORMATS.get("dicom").suffixes):
        return ()
    stem = name[: -len(".nii.gz")] if lower.endswith(".nii.gz") else name.rpartition(".")[0]
    return tuple(stem + suffix for suffix in (".json", ".raw", ".zraw", ".txt", ".TXT"))


def list_scans(path: Path) -> tuple[str, ...]:
    """The members of a file that holds several scans (both eyes of a patient), else (). Raises VolumeRejected."""
    name = recognise(path) if path.suffix.lower() in suffixes(multi_scan_only=True) and path.is_file() else None
    if name is None or not FORMATS.get(name).multi_scan or _failed_download(path):
        return ()
    members: tuple[str, ...] = import_module(FORMATS.get(name).reader.partition(":")[0]).members(path)
    return members if len(members) > 1 else ()


def read_scan(path: Path, format: str, member: str = "", spacing_mm: AxisSpacing | None = None) -> RawScan:
    """The scan at `path`, of a format that `recognise` named; `member` one of `list_scans`.

    `spacing_mm` (slice, depth, column) is the user's; it helps to tell the axes of an array. Raises VolumeRejected.
    """
    try:
        if path.is_file() and path.stat().st_size == 0:
            raise rejection("empty_file", "zero bytes")
    except OSError as error:
        raise rejection("unreadable_file", error.strerror or str(error)) from None
    if path.is_file() and format != "dicom" and (other := _failed_download(path)):
        raise rejection("unknown_format", f"{other}, whatever its name says")
    module, _, function = FORMATS.get(format).reader.partition(":")
    selection = {"member": member} if member else {}
    scan: RawScan = getattr(import_module(module), function)(path, **selection)
    return scan if format in ("dicom", "dicom_series") else with_axes(with_sidecar(scan, path), spacing_mm)


def _failed_download(path: Path) -> str:
    """The kind of a file that has no scan format, as a failed download leaves it; "" if it may be a scan."""
    with path.open("rb") as file:
        head = file.read(_HEAD_BYTES)
    if head.startswith(b"PK\x03\x04") and path.suffix.lower() == ".oct":
        return "a ZIP archive, as Thorlabs' software writes (.oct): export the scan as TIFF or .img"
    text = head.removeprefix(b"\xef\xbb\xbf").lstrip().lower()
    if text.startswith((b"<!doctype html", b"<html")) or (text.startswith(b"<?xml") and b"<html" in text):
        return "an HTML page"
    return "a PDF document" if head.startswith(b"%PDF-") else ""


def import_extra(library: str, extra: str) -> ModuleType:
    """A library that an extra installs. Raises VolumeRejected no_decoder, with the command that installs it."""
    try:
        return import_module(library)
    except ImportError:
        raise rejection("no_decoder", f"{library} is not installed: {install_command(extra)}") from None
