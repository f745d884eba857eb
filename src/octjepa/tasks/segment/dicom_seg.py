"""Codes as a DICOM Segmentation (PS3.3 A.51), binary, a frame per class and B-scan that holds it.

It references the scan frame by frame, and copies of it what ties it to the scan: study, series and instance UIDs, frame
of reference, and where the scan gives them orientation and position of the B-scans. Patient's name, id, birth date and
sex, and the date and time of the study, are empty, as the standard allows (type 2): a PACS files it by its study UID.
"""

from __future__ import annotations

import copy
import datetime
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pydicom
from jaxtyping import UInt8
from pydicom.dataset import Dataset, FileMetaDataset
from pydicom.pixels import pack_bits
from pydicom.uid import ExplicitVRLittleEndian, generate_uid

from octjepa.errors import UsageError
from octjepa.tasks.segment.dicom_read import SEGMENTATION

_PURPOSE = "Source image for image processing operation"
_SCHEME = "99OCTJEPA"  # private: no standard set of codes names every layer


def write_segmentation(
    path: Path, codes: UInt8[np.ndarray, "N R C"], classes: Sequence[str], spacing_mm: tuple[float, float, float],
    source: Path,
) -> None:  # fmt: skip
    """`codes` in the order of the frames of `source`, a multi-frame DICOM scan.

    Raises UsageError: `source` is none, has other frames, or no class was found in any voxel.
    """
    scan = _source(source)
    if int(scan.get("NumberOfFrames", 0)) != len(codes) or (scan.Rows, scan.Columns) != codes.shape[1:]:
        raise UsageError(f"{source} has other frames than the segmentation: it cannot reference them")
    kept = [(code, frame) for code in range(1, len(classes) + 1) for frame in range(len(codes))]
    kept = [(code, frame) for code, frame in kept if (codes[frame] == code).any()]
    if not kept:
        raise UsageError(f"no class was found in {source}: a DICOM Segmentation needs a frame; write NIfTI alone")
    made = _whole(scan, codes, classes, spacing_mm)
    made.NumberOfFrames = len(kept)
    made.PerFrameFunctionalGroupsSequence = [_frame(scan, code, frame, codes) for code, frame in kept]
    made.PixelData = pack_bits(np.stack([codes[frame] == code for code, frame in kept]).astype(np.uint8))
    made.save_as(path, enforce_file_format=True)


def _source(source: Path) -> Dataset:
    try:
        scan = pydicom.dcmread(source, stop_before_pixels=True)
        for name in ("SOPClassUID", "SOPInstanceUID", "StudyInstanceUID", "SeriesInstanceUID"):
            if not scan.get(name):
                raise UsageError(f"{source} has no {name}: a DICOM Segmentation cannot reference it; write NIfTI")
    except (pydicom.errors.InvalidDicomError, OSError):
        raise UsageError(
            f"{source} is no DICOM file: a DICOM Segmentation needs one to reference; write NIfTI"
        ) from None
    return scan


def _whole(scan: Dataset, codes: np.ndarray, classes: Sequence[str], spacing_mm: tuple[float, float, float]) -> Dataset:
    """Everything but the frames."""
    now = datetime.datetime.now(datetime.UTC)
    made = Dataset()
    made.file_meta = FileMetaDataset()
    made.file_meta.TransferSyntaxUID = ExplicitVRLittleEndian
    made.file_meta.MediaStorageSOPClassUID = made.SOPClassUID = SEGMENTATION
    made.file_meta.MediaStorageSOPInstanceUID = made.SOPInstanceUID = generate_uid()
    made.SpecificCharacterSet = "ISO_IR 192"  # names of classes may be in any language
    # Patient, study, series
    for empty in (
        "PatientName",
        "PatientID",
        "PatientBirthDate",
        "PatientSex",
        "StudyDate",
        "StudyTime",
        "ReferringPhysicianName",
        "StudyID",
        "AccessionNumber",
    ):
        setattr(made, empty, "")
    made.StudyInstanceUID, made.SeriesInstanceUID = scan.StudyInstanceUID, generate_uid()
    made.Modality, made.SeriesNumber, made.InstanceNumber = "SEG", 1, 1
    if scan.get("FrameOfReferenceUID"):
        made.FrameOfReferenceUID, made.PositionReferenceIndicator = scan.FrameOfReferenceUID, ""
    made.Manufacturer = made.ManufacturerModelName = "octjepa"
    made.DeviceSerialNumber, made.SoftwareVersions = "none", version("octjepa")
    made.ReferencedSeriesSequence = [_of(
        SeriesInstanceUID=scan.SeriesInstanceUID,
        ReferencedInstanceSequence=[
            _of(ReferencedSOPClassUID=scan.SOPClassUID, ReferencedSOPInstanceUID=scan.SOPInstanceUID)
        ],
    )]  # fmt: skip
    # Image and segmentation
    made.ImageType = ["DERIVED", "PRIMARY"]
    made.ContentDate, made.ContentTime = now.strftime("%Y%m%d"), now.strftime("%H%M%S")
    made.ContentLabel, made.ContentDescription, made.ContentCreatorName = "SEGMENTATION", "Layers or lesions", ""
    made.SamplesPerPixel, made.PhotometricInterpretation, made.PixelRepresentation = 1, "MONOCHROME2", 0
    made.BitsAllocated = made.BitsStored = 1
    made.HighBit, made.LossyImageCompression = 0, str(scan.get("LossyImageCompression") or "00")
    if made.LossyImageCompression == "01":
        made.LossyImageCompressionRatio = scan.get("LossyImageCompressionRatio") or 1
        made.LossyImageCompressionMethod = scan.get("LossyImageCompressionMethod") or "ISO_10918_1"
    made.Rows, made.Columns = codes.shape[1:]
    made.SegmentationType, made.SegmentsOverlap = "BINARY", "NO"
    made.SegmentSequence = [_segment(number, name) for number, name in enumerate(classes, start=1)]
    dz, dy, dx = (f"{one:.8g}" for one in spacing_mm)
    shared = _of(PixelMeasuresSequence=[_of(PixelSpacing=[dy, dx], SliceThickness=dz, SpacingBetweenSlices=dz)])
    orientation = _group(scan, None, "PlaneOrientationSequence")
    if orientation is not None:
        shared.PlaneOrientationSequence = [orientation]
    made.SharedFunctionalGroupsSequence = [shared]
    organisation = generate_uid()
    made.DimensionOrganizationSequence = [_of(DimensionOrganizationUID=organisation)]
    made.DimensionIndexSequence = [
        _of(DimensionOrganizationUID=organisation, DimensionIndexPointer=pointer, FunctionalGroupPointer=group,
            DimensionDescriptionLabel=label)
        for pointer, group, label in (
            (0x0062000B, 0x0062000A, "Segment"),  # ReferencedSegmentNumber in SegmentIdentificationSequence
            (0x00209057, 0x00209111, "B-scan"),  # InStackPositionNumber in FrameContentSequence
        )
    ]  # fmt: skip
    return made


def _segment(number: int, name: str) -> Dataset:
    return _of(
        SegmentNumber=number, SegmentLabel=name[:64], SegmentAlgorithmType="AUTOMATIC", SegmentAlgorithmName="octjepa",
        SegmentedPropertyCategoryCodeSequence=[_code("91723000", "SCT", "Anatomical structure")],
        SegmentedPropertyTypeCodeSequence=[_code(name[:16], _SCHEME, name[:64])],
    )  # fmt: skip


def _frame(scan: Dataset, code: int, frame: int, codes: np.ndarray) -> Dataset:
    made = _of(
        FrameContentSequence=[
            _of(DimensionIndexValues=[code, frame + 1], StackID="1", InStackPositionNumber=frame + 1)
        ],
        SegmentIdentificationSequence=[_of(ReferencedSegmentNumber=code)],
        DerivationImageSequence=[_of(
            DerivationCodeSequence=[_code("113076", "DCM", "Segmentation")],
            SourceImageSequence=[_of(
                ReferencedSOPClassUID=scan.SOPClassUID, ReferencedSOPInstanceUID=scan.SOPInstanceUID,
                ReferencedFrameNumber=frame + 1, SpatialLocationsPreserved="YES",
                PurposeOfReferenceCodeSequence=[_code("121322", "DCM", _PURPOSE)],
            )],
        )],
    )  # fmt: skip
    position = _group(scan, frame, "PlanePositionSequence")
    if position is not None:
        made.PlanePositionSequence = [position]
    return made


def _group(scan: Dataset, frame: int | None, name: str) -> Dataset | None:
    """A functional group of the scan, shared or of one frame (the first where None); None where it has none."""
    groups: Any = [scan.get("SharedFunctionalGroupsSequence"), scan.get("PerFrameFunctionalGroupsSequence")]
    for found, place in zip(groups, (0, frame or 0), strict=True):
        if found and place < len(found) and name in found[place] and len(found[place][name].value):
            item = found[place][name].value[0]
            return copy.deepcopy(item) if all(element.value for element in item) else None  # some write empty ones
    return None


def _of(**fields: Any) -> Dataset:
    made = Dataset()
    for name, value in fields.items():
        setattr(made, name, value)
    return made


def _code(value: str, scheme: str, meaning: str) -> Dataset:
    return _of(CodeValue=value, CodingSchemeDesignator=scheme, CodeMeaning=meaning)
