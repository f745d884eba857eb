"""By what a format is known: its mark in the first bytes of a file. Each takes (path, first 1,024 bytes)."""

from __future__ import annotations

import struct
import zlib
from pathlib import Path


def dicom(_: Path, head: bytes) -> bool:
    return head[128:132] == b"DICM"


def nifti(_: Path, head: bytes) -> bool:
    """NIfTI-1 of one file or of two, and NIfTI-2, plain or gzipped."""
    if head.startswith(b"\x1f\x8b"):
        try:
            head = zlib.decompressobj(31).decompress(head, 348)
        except zlib.error:
            return False
    return head[344:348] in (b"n+1\0", b"ni1\0") or head[4:8] == b"n+2\0"


def metaimage(_: Path, head: bytes) -> bool:
    """A text header that begins with one of the fields MetaIO writes first."""
    first = head.partition(b"\n")[0].partition(b"=")
    return first[1] == b"=" and first[0].strip() in (b"ObjectType", b"NDims", b"Comment")


def npy(_: Path, head: bytes) -> bool:
    return head.startswith(b"\x93NUMPY")


def npz(_: Path, head: bytes) -> bool:
    """A ZIP archive whose first member is called .npy."""
    if not head.startswith(b"PK\x03\x04") or len(head) < 30:
        return False
    length = struct.unpack_from("<H", head, 26)[0]
    return head[30 : 30 + length].endswith(b".npy")


def mat(_: Path, head: bytes) -> bool:
    return head.startswith((b"MATLAB 5.0 MAT-file", b"MATLAB 7.3 MAT-file"))


def many_pages(path: Path, head: bytes) -> bool:
    """A TIFF, classic or big, with a second page; one whose page table lies beyond its end counts, for it was cut."""
    order = {b"II": "<", b"MM": ">"}.get(head[:2], "")
    if not order or len(head) < 16 or struct.unpack_from(order + "H", head, 2)[0] not in (42, 43):
        return False
    big = struct.unpack_from(order + "H", head, 2)[0] == 43
    count_kind, entry_bytes, at_kind = ("Q", 20, "Q") if big else ("H", 12, "I")
    at = struct.unpack_from(order + at_kind, head, 8 if big else 4)[0]
    size = path.stat().st_size
    with path.open("rb") as file:
        if at + struct.calcsize(count_kind) > size:
            return True
        file.seek(at)
        entries = struct.unpack(order + count_kind, file.read(struct.calcsize(count_kind)))[0]
        at = file.tell() + entry_bytes * entries
        if at + struct.calcsize(at_kind) > size:
            return True
        file.seek(at)
        return struct.unpack(order + at_kind, file.read(struct.calcsize(at_kind)))[0] != 0


def foreign(path: Path) -> str:
    """What a file of no scan format is, as a download that failed leaves it; "" where it may be a scan."""
    with path.open("rb") as file:
        head = file.read(1024)
    text = head.removeprefix(b"\xef\xbb\xbf").lstrip().lower()
    if text.startswith((b"<!doctype html", b"<html")) or (text.startswith(b"<?xml") and b"<html" in text):
        return "an HTML page"
    return "a PDF document" if head.startswith(b"%PDF-") else ""
