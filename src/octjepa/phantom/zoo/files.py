"""Files that are damaged as files: cut, emptied, wrapped, replaced, converted as text."""

from __future__ import annotations

import gzip
import zlib
from typing import Final

from pydicom.uid import DeflatedExplicitVRLittleEndian

from octjepa.phantom.zoo.specimen import PIXEL_TAG, Files, Kind, Specimen, accepted, ignored, refused

_HTML = b"<!DOCTYPE html>\n<html><head><title>403 Forbidden</title></head><body><h1>403 Forbidden</h1></body></html>\n"
# The head of an AppleDouble file, which macOS leaves as ._name next to name.
_APPLE_DOUBLE = bytes.fromhex("00051607 00020000") + b"Mac OS X        " + bytes(58)
_DIRECTORY = "1.2.840.10008.1.3.10"


def _pixels_at(content: bytes) -> int:
    return content.rindex(PIXEL_TAG + b"OB")


def _data_at(content: bytes) -> int:
    """Where the data set begins: behind preamble, mark and file meta information."""
    return 132 + 12 + int.from_bytes(content[140:144], "little")


def _cut(s: Specimen) -> Files:
    content = s.content()
    return {s.path: content[: len(content) * 3 // 5]}


def _cut_in_header(s: Specimen) -> Files:
    content = s.content()
    return {s.path: content[: _pixels_at(content) * 2 // 3]}


def _cut_at_the_end(s: Specimen) -> Files:
    return {s.path: s.content()[:-40]}


def _cut_before_delimiter(s: Specimen) -> Files:
    s.compress("rle")
    return {s.path: s.content()[:-8]}


def _cut_behind_the_preamble(s: Specimen) -> Files:
    return {s.path: s.content()[:132]}


def _zero_bytes(s: Specimen) -> Files:
    return {s.path: b""}


def _html_page(s: Specimen) -> Files:
    return {s.path: _HTML}


def _resource_fork(s: Specimen) -> Files:
    s.row = None
    return {s.path.with_name(f"._{s.path.name}"): _APPLE_DOUBLE}


def _preamble_missing(s: Specimen) -> Files:
    return {s.path: s.content()[132:]}


def _gzipped(s: Specimen) -> Files:
    return {s.path: gzip.compress(s.content()[:50_000], compresslevel=1, mtime=0)}


def _as_text(s: Specimen) -> Files:
    return {s.path: s.content().replace(b"\n", b"\r\n")}


def _zeroed_header(s: Specimen) -> Files:
    content = bytearray(s.content())
    content[132:1156] = bytes(1024)
    return {s.path: bytes(content)}


def _bytes_behind(s: Specimen) -> Files:
    """An element that is never closed, as the rest of a longer file would be."""
    return {s.path: s.content() + b"\xfc\xff\xfc\xffOB\0\0" + b"\xff" * 4 + bytes(range(256)) * 4}


def _zeros_behind(s: Specimen) -> Files:
    content = s.content()
    return {s.path: content + bytes(-len(content) % 4096)}


def _no_suffix(s: Specimen) -> Files:
    s.row = None
    return {s.path.with_name(s.path.stem.replace(".", "_")): s.content()}


def _dicomdir(s: Specimen) -> None:
    s.data.SOPClassUID = s.data.file_meta.MediaStorageSOPClassUID = _DIRECTORY
    del s.data.PixelData


def _one_frame(s: Specimen) -> None:
    """As a secondary capture export writes it: a file per B-scan, with its place in the series at the top."""
    index = len(s.eye.pixels) // 2
    s.store(s.eye.pixels[index : index + 1])
    data, measures = s.data, s.measures
    data.PixelSpacing, data.SliceThickness = measures.PixelSpacing, measures.SliceThickness
    data.ImagePositionPatient = ["0", f"{index * s.eye.spacing_mm[0]:.6f}", "0"]
    data.ImageOrientationPatient = [1, 0, 0, 0, 0, -1]
    data.InstanceNumber = index + 1
    del data.SharedFunctionalGroupsSequence, data.PerFrameFunctionalGroupsSequence, data.NumberOfFrames


def _deflate_bomb(s: Specimen) -> Files:
    """A deflated scan, and behind it some that that inflate to two gigabytes."""
    s.store(s.eye.pixels[:4])
    plain = s.content()
    s.data.file_meta.TransferSyntaxUID = DeflatedExplicitVRLittleEndian
    head = s.content()
    pack = zlib.compressobj(9, zlib.DEFLATED, -zlib.MAX_WBITS)
    scan = pack.compress(plain[_data_at(plain) :]) + pack.flush(zlib.Z_FULL_FLUSH)
    zeros = pack.compress(bytes(1 << 24)) + pack.flush(zlib.Z_FULL_FLUSH)
    return {s.path: head[: _data_at(head)] + scan + zeros * 128}


FIRST: Final = (
    refused("truncated", "two fifths of the file are missing", _cut, "truncated", "frames_missing"),
    refused("zero_bytes", "zero bytes long", _zero_bytes, "empty_file"),
    refused("html_page", "the web page of a failed download", _html_page, "not_dicom"),
)
FORK: Final = ignored("resource_fork", "the `._` twin that macOS leaves", _resource_fork)
KINDS: Final[tuple[Kind, ...]] = (
    refused("cut_in_header", "ends within the header", _cut_in_header, "truncated", "broken_header"),
    refused("cut_at_the_end", "the last 40 bytes are missing", _cut_at_the_end, "truncated", "frames_missing"),
    refused(
        "cut_before_delimiter", "only the mark behind the last frame is missing", _cut_before_delimiter, "truncated"
    ),
    refused(
        "cut_behind_preamble", "nothing behind DICOM's mark", _cut_behind_the_preamble, "broken_header", "truncated"
    ),
    refused("preamble_missing", "without preamble and DICM mark", _preamble_missing, "not_dicom", "unknown_format"),
    refused("gzipped", "a gzip archive called .dcm", _gzipped, "not_dicom"),
    refused(
        "sent_as_text", "line ends rewritten by a transfer in text mode", _as_text,
        "broken_header", "truncated", "not_structural_oct", "header_contradicts_pixels", "frames_missing",
        "unsupported_pixels", "no_pixel_data", "frames_broken", "wrong_transfer_syntax",
    ),
    refused("zeroed_header", "a kilobyte of the header is zeros", _zeroed_header, "broken_header"),
    refused("deflate_bomb", "a few megabytes that inflate to two gigabytes", _deflate_bomb, "size_implausible"),
    accepted("bytes_behind", "a kilobyte of other data behind the scan", _bytes_behind),
    accepted("zeros_behind", "filled up with zeros to a block of the disk", _zeros_behind),
    accepted("no_suffix", "named without .dcm, not in the manifest", _no_suffix),
    refused("dicomdir", "the directory of a DICOM medium", _dicomdir, "not_structural_oct"),
    refused("single_frame", "one B-scan of a file-per-B-scan series", _one_frame, "single_frame_series"),
)  # fmt: skip
