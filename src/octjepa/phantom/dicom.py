"""Writes an eye as Ophthalmic Tomography DICOM (SOP class 1.2.840.10008.5.1.4.1.1.77.1.5.4) in its vendor's dialect.

Enhanced multi-frame: pixel measures, orientation and anatomy are shared, frame content, plane position and frame
location are per frame (DICOM PS3.3 A.52.4). Pillow writes JPEG; pydicom's encoders write JPEG 2000 by openjpeg and RLE
by gdcm. Nothing depends on the clock: identifiers and dates come from the seed, so equal seeds give equal bytes.
"""

from __future__ import annotations

import hashlib
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Final

import numpy as np
from jaxtyping import UInt8
from pydicom.dataset import Dataset, FileMetaDataset
from pydicom.encaps import encapsulate
from pydicom.pixels.encoders import JPEG2000LosslessEncoder, RLELosslessEncoder
from pydicom.uid import ExplicitVRLittleEndian, JPEG2000Lossless, JPEGBaseline8Bit, RLELossless

from octjepa.phantom.dialect import Dialect, dialect_of
from octjepa.phantom.eye import Eye

SOP_CLASS = "1.2.840.10008.5.1.4.1.1.77.1.5.4"
_PHOTOGRAPHY_8_BIT = "1.2.840.10008.5.1.4.1.1.77.1.5.1"
# pydicom's own root names the library that wrote the file, as the standard wants.
_IMPLEMENTATION_UID = "1.2.826.0.1.3680043.8.498.1"
TRANSFER_SYNTAX = {
    "native": ExplicitVRLittleEndian,
    "jpeg": JPEGBaseline8Bit,
    "jpeg2000": JPEG2000Lossless,
    "rle": RLELossless,
}
JPEG_QUALITY = 92
SIDES: Final = {"OD": "R", "OS": "L"}


def derived_uid(*parts: int | str) -> str:
    """A UID under 2.25 (ITU-T X.667) from `parts`; equal parts give equal UIDs."""
    text = "\x1f".join(str(part) for part in parts)
    return "2.25." + str(int.from_bytes(hashlib.blake2b(text.encode(), digest_size=16).digest(), "big"))


def sop_uid(seed: int, eye: Eye) -> str:
    """The SOP instance UID of the file of `eye` in the cohort `seed`."""
    other: list[str] = [] if eye.person.difficulty == "plain" else [eye.person.difficulty]
    other += [] if eye.person.group_effect == 1 else [f"group effect {eye.person.group_effect:g}"]
    other += _variant(eye)
    return derived_uid("phantom", seed, eye.person.index, eye.laterality, eye.device, eye.size, *other)


def _variant(eye: Eye) -> list[str]:
    return [eye.variant] if eye.variant else []


def write_eye(path: Path, eye: Eye, seed: int) -> None:
    """Writes `eye` to `path` with its 128-byte preamble. Raises OSError where the disk refuses."""
    buffer = io.BytesIO()
    eye_dataset(eye, seed).save_as(buffer, enforce_file_format=True)
    path.write_bytes(buffer.getvalue())


def eye_dataset(eye: Eye, seed: int) -> Dataset:
    """The whole file as a pydicom dataset, file meta included."""
    dialect, uid = dialect_of(eye.device), sop_uid(seed, eye)
    ds = item(**_CONSTANT, **_identity(eye, dialect, uid, seed), **_image(eye, dialect, uid))
    ds.file_meta = file_meta(uid, dialect.codec, "OCTJEPA_PHANTOM")
    ds.SharedFunctionalGroupsSequence = [_shared_groups(eye, seed)]
    ds.PerFrameFunctionalGroupsSequence = _frame_groups(eye, dialect, seed)
    _set_pixels(ds, eye, dialect)
    return ds


def item(**elements: object) -> Dataset:
    """A data set of `elements`, for a sequence."""
    dataset = Dataset()
    for keyword, value in elements.items():
        setattr(dataset, keyword, value)
    return dataset


def coded(value: str, scheme: str, meaning: str) -> Dataset:
    """A coded concept."""
    return item(CodeValue=value, CodingSchemeDesignator=scheme, CodeMeaning=meaning)


def coded_retina() -> Dataset:
    """The anatomic region retina."""
    return coded("5665001", "SCT", "Retina")


def file_meta(uid: str, codec: str, implementation: str) -> FileMetaDataset:
    """The file meta information of an instance `uid` whose pixels have the coding `codec`."""
    meta = FileMetaDataset()
    meta.FileMetaInformationVersion = b"\x00\x01"
    meta.MediaStorageSOPClassUID = SOP_CLASS
    meta.MediaStorageSOPInstanceUID = uid
    meta.TransferSyntaxUID = TRANSFER_SYNTAX[codec]
    meta.ImplementationClassUID = _IMPLEMENTATION_UID
    meta.ImplementationVersionName = implementation
    return meta


def _identity(eye: Eye, dialect: Dialect, uid: str, seed: int) -> dict[str, object]:
    """Patient, study, series, equipment and acquisition."""
    index = eye.person.index
    day = eye.person.study_visit_date.replace("-", "")
    clock = f"{9 + index % 8:02d}{7 * index % 60:02d}00"
    return {
        "ImageType": ["ORIGINAL", "PRIMARY"],
        "SOPClassUID": SOP_CLASS,
        "SOPInstanceUID": uid,
        "StudyDate": day,
        "ContentDate": day,
        "StudyTime": clock,
        "ContentTime": clock,
        "AcquisitionDateTime": day + clock,
        "Modality": "OPT",
        "Manufacturer": dialect.manufacturer,
        "ManufacturerModelName": dialect.model,
        "PatientID": dialect.patient_id_prefix + eye.person.person_id,
        "ProtocolName": f"{dialect.protocol} oct",
        "StudyInstanceUID": derived_uid("phantom study", seed, index, *_variant(eye)),
        "SeriesInstanceUID": derived_uid("phantom series", uid),
        "FrameOfReferenceUID": derived_uid("phantom frame of reference", uid),
        "SynchronizationFrameOfReferenceUID": derived_uid("phantom synchronization", uid),
        "ImageLaterality": SIDES[eye.laterality],
        "AnatomicRegionSequence": [coded_retina()],
        "AcquisitionDeviceTypeCodeSequence": [coded("392012008", "SCT", "Optical Coherence Tomography Scanner")],
        "DepthSpatialResolution": dialect.axial_resolution_um,  # optical resolution in um, not the pixel spacing
        "IlluminationWaveLength": 1050.0 if dialect.device == "topcon_triton" else 870.0,
    }


INTENSITY_8_BIT: Final[dict[str, object]] = {
    "SamplesPerPixel": 1,
    "PhotometricInterpretation": "MONOCHROME2",
    "BitsAllocated": 8,
    "BitsStored": 8,
    "HighBit": 7,
    "PixelRepresentation": 0,
}
# Elements that are the same in every file. AI-READI writes the sex M for everyone.
_CONSTANT: Final[dict[str, object]] = {
    "AccessionNumber": "",
    "DeviceSerialNumber": "0",
    "SoftwareVersions": "synthetic",
    "ReferringPhysicianName": "",
    "PatientName": "",
    "PatientBirthDate": "",
    "PatientSex": "M",
    "StudyID": "",
    "SeriesNumber": "1",
    "InstanceNumber": "1",
    "PositionReferenceIndicator": "",
    "SynchronizationTrigger": "NO TRIGGER",
    "AcquisitionTimeSynchronized": "N",
    "AcquisitionContextSequence": [],
    "PupilDilated": "YES",
    "AxialLengthOfTheEye": None,
    "HorizontalFieldOfView": None,
    "RefractiveStateSequence": [],
    "EmmetropicMagnification": None,
    "IntraOcularPressure": None,
    "DetectorType": "CCD",
    "MaximumDepthDistortion": 0.5,
    "AlongScanSpatialResolution": 14.0,
    "MaximumAlongScanDistortion": 0.5,
    "AcrossScanSpatialResolution": 14.0,
    "MaximumAcrossScanDistortion": 0.5,
    "IlluminationPower": 1200.0,
    "IlluminationBandwidth": 50.0,
    **INTENSITY_8_BIT,
    "BurnedInAnnotation": "NO",
    "PresentationLUTShape": "IDENTITY",
    "ConcatenationFrameOffsetNumber": 0,
    "InConcatenationNumber": 1,
}


def _image(eye: Eye, dialect: Dialect, uid: str) -> dict[str, object]:
    """Image pixels and multi-frame dimensions."""
    return {
        **frame_elements(eye.pixels.shape, derived_uid("phantom dimensions", uid)),
        "LossyImageCompression": "01" if dialect.codec == "jpeg" else "00",
    }


def frame_elements(shape: tuple[int, ...], dimension: str) -> dict[str, object]:
    """Size of the frames `[D, H, W]`, which the dimensions stack and position in stack (UID `dimension`) order."""
    frames, depth, columns = shape
    return {
        "NumberOfFrames": frames,
        "Rows": depth,
        "Columns": columns,
        "DimensionOrganizationSequence": [item(DimensionOrganizationUID=dimension)],
        "DimensionIndexSequence": [
            item(
                DimensionOrganizationUID=dimension,
                DimensionIndexPointer=pointer,
                FunctionalGroupPointer=(0x0020, 0x9111),
            )
            for pointer in ((0x0020, 0x9056), (0x0020, 0x9057))
        ],
    }


def frame_content(number: int) -> Dataset:
    """The frame content of the frame with this number, from 1."""
    return item(StackID="1", InStackPositionNumber=number, DimensionIndexValues=[1, number])


def thickness_mm(eye: Eye) -> float:
    """SliceThickness as the vendor writes it."""
    dz, _, dx = eye.spacing_mm
    return dx if dialect_of(eye.device).thickness_is_column_spacing else dz


def _shared_groups(eye: Eye, seed: int) -> Dataset:
    _, dy, dx = eye.spacing_mm
    reference = item(
        ReferencedSOPClassUID=_PHOTOGRAPHY_8_BIT,
        ReferencedSOPInstanceUID=fundus_uid(seed, eye),
        PurposeOfReferenceCodeSequence=[coded("121311", "DCM", "Localizer")],
    )
    measures = item(SliceThickness=decimal_text(thickness_mm(eye)), PixelSpacing=[decimal_text(dy), decimal_text(dx)])
    return item(
        ReferencedImageSequence=[reference],
        DerivationImageSequence=[],
        FrameAnatomySequence=[item(AnatomicRegionSequence=[coded_retina()], FrameLaterality=SIDES[eye.laterality])],
        PlaneOrientationSequence=[item(ImageOrientationPatient=[1, 0, 0, 0, 0, -1])],
        PixelMeasuresSequence=[measures],
    )


def fundus_uid(seed: int, eye: Eye) -> str:
    """The localizer photograph that the scan refers to; it is named but not part of the cohort."""
    return derived_uid("phantom fundus", seed, eye.person.index, eye.laterality, *_variant(eye))


def _frame_groups(eye: Eye, dialect: Dialect, seed: int) -> list[Dataset]:
    frames, dz = len(eye.pixels), eye.spacing_mm[0]
    upward = 1 if dialect.first_frame == "inferior" else -1
    localizer = fundus_uid(seed, eye)
    groups = []
    for i in range(frames):
        position = ["0", decimal_text(upward * i * dz), "0"] if dialect.has_positions else []
        line = 768 * (i + 0.5) / frames
        line = 768 - line if upward > 0 else line
        location = item(
            ReferencedSOPClassUID=_PHOTOGRAPHY_8_BIT,
            ReferencedSOPInstanceUID=localizer,
            ReferenceCoordinates=[line, 0.0, line, 767.0],
            OphthalmicImageOrientation="LINEAR",
        )
        groups.append(
            item(
                FrameContentSequence=[frame_content(i + 1)],
                PlanePositionSequence=[item(ImagePositionPatient=position)],
                OphthalmicFrameLocationSequence=[location],
            )
        )
    return groups


def _set_pixels(ds: Dataset, eye: Eye, dialect: Dialect) -> None:
    if dialect.codec == "native":
        set_native_pixels(ds, eye.pixels)
        return
    frames = encode_frames(eye.pixels, dialect.codec)
    if dialect.codec == "jpeg":
        ds.LossyImageCompressionRatio = f"{eye.pixels.size / sum(map(len, frames)):.2f}"
        ds.LossyImageCompressionMethod = "ISO_10918_1"
    ds.add_new(0x7FE00010, "OB", encapsulate(frames))
    ds["PixelData"].is_undefined_length = True


def set_native_pixels(ds: Dataset, pixels: UInt8[np.ndarray, "D H W"]) -> None:
    """Puts uncompressed pixels into `ds`."""
    data = pixels.tobytes()
    ds.add_new(0x7FE00010, "OB", data + b"\x00" * (len(data) % 2))


def encode_frames(pixels: UInt8[np.ndarray, "D H W"], codec: str) -> list[bytes]:
    """Frames -> one code stream each; `codec` is "jpeg", "jpeg2000" or "rle"."""
    if codec == "jpeg":
        return [_jpeg(frame) for frame in pixels]
    # gdcm writes RLE 20 times faster than pydicom's own encoder; openjpeg is the only JPEG 2000 one.
    encoder, plugin = (RLELosslessEncoder, "gdcm") if codec == "rle" else (JPEG2000LosslessEncoder, "pylibjpeg")
    frames, depth, columns = pixels.shape
    return [
        encoder.encode(
            pixels,
            index=index,
            encoding_plugin=plugin,
            rows=depth,
            columns=columns,
            number_of_frames=frames,
            samples_per_pixel=1,
            bits_allocated=8,
            bits_stored=8,
            pixel_representation=0,
            photometric_interpretation="MONOCHROME2",
        )
        for index in range(frames)
    ]


def _jpeg(frame: UInt8[np.ndarray, "H W"]) -> bytes:
    from PIL import Image

    buffer = io.BytesIO()
    Image.fromarray(frame).save(buffer, "JPEG", quality=JPEG_QUALITY)
    return buffer.getvalue()


def decimal_text(value: float) -> str:
    """A number as DICOM decimal text: at most 16 characters."""
    return f"{value:.8f}".rstrip("0").rstrip(".")


def spacing_text(spacing: Sequence[float]) -> str:
    """Pixel spacing as the manifest writes it: the text of a list."""
    return "[" + ", ".join(decimal_text(value) for value in spacing) + "]"
