"""Broken files for a synthetic cohort: a good scan file with one defect, and what a reader must do with it.

`DEFECTS` are the six kinds of `octjepa phantom --broken`. The tests add many more kinds to them (tests/zoo)
with the same building blocks: `ScanFile` is a good file to change, a `Defect` says how it changes and what must become
of it. `accepted` and `refused` make the two common forms of a `Defect`.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
from jaxtyping import UInt8
from pydicom.dataset import Dataset
from pydicom.encaps import encapsulate
from pydicom.uid import ExplicitVRLittleEndian

from octjepa.phantom.dicom import TRANSFER_SYNTAX, encode_frames, eye_dataset
from octjepa.phantom.eye import Eye
from octjepa.recipe import DEVICES

PIXEL_DATA = 0x7FE00010


@dataclass
class ScanFile:
    """A good file before its defect: header and pixels in `data`, its line of manifest.tsv in `manifest_row`.

    A defect changes them, and may set `manifest_row` to None (not listed). `path` is where the file belongs.
    """

    eye: Eye
    seed: int
    path: Path
    manifest_row: dict[str, Any] | None
    data: Dataset = field(init=False)

    def __post_init__(self) -> None:
        self.data = eye_dataset(self.eye, self.seed)

    @property
    def pixels(self) -> UInt8[np.ndarray, "D H W"]:
        """The eye's true pixels."""
        return self.eye.pixels

    @property
    def shared(self) -> Dataset:
        """The shared functional groups."""
        return self.data.SharedFunctionalGroupsSequence[0]

    @property
    def measures(self) -> Dataset:
        """The shared pixel measures."""
        return self.shared.PixelMeasuresSequence[0]

    @property
    def frame_groups(self) -> Any:
        """The per-frame functional groups."""
        return self.data.PerFrameFunctionalGroupsSequence

    def set_elements(self, **elements: Any) -> None:
        """Sets elements of the data set by keyword; None deletes one."""
        for keyword, value in elements.items():
            if value is None:
                delattr(self.data, keyword)
            else:
                setattr(self.data, keyword, value)

    def set_class(self, sop_class: str, **elements: Any) -> None:
        """Sets the SOP class in the data set and in the file meta information, and other elements."""
        self.set_elements(SOPClassUID=sop_class, **elements)
        self.data.file_meta.MediaStorageSOPClassUID = sop_class

    def unlist(self) -> None:
        """Takes the file out of the manifest."""
        self.manifest_row = None

    def silence_manifest(self) -> None:
        """The manifest lists the file without its spacing."""
        if self.manifest_row is not None:
            self.manifest_row |= {"pixel_spacing": "Not reported", "slice_thickness": "Not reported"}

    def store(self, pixels: np.ndarray | None = None, bits_stored: int | None = None, **elements: Any) -> None:
        """Stores `pixels` [D, H, W] or [D, H, W, 3], or the eye's own, uncompressed, then sets `elements`."""
        pixels = self.pixels if pixels is None else pixels
        data, bits = self.data, pixels.dtype.itemsize * 8
        data.file_meta.TransferSyntaxUID = ExplicitVRLittleEndian
        data.NumberOfFrames, data.Rows, data.Columns = pixels.shape[:3]
        data.SamplesPerPixel = 1 if pixels.ndim == 3 else 3
        data.BitsAllocated, data.BitsStored = bits, bits_stored or bits
        data.HighBit = data.BitsStored - 1
        data.PixelRepresentation = int(pixels.dtype.kind == "i")
        content = pixels.astype(pixels.dtype.newbyteorder("<")).tobytes()
        data.add_new(PIXEL_DATA, "OB" if bits == 8 else "OW", content + b"\0" * (len(content) % 2))
        self.set_elements(**elements)

    def compress(self, codec: str, streams: list[bytes] | None = None, **encapsulation: Any) -> list[bytes]:
        """Stores the code `streams`, or the eye's own in `codec`, encapsulated; returns them.

        `encapsulation` goes to `pydicom.encaps.encapsulate`.
        """
        if streams is None:
            streams = encode_frames(self.pixels, codec)
        self.data.file_meta.TransferSyntaxUID = TRANSFER_SYNTAX[codec]
        self.set_encapsulated(encapsulate(streams, **encapsulation))
        return streams

    def set_encapsulated(self, content: bytes) -> None:
        """Stores encapsulated pixel data as they are."""
        self.data.add_new(PIXEL_DATA, "OB", content)
        self.data["PixelData"].is_undefined_length = True

    def content(self) -> bytes:
        """The bytes of the file."""
        buffer = io.BytesIO()
        self.data.save_as(buffer, enforce_file_format=True)
        return buffer.getvalue()

    def replaced(self, old: bytes, new: bytes, count: int = 1) -> Files:
        """The file with the first `count` (-1: all) occurrences of `old` in its bytes replaced."""
        return {self.path: self.content().replace(old, new, count)}

    def moved(self, path: Path) -> Files:
        """The file at another path, not in the manifest."""
        self.unlist()
        return {path: self.content()}


Files = dict[Path, bytes]
Apply = Callable[[ScanFile], Files | None]


@dataclass(frozen=True)
class Defect:
    """A defect and what a reader must do with it.

    `apply` returns the files to write, the broken one last, or None: the scan file as it was changed. An accepted file
    has the true spacing (within 5 %, the error of a pitch that is read off the fundus image), unless the axis is in
    `uncertain`: then the reader must call it uncertain. Its pixels are those of the good file, unless `same_pixels` is
    False, and `fewer_frames` of them are missing. All `notes` must be reported. A refused file has one of `reasons`.
    """

    name: str
    description: str
    apply: Apply
    outcome: Literal["accepted", "refused", "ignored"]
    reasons: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    uncertain: tuple[str, ...] = ()
    provenance: tuple[tuple[str, str], ...] = ()
    pattern: str = "raster"
    same_pixels: bool = True
    fewer_frames: int = 0
    devices: tuple[str, ...] = DEVICES
    level: str = ""


def accepted(name: str, description: str, apply: Apply, *notes: str, **expected: Any) -> Defect:
    """A defect that a reader survives, with `notes`."""
    return Defect(name, description, apply, "accepted", notes=notes, **expected)


def refused(name: str, description: str, apply: Apply, *reasons: str) -> Defect:
    """A defect that a reader refuses for one of `reasons`."""
    return Defect(name, description, apply, "refused", reasons=reasons)


_HTML = b"<!DOCTYPE html>\n<html><head><title>403 Forbidden</title></head><body><h1>403 Forbidden</h1></body></html>\n"
# The head of an AppleDouble file, which macOS leaves as ._name next to name.
_APPLE_DOUBLE = bytes.fromhex("00051607 00020000") + b"Mac OS X        " + bytes(58)


def _truncate(scan: ScanFile) -> Files:
    content = scan.content()
    return {scan.path: content[: len(content) * 3 // 5]}


def _resource_fork(scan: ScanFile) -> Files:
    scan.unlist()
    return {scan.path.with_name(f"._{scan.path.name}"): _APPLE_DOUBLE}


def _spacing_of_one(scan: ScanFile) -> None:
    """1 mm on every axis and no positions; the manifest has the true spacing."""
    scan.measures.PixelSpacing, scan.measures.SliceThickness = ["1", "1"], "1"
    for group in scan.frame_groups:
        if "PlanePositionSequence" in group:
            del group.PlanePositionSequence


DEFECTS: Final[dict[str, Defect]] = {
    defect.name: defect
    for defect in (
        replace(
            refused(
                "truncated", "the last two fifths of the file are missing", _truncate, "truncated", "frames_missing"
            ),
            level="file",
        ),
        replace(
            refused("zero_bytes", "an empty file", lambda scan: {scan.path: b""}, "empty_file"),
            level="file",
        ),
        replace(
            refused("html_page", "the web page of a failed download", lambda scan: {scan.path: _HTML}, "not_dicom"),
            level="file",
        ),
        replace(
            refused(
                "no_pixel_data",
                "no pixel data element",
                lambda scan: scan.set_elements(PixelData=None),
                "no_pixel_data",
            ),
            level="header",
        ),
        Defect(
            "resource_fork",
            "the `._` side file that macOS writes (AppleDouble)",
            _resource_fork,
            "ignored",
            level="file",
        ),
        replace(
            accepted(
                "wrong_spacing",
                "1 mm on every axis and no positions; true values in the manifest",
                _spacing_of_one,
                "spacing_implausible_shared",
                provenance=(("depth", "manifest"), ("column", "manifest")),
            ),
            level="geometry",
        ),
    )
}


def defects_for(devices: tuple[str, ...]) -> list[Defect]:
    """The defects that one of `devices` can have, in the order in which a cohort takes them."""
    return [defect for defect in DEFECTS.values() if set(defect.devices) & set(devices)]


def write_broken(
    path: Path, eye: Eye, seed: int, defect: Defect, manifest_row: dict[str, Any]
) -> tuple[list[Path], dict[str, Any]]:
    """Writes `eye` with `defect` to `path` or next to it. Raises OSError where the disk refuses.

    `manifest_row` is the good file's line of manifest.tsv. Returns the files that were written, with the broken file
    last (none if the defect is an absent file), and the line that the manifest then holds ({} for no line).
    """
    scan = ScanFile(eye, seed, path, dict(manifest_row))
    written = defect.apply(scan)
    if written is None:
        written = {path: scan.content()}
    for target, content in written.items():
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content)
    return list(written), scan.manifest_row or {}
