"""What broken files are made of: a specimen to spoil, and a `Kind` that says how, and what must become of it."""

from __future__ import annotations

import io
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydicom.dataset import Dataset
from pydicom.encaps import encapsulate
from pydicom.uid import ExplicitVRLittleEndian, JPEG2000Lossless, JPEGBaseline8Bit, RLELossless

from octjepa.phantom.dicom import encode_frames, eye_dataset
from octjepa.phantom.eye import Eye
from octjepa.recipe import DEVICES

Fate = Literal["accepted", "refused", "ignored"]
PIXEL_TAG = b"\xe0\x7f\x10\x00"
_SYNTAX = {"jpeg": JPEGBaseline8Bit, "jpeg2000": JPEG2000Lossless, "rle": RLELossless}


@dataclass
class Specimen:
    """One good file before it is spoilt: its header and pixels in `data`, its line of manifest.tsv in `row`.

    A spoiler changes them, and may set `row` to None (not listed). `path` is where the file belongs.
    """

    eye: Eye
    seed: int
    path: Path
    row: dict[str, Any] | None
    data: Dataset = field(init=False)

    def __post_init__(self) -> None:
        self.data = eye_dataset(self.eye, self.seed)

    @property
    def shared(self) -> Dataset:
        return self.data.SharedFunctionalGroupsSequence[0]

    @property
    def measures(self) -> Dataset:
        return self.shared.PixelMeasuresSequence[0]

    @property
    def frames(self) -> Any:
        return self.data.PerFrameFunctionalGroupsSequence

    def silence_manifest(self) -> None:
        """The manifest lists the file, and says nothing of its spacing."""
        if self.row is not None:
            self.row |= {"pixel_spacing": "Not reported", "slice_thickness": "Not reported"}

    def store(self, pixels: np.ndarray, depth: int | None = None) -> None:
        """Puts `pixels` [F, H, W] or [F, H, W, 3] into the data set, uncompressed; `depth` bits are in use."""
        data, bits = self.data, pixels.dtype.itemsize * 8
        data.file_meta.TransferSyntaxUID = ExplicitVRLittleEndian
        data.NumberOfFrames, data.Rows, data.Columns = pixels.shape[:3]
        data.SamplesPerPixel = 1 if pixels.ndim == 3 else 3
        data.BitsAllocated, data.BitsStored = bits, depth or bits
        data.HighBit = data.BitsStored - 1
        data.PixelRepresentation = int(pixels.dtype.kind == "i")
        content = pixels.astype(pixels.dtype.newbyteorder("<")).tobytes()
        data.add_new(0x7FE00010, "OB" if bits == 8 else "OW", content + b"\0" * (len(content) % 2))

    def compress(self, codec: str, frames: list[bytes] | None = None, **how: Any) -> list[bytes]:
        """Puts `frames`, or the eye's own in `codec`, into the data set encapsulated; returns them."""
        if frames is None:
            frames = encode_frames(self.eye.pixels, codec)
        self.data.file_meta.TransferSyntaxUID = _SYNTAX[codec]
        self.raw_frames(encapsulate(frames, **how))
        return frames

    def raw_frames(self, content: bytes) -> None:
        self.data.add_new(0x7FE00010, "OB", content)
        self.data["PixelData"].is_undefined_length = True

    def content(self) -> bytes:
        """The bytes of the file."""
        buffer = io.BytesIO()
        self.data.save_as(buffer, enforce_file_format=True)
        return buffer.getvalue()


Files = dict[Path, bytes]
Spoiler = Callable[[Specimen], Files | None]


@dataclass(frozen=True)
class Kind:
    """A defect and its fate. `spoil` returns the files to write, the broken one last, or None: the specimen as it is.

    An accepted file has the true spacing (within 5 %, the error of a pitch that is read off the fundus image), unless
    the axis is in `doubtful`: then the reader must call it uncertain. Its pixels are those of the good file, unless
    `same_pixels` is False, and `frames` of them fewer. `notes` must all be told. A refused file has one of `reasons`.
    """

    name: str
    what: str
    spoil: Spoiler
    fate: Fate
    reasons: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    doubtful: tuple[str, ...] = ()
    provenance: tuple[tuple[str, str], ...] = ()
    pattern: str = "raster"
    same_pixels: bool = True
    fewer_frames: int = 0
    devices: tuple[str, ...] = DEVICES
    level: str = ""


def accepted(name: str, what: str, spoil: Spoiler, *notes: str, **more: Any) -> Kind:
    return Kind(name, what, spoil, "accepted", notes=notes, **more)


def refused(name: str, what: str, spoil: Spoiler, *reasons: str, **more: Any) -> Kind:
    return Kind(name, what, spoil, "refused", reasons=reasons, **more)


def ignored(name: str, what: str, spoil: Spoiler) -> Kind:
    return Kind(name, what, spoil, "ignored")
