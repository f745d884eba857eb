"""Small OCT-shaped DICOM files, correct unless told otherwise."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from pydicom.dataset import Dataset, FileMetaDataset
from pydicom.encaps import encapsulate
from pydicom.uid import (
    UID,
    DeflatedExplicitVRLittleEndian,
    ExplicitVRLittleEndian,
    JPEG2000Lossless,
    JPEGBaseline8Bit,
    JPEGLSLossless,
    RLELossless,
    generate_uid,
)

OPT = "1.2.840.10008.5.1.4.1.1.77.1.5.4"


def retina(frames: int = 10, rows: int = 96, columns: int = 80, seed: int = 3) -> np.ndarray:
    """uint8 [D, H, W]: two bright layers on noise, each B-scan a little different from the last."""
    rng = np.random.default_rng(seed)
    y = np.arange(rows)[None, :, None]
    z = np.arange(frames)[:, None, None]
    x = np.arange(columns)[None, None, :]
    top = rows * 0.35 + 3 * np.sin(x / 20) + 0.4 * z
    image = 20 + 110 * ((y > top) & (y < top + 30)) + 90 * ((y > top + 24) & (y < top + 30)) + 30 * (y > top + 30)
    return np.clip(image + rng.normal(0, 5, (frames, rows, columns)), 0, 255).astype(np.uint8)


def _group(**items: Any) -> Dataset:
    group = Dataset()
    for name, value in items.items():
        setattr(group, name, value)
    return group


def make_dataset(pixels: np.ndarray, pitch_mm: float | None = 0.05) -> Dataset:
    """A native OPT dataset of `pixels`; `pitch_mm` None leaves positions and thickness out."""
    frames, rows, columns = pixels.shape[:3]
    ds = Dataset()
    ds.file_meta = FileMetaDataset()
    ds.file_meta.TransferSyntaxUID = ExplicitVRLittleEndian
    ds.SOPClassUID = ds.file_meta.MediaStorageSOPClassUID = OPT
    ds.SOPInstanceUID = ds.file_meta.MediaStorageSOPInstanceUID = generate_uid()
    ds.Modality = "OPT"
    ds.Manufacturer, ds.ManufacturerModelName = "Topcon", "3DOCT-1Maestro2"
    ds.PatientName, ds.PatientBirthDate, ds.PatientID = "Doe^Jane", "19500101", "AIREADI-1234"
    ds.ProtocolName = "maestro2 3d macula oct"
    ds.ImageLaterality = "R"
    ds.NumberOfFrames, ds.Rows, ds.Columns = frames, rows, columns
    ds.SamplesPerPixel = 1 if pixels.ndim == 3 else 3
    ds.PhotometricInterpretation = "MONOCHROME2" if pixels.ndim == 3 else "RGB"
    if pixels.ndim == 4:
        ds.PlanarConfiguration = 0
    bits = pixels.dtype.itemsize * 8
    ds.BitsAllocated = ds.BitsStored = bits
    ds.HighBit = bits - 1
    ds.PixelRepresentation = int(pixels.dtype.kind == "i")
    measures = _group(PixelSpacing=[0.0026, 0.0117])
    orientation = _group(ImageOrientationPatient=[1.0, 0, 0, 0, 0, -1.0])
    if pitch_mm is not None:
        measures.SliceThickness = pitch_mm
    shared = _group(
        PixelMeasuresSequence=[measures],
        PlaneOrientationSequence=[orientation],
        FrameAnatomySequence=[_group(FrameLaterality="R")],
    )
    ds.SharedFunctionalGroupsSequence = [shared]
    groups = []
    for index in range(frames):
        group = _group(FrameContentSequence=[_group(StackID="1", InStackPositionNumber=index + 1)])
        if pitch_mm is not None:
            group.PlanePositionSequence = [_group(ImagePositionPatient=[0.0, round(index * pitch_mm, 6), 0.0])]
        groups.append(group)
    ds.PerFrameFunctionalGroupsSequence = groups
    ds.PixelData = pixels.tobytes()
    ds["PixelData"].VR = "OB" if bits == 8 else "OW"
    return ds


def encode(pixels: np.ndarray, syntax: UID) -> list[bytes]:
    """Frames in `syntax`, by encoders other than the reader's decoders where there are any."""
    frames: list[bytes] = []
    for frame in pixels:
        if syntax == JPEGBaseline8Bit:
            buffer = io.BytesIO()
            Image.fromarray(frame).save(buffer, "JPEG", quality=95)
            frames.append(buffer.getvalue())
        elif syntax == JPEG2000Lossless:
            from openjpeg.utils import encode_array

            frames.append(bytes(encode_array(frame)))
        elif syntax == JPEGLSLossless:
            import jpeg_ls

            frames.append(bytes(jpeg_ls.encode_array(frame)))
        else:
            raise ValueError(syntax)
    return frames


def use_syntax(ds: Dataset, pixels: np.ndarray, syntax: UID) -> None:
    """Brings `ds` into another transfer syntax."""
    if syntax == RLELossless:
        ds.compress(RLELossless, pixels, generate_instance_uid=False)
        return
    ds.file_meta.TransferSyntaxUID = syntax
    if syntax not in (DeflatedExplicitVRLittleEndian, ExplicitVRLittleEndian):
        put_frames(ds, encode(pixels, syntax))


def put_frames(ds: Dataset, frames: list[bytes], has_bot: bool = True) -> None:
    ds.PixelData = encapsulate(frames, has_bot=has_bot)
    ds["PixelData"].VR = "OB"
    ds["PixelData"].is_undefined_length = True


def save(ds: Dataset, path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    ds.save_as(path, enforce_file_format=True)
    return path
