"""A scan of which a folder holds one DICOM file per B-scan: found by headers, assembled by position, or refused.

Files belong together that share series, frame of reference, eye, size and coding. Their datasets are joined to that of
a multi-frame file, so that everything else is decided as for one: spacing, order, pixels, identity.
"""

from __future__ import annotations

import hashlib
import os
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from octjepa.errors import VolumeRejected
from octjepa.read.dicom import (
    GENERIC,
    OPHTHALMIC_TOMOGRAPHY,
    has_dicom_magic,
    read_with_pixels,
    stated_text,
    to_raw_scan,
)
from octjepa.read.dicom_file import read_header
from octjepa.read.encapsulated import split_frames
from octjepa.read.formats.sequence import MIN_FRAMES
from octjepa.read.frames import floats
from octjepa.read.personal_data import personal_fields
from octjepa.read.pixels import check_size, integer, read_layout
from octjepa.read.raw_scan import RawScan
from octjepa.reasons import rejection

if TYPE_CHECKING:
    from pydicom.dataset import Dataset

_SUFFIXES = {".dcm", ".dicom", ".dic", ".ima", ""}
_LAST_TAG = 0x00280103  # of `_READ`: what follows is long in multi-frame files
_PEEKED = 8  # of the smallest files of a folder: if none is a single B-scan, no series is looked for
_SHARED = (
    "SeriesInstanceUID",
    "FrameOfReferenceUID",
    "ImageLaterality",
    "Laterality",
    "Rows",
    "Columns",
    "BitsAllocated",
    "SamplesPerPixel",
    "PhotometricInterpretation",
    "PixelRepresentation",
)
_READ = (*_SHARED, "SOPClassUID", "Modality", "NumberOfFrames", "SOPInstanceUID", "InstanceNumber")
# Elements of a file's header that a multi-frame file has in its functional groups.
_GROUPS = {
    "PlanePositionSequence": ("ImagePositionPatient",),
    "PlaneOrientationSequence": ("ImageOrientationPatient",),
    "PixelMeasuresSequence": ("PixelSpacing", "SliceThickness", "SpacingBetweenSlices"),
    "PixelValueTransformationSequence": ("RescaleSlope", "RescaleIntercept"),
}
# Groups that a multi-frame file states for each frame; a file of one frame may state them as shared.
_OF_EACH_FRAME = (
    "PlanePositionSequence",
    "PlaneOrientationSequence",
    "PixelValueTransformationSequence",
    "FrameAnatomySequence",
)
_SAME_POSITION_MM = 1e-4
_EVEN = 0.05  # relative deviation of gaps from their median below which no B-scan can be missing between


class Series(NamedTuple):
    """`member` names the scan within its folder, whatever other files are added; `names` of its files, sorted.

    `beside` are the folder's other files of the same series, such as its localizer.
    """

    member: str
    names: tuple[str, ...]
    beside: tuple[str, ...] = ()


def series_facts(path: Path) -> Dataset | None:
    """The elements by which files are joined, of a DICOM image of any kind; None for another file."""
    try:
        return read_header(path, _READ, _LAST_TAG) if has_dicom_magic(path) else None
    except Exception:  # pydicom raises what a damaged header made of its parser; reading the file says what is wrong
        return None


def _is_single(facts: Dataset | None) -> bool:
    """Whether a file is one frame of OCT in a series.

    A placeholder does not count as a series: an anonymiser may write it into the files of all people.
    """
    if facts is None or integer(facts, "NumberOfFrames") > 1 or not stated_text(facts, "SeriesInstanceUID"):
        return False
    kind = str(facts.get("SOPClassUID", ""))
    return kind == OPHTHALMIC_TOMOGRAPHY or (kind in GENERIC and facts.get("Modality") == "OPT")


def series_in(folder: Path, names: Sequence[str]) -> list[Series]:
    """The scans of which `folder` holds a file per B-scan, four at least, sorted by their first name."""
    if sum(map(may_be_b_scan, names)) < MIN_FRAMES:
        return []
    try:
        sizes = {name: os.path.getsize(folder / name) for name in names if may_be_b_scan(name)}
    except OSError:
        return []
    return find_series(sizes, lambda some: [series_facts(folder / name) for name in some])


def find_series(
    sizes: Mapping[str, int], facts_of: Callable[[Sequence[str]], Sequence[Dataset | None]], peeked: int = _PEEKED
) -> list[Series]:
    """The scans among files of which `sizes` holds the bytes, by name; `facts_of` some of them is `series_facts`.

    If none of the `peeked` smallest is a single B-scan, the others are not opened.
    """
    if not any(map(_is_single, facts_of(sorted(sizes, key=lambda name: (sizes[name], name))[:peeked]))):
        return []
    by_series: defaultdict[str, defaultdict[tuple[str, ...], dict[str, str]]] = defaultdict(lambda: defaultdict(dict))
    every: defaultdict[str, list[str]] = defaultdict(list)  # names of all files of a series, whatever they hold
    for name, facts in zip(sorted(sizes), facts_of(sorted(sizes)), strict=True):
        if facts is None:
            continue
        every[str(facts.get("SeriesInstanceUID") or "")].append(name)
        if _is_single(facts):
            key = tuple(_shared(facts).values())
            by_series[str(facts.SeriesInstanceUID)][key].setdefault(stated_text(facts, "SOPInstanceUID") or name, name)
    made = []
    for uid, groups in by_series.items():
        whole = {key: files for key, files in groups.items() if len(files) >= MIN_FRAMES}
        if not whole and len(groups) >= MIN_FRAMES:  # what keeps its files apart, their reading says
            whole = {(uid,): {name: name for files in groups.values() for name in files.values()}}
        for key, files in whole.items():
            names_of_scan = tuple(files.values())
            beside = tuple(name for name in every[uid] if name not in names_of_scan)
            made.append(Series(hashlib.sha256(repr((uid, key)).encode()).hexdigest()[:12], names_of_scan, beside))
    return sorted(made, key=lambda series: series.names[0])


def may_be_b_scan(name: str) -> bool:
    """By its name: not hidden, and with no suffix, DICOM's own, or a number, as in a UID."""
    suffix = Path(name).suffix.lower()
    return not name.startswith(".") and (suffix in _SUFFIXES or suffix[1:].isdigit())


def _shared(facts: Dataset) -> dict[str, str]:
    """The facts that all B-scans of a scan share, by name."""
    shared = {element: str(facts.get(element) or "") for element in _SHARED}
    return {**shared, "TransferSyntaxUID": str(getattr(facts, "file_meta", {}).get("TransferSyntaxUID", ""))}


def _may_belong(facts: Dataset, first: Dataset) -> bool:
    """Whether a file of the series may be a B-scan of the scan of `first`: one frame of its size, not the other eye."""
    shared = (_shared(facts), _shared(first))
    eyes = {fields["ImageLaterality"] or fields["Laterality"] for fields in shared} - {""}
    sizes = {(fields["Rows"], fields["Columns"]) for fields in shared}
    return _is_single(facts) and len(eyes) < 2 and len(sizes) == 1


def _check_single(header: Dataset) -> None:
    """Raises VolumeRejected: size_implausible, broken_header, unsupported_pixels, frames_missing."""
    check_size(1, read_layout(header))
    if integer(header, "NumberOfFrames") > 1:
        raise rejection("frames_missing", "a file of the series changed while it was read")


def _item(**elements: Any) -> Dataset:
    from pydicom.dataset import Dataset

    item = Dataset()
    for name, value in elements.items():
        setattr(item, name, value)
    return item


def _groups(header: Dataset) -> tuple[Dataset, Dataset]:
    """(functional groups of a file's frame, shared functional groups), each empty if absent."""
    frame, shared = (
        (header.get(sequence) or [_item()])[0]
        for sequence in ("PerFrameFunctionalGroupsSequence", "SharedFunctionalGroupsSequence")
    )
    return frame, shared


def _group(header: Dataset, number: int) -> Dataset:
    """The functional groups of one B-scan: its own, else the shared groups, else what its header holds at the top."""
    group, shared = _groups(header)
    for sequence in _OF_EACH_FRAME:
        if shared.get(sequence) and not group.get(sequence):
            setattr(group, sequence, shared[sequence].value)
    for sequence, names in _GROUPS.items():
        if group.get(sequence) or shared.get(sequence):
            continue
        elements = {name: header[name].value for name in names if name in header}
        if elements:
            setattr(group, sequence, [_item(**elements)])
    group.FrameContentSequence = [_item(InStackPositionNumber=number)]
    return group


def _numbers(headers: Sequence[Dataset]) -> list[int] | None:
    """The numbers that order the files: InStackPositionNumber or InstanceNumber, if all differ."""
    in_stack = []
    for header in headers:
        content = _groups(header)[0].get("FrameContentSequence") or [_item()]
        in_stack.append(integer(content[0], "InStackPositionNumber", -1))
    for numbers in (in_stack, [integer(header, "InstanceNumber", -1) for header in headers]):
        if len(set(numbers)) == len(numbers) and min(numbers) >= 0:
            return numbers
    return None


def _positions(headers: Sequence[Dataset]) -> np.ndarray | None:
    """Positions in mm along the line through the B-scans, or None if one is missing."""
    positions: list[list[float]] = []
    for header in headers:
        stated = (group.get("PlanePositionSequence") for group in _groups(header))
        source = next(filter(None, stated), [header])[0]
        position = floats(source.get("ImagePositionPatient"), 3)
        if position is None:
            return None
        positions.append(position)
    points = np.array(positions) - np.mean(positions, axis=0)
    if not np.ptp(points, axis=0).any():
        return None
    return np.asarray(points @ np.linalg.svd(points)[2][0])


def _check_whole(headers: Sequence[Dataset], beside: set[int]) -> list[int]:
    """The number of each file; `beside` are numbers of other files of the series, such as the localizer.

    Raises VolumeRejected: single_frame_series, frames_missing.
    """
    count = len(headers)
    announced = max(integer(header, "ImagesInAcquisition") for header in headers)
    if announced > count + len(beside):
        raise rejection("frames_missing", f"{announced} images in the acquisition by the header, {count} are here")
    numbers, positions = _numbers(headers), _positions(headers)
    ranks: list[int] = [] if positions is None else np.argsort(np.argsort(positions)).tolist()
    if positions is not None:
        gaps = np.diff(np.sort(positions))
        if gaps.min() < 1e-4:
            raise rejection(
                "single_frame_series",
                f"{int((gaps < 1e-4).sum()) + 1} of its {count} files have the position of another: repeats, or two "
                "scans in one series; give each scan a separate folder",
            )
        if np.abs(gaps - np.median(gaps)).max() <= _EVEN * np.median(gaps):
            return numbers or ranks
    if numbers is None:
        if ranks:
            return ranks
        raise rejection(
            "single_frame_series",
            f"{count} files of one series, and neither ImagePositionPatient nor InstanceNumber orders them",
        )
    missing = sorted(set(range(min(numbers), max(numbers) + 1)) - set(numbers) - beside)
    if missing:
        shown = ", ".join(map(str, missing[:5])) + (", ..." if len(missing) > 5 else "")
        raise rejection("frames_missing", f"{count} files of one series, numbers {shown} between them are missing")
    return numbers


def _without_copies(headers: Sequence[Dataset]) -> list[Dataset]:
    """The files without those that repeat the pixels of an earlier one, and state no other position.

    Exports hold such copies under a separate instance UID.
    """
    retained: dict[bytes, Dataset] = {}
    out = []
    for header in headers:
        digest = hashlib.sha256(header.PixelData).digest()
        first = retained.setdefault(digest, header)
        positions = None if first is header else _positions([first, header])
        if first is header or (positions is not None and abs(positions[0] - positions[1]) > _SAME_POSITION_MM):
            out.append(header)
    return out


def _joined(headers: Sequence[Dataset], numbers: Sequence[int]) -> Dataset:
    """One multi-frame dataset of single-frame datasets. Raises VolumeRejected: truncated, wrong_transfer_syntax."""
    from pydicom.encaps import encapsulate

    order = np.argsort(numbers, kind="stable")
    first = headers[order[0]]
    check_size(len(headers), read_layout(first))
    groups = [_group(headers[index], int(numbers[index])) for index in order]
    if first.file_meta.TransferSyntaxUID.is_encapsulated:
        frames = [b"".join(split_frames(headers[index], 1)) for index in order]
        first.PixelData = encapsulate(frames)
        first["PixelData"].is_undefined_length = True
    else:
        size = read_layout(first).frame_bytes
        parts = [headers[index].PixelData[:size] for index in order]
        if short := sum(len(part) < size for part in parts):
            raise rejection("truncated", f"{short} of {len(parts)} files hold less than a B-scan")
        first.PixelData = b"".join(parts)
    for name in ("PatientName", "PatientBirthDate"):  # what any file states of the person masks the scan's path
        setattr(first, name, next((header[name].value for header in headers if stated_text(header, name)), ""))
    first.NumberOfFrames = len(headers)
    first.PerFrameFunctionalGroupsSequence = groups
    return first


def read_dicom_series(folder: Path, member: str = "") -> RawScan:
    """The scan of a folder with a file per B-scan; without `member` the first, with a note of how many more there are.

    Raises VolumeRejected: single_frame_series, frames_missing, and what one file or the joined scan is refused for.
    """
    found = series_in(folder, sorted(child.name for child in folder.iterdir() if child.is_file()))
    series = next((candidate for candidate in found if member in ("", candidate.member)), None)
    if series is None:
        raise rejection("single_frame_series", f"no series of {MIN_FRAMES} B-scans is in the folder any more")
    headers = []
    for number, name in enumerate(series.names, 1):
        try:
            headers.append(read_with_pixels(folder / name, _check_single))
        except VolumeRejected as error:
            raise rejection(error.reason, f"file {number} of {len(series.names)}: {error.detail}") from None
    numbers = [integer(header, "InstanceNumber") for header in headers]
    beside: set[int] = set()  # InstanceNumbers of files that belong to the series but not to this scan
    between: list[Dataset] = []  # B-scans that the scan may lack
    of_others = {name for other in found if other is not series for name in other.names}
    for name in series.beside:
        facts = series_facts(folder / name)
        if facts is None:
            continue
        number = integer(facts, "InstanceNumber")
        if (
            name not in of_others
            and min(numbers) < number < max(numbers)
            and number not in numbers
            and _may_belong(facts, headers[0])
        ):
            between.append(facts)
        else:
            beside.add(number)
    shared = [_shared(header) for header in (*headers, *between)]
    if differing := [name for name in shared[0] if len({fields[name] for fields in shared}) > 1]:
        raise rejection(
            "single_frame_series",
            f"{len(shared)} files of one series with a B-scan each that differ in {', '.join(differing)}; expected "
            "one value for all files of a scan",
        )
    different = _without_copies(headers)
    copies = len(headers) - len(different)
    retained = {id(header) for header in different}
    beside |= {integer(header, "InstanceNumber") for header in headers if id(header) not in retained}
    scan = to_raw_scan(_joined(different, _check_whole(different, beside)))
    personal = tuple(dict.fromkeys(field for header in headers for field in personal_fields(header)))
    more = (f"more_scans_in_file={len(found) - 1}",) if not member and len(found) > 1 else ()
    repeated = (f"repeated_files_dropped={copies}",) if copies else ()
    notes = (*scan.notes, f"assembled_from_files={len(headers)}", *repeated, *more)
    return replace(scan, notes=notes, personal=personal)
