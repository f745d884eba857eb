"""What the fuzzer starts from and what it does to it: valid files of every kind, and damage that a number decides.

A case is a pure function of its number: base file, kind of damage and every random choice. Bases are small phantoms,
one per transfer syntax of DICOM and one per other format, and are written anew with the same bytes by every run.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "support"))

from fuzz_content import KINDS, Expected, content_case

from oct_dicom import make_dataset, put_frames, retina, use_syntax
from vendor_files import bioptigen_bytes, e2e_bytes, lines, topcon_bytes, topcon_jpegs, vol_bytes

CONTENT_SHARE = 0.1  # of the cases are whole files of another content
OPTION_MM = (0.05, 0.0026, 0.0117)  # the user's word, for formats that do not know their spacing


@dataclass(frozen=True)
class Base:
    """A valid file. `header` are the bytes that may speak of geometry (None: any byte may); DICOM is asked itself."""

    name: str
    content: bytes
    suffix: str
    header: tuple[int, int] | None = None
    option_mm: tuple[float, float, float] | None = None

    @property
    def dicom(self) -> bool:
        return self.suffix == ".dcm"


@dataclass(frozen=True)
class Case:
    """A damaged file. `span` covers the bytes that changed; damage that moves what follows reaches to the end."""

    number: int
    base: Base
    what: str
    content: bytes
    span: tuple[int, int]
    expected: Expected | None = None  # of a change of content


def _dicom(name: str, change: Callable[[Any, np.ndarray], None], pixels: np.ndarray | None = None) -> Base:
    pixels = retina(8, 64, 48) if pixels is None else pixels
    data = make_dataset(pixels)
    uid = f"1.2.826.0.1.3680043.8.498.{int.from_bytes(name.encode()[:12], 'big')}"
    data.SOPInstanceUID = data.file_meta.MediaStorageSOPInstanceUID = uid
    change(data, pixels)
    buffer = BytesIO()
    data.save_as(buffer, enforce_file_format=True)
    return Base(f"dicom {name}", buffer.getvalue(), ".dcm")


def dicom_bases() -> list[Base]:
    """One file a transfer syntax, and 16 bit."""
    import imagecodecs
    from pydicom import uid

    def encoded(syntax: uid.UID, encode: Callable[[np.ndarray], bytes], bot: bool = True) -> Callable[[Any, Any], None]:
        def change(data: Any, pixels: np.ndarray) -> None:
            data.file_meta.TransferSyntaxUID = syntax
            put_frames(data, [bytes(encode(frame)) for frame in pixels], has_bot=bot)

        return change

    def plain(syntax: uid.UID) -> Callable[[Any, Any], None]:
        return lambda data, pixels: use_syntax(data, pixels, syntax)

    def implicit(data: Any, _: np.ndarray) -> None:
        data.file_meta.TransferSyntaxUID = uid.ImplicitVRLittleEndian

    return [
        _dicom("explicit", plain(uid.ExplicitVRLittleEndian)),
        _dicom("implicit", implicit),
        _dicom("16 bit", plain(uid.ExplicitVRLittleEndian), retina(8, 64, 48).astype(np.uint16) * 16),
        _dicom("deflated", plain(uid.DeflatedExplicitVRLittleEndian)),
        _dicom("JPEG", plain(uid.JPEGBaseline8Bit)),
        _dicom("JPEG 2000", plain(uid.JPEG2000Lossless)),
        _dicom("JPEG-LS", plain(uid.JPEGLSLossless)),
        _dicom("RLE", plain(uid.RLELossless)),
        _dicom("JPEG lossless", encoded(uid.JPEGLosslessSV1, imagecodecs.ljpeg_encode)),
        _dicom("HTJ2K", encoded(uid.HTJ2KLossless, imagecodecs.htj2k_encode)),
        _dicom("JPEG 2000, no offsets", encoded(uid.JPEG2000Lossless, imagecodecs.jpeg2k_encode, bot=False)),
    ]


def other_bases(folder: Path) -> list[Base]:
    """One file of every other format whose scan is one file."""
    from PIL import Image
    from scipy.io import savemat

    from eye_files import write_voxels

    pixels = retina(8, 64, 48)
    intensity = pixels.astype(np.float32) / 255
    written: dict[str, bytes] = {}
    for suffix in (".nii", ".nii.gz", ".mha"):
        written[suffix] = write_voxels(folder / f"scan{suffix}", pixels, (0.05, 0.0026, 0.0117)).read_bytes()
    npy, npz, mat, tiff = BytesIO(), BytesIO(), BytesIO(), BytesIO()
    np.save(npy, pixels)
    np.savez_compressed(npz, oct_bscans=pixels)
    savemat(mat, {"images": pixels.transpose(1, 2, 0)})
    pages = [Image.fromarray(frame) for frame in pixels]
    pages[0].save(tiff, "TIFF", save_all=True, append_images=pages[1:])
    mha_header = written[".mha"].index(b"LOCAL") + 6
    return [
        Base("nifti", written[".nii"], ".nii", (0, 352)),
        Base("nifti.gz", written[".nii.gz"], ".nii.gz"),
        Base("metaimage", written[".mha"], ".mha", (0, mha_header)),
        Base("npy", npy.getvalue(), ".npy", (0, 128), OPTION_MM),
        Base("npz", npz.getvalue(), ".npz", None, OPTION_MM),
        Base("mat", mat.getvalue(), ".mat", None, OPTION_MM),
        Base("tiff", tiff.getvalue(), ".tiff", None, OPTION_MM),
        Base("vol", vol_bytes(intensity, lines(8)), ".vol"),
        Base("e2e", e2e_bytes([np.maximum(intensity, 0.01)]), ".e2e", None, OPTION_MM),
        Base("fda", topcon_bytes(topcon_jpegs(retina(8, 64, 160)), "@IMG_JPEG"), ".fda"),
        Base("bioptigen", bioptigen_bytes(pixels.astype(np.uint16) * 16), ".OCT"),
    ]


# Damage to any bytes. Each takes (random, content) and gives (what it did, damaged, first byte, last byte + 1).

Damaged = tuple[str, bytes, int, int]


def _position(chance: random.Random, content: bytes) -> int:
    """A byte: headers lie in front and are small, so that half of all damage goes there."""
    return chance.randrange(min(len(content), 4096) if chance.random() < 0.5 else len(content))


def _flip(chance: random.Random, content: bytes) -> Damaged:
    damaged, positions = bytearray(content), []
    for _ in range(chance.choice((1, 1, 4, 32))):
        positions.append(_position(chance, content))
        damaged[positions[-1]] ^= chance.choice((1, 128, 255, chance.randrange(1, 256)))
    return f"{len(positions)} bytes flipped", bytes(damaged), min(positions), max(positions) + 1


def _cut(chance: random.Random, content: bytes) -> Damaged:
    at = _position(chance, content)
    return f"cut at {at}", content[:at], at, len(content)


def _length(chance: random.Random) -> int:
    return chance.choice((1, 2, 16, 512, 4096))


def _blank(chance: random.Random, content: bytes) -> Damaged:
    at, length = _position(chance, content), _length(chance)
    value = chance.choice((b"\0", b"\xff"))
    return f"{length} bytes {value!r} at {at}", content[:at] + value * length + content[at + length :], at, at + length


def _insert(chance: random.Random, content: bytes) -> Damaged:
    at, length = _position(chance, content), _length(chance)
    new = chance.randbytes(length)
    return f"{length} bytes put in at {at}", content[:at] + new + content[at:], at, len(content)


def _drop(chance: random.Random, content: bytes) -> Damaged:
    at, length = _position(chance, content), _length(chance)
    return f"{length} bytes left out at {at}", content[:at] + content[at + length :], at, len(content)


def _swap(chance: random.Random, content: bytes) -> Damaged:
    length = _length(chance)
    one, two = sorted((_position(chance, content), _position(chance, content)))
    two = max(two, one + length)
    damaged = content[:one] + content[two : two + length] + content[one + length : two] + content[one : one + length]
    return f"{length} bytes at {one} and {two} changed over", damaged + content[two + length :], one, two + length


def _big_number(chance: random.Random, content: bytes) -> Damaged:
    at = _position(chance, content) & ~1
    value = chance.choice(
        (b"\xff\xff\xff\x7f", b"\xff\xff\xff\xff", b"\0\0\0\0", b"\xff\xff", b"\0\x80", b"\x01\0\0\0")
    )
    return f"{value!r} at {at}", content[:at] + value + content[at + len(value) :], at, at + len(value)


ANY = (_flip, _flip, _cut, _blank, _insert, _drop, _swap, _big_number)


# Damage to DICOM that keeps it DICOM

GEOMETRY = {
    "Rows",
    "Columns",
    "NumberOfFrames",
    "PixelSpacing",
    "SliceThickness",
    "SpacingBetweenSlices",
    "ImagePositionPatient",
    "ImageOrientationPatient",
    "ReferenceCoordinates",
    "InStackPositionNumber",
    "OphthalmicImageOrientation",
    "Manufacturer",
    "ManufacturerModelName",
    "ProtocolName",
    "SeriesDescription",
}
_STRANGE = (
    "",
    0,
    -1,
    1,
    65535,
    4294967295,
    1e-12,
    1e12,
    float("nan"),
    float("inf"),
    "0",
    "-0.01",
    "1e400",
    "abc",
    "0.01\\0.02",
    [],
    [0.0, 0.0],
    [1e9, 1e-9],
    [0.0117, 0.0026],
    [0.0039, 0.0123],
    [0.0039, 0.0123],
    [0.0, 0.3, 0.0],
    0.12,
    4,
    16,
    96,
    [0.5],
    [1.0] * 7,
    b"\xff\xfe",
    "1.2.3",
    "é" * 300,
)


def _elements(data: Any) -> list[tuple[Any, Any]]:
    """(dataset, tag) of every element, those of sequences too."""
    found = []
    for element in data:
        found.append((data, element.tag))
        if element.VR == "SQ":
            for item in element.value:
                found += _elements(item)
    return found


def _tags(chance: random.Random, content: bytes) -> bytes | tuple[str, bytes]:
    from pydicom import dcmread
    from pydicom.dataelem import DataElement
    from pydicom.dataset import Dataset
    from pydicom.sequence import Sequence

    data = dcmread(BytesIO(content))
    done = []
    for _ in range(chance.choice((1, 1, 2, 4))):
        positions = [location for location in _elements(data) if location[1] != 0x7FE00010]
        if chance.random() < 0.5:  # most elements are those of single frames
            positions = [
                location for location in positions if location[0][location[1]].keyword in GEOMETRY
            ] or positions
        holder, tag = chance.choice(positions)
        element = holder[tag]
        how = chance.choice(("delete", "value", "value", "value", "type", "empty", "nest", "repeat"))
        done.append(f"{how} {element.keyword or tag}")
        if how == "delete":
            del holder[tag]
        elif how == "type":
            vr = chance.choice(("LO", "UN", "OB", "DS", "US", "FD"))
            value: Any = {"US": 7, "FD": 0.5, "OB": b"\1\2", "UN": b"\1\2", "DS": "0.01", "LO": "text"}[vr]
            holder[tag] = DataElement(tag, vr, value)
        elif element.VR == "SQ":
            items = list(element.value)
            if how == "nest":
                wrapped = Dataset()
                wrapped[tag] = DataElement(tag, "SQ", Sequence(items))
                items = [wrapped]
            elif how == "repeat":
                items = items * chance.choice((2, 50))
            elif how == "empty":
                items = []
            else:
                chance.shuffle(items)
                items = items[: chance.randrange(len(items) + 1)]
            holder[tag] = DataElement(tag, "SQ", Sequence(items))
        else:
            element._value = None if how == "empty" else chance.choice(_STRANGE)
    return "; ".join(done), _saved(data)


def _regrid(chance: random.Random, content: bytes) -> tuple[str, bytes]:
    """A header that is whole and says another geometry, which may be plausible: it is the source's word then."""
    from pydicom import dcmread

    data = dcmread(BytesIO(content))
    measures = data.SharedFunctionalGroupsSequence[0].PixelMeasuresSequence[0]
    positions = [group.PlanePositionSequence[0] for group in data.PerFrameFunctionalGroupsSequence]
    how = chance.choice(("pair", "pair", "thickness", "pitch", "shuffle", "reverse", "lose", "same", "frames", "plane"))
    factor = chance.choice((0.25, 0.5, 1.5, 2.0, 4.0, 100.0))
    if how == "pair":
        measures.PixelSpacing = chance.choice(([0.0039, 0.0123], [0.0123, 0.0039], [0.0026, 0.0117 * factor], [1, 1]))
    elif how == "thickness":
        measures.SliceThickness = 0.05 * factor
        del data.PerFrameFunctionalGroupsSequence
    elif how == "pitch":
        for location in positions:
            location.ImagePositionPatient = [0.0, round(float(location.ImagePositionPatient[1]) * factor, 6), 0.0]
    elif how in ("shuffle", "reverse"):
        values = [list(location.ImagePositionPatient) for location in positions]
        values = values[::-1] if how == "reverse" else chance.sample(values, len(values))
        for location, value in zip(positions, values, strict=True):
            location.ImagePositionPatient = value
    elif how == "lose":
        for location in chance.sample(positions, chance.choice((1, len(positions)))):
            del location.ImagePositionPatient
    elif how == "same":
        for location in positions:
            location.ImagePositionPatient = [0.0, 0.0, 0.0]
    elif how == "frames":
        data.NumberOfFrames = max(0, data.NumberOfFrames + chance.choice((-7, -1, 1, 100)))
    else:
        data.Rows, data.Columns = chance.choice(((data.Columns, data.Rows), (data.Rows // 2, data.Columns)))
    return f"geometry: {how} {factor}", _saved(data)


def _saved(data: Any) -> bytes:
    buffer = BytesIO()
    data.save_as(buffer, enforce_file_format=False, implicit_vr=data.original_encoding[0], little_endian=True)
    return buffer.getvalue()


def _encapsulated(chance: random.Random, content: bytes) -> tuple[str, bytes]:
    """Frames left out, doubled, changed over, emptied, cut, swollen; offsets that lie; a delimiter that is missing."""
    from pydicom import dcmread
    from pydicom.encaps import encapsulate, generate_fragments, parse_basic_offsets

    data = dcmread(BytesIO(content))
    if not data.file_meta.TransferSyntaxUID.is_encapsulated:
        pixels = data.PixelData
        cut = chance.choice((1, 2, 48 * 64, 48 * 64 * 3, len(pixels) - 2))
        data.PixelData = pixels[:-cut] if chance.random() < 0.5 else pixels + pixels[:cut]
        return f"pixel data {len(data.PixelData) - len(pixels):+d} bytes", _saved(data)
    start = 8 + 4 * len(parse_basic_offsets(data.PixelData))
    frames = list(generate_fragments(data.PixelData[start:]))
    one, two = chance.randrange(len(frames)), chance.randrange(len(frames))
    how = chance.choice(
        ("leave out", "double", "change over", "empty", "cut", "noise", "other", "offsets", "no end", "split")
    )
    if how == "leave out":
        del frames[one]
    elif how == "double":
        frames.insert(one, frames[one])
    elif how == "change over":
        frames[one], frames[two] = frames[two], frames[one]
    elif how == "empty":
        frames[one] = b""
    elif how == "cut":
        frames[one] = frames[one][: chance.randrange(1, len(frames[one]))]
    elif how == "noise":
        _, frames[one], _, _ = _flip(chance, frames[one])
    elif how == "other":
        frames[one] = chance.choice((b"\xff\xd8\xff\xd9", b"\0" * 64, chance.randbytes(200)))
    elif how == "split":
        half = len(frames[one]) // 2
        frames[one : one + 1] = [frames[one][:half], frames[one][half:]]
    frames = [frame + b"\0" * (len(frame) % 2) for frame in frames]
    made = encapsulate(frames, has_bot=start > 8) if all(frames) else _items(frames)
    if how == "offsets":
        made = bytearray(made)
        at = 8 + 4 * one
        made[at : at + 4] = chance.choice((b"\xff\xff\xff\xff", b"\0\0\0\0", chance.randbytes(4)))
    if how == "no end":
        made = made[:-8]
    data.PixelData = bytes(made)
    return f"frames: {how} {one}", _saved(data)


def _items(frames: list[bytes]) -> bytes:
    parts = [b"", *frames]
    body = b"".join(b"\xfe\xff\x00\xe0" + len(part).to_bytes(4, "little") + part for part in parts)
    return body + b"\xfe\xff\xdd\xe0\0\0\0\0"


def make_case(number: int, bases: list[Base]) -> Case:
    """The damaged file of this number. A damage that cannot be written (pydicom refuses) becomes one of bytes."""
    chance = random.Random(f"octjepa content {number}")
    if chance.random() < CONTENT_SHARE:
        kind = chance.choice(KINDS)
        what, content, expected = content_case(chance, kind)
        return Case(number, Base(f"content {kind}", content, ".dcm"), what, content, (0, len(content)), expected)
    chance = random.Random(f"octjepa {number}")
    base = bases[chance.randrange(len(bases))]
    if base.dicom and chance.random() < 0.5:
        try:
            what, content = chance.choice((_tags, _tags, _encapsulated, _regrid))(chance, base.content)
            return Case(number, base, what, content, (0, len(content)))
        except Exception:  # what is too strange for pydicom to write
            chance = random.Random(f"octjepa bytes {number}")
    what, content, first, last = chance.choice(ANY)(chance, base.content)
    return Case(number, base, what, content, (first, last))
