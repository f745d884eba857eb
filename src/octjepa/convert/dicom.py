"""Writes a scan as one multi-frame DICOM file of the class Ophthalmic Tomography (PS3.3 A.52.4), uncompressed.

The file holds what an `OCTVolume` knows: pixels, spacing, the position of each B-scan, eye, device and protocol.
Patient, dates and acquisition settings are empty or absent, because they are personal or unknown. Every UID is derived
from the pixels or the pseudonyms of person and visit, so that none leads back to the source, and equal scans give equal
files. The file is for software that reads images; an archive that checks every attribute of the class may refuse it.
"""

from __future__ import annotations

import io
from importlib.metadata import version
from pathlib import Path

import numpy as np
from pydicom.dataset import Dataset

from octjepa.convert.description import NotPreserved
from octjepa.files import write_atomic
from octjepa.phantom.dicom import (
    INTENSITY_8_BIT,
    SIDES,
    SOP_CLASS,
    coded,
    coded_retina,
    derived_uid,
    file_meta,
    frame_content,
    frame_elements,
    item,
    set_native_pixels,
)
from octjepa.read.devices import describe_device
from octjepa.read.orientation import VERTICAL_NOTE, has_slice_direction
from octjepa.volume import AXES, OCTVolume

_LONGEST_DECIMAL = 16
LONGEST_TEXT = 64
# Required attributes whose values are personal, or unknown for a scan that was read from another format.
_EMPTY = (
    "AccessionNumber",
    "AcquisitionDateTime",
    "ContentDate",
    "ContentTime",
    "PatientBirthDate",
    "PatientName",
    "PatientSex",
    "PositionReferenceIndicator",
    "ReferringPhysicianName",
    "StudyDate",
    "StudyID",
    "StudyTime",
)
# Cosines of rows and columns in AI-READI's coordinates: x to the patient's left, z out of the eye.
_HORIZONTAL, _VERTICAL = [1, 0, 0, 0, 0, -1], [0, 1, 0, 0, 0, -1]


def write_dicom(path: Path, volume: OCTVolume) -> None:
    """Writes `volume` to `path`.

    Raises NotPreserved for radial and circular scans, because an `OCTVolume` does not hold where their B-scans lie, and
    OctjepaError if the file cannot be written.
    """
    if volume.pattern != "raster":
        raise NotPreserved(
            f"a {volume.pattern} scan: DICOM needs the position of each B-scan, which octjepa keeps for rasters only"
        )
    buffer = io.BytesIO()
    _dataset(volume).save_as(buffer, enforce_file_format=True)
    write_atomic(path, lambda file: file.write(buffer.getbuffer()))


def _dataset(volume: OCTVolume) -> Dataset:
    uid = derived_uid("octjepa convert", volume.content_hash)
    device = describe_device(volume.device)
    is_known = volume.device != "unknown"
    study = derived_uid("octjepa convert study", volume.person_id, volume.visit or volume.content_hash)
    dataset = item(
        **dict.fromkeys(_EMPTY, ""),
        **INTENSITY_8_BIT,
        **frame_elements(volume.pixels.shape, derived_uid("octjepa convert dimensions", volume.content_hash)),
        SpecificCharacterSet="ISO_IR 192",  # UTF-8: ids and protocols may be in any script
        SOPClassUID=SOP_CLASS,
        SOPInstanceUID=uid,
        StudyInstanceUID=study,
        SeriesInstanceUID=derived_uid("octjepa convert series", volume.content_hash),
        FrameOfReferenceUID=derived_uid("octjepa convert frame of reference", volume.content_hash),
        Modality="OPT",
        ImageType=["DERIVED", "PRIMARY"],
        InstanceNumber="1",
        SeriesNumber="1",
        PatientID="" if "person_unknown" in volume.notes else volume.person_id[:LONGEST_TEXT],
        PatientIdentityRemoved="YES",
        Manufacturer=device.make if is_known else "",
        ManufacturerModelName=device.model if is_known else "",
        ProtocolName=volume.protocol[:LONGEST_TEXT],
        AnatomicRegionSequence=[coded_retina()],
        AcquisitionDeviceTypeCodeSequence=[coded("392012008", "SCT", "Optical Coherence Tomography Scanner")],
        AcquisitionContextSequence=[],
        BurnedInAnnotation="YES" if "burned_in_text" in volume.notes else "NO",
        LossyImageCompression="00",
        PresentationLUTShape="IDENTITY",
        DerivationDescription=_derivation(volume),
        ContributingEquipmentSequence=[
            item(
                PurposeOfReferenceCodeSequence=[coded("109103", "DCM", "Modifying Equipment")],
                Manufacturer="octjepa",
                SoftwareVersions=version("octjepa"),
            )
        ],
    )
    if volume.laterality:
        dataset.ImageLaterality = SIDES[volume.laterality]
    dataset.file_meta = file_meta(uid, "native", "OCTJEPA_CONVERT")
    dataset.SharedFunctionalGroupsSequence = [_shared_groups(volume)]
    dataset.PerFrameFunctionalGroupsSequence = _frame_groups(volume)
    set_native_pixels(dataset, volume.pixels)
    return dataset


def _derivation(volume: OCTVolume) -> str:
    """Where the scan comes from, in words: format, sources of the spacing, uncertain axes."""
    sources = ", ".join(f"{axis} from {volume.provenance[axis]}" for axis in AXES)
    doubt = f"; uncertain: {', '.join(volume.uncertain)}" if volume.uncertain else ""
    return f"Converted by octjepa from {volume.format}; spacing: {sources}{doubt}"


def _shared_groups(volume: OCTVolume) -> Dataset:
    dz, dy, dx = map(_decimal, volume.spacing_mm)
    anatomy = item(AnatomicRegionSequence=[coded_retina()])
    if volume.laterality:
        anatomy.FrameLaterality = SIDES[volume.laterality]
    shared = item(
        FrameAnatomySequence=[anatomy],
        PixelMeasuresSequence=[item(SliceThickness=dz, SpacingBetweenSlices=dz, PixelSpacing=[dy, dx])],
    )
    if has_slice_direction(volume):  # else no format states how the B-scans lie in space
        cosines = _VERTICAL if VERTICAL_NOTE in volume.notes else _HORIZONTAL
        shared.PlaneOrientationSequence = [item(ImageOrientationPatient=cosines)]
    return shared


def _frame_groups(volume: OCTVolume) -> list[Dataset]:
    """Position of each B-scan along the normal of the plane, in mm from the first one."""
    slices = volume.shape[0]
    positions = volume.slice_positions_mm
    along = np.arange(slices) * volume.spacing_mm[0] if positions is None else positions - positions[0]
    axis = np.array([-1.0, 0.0, 0.0] if VERTICAL_NOTE in volume.notes else [0.0, 1.0, 0.0])
    return [
        item(
            FrameContentSequence=[frame_content(number)],
            PlanePositionSequence=[item(ImagePositionPatient=[_decimal(float(mm)) for mm in axis * offset])],
        )
        for number, offset in enumerate(along, 1)
    ]


def _decimal(value: float) -> str:
    """A number as DICOM decimal text of at most 16 characters."""
    text = repr(value + 0.0)  # not -0.0
    if len(text) > _LONGEST_DECIMAL or "e" in text:
        whole = len(f"{value:.0f}")
        text = f"{value:.{_LONGEST_DECIMAL - whole - 1}f}".rstrip("0").rstrip(".")
    return text
