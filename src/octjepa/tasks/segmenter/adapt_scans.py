"""`octjepa segment adapt`: scans and label files in, a folder with the adapted network out.

In: scans and folders or files of labels in every form of `octjepa.tasks.segment.label_files`. Out: a folder with
`segmenter.safetensors` and `segmenter.json` for `octjepa segment --model` and `octjepa.load_segmenter`. The folder
names neither scans nor people. The weights were tuned on their images: share them only where you may share these.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, ClassVar, Final

import numpy as np
from jaxtyping import UInt8
from safetensors.torch import save

from octjepa.errors import UsageError, VolumeRejected
from octjepa.files import write_atomic
from octjepa.ingest.source_file import SourceFile
from octjepa.ingest.sources import discover
from octjepa.locks import writer_lock
from octjepa.read.formats.images import frame_names
from octjepa.read.reader import SpacingOption, read_volume
from octjepa.record import Record
from octjepa.tasks.segment.label_files import UNLABELLED, LabelFolder, LabelVolume, ScanNames, joined
from octjepa.tasks.segment.labelled_volumes import frames_reversed
from octjepa.tasks.segment.layer_names import ANY_CLASS, KNOWN_NAMES, class_set
from octjepa.tasks.segmenter.adapt import AdaptSettings, Candidate, LabelledScan, adapt, as_record
from octjepa.tasks.segmenter.inference import PACKAGED, Segmenter, load_segmenter
from octjepa.volume import OCTVolume, volume_id

WEIGHTS: Final = "segmenter.safetensors"
RECORD: Final = "segmenter.json"


@dataclass(frozen=True)
class AdaptRequest:
    """The training data: scans, folders or files of labels, and the network to start from (None: the packaged one)."""

    sources: Sequence[str]
    labels: Sequence[Path]
    start: Path | None = None
    spacing_mm: SpacingOption = None
    baseline: bool = True


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
    Raises VolumeRejected for a scan that cannot be read, and OctjepaError if `start` is not a network.
    """
    settings = settings or AdaptSettings()
    start = load_segmenter(request.start)
    discovery = discover(request.sources)
    if discovery.refused:
        refused = discovery.refused[0]
        raise VolumeRejected(refused.reason, refused.detail)
    folders = [LabelFolder(path) for path in request.labels]
    scans: list[LabelledScan] = []
    notes: list[str] = []
    unlabelled = 0
    for source in discovery.files:
        scan = _labelled_scan(source, folders, request.spacing_mm, len(discovery.files) == 1, notes)
        if scan is None:
            unlabelled += 1
        else:
            scans.append(scan)
    if not scans:
        raise UsageError(
            f"none of the label files belongs to one of the {len(discovery.files)} scans: name them after the scans "
            "(docs/segment.md)"
        )
    if unlabelled:
        notes.append(f"{unlabelled} of {len(discovery.files)} scans have no labels and are not used")
    with writer_lock(out):
        adaptation = adapt(scans, settings, start, request.baseline, say)
        save_segmenter(
            adaptation.segmenter, out, {"adaptation": as_record(adaptation, settings), "adapted_from": _origin(request)}
        )
    return AdaptedFolder(
        folder=out,
        scans=len(scans),
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


def _labelled_scan(
    source: SourceFile, folders: Sequence[LabelFolder], spacing_mm: SpacingOption, alone: bool, notes: list[str]
) -> LabelledScan | None:
    """A scan with its labels; None if it has none. `alone`: labels of other names are those of the only scan."""
    with source.local() as path:
        volume = read_volume(
            path,
            source.row,
            None if spacing_mm == "file" else spacing_mm,
            dataset_path=source.dataset_path,
            member=source.member,
        )
        bscans = frame_names(path) if path.is_dir() else []
    names = ScanNames(volume.sop_instance_uid, source.name, volume_id(volume.content_hash))
    parts: list[LabelVolume] = []
    for folder in folders:
        file = folder.file_for(names)
        if file is None and alone:
            file = folder.only_file(f"the only scan, {Path(source.name).name}")
        if file is not None:
            read = folder.read(file, folder.names(file), volume.shape, bscans)
            read.check(volume.shape, volume.spacing_mm, str(file))
            if read.is_empty:
                notes.append(
                    f"{file.name} marks no voxel and is learned as background: remove it if nobody labelled it"
                )
            parts.append(read)
    if not parts:
        return None
    labels = joined(parts)
    notes += labels.notes
    return labelled_scan(volume, labels, source.name)


def labelled_scan(volume: OCTVolume, labels: LabelVolume, name: str) -> LabelledScan:
    """Labels in the order of the file's B-scans as what the network learns, in the order of `volume`.

    Raises UsageError: the reader moved voxels, or no name is a boundary, a layer or fluid.
    """
    is_known = any(class_set(item) for item in labels.names)
    if labels.boundaries_px is None and not is_known:
        raise UsageError(f"the labels are called {', '.join(labels.names)}: expected {KNOWN_NAMES}")
    step = -1 if frames_reversed(volume.notes) else 1
    boundaries = np.full((8, volume.shape[0], volume.shape[2]), np.nan, np.float32)
    if labels.boundaries_px is not None:
        boundaries = labels.boundaries_px
    return LabelledScan(name, volume, boundaries[:, ::step], allowed_classes(labels)[::step])


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
