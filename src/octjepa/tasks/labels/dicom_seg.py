"""DICOM Segmentations (PS3.3 A.51), read and written by highdicom (extra `segment`).

Written: binary, a frame for each class and B-scan that holds it. It references the scan frame by frame, and holds of it
what ties it to the scan: UIDs of study, series, instance and frame of reference, position and orientation of the
B-scans. Patient's name, id, birth date and sex, and the date and time of the study, are empty, as the standard allows
(type 2): a PACS files it by its study UID.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import UInt8
from pydicom.dataset import Dataset
from pydicom.uid import generate_uid

from octjepa.errors import UsageError, VolumeRejected, install_command
from octjepa.files import write_atomic
from octjepa.read.dicom_file import open_dicom, read_header
from octjepa.read.intensity import check_size

SEGMENTATION = "1.2.840.10008.5.1.4.1.1.66.4"
_ADAPTED = ("network", "adapted")  # name and value of a parameter of the algorithm
MAX_CLASSES = 60
_IDENTIFIERS = ("SOPClassUID", "SOPInstanceUID", "StudyInstanceUID", "SeriesInstanceUID")
_EMPTY = (
    "PatientName",
    "PatientID",
    "PatientBirthDate",
    "PatientSex",
    "StudyDate",
    "StudyTime",
    "ReferringPhysicianName",
    "StudyID",
    "AccessionNumber",
)
Code = tuple[str, str, str]  # value, coding scheme, meaning
_STRUCTURE = ("91723000", "SCT", "Anatomical Structure")
_SUBSTANCE = ("91720002", "SCT", "Body Substance")
_ABNORMAL = ("49755003", "SCT", "Morphologically Abnormal Structure")
_TISSUE = ("85756007", "SCT", "Tissue")
_RETINA = ("5665001", "SCT", "Retina")
# (words of a class's name, category, type): the first that matches; CID 7150 and 7151.
_PROPERTIES: tuple[tuple[tuple[str, ...], Code, Code], ...] = (
    (("fluid", "irf", "srf"), _SUBSTANCE, ("32457005", "SCT", "Body fluid")),
    (("edema", "oedema"), _ABNORMAL, ("79654002", "SCT", "Edema")),
    (("hemorrhage", "haemorrhage"), _ABNORMAL, ("50960005", "SCT", "Hemorrhage")),
    (("cyst", "cysts"), _ABNORMAL, ("367643001", "SCT", "Cyst")),
    (("drusen", "atrophy", "epiretinal", "ped", "lesion", "lesions", "scar", "sub"), _ABNORMAL, _ABNORMAL),
    (("choroid",), _STRUCTURE, ("68703001", "SCT", "Choroid of eye")),
    (("vitreous",), _STRUCTURE, ("26386000", "SCT", "Vitreous")),
    (
        ("inner", "rnfl", "nfl", "gcl", "ipl", "inl", "opl", "onl", "elm", "ez", "photoreceptors", "rpe", "retina"),
        _STRUCTURE,
        _RETINA,
    ),
)
_OTHER = _TISSUE, ("81745001", "SCT", "Eye")


@dataclass(frozen=True, eq=False)
class Segmentation:
    """`codes` k is `names[k - 1]`, the k-th segment; spacing (slice, depth, column) where the file tells all three."""

    codes: UInt8[np.ndarray, "N R C"]
    names: tuple[str, ...]
    spacing_mm: tuple[float, float, float] | None


def segment_property(name: str) -> tuple[Code, Code]:
    """The coded category and type of the class called `name`; tissue of the eye if no word of it is known."""
    words = name.lower().replace("-", "_").replace(" ", "_").split("_")
    return next(
        ((category, kind) for words_of_property, category, kind in _PROPERTIES if {*words_of_property} & {*words}),
        _OTHER,
    )


def is_segmentation(path: Path) -> bool:
    """Whether the file is a DICOM Segmentation."""
    try:
        return str(read_header(path, ["SOPClassUID"]).get("SOPClassUID", "")) == SEGMENTATION
    except VolumeRejected:
        return False


def referenced_scan(path: Path) -> str:
    """SOP instance UID of the scan. Raises UsageError: none, or several."""
    try:
        header = read_header(path, ["ReferencedSeriesSequence"])
    except VolumeRejected as error:
        raise _unreadable(path, error) from None
    uids = {
        str(instance.ReferencedSOPInstanceUID)
        for series in header.get("ReferencedSeriesSequence", [])
        for instance in series.get("ReferencedInstanceSequence", [])
    }
    if len(uids) != 1:
        raise UsageError(f"{path} references {len(uids)} instances; expected one multi-frame OCT scan")
    return uids.pop()


def segment_names(path: Path) -> tuple[str, ...]:
    """Labels of the segments 1, 2, ... Raises UsageError: damaged, more than 60, not numbered from 1."""
    try:
        segments = sorted(
            read_header(path, ["SegmentSequence"]).SegmentSequence, key=lambda segment: int(segment.SegmentNumber)
        )
        names = tuple(str(segment.SegmentLabel) for segment in segments)
        numbers = [int(segment.SegmentNumber) for segment in segments]
    except (VolumeRejected, AttributeError, TypeError, ValueError) as error:
        raise _unreadable(path, error) from None
    if numbers != list(range(1, len(numbers) + 1)) or len(names) > MAX_CLASSES:
        raise UsageError(f"{path}: expected at most {MAX_CLASSES} segments numbered 1, 2, ...")
    return names


def segmentation_source(path: Path) -> str:
    """The author of the segments, according to their algorithm type (0062,0008); "" if the file does not state it.

    For example "made automatically by octjepa 0.1.0". Segments of several origins are listed in the order of the file.
    """
    try:
        segments = read_header(path, ["SegmentSequence"]).get("SegmentSequence", [])
        return "; ".join(dict.fromkeys(filter(None, map(_origin, segments))))
    except (VolumeRejected, AttributeError, TypeError, ValueError):
        return ""


def _origin(segment: Dataset) -> str:
    """How one segment was made. Only the algorithm is named, never a person."""
    kind = str(segment.get("SegmentAlgorithmType", "")).upper()
    if kind == "MANUAL":
        return "marked by hand"
    if kind not in ("AUTOMATIC", "SEMIAUTOMATIC"):
        return ""
    algorithms = segment.get("SegmentationAlgorithmIdentificationSequence") or []
    version_name = str(algorithms[0].get("AlgorithmVersion", "")) if len(algorithms) else ""
    name = f"{segment.get('SegmentAlgorithmName', '')} {version_name}".strip()[:64]
    name = "".join(letter for letter in name if letter.isprintable())
    way = "made automatically" if kind == "AUTOMATIC" else "made semi-automatically"
    is_adapted = len(algorithms) > 0 and algorithms[0].get("AlgorithmParameters") == "=".join(_ADAPTED)
    return (f"{way} by {name}" if name else way) + (", adapted network" if is_adapted else "")


def read_segmentation(path: Path, frames: int) -> Segmentation:
    """Of a scan of `frames` B-scans. Raises UsageError: damaged, not binary, overlapping segments, of another scan."""
    names, uid = segment_names(path), referenced_scan(path)
    try:
        with open_dicom(path) as stream:
            dataset = stream.read()
        check_size((frames, int(dataset.Rows), int(dataset.Columns)), 1)  # of what is returned
        file = _highdicom().seg.Segmentation.from_dataset(dataset, copy=False)
        kind = file.segmentation_type.value
        referenced = [
            int(np.atleast_1d(source.ReferencedFrameNumber)[0])
            for group in file.PerFrameFunctionalGroupsSequence
            for source in group.DerivationImageSequence[0].SourceImageSequence
        ]
    except (VolumeRejected, AttributeError, KeyError, IndexError, TypeError, ValueError) as error:
        raise _unreadable(path, error) from None
    if kind != "BINARY":
        raise UsageError(f"{path} is a {kind.lower()} segmentation; expected a binary one")
    outside = [number for number in referenced if not 1 <= number <= frames]
    if outside:
        raise UsageError(f"{path} references B-scan {outside[0]} of a scan of {frames}: it is of another scan")
    try:
        codes = file.get_pixels_by_source_frame(
            uid,
            range(1, frames + 1),
            combine_segments=True,
            relabel=False,
            assert_missing_frames_are_empty=True,
            ignore_spatial_locations=True,
            dtype=np.uint8,
        )
    except RuntimeError:  # two segments, or one twice, hold the same voxel
        raise UsageError(f"{path}: segments overlap; expected one class a voxel. Give one file a class set") from None
    except (AttributeError, KeyError, IndexError, TypeError, ValueError) as error:
        raise _unreadable(path, error) from None
    return Segmentation(codes, names, _spacing(file))


def write_segmentation(
    path: Path,
    codes: UInt8[np.ndarray, "N R C"],
    classes: Sequence[str],
    spacing_mm: tuple[float, float, float],
    source: Path,
    is_adapted: bool = False,
) -> None:
    """`codes` in the order of the frames of `source`, a multi-frame DICOM scan.

    The parameters of the algorithm (0066,0032) say whether an adapted network made them. Raises UsageError: `source` is
    none, has other frames, or no class was found in any voxel.
    """
    hd, scan = _highdicom(), _read_scan(source)
    if int(scan.get("NumberOfFrames", 0)) != len(codes) or (scan.Rows, scan.Columns) != codes.shape[1:]:
        raise UsageError(f"{source} has other frames than the segmentation: it cannot reference them")
    if not codes.any():
        raise UsageError(f"no class was found in {source}: a DICOM Segmentation needs a frame; write only NIfTI")
    artificial = hd.sr.CodedConcept("123110", "DCM", "Artificial Intelligence")
    parameters = dict([_ADAPTED]) if is_adapted else None
    algorithm = hd.AlgorithmIdentificationSequence("octjepa", artificial, version("octjepa"), parameters=parameters)
    segments = []
    for number, name in enumerate(classes, start=1):
        category, kind = (hd.sr.CodedConcept(*code) for code in segment_property(name))
        segments.append(hd.seg.SegmentDescription(number, name[:64], category, kind, "AUTOMATIC", algorithm))
    segmentation = hd.seg.Segmentation(
        [_deidentified(scan, spacing_mm)],
        codes,
        "BINARY",
        segments,
        generate_uid(),
        1,
        generate_uid(),
        1,
        "octjepa",
        "octjepa",
        version("octjepa"),
        "none",
        content_description="Layers or lesions",
        omit_empty_frames=True,
    )
    write_atomic(path, lambda file: segmentation.save_as(file, enforce_file_format=True))


def _read_scan(source: Path) -> Dataset:
    try:
        scan = read_header(source)
    except VolumeRejected:
        raise UsageError(
            f"{source} is not a DICOM file: a DICOM Segmentation needs one to reference; write NIfTI"
        ) from None
    for name in _IDENTIFIERS:
        if not scan.get(name):
            raise UsageError(f"{source} has no {name}: a DICOM Segmentation cannot reference it; write NIfTI")
    return scan


def _deidentified(scan: Dataset, spacing_mm: tuple[float, float, float]) -> Dataset:
    """The attributes that highdicom copies from a scan: identifiers and geometry, nothing of the patient.

    A scan without positions of its B-scans gets a separate frame of reference, in which they are `spacing_mm` apart.
    """
    dz, dy, dx = (float(f"{mm:.8g}") for mm in spacing_mm)
    dataset, frames = Dataset(), int(scan.NumberOfFrames)
    for name in (*_IDENTIFIERS, "Rows", "Columns", "NumberOfFrames"):
        setattr(dataset, name, getattr(scan, name))
    for name in _EMPTY:
        setattr(dataset, name, "")
    for name in ("LossyImageCompression", "LossyImageCompressionRatio", "LossyImageCompressionMethod"):
        if scan.get(name):
            setattr(dataset, name, scan.get(name))
    measures = _item(PixelSpacing=[dy, dx], SliceThickness=dz, SpacingBetweenSlices=dz)
    orientation = _functional_group(scan, None, "PlaneOrientationSequence")
    positions = [_functional_group(scan, frame, "PlanePositionSequence") for frame in range(frames)]
    distinct = {tuple(map(float, frame.ImagePositionPatient)) for frame in positions if frame is not None}
    if orientation is None or len(distinct) < frames or not scan.get("FrameOfReferenceUID"):
        dataset.FrameOfReferenceUID = generate_uid()
        orientation = _item(ImageOrientationPatient=[1.0, 0.0, 0.0, 0.0, 1.0, 0.0])
        positions = [_item(ImagePositionPatient=[0.0, 0.0, round(frame * dz, 6)]) for frame in range(frames)]
    else:
        dataset.FrameOfReferenceUID = scan.FrameOfReferenceUID
    dataset.Modality, dataset.PositionReferenceIndicator = "OPT", ""
    dataset.SharedFunctionalGroupsSequence = [
        _item(PixelMeasuresSequence=[measures], PlaneOrientationSequence=[orientation])
    ]
    dataset.PerFrameFunctionalGroupsSequence = [_item(PlanePositionSequence=[position]) for position in positions]
    return dataset


def _functional_group(scan: Dataset, frame: int | None, name: str) -> Dataset | None:
    """A functional group of the scan, shared or of one frame (None: the first); None if it has none."""
    groups: Any = [scan.get("SharedFunctionalGroupsSequence"), scan.get("PerFrameFunctionalGroupsSequence")]
    for sequence, index in zip(groups, (0, frame or 0), strict=True):
        if sequence and index < len(sequence) and name in sequence[index] and len(sequence[index][name].value):
            item = sequence[index][name].value[0]
            # some programs write empty groups
            return copy.deepcopy(item) if all(element.value for element in item) else None
    return None


def _spacing(file: Dataset) -> tuple[float, float, float] | None:
    try:
        measures = file.SharedFunctionalGroupsSequence[0].PixelMeasuresSequence[0]
        depth, column = map(float, measures.PixelSpacing)
        return float(measures.get("SpacingBetweenSlices", 1.0)), depth, column  # 1: unknown, as in NIfTI
    except (AttributeError, IndexError, TypeError, ValueError):
        return None


def _item(**fields: Any) -> Dataset:
    item = Dataset()
    for name, value in fields.items():
        setattr(item, name, value)
    return item


def _unreadable(path: Path, error: Exception) -> UsageError:
    return UsageError(f"{path} cannot be read as a DICOM Segmentation ({type(error).__name__})")


def check_highdicom() -> None:
    """Raises UsageError naming the extra if highdicom is missing."""
    _highdicom()


def _highdicom() -> Any:
    """highdicom. Raises UsageError naming the extra."""
    try:
        return import_module("highdicom")
    except ImportError:
        raise UsageError(f"DICOM Segmentations need highdicom: {install_command('segment')}") from None
