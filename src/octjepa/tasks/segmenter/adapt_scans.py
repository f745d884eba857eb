"""`octjepa segment adapt`: scans and label files in, a folder with the adapted network out.

In: scans, or pictures of single B-scans, and folders or files of labels in every form of
`octjepa.tasks.labels.label_files`. Out: a folder with
`segmenter.safetensors` and `segmenter.json` for `octjepa segment --model` and `octjepa.load_segmenter`. The folder
names neither scans nor people. The weights were tuned on their images: share them only where you may share these.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar, Final

import numpy as np
from jaxtyping import UInt8
from safetensors.torch import save

from octjepa.checkpoint.boundary_unet import PACKAGED
from octjepa.errors import UsageError, VolumeRejected, counted
from octjepa.files import write_atomic
from octjepa.ingest.output_names import ShownNames
from octjepa.ingest.source_file import Discovery, SourceFile
from octjepa.ingest.sources import discover
from octjepa.locks import writer_lock
from octjepa.read.dicom_file import read_header
from octjepa.read.file_order import FileOrder
from octjepa.read.formats.images import frame_names
from octjepa.read.reader import SpacingOption, read_volume
from octjepa.read.single_bscan import ASSUMED_NOTE, read_bscan_volume
from octjepa.record import Record
from octjepa.tasks.labels.label_files import UNLABELLED, LabelFolder, LabelVolume, ScanNames, joined, label_key
from octjepa.tasks.labels.layer_names import ANY_CLASS, KNOWN_NAMES, class_set
from octjepa.tasks.segmenter.adapt import AdaptSettings, Candidate, LabelledScan, adapt, as_record
from octjepa.tasks.segmenter.inference import Segmenter, load_segmenter
from octjepa.volume import OCTVolume, volume_id

WEIGHTS: Final = "segmenter.safetensors"
RECORD: Final = "segmenter.json"
# Advice if a label file belongs to several volumes, or to several pictures.
_BY_ID: Final = "name label files by SOP instance UID or volume id (docs/segment.md)"
_BY_FOLDER: Final = "put label files into folders with the names of those of the pictures"
_MOST_NAMED: Final = 5  # files in a note
_TURNED: Final = "turned_upright"  # the note of the reader
_SOP_INSTANCE_UID: Final = 0x00080018  # no later tag of the header is needed
_ID: Final = re.compile(r"[0-9a-f]{16}|[0-9]+(\.[0-9]+){3,}")  # the id of a volume in a store, or a DICOM UID


@dataclass(frozen=True)
class AdaptRequest:
    """The training data: scans, folders or files of labels, and the network to start from (None: the packaged one).

    `single_bscans`: every picture and one-frame DICOM file of `sources` is a single B-scan.
    """

    sources: Sequence[str]
    labels: Sequence[Path]
    start: Path | None = None
    spacing_mm: SpacingOption = None
    baseline: bool = True
    single_bscans: bool = False


@dataclass(frozen=True)
class AdaptedFolder(Record):
    """The folder of the adapted network, the number of scans and B-scans, the scores of the networks, and notes."""

    ALIASES: ClassVar[Mapping[str, str]] = {"model": "folder", "networks": "candidates"}
    folder: Path
    scans: int
    training_bscans: int
    held_out_bscans: int
    candidates: tuple[Candidate, ...]
    notes: tuple[str, ...]


def adapt_sources(
    request: AdaptRequest,
    out: Path,
    settings: AdaptSettings | None = None,
    say: Callable[[str], None] = lambda text: None,
) -> AdaptedFolder:
    """Adapts the network to labelled scans and writes it into the folder `out`.

    Raises UsageError: no scan, no label, a label that does not fit its scan, names that are neither layers nor fluid.
    Raises VolumeRejected if none of the labelled scans can be read, and OctjepaError if `start` is not a network. A
    file that cannot be read is left out with a note that names it, because a folder holds many.
    """
    settings = settings or AdaptSettings()
    start = load_segmenter(request.start)
    discovery = discover(request.sources, request.single_bscans)
    folders = [LabelFolder(path, request.single_bscans) for path in request.labels]
    notes: list[str] = []
    shown = ShownNames([*discovery.files, *(refused.source for refused in discovery.refused)])
    if discovery.refused:
        entries = [
            _named(shown, source, VolumeRejected(reason, detail)) for source, reason, detail in discovery.refused
        ]
        notes.append(f"not read: {_listed(entries)}")
    if request.single_bscans:
        labelled = _labelled_bscans(discovery.files, folders, request.spacing_mm, shown, notes)
    else:
        labelled = _labelled_volumes(discovery, folders, request.spacing_mm, shown, notes)
    with writer_lock(out):
        adaptation = adapt(labelled, settings, start, request.baseline, say)
        save_segmenter(
            adaptation.segmenter, out, {"adaptation": as_record(adaptation, settings), "adapted_from": _origin(request)}
        )
    return AdaptedFolder(
        folder=out,
        scans=len(labelled),
        training_bscans=adaptation.training_bscans,
        held_out_bscans=adaptation.held_out_bscans,
        candidates=adaptation.candidates,
        notes=(*dict.fromkeys(notes), *adaptation.notes),
    )


def save_segmenter(segmenter: Segmenter, folder: Path, record: dict[str, Any]) -> None:
    """Writes a network and its calibration as `load_segmenter` reads them."""
    tensors = {
        name: (value.half() if value.is_floating_point() else value).contiguous().cpu()
        for name, value in segmenter.network.state_dict().items()
    }
    weights = save(tensors)
    text = json.dumps({"calibration": asdict(segmenter.calibration), **record}, indent=1).encode()
    write_atomic(folder / WEIGHTS, lambda file: file.write(weights))
    write_atomic(folder / RECORD, lambda file: file.write(text))


def _origin(request: AdaptRequest) -> dict[str, str]:
    """The network that the adaptation started from."""
    folder = request.start or PACKAGED
    weights = hashlib.sha256((folder / WEIGHTS).read_bytes()).hexdigest()
    return {"network": "packaged" if request.start is None else "adapted before", "sha256": weights}


def _named(shown: ShownNames, source: SourceFile, error: VolumeRejected) -> VolumeRejected:
    """The refusal of a file with the file's name in front of its detail; the name of a person in it is masked."""
    return VolumeRejected(error.reason, f"{shown.of(source, ())}: {error.detail}")


def _listed(refused: Sequence[VolumeRejected]) -> str:
    """The first refused files with the reasons, in one line."""
    more = f"; and {len(refused) - _MOST_NAMED} more" if len(refused) > _MOST_NAMED else ""
    return "; ".join(f"{error.detail} ({error.reason})" for error in refused[:_MOST_NAMED]) + more


def _stated_uid(source: SourceFile) -> str:
    """The SOP Instance UID that the manifest or the header of a DICOM file on a disk states; "" without one."""
    if source.row is not None and source.row.sop_instance_uid:
        return source.row.sop_instance_uid
    if isinstance(source.location, str) or not source.location.is_file():
        return ""
    try:
        return str(read_header(source.location, ("SOPInstanceUID",), _SOP_INSTANCE_UID).get("SOPInstanceUID", ""))
    except Exception:  # not DICOM, or damaged; pydicom raises what a damaged header made of its parser
        return ""


def _sources_to_read(
    sources: Sequence[SourceFile], folders: Sequence[LabelFolder]
) -> tuple[list[SourceFile], set[str]]:
    """(the scans that may have labels, the keys of those that certainly have), from names and headers only.

    Labels may also be called after an id that only the whole scan tells. If there are such labels, all scans may have
    them.
    """
    labelled, used = set[str](), set[Path]()
    for source in sources:
        names = ScanNames(_stated_uid(source), source.name, "")
        if files := {file for folder in folders for file in folder.files_for(names)}:
            labelled.add(source.key)
            used |= files
    is_id_left = any(
        _ID.fullmatch(label_key(key)) for folder in folders for key, file in folder.files.items() if file not in used
    )
    return [source for source in sources if is_id_left or source.key in labelled], labelled


def _labelled_volumes(
    discovery: Discovery,
    folders: Sequence[LabelFolder],
    spacing_mm: SpacingOption,
    shown: ShownNames,
    notes: list[str],
) -> list[LabelledScan]:
    """The scans that have labels. Only these are read, because a folder may hold many others.

    Adds to `notes`. Raises UsageError: none has labels, or a label file belongs to several scans. VolumeRejected: all
    with labels are refused.
    """
    sources = discovery.files
    is_only = len(sources) == 1 and not discovery.refused
    to_read, with_labels = _sources_to_read(sources, folders)
    scans, moved, used = [], list[str](), dict[Path, SourceFile]()
    refused, others = list[VolumeRejected](), list[VolumeRejected]()
    for source in sources if is_only else to_read:
        try:
            with source.local() as path:
                volume = read_volume(
                    path,
                    source.row,
                    None if spacing_mm == "file" else spacing_mm,
                    dataset_path=source.dataset_path,
                    member=source.member,
                )
                bscans = frame_names(path) if path.is_dir() else []
        except VolumeRejected as error:
            (refused if is_only or source.key in with_labels else others).append(_named(shown, source, error))
            stated = ScanNames(_stated_uid(source), source.name, "")
            pairs = [(folder, file) for folder in folders if (file := folder.file_for(stated)) is not None]
            _use(pairs, source, used, shown, _BY_ID)
            continue
        names = ScanNames(volume.sop_instance_uid, source.name, volume_id(volume.content_hash))
        files = [folder.file_for(names) for folder in folders]
        if is_only:  # labels of other names are those of the only scan
            only = f"the only scan, {Path(shown.of(source, ())).name}"
            files = [file or folder.only_file(only) for folder, file in zip(folders, files, strict=True)]
        pairs = [(folder, file) for folder, file in zip(folders, files, strict=True) if file is not None]
        _use(pairs, source, used, shown, _BY_ID)
        if pairs and (fault := _moved(volume, pairs)):
            moved.append(f"{shown.of(source, ())}: {fault}")
        elif parts := [_read_labels(folder, file, volume, bscans, notes) for folder, file in pairs]:
            labels = joined(parts)
            notes += labels.notes
            scans.append(labelled_scan(volume, labels, source.name))
    if others:
        notes.append(f"not read: {_listed(others)}")
    _check_refused(refused, bool(scans), "scan", notes)
    _check_moved(moved, bool(scans), "scan", notes)
    _check_and_note(len(scans), len(sources) - len(refused) - len(others) - len(moved), "scans", notes)
    _note_unused(folders, used, "" if is_only else "scan", notes)
    return scans


def _use(
    pairs: Sequence[tuple[LabelFolder, Path]],
    source: SourceFile,
    used: dict[Path, SourceFile],
    shown: ShownNames,
    advice: str,
) -> None:
    """Adds the label files of `source` to `used`. Raises UsageError with `advice`: another scan has one of them.

    Scans of several people are often called alike, `oct.dcm`. The labels of one scan are not labels of the others.
    """
    for file in [part for folder, whole in pairs for part in folder.parts(whole)]:
        first = used.setdefault(file, source)
        if first.key != source.key:
            scans = " and ".join(shown.of(scan, ()) for scan in (first, source))
            raise UsageError(f"{file} belongs to {scans}: {advice}")


def _labelled_bscans(
    sources: Sequence[SourceFile],
    folders: Sequence[LabelFolder],
    spacing_mm: SpacingOption,
    shown: ShownNames,
    notes: list[str],
) -> list[LabelledScan]:
    """The pictures that have labels. Only these are read, because a folder may hold many others.

    Adds to `notes`. Raises UsageError: none has labels, or a label file belongs to several pictures. VolumeRejected:
    all with labels are refused.
    """
    label_paths = {folder.path.resolve() for folder in folders}
    # Masks in a folder below the pictures are not pictures. Masks next to their pictures are left out by their names.
    sources = [source for source in sources if not label_paths & set(source.path.resolve().parents)] or sources
    scans, refused, moved, used = [], [], list[str](), dict[Path, SourceFile]()
    for source in sources:
        names = ScanNames("", source.path.resolve().as_posix(), "")
        pairs = [(folder, file) for folder in folders if (file := folder.file_for(names)) is not None]
        if not pairs:
            continue
        _use(pairs, source, used, shown, _BY_FOLDER)
        stated_mm = None if spacing_mm == "file" else spacing_mm
        try:
            volume = read_bscan_volume(source.path, source.row, stated_mm, source.dataset_path)
        except VolumeRejected as error:
            refused.append(_named(shown, source, error))
            continue
        if fault := _moved(volume, pairs, is_single=True):
            moved.append(f"{shown.of(source, ())}: {fault}")
            continue
        is_turned = _TURNED in volume.notes
        labels = joined([_read_labels(folder, file, volume, (), notes, is_turned) for folder, file in pairs])
        notes += labels.notes
        scans.append(labelled_scan(volume, labels, source.name, is_single=True))
    _check_refused(refused, bool(scans), "picture", notes)
    _check_moved(moved, bool(scans), "picture", notes)
    _check_and_note(len(scans), len(sources) - len(refused) - len(moved), "pictures", notes)
    _note_unused(folders, used, "picture", notes)
    if any(ASSUMED_NOTE in scan.volume.notes for scan in scans):
        notes.append("spacing unknown: pictures are taken to be 2 x 6 mm (--spacing depth,column states it)")
    return scans


def _check_refused(refused: Sequence[VolumeRejected], is_any_read: bool, noun: str, notes: list[str]) -> None:
    """Adds a note that names the labelled files that were refused. Raises the first refusal if no other was read."""
    if refused and not is_any_read:
        raise refused[0]
    if refused:
        notes.append(f"not used, because unreadable: {counted(len(refused), f'labelled {noun}')}: {_listed(refused)}")


def _moved(volume: OCTVolume, pairs: Sequence[tuple[LabelFolder, Path]], is_single: bool = False) -> str:
    """Why the labels in these files cannot be placed on the voxels of `volume`; "" if they can."""
    try:
        _order(volume, is_single)
        for folder, file in pairs:
            folder.check_frames(file, volume.notes)
    except UsageError as error:
        return str(error)
    return ""


def _order(volume: OCTVolume, is_single: bool) -> FileOrder:
    """The order of the file. Labels of a single B-scan are turned upright with it, so that this move does not matter.

    Raises UsageError: the reader moved voxels in another way.
    """
    return FileOrder.of([note for note in volume.notes if not (is_single and note == _TURNED)], volume.shape[0])


def _check_moved(moved: Sequence[str], is_any_read: bool, noun: str, notes: list[str]) -> None:
    """Adds a note that names the labelled files that were left out. Raises UsageError if no other was read."""
    if moved and not is_any_read:
        raise UsageError(moved[0])
    if moved:
        shown = "; ".join(moved[:_MOST_NAMED]) + (f"; and {len(moved) - _MOST_NAMED} more" * (len(moved) > _MOST_NAMED))
        notes.append(f"not used: {counted(len(moved), f'labelled {noun}')}: {shown}")


def _check_and_note(labelled: int, total: int, noun: str, notes: list[str]) -> None:
    if not labelled:
        raise UsageError(
            f"none of the label files belongs to one of the {total} {noun}: name them after the {noun} "
            "(docs/segment.md)"
        )
    if labelled < total:
        notes.append(f"{total - labelled} of {total} {noun} have no labels and are not used")


def _note_unused(folders: Sequence[LabelFolder], used: Collection[Path], noun: str, notes: list[str]) -> None:
    """Adds notes that count the label files that were not read. Without a `noun` all label files are of one scan."""
    count = sum(folder.unused(used) for folder in folders) if noun else 0
    if count:
        notes.append(f"not used: {counted(count, 'label file')} without a {noun} of that name")
    twice = [file.name for folder in folders for file in sorted(folder.passed_over - set(used))]
    if twice:
        shown = ", ".join(twice[:_MOST_NAMED]) + (", ..." if len(twice) > _MOST_NAMED else "")
        notes.append(f"not used, because another label file of the scan holds the same classes: {shown}")


def _read_labels(
    folder: LabelFolder,
    file: Path,
    volume: OCTVolume,
    bscans: Sequence[str],
    notes: list[str],
    is_turned: bool = False,
) -> LabelVolume:
    """The labels in `file`. Adds to `notes` if nothing is marked. Raises UsageError: they do not fit the scan."""
    read = folder.read(file, folder.names(file), volume.shape, bscans, is_turned)
    read.check(volume.shape, volume.spacing_mm, str(file))
    if read.is_empty:
        notes.append(f"{file.name} marks no voxel and is learned as background: remove it if nobody labelled it")
    return read


def labelled_scan(volume: OCTVolume, labels: LabelVolume, name: str, is_single: bool = False) -> LabelledScan:
    """Labels in the order of the file's B-scans as what the network learns, in the order of `volume`.

    is_single: `volume` is a single B-scan, and `labels` are turned upright with it.

    Raises UsageError: the reader moved voxels, or no name is a boundary, a layer or fluid.
    """
    is_known = any(class_set(item) for item in labels.names)
    if labels.boundaries_px is None and not is_known:
        raise UsageError(f"the labels are called {', '.join(labels.names)}: expected {KNOWN_NAMES}")
    order = _order(volume, is_single)
    boundaries = np.full((8, volume.shape[0], volume.shape[2]), np.nan, np.float32)
    if labels.boundaries_px is not None:
        boundaries = labels.boundaries_px
    return LabelledScan(name, volume, order.ascans(boundaries), order.voxels(allowed_classes(labels)))


def allowed_classes(labels: LabelVolume) -> UInt8[np.ndarray, "N R C"]:
    """The classes that each voxel may have: bit k for class k.

    Classes that no name stands for were not graded, so a voxel without a mark may have them.
    """
    graded = 0
    table = np.full(256, ANY_CLASS, np.uint8)
    for name in labels.names:
        graded |= class_set(name)
    table[: len(labels.names) + 1] = ANY_CLASS & ~graded
    for code, name in enumerate(labels.names, start=1):
        if members := class_set(name):
            table[code] = members
    table[UNLABELLED] = ANY_CLASS
    return table[labels.codes]
