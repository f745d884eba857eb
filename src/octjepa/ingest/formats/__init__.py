"""The formats octjepa reads, one line each: how a file is recognised, and which function makes a `RawScan` of it.

In comes a path, a file or a folder of B-scan images; out comes the format's name, or its `RawScan`. What can fail is
the file: VolumeRejected, with `no_decoder` where the library of an extra is not installed. Readers are imported when a
file of theirs is read.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

from octjepa.extras import to_install
from octjepa.ingest.formats import signs, vendor
from octjepa.ingest.formats.sequence import sequences
from octjepa.ingest.formats.sidecar import with_sidecar
from octjepa.ingest.raw_scan import RawScan
from octjepa.ingest.reasons import rejection

_HEAD_BYTES = 1024


class Format(NamedTuple):
    """`is_it` judges the first 1,024 bytes; `suffixes` decide where the content of no format is found."""

    name: str
    suffixes: tuple[str, ...]
    is_it: Callable[[Path, bytes], bool]
    reader: str  # "module:function", a function of the path
    several: bool = False  # a file may hold several scans: its reader takes a member, its module has `members`


_HERE = "octjepa.ingest.formats"
FORMATS = (
    Format("dicom", (".dcm", ".dicom", ".dic", ".ima"), signs.dicom, "octjepa.ingest.dicom:read_dicom"),
    Format("nifti", (".nii", ".nii.gz"), signs.nifti, f"{_HERE}.nifti:read_nifti"),
    Format("metaimage", (".mhd", ".mha"), signs.metaimage, f"{_HERE}.metaimage:read_metaimage"),
    Format("npy", (".npy",), signs.npy, f"{_HERE}.arrays:read_npy"),
    Format("npz", (".npz",), signs.npz, f"{_HERE}.arrays:read_npz"),
    Format("mat", (".mat",), signs.mat, f"{_HERE}.matlab:read_mat"),
    Format("tiff", (".tif", ".tiff"), signs.many_pages, f"{_HERE}.images:read_tiff"),
    Format("heidelberg_vol", (".vol",), vendor.is_vol, f"{_HERE}.vendor.heidelberg_vol:read_vol"),
    Format("heyex_xml", (".xml",), vendor.is_heyex_xml, f"{_HERE}.vendor.heyex_xml:read_xml", True),
    Format("heidelberg_e2e", (".e2e",), vendor.is_e2e, f"{_HERE}.vendor.heyex_e2e:read_e2e", True),
    Format("topcon", (".fda", ".fds"), vendor.is_topcon, f"{_HERE}.vendor.topcon:read_topcon"),
    Format("zeiss_img", (".img",), vendor.is_zeiss, f"{_HERE}.vendor.zeiss_img:read_img"),
    Format("bioptigen_oct", (), vendor.is_bioptigen, f"{_HERE}.vendor.bioptigen:read_bioptigen", True),
    Format("optovue_oct", (".oct",), vendor.is_optovue, f"{_HERE}.vendor.optovue:read_optovue", True),
)  # fmt: skip
_FOLDER = Format("images", (), lambda path, _: path.is_dir(), f"{_HERE}.images:read_images")
_SINGLE = ("tiff", "heyex_xml", "zeiss_img")  # a suffix that other things bear, too: content and name decide
_OPEN = ("nifti", "metaimage", "npy", "npz", "mat", "tiff")  # may lie beside B-scan images, as masks do
_BY_NAME = {format.name: format for format in (*FORMATS, _FOLDER)}
SUFFIXES = frozenset(suffix for format in FORMATS for suffix in format.suffixes)
MULTI_SCAN_SUFFIXES = frozenset(suffix for format in FORMATS for suffix in format.suffixes if format.several)


def recognise(path: Path) -> str | None:
    """The format of a file or folder, by content first, by suffix second; None where octjepa reads no such thing.

    Raises VolumeRejected unreadable_file.
    """
    if path.is_dir():
        names = sorted(child.name for child in path.iterdir() if child.is_file())
        return "images" if is_scan_folder(path, names) else None
    try:
        with path.open("rb") as file:
            head = file.read(_HEAD_BYTES)
    except OSError as error:
        raise rejection("unreadable_file", error.strerror or str(error)) from None
    for format in FORMATS:
        if format.is_it(path, head):
            return format.name
    name = path.name.lower()
    by_suffix = (format.name for format in FORMATS if name.endswith(format.suffixes) and format.name not in _SINGLE)
    return next(by_suffix, None)


def is_scan_folder(folder: Path, names: Sequence[str]) -> bool:
    """Whether `folder`, whose files are called `names`, holds its B-scans as images, and no DICOM or vendor's file.

    By names alone where the folder is not on this disk. A folder of several sequences counts: its reader says what is
    wrong with it.
    """
    found = sequences(names)
    if not found:
        return False
    first = folder / found[0][0][1]
    if first.suffix.lower() in _BY_NAME["tiff"].suffixes and first.is_file() and recognise(first) == "tiff":
        return False  # every file is a scan
    closed = tuple(suffix for format in FORMATS if format.name not in _OPEN for suffix in format.suffixes)
    for name in names:
        path = folder / name
        if name.startswith(".") or not (name.lower().endswith(closed) or not path.suffix):
            continue
        if not path.is_file():
            if path.suffix:
                return False
        elif recognise(path) not in (None, *_OPEN):
            return False
    return True


def companion_names(name: str) -> tuple[str, ...]:
    """What files that belong to a scan called `name` may be called: its JSON, its voxels, its text; () for DICOM."""
    lower = name.lower()
    if not lower.endswith(tuple(SUFFIXES)) or lower.endswith(_BY_NAME["dicom"].suffixes):
        return ()
    stem = name[: -len(".nii.gz")] if lower.endswith(".nii.gz") else name.rpartition(".")[0]
    return tuple(stem + suffix for suffix in (".json", ".raw", ".zraw", ".txt"))


def list_scans(path: Path) -> tuple[str, ...]:
    """The scans in a file that holds several (both eyes of a patient), else nothing. Raises VolumeRejected."""
    format = recognise(path) if path.suffix.lower() in MULTI_SCAN_SUFFIXES and path.is_file() else None
    if format is None or not _BY_NAME[format].several:
        return ()
    found: tuple[str, ...] = import_module(_BY_NAME[format].reader.partition(":")[0]).members(path)
    return found if len(found) > 1 else ()


def read_scan(path: Path, format: str, member: str = "") -> RawScan:
    """The scan at `path`, of a format that `recognise` named; `member` one of `members`. Raises VolumeRejected."""
    try:
        if path.is_file() and path.stat().st_size == 0:
            raise rejection("empty_file", "zero bytes")
    except OSError as error:
        raise rejection("unreadable_file", error.strerror or str(error)) from None
    if path.is_file() and format != "dicom" and (strange := signs.foreign(path)):
        raise rejection("unknown_format", f"{strange}, whatever its name says")
    module, _, function = _BY_NAME[format].reader.partition(":")
    chosen = {"member": member} if member else {}
    scan: RawScan = getattr(import_module(module), function)(path, **chosen)
    return scan if format == "dicom" else with_sidecar(scan, path)


def library(name: str, extra: str) -> ModuleType:
    """A library that an extra brings. Raises VolumeRejected no_decoder, with the command that installs it."""
    try:
        return import_module(name)
    except ImportError:
        raise rejection("no_decoder", f"{name} is not installed: {to_install(extra)}") from None
