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

from octjepa.ingest.formats import signs
from octjepa.ingest.reasons import rejected
from octjepa.ingest.scan import RawScan

_HEAD_BYTES = 1024


class Format(NamedTuple):
    """`is_it` judges the first 1,024 bytes; `suffixes` decide where the content of no format is found."""

    name: str
    suffixes: tuple[str, ...]
    is_it: Callable[[Path, bytes], bool]
    reader: str  # "module:function", a function of the path


FORMATS = (
    Format("dicom", (".dcm", ".dicom", ".dic", ".ima"), signs.dicom, "octjepa.ingest.dicom:read_dicom"),
)  # fmt: skip
_BY_NAME = {format.name: format for format in FORMATS}
SUFFIXES = frozenset(suffix for format in FORMATS for suffix in format.suffixes)


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
        raise rejected("unreadable_file", error.strerror or str(error)) from None
    for format in FORMATS:
        if format.is_it(path, head):
            return format.name
    name = path.name.lower()
    return next((format.name for format in FORMATS if name.endswith(format.suffixes)), None)


def is_scan_folder(folder: Path, names: Sequence[str]) -> bool:
    """Whether `folder`, whose files are called `names`, is one scan: its B-scans as images, and no DICOM."""
    return False


def read(path: Path, format: str) -> RawScan:
    """The scan at `path`, of a format that `recognise` named. Raises VolumeRejected."""
    try:
        if path.is_file() and path.stat().st_size == 0:
            raise rejected("empty_file", "zero bytes")
    except OSError as error:
        raise rejected("unreadable_file", error.strerror or str(error)) from None
    module, _, function = _BY_NAME[format].reader.partition(":")
    scan: RawScan = getattr(import_module(module), function)(path)
    return scan


def library(name: str, extra: str) -> ModuleType:
    """A library that an extra brings. Raises VolumeRejected no_decoder, with the command that installs it."""
    try:
        return import_module(name)
    except ImportError:
        raise rejected("no_decoder", f'{name} is not installed: pip install "octjepa[{extra}]"') from None
