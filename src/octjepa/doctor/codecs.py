"""Can every transfer syntax of OCT DICOM be decoded here? A tiny file of each is made in memory and read.

`frames.json` holds one compressed 16 x 16 frame a syntax, so that no encoder is needed (and none can mislead);
`tests/support/tiny_frames.py` made it. Uncompressed and deflated files are written by pydicom.
"""

from __future__ import annotations

import base64
import io
import json
from collections.abc import Iterator
from importlib.resources import files

import numpy as np
from jaxtyping import UInt8

from octjepa.doctor.check import Check, tried
from octjepa.ingest.pixels import decode_pixels

NATIVE = (
    "1.2.840.10008.1.2",
    "1.2.840.10008.1.2.1",
    "1.2.840.10008.1.2.2",
    "1.2.840.10008.1.2.1.99",
)
LOSS = 10  # grey values that a lossy coding may be off
_FRAMES = 4
_TO_DO = "reinstall the decoders: pip install --force-reinstall pylibjpeg-openjpeg python-gdcm pyjpegls pillow"


def frame() -> UInt8[np.ndarray, "16 16"]:
    """What every frame shows: a bright band on a slope, as a B-scan in small."""
    rows, columns = np.mgrid[:16, :16]
    band = np.exp(-(((rows - 6 - columns / 8) / 3) ** 2))
    return (20 + 180 * band + 2 * columns).astype(np.uint8)


def compressed() -> dict[str, bytes]:
    """{transfer syntax UID: one frame as it stands in a file}."""
    text = (files("octjepa.doctor") / "frames.json").read_text(encoding="utf-8")
    return {syntax: base64.b64decode(code) for syntax, code in json.loads(text).items()}


def checks() -> list[Check]:
    """One check over all syntaxes; it names those that fail."""
    expected = "every transfer syntax of OCT decodes to the known frame"
    return [tried("codecs", expected, _TO_DO, lambda: _judged(expected))]


def _judged(expected: str) -> Check:
    faults, count = [], 0
    for name, fault in _outcomes():
        count += 1
        if fault:
            faults.append(f"{name} ({fault})")
    if faults:
        return Check("codecs", "failed", "; ".join(faults), expected, _TO_DO)
    return Check("codecs", "ok", f"{count} transfer syntaxes", expected)


def _outcomes() -> Iterator[tuple[str, str]]:
    """(name of a transfer syntax, what went wrong or nothing)."""
    from pydicom.uid import UID

    for syntax in (*NATIVE, *compressed()):
        try:
            error = np.abs(_read(syntax).astype(int) - frame()).max()
        except Exception as failure:  # a decoder may raise anything
            yield UID(syntax).name, type(failure).__name__
            continue
        yield UID(syntax).name, f"off by {error} grey values" if error > LOSS else ""


def _read(syntax: str) -> UInt8[np.ndarray, "F 16 16"]:
    from pydicom import Dataset, dcmread, dcmwrite
    from pydicom.dataset import FileMetaDataset
    from pydicom.encaps import encapsulate
    from pydicom.uid import UID, OphthalmicTomographyImageStorage

    data, meta = Dataset(), FileMetaDataset()
    meta.TransferSyntaxUID = UID(syntax)
    data.SOPClassUID = meta.MediaStorageSOPClassUID = OphthalmicTomographyImageStorage
    data.SOPInstanceUID = meta.MediaStorageSOPInstanceUID = "1.2.3"
    data.Rows, data.Columns = frame().shape
    data.NumberOfFrames, data.SamplesPerPixel, data.PixelRepresentation = _FRAMES, 1, 0
    data.BitsAllocated, data.BitsStored, data.HighBit = 8, 8, 7
    data.PhotometricInterpretation = "MONOCHROME2"
    coded = compressed().get(syntax)
    data.PixelData = frame().tobytes() * _FRAMES if coded is None else encapsulate([coded] * _FRAMES)
    data["PixelData"].VR = "OB"
    data.file_meta = meta
    file = io.BytesIO()
    dcmwrite(file, data, enforce_file_format=True)
    return decode_pixels(dcmread(io.BytesIO(file.getvalue()))).pixels
