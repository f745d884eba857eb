"""Files that are damaged as files: cut, emptied, wrapped, replaced, converted as text."""

from __future__ import annotations

import gzip
import zlib
from typing import Final

from pydicom.uid import DeflatedExplicitVRLittleEndian

from octjepa.phantom.broken import Defect, Files, ScanFile, accepted, refused

_PIXEL_DATA_HEADER = b"\xe0\x7f\x10\x00OB"
# An element that is never closed, as the rest of a longer file would be.
_OPEN_ELEMENT = b"\xfc\xff\xfc\xffOB\0\0\xff\xff\xff\xff"
_DIRECTORY = "1.2.840.10008.1.3.10"


def dataset_offset(content: bytes) -> int:
    """The byte where the data set begins: after preamble, mark and file meta information."""
    return 132 + 12 + int.from_bytes(content[140:144], "little")


def _cut_in_header(scan: ScanFile) -> Files:
    content = scan.content()
    return {scan.path: content[: content.rindex(_PIXEL_DATA_HEADER) * 2 // 3]}


def _cut_before_delimiter(scan: ScanFile) -> Files:
    scan.compress("rle")
    return {scan.path: scan.content()[:-8]}


def _zeroed_header(scan: ScanFile) -> Files:
    content = scan.content()
    return {scan.path: content[:132] + bytes(1024) + content[1156:]}


def _zeros_behind(scan: ScanFile) -> Files:
    content = scan.content()
    return {scan.path: content + bytes(-len(content) % 4096)}


def _single_frame(scan: ScanFile) -> None:
    """As a secondary capture export writes it: a file per B-scan, with its position in the series at the top."""
    index = len(scan.pixels) // 2
    measures = scan.measures
    scan.store(
        scan.pixels[index : index + 1],
        PixelSpacing=measures.PixelSpacing,
        SliceThickness=measures.SliceThickness,
        ImagePositionPatient=["0", f"{index * scan.eye.spacing_mm[0]:.6f}", "0"],
        ImageOrientationPatient=[1, 0, 0, 0, 0, -1],
        InstanceNumber=index + 1,
        SharedFunctionalGroupsSequence=None,
        PerFrameFunctionalGroupsSequence=None,
        NumberOfFrames=None,
    )


def _deflate_bomb(scan: ScanFile) -> Files:
    """A deflated scan, followed by some data that inflate to two gigabytes."""
    scan.store(scan.pixels[:4])
    plain = scan.content()
    scan.data.file_meta.TransferSyntaxUID = DeflatedExplicitVRLittleEndian
    head = scan.content()
    pack = zlib.compressobj(9, zlib.DEFLATED, -zlib.MAX_WBITS)
    deflated = pack.compress(plain[dataset_offset(plain) :]) + pack.flush(zlib.Z_FULL_FLUSH)
    zeros = pack.compress(bytes(1 << 24)) + pack.flush(zlib.Z_FULL_FLUSH)
    return {scan.path: head[: dataset_offset(head)] + deflated + zeros * 128}


DEFECTS: Final[tuple[Defect, ...]] = (
    refused("cut_in_header", "ends within the header", _cut_in_header, "truncated", "broken_header"),
    refused(
        "cut_at_the_end",
        "the last 40 bytes are missing",
        lambda scan: {scan.path: scan.content()[:-40]},
        "truncated",
        "frames_missing",
    ),
    refused("cut_before_delimiter", "no sequence delimiter after the last frame", _cut_before_delimiter, "truncated"),
    refused(
        "cut_behind_preamble",
        "ends after the prefix DICM",
        lambda scan: {scan.path: scan.content()[:132]},
        "broken_header",
        "truncated",
    ),
    refused(
        "preamble_missing",
        "no preamble and no prefix DICM",
        lambda scan: {scan.path: scan.content()[132:]},
        "not_dicom",
        "unknown_format",
    ),
    refused(
        "gzipped",
        "a gzip archive named .dcm",
        lambda scan: {scan.path: gzip.compress(scan.content()[:50_000], compresslevel=1, mtime=0)},
        "not_dicom",
    ),
    refused(
        "sent_as_text",
        "line endings rewritten by a transfer in text mode",
        lambda scan: scan.replaced(b"\n", b"\r\n", -1),
        "broken_header",
        "truncated",
        "not_structural_oct",
        "header_contradicts_pixels",
        "frames_missing",
        "unsupported_pixels",
        "no_pixel_data",
        "frames_broken",
        "wrong_transfer_syntax",
    ),
    refused("zeroed_header", "a kilobyte of the header is zeroed", _zeroed_header, "broken_header"),
    refused("deflate_bomb", "a few megabytes that inflate to two gigabytes", _deflate_bomb, "size_implausible"),
    accepted(
        "bytes_behind",
        "a kilobyte of other data after the data set",
        lambda scan: {scan.path: scan.content() + _OPEN_ELEMENT + bytes(range(256)) * 4},
    ),
    accepted("zeros_behind", "padded with zeros to a disk block", _zeros_behind),
    accepted(
        "no_suffix",
        "no suffix .dcm, and not in the manifest",
        lambda scan: scan.moved(scan.path.with_name(scan.path.stem.replace(".", "_"))),
    ),
    refused("dicomdir", "a DICOMDIR", lambda scan: scan.set_class(_DIRECTORY, PixelData=None), "not_structural_oct"),
    refused("single_frame", "one B-scan of a file-per-B-scan series", _single_frame, "single_frame_series"),
)
