"""Apply a head to whole scans and write its predictions: `octjepa segment HEAD` and `octjepa predict HEAD`.

In: files, folders, globs or lists of scans. A scan wider than the encoder's view is prepared whole and read window by
window. Out, in one folder and in the geometry of each scan: NIfTI, a DICOM Segmentation of a DICOM scan, tables of
thickness and of ETDRS means, and a picture. For every single B-scan: PNG (`single_bscans`). Names are hashes of the
scan's pixels, never the file's. A scan that is refused does not stop the others.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import numpy as np
from jaxtyping import Float

from octjepa.canonical.native_mapping import NativeMap
from octjepa.canonical.pipeline import CanonicalisationResult, canonicalise
from octjepa.canonical.single_bscan import canonicalise_bscan
from octjepa.files import write_json
from octjepa.ingest.output_names import ShownNames, check_apart, refused_by_search
from octjepa.ingest.read_source import read_source
from octjepa.ingest.refused_scan import RefusedScan, WithoutResult, collect_refusals, lost_share
from octjepa.ingest.results_record import SHARED, ResultsRecord
from octjepa.ingest.source_file import SourceFile
from octjepa.ingest.sources import discover
from octjepa.locks import writer_lock
from octjepa.progress import bar
from octjepa.read.orientation import has_slice_direction
from octjepa.read.personal_data import StatedPerson
from octjepa.read.reader import SpacingOption
from octjepa.read.single_bscan import read_bscan_volume
from octjepa.read.written_results import CLASS_PICTURE, CLASSES, HEAD_ENDINGS, SEGMENTED
from octjepa.record import Record
from octjepa.tasks.labels.class_files import Forms, missing_library, write_classes
from octjepa.tasks.labels.label_files import SOURCE, made_automatically
from octjepa.tasks.segment.folder import SavedHead, load_head
from octjepa.tasks.segment.labelled_volumes import scores_to_scan, whole_scan_preprocessing
from octjepa.tasks.segment.single_bscans import SegmentedPicture, write_picture
from octjepa.tasks.thickness import (
    NO_SECTORS_OF_VERTICAL,
    SECTORS,
    Lines,
    ScanOrientation,
    draw_thickness,
    lines_of,
    scan_centre,
    sector_means,
    slice_positions_mm,
    slice_widths_mm,
    thickness_um,
    write_table,
)
from octjepa.volume import OCTVolume

_SECTOR_NOTES: Mapping[Lines, tuple[str, ...]] = {
    "horizontal": (),
    "vertical": (NO_SECTORS_OF_VERTICAL,),
    "not parallel": ("the B-scans are not parallel: no ETDRS sectors",),
}
PATTERN_UNKNOWN = "pattern_unknown"  # the reason of a scan whose pattern the encoder was not trained on


class PatternUnknown(WithoutResult):
    """The encoder was trained on scans of other patterns."""

    def refusal(self, scan: str) -> RefusedScan:
        return RefusedScan(scan, PATTERN_UNKNOWN, str(self), "train a head on an encoder of such scans")


@dataclass(frozen=True)
class SegmentedFile(Record):
    """The files of a segmented scan (nifti, dicom, etdrs, figure) and the mean thickness of each class.

    scan: the name of its file, with what identifies the person masked. notes: what was not written, and why.
    """

    scan: str
    volume_id: str
    eye: str
    nifti: str | None
    dicom: str | None
    notes: tuple[str, ...]
    etdrs: str
    figure: str
    mean_um: Mapping[str, float]
    OMITTED = ("nifti", "dicom")


@dataclass
class SegmentedFiles(Record):
    """All scans that a head was applied to. `notes` are about the whole call, such as a missing library."""

    classes: tuple[str, ...]
    scans: list[SegmentedFile | SegmentedPicture] = field(default_factory=list)
    refused: list[RefusedScan] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def lost_share(self) -> float:
        """Lost scans divided by lost and segmented scans."""
        return lost_share(self.refused, len(self.scans))


def segment_scans(
    head: str | Path,
    checkpoint: str | None,
    sources: Sequence[str | Path],
    out: Path,
    forms: Forms = ("nifti", "dicom"),
    spacing_mm: SpacingOption = None,
    single_bscans: bool = False,
) -> SegmentedFiles:
    """Writes the prediction of `head` for every scan of `sources` into `out`.

    `spacing_mm` (slice, depth, column) takes precedence over the files. With `single_bscans` each picture or one-frame
    DICOM file is a separate B-scan.

    Raises UsageError: no such path, no scan found, or `out` is a folder that holds a scan of `sources`, or a
    `classes.json` of other classes, or one that octjepa did not write. Raises ContractError, CheckpointError.
    """
    discovery = discover(sources, single_bscans)
    check_apart(discovery.files, out)
    saved = load_head(head, checkpoint)
    result = SegmentedFiles(tuple(saved.classes))
    shown = ShownNames([*discovery.files, *(refused.source for refused in discovery.refused)])
    result.refused += refused_by_search(discovery, shown)
    codes = {str(code): name for code, name in enumerate(saved.classes, start=1)}
    with writer_lock(out), bar("segment", len(discovery.files), "scan") as progress:
        record = ResultsRecord(out, SEGMENTED)
        record.claim(SHARED, hashlib.sha256("\x1f".join(saved.classes).encode()).hexdigest(), (CLASSES,))
        write_json(out / CLASSES, {**codes, SOURCE: made_automatically()})
        for source in discovery.files:
            people: list[StatedPerson] = []
            with collect_refusals(result.refused, partial(shown.of, source, people)):
                volume = (_read_bscan if single_bscans else read_source)(source, spacing_mm, people)
                to = _Output(out, shown.of(source, people), forms, record)
                if single_bscans:
                    result.scans.append(_segment_bscan(saved, volume, to))
                else:
                    _check_pattern(volume, saved)
                    if (note := missing_library(volume.format, forms)) and not result.notes:
                        result.notes.append(note)
                    result.scans.append(_segment_volume(saved, volume, source, to))
            progress.advance()
    return result


@dataclass(frozen=True)
class _Output:
    folder: Path
    scan: str
    forms: Forms
    record: ResultsRecord


def _read_bscan(source: SourceFile, spacing_mm: SpacingOption, people: list[StatedPerson]) -> OCTVolume:
    """Raises VolumeRejected: it cannot be read."""
    given = None if spacing_mm == "file" else spacing_mm
    with source.local() as path:
        return read_bscan_volume(path, source.row, given, source.dataset_path, people)


def _check_pattern(volume: OCTVolume, saved: SavedHead) -> None:
    """Raises PatternUnknown: the encoder knows only scans of other patterns."""
    patterns = saved.encoder.recipe.data.patterns
    if volume.pattern not in patterns:
        raise PatternUnknown(f"its pattern is {volume.pattern}: the encoder knows {', '.join(patterns)}")


def segment_volume(saved: SavedHead, volume: OCTVolume) -> tuple[np.ndarray, str]:
    """(codes [N, R, C] of every voxel of the scan in the order of `volume`, volume id). 255 beyond the stored depth.

    A single B-scan fills one patch along the slice axis, as in a store. Raises VolumeRejected as canonicalisation does.
    """
    recipe = saved.encoder.recipe
    whole = whole_scan_preprocessing(recipe.preprocessing, volume)
    bscan_slices = recipe.tokens.patch_size[0] if volume.shape[0] == 1 else 0
    canonical: CanonicalisationResult = (
        canonicalise_bscan(volume, whole, bscan_slices) if bscan_slices else canonicalise(volume, whole)
    )
    prepared = replace(canonical.volume, bscan_slices=bscan_slices)
    assert prepared.frame_shifts is not None
    assert prepared.frame_mm is not None
    slice_mm = bscan_slices * whole.target_spacing_mm[0] or volume.spacing_mm[0]
    native = NativeMap(
        volume.shape,
        (slice_mm, *volume.spacing_mm[1:]),
        whole,
        prepared.frame_shifts,
        prepared.frame_mm,
        canonical.mirrored,
    )
    return scores_to_scan(saved.head.scores(prepared), native), prepared.volume_id


def _segment_bscan(saved: SavedHead, volume: OCTVolume, to: _Output) -> SegmentedPicture:
    """Writes the files of one single B-scan."""
    codes, name = segment_volume(saved, volume)
    to.record.claim(name, volume.content_hash, (f"{name}{CLASS_PICTURE}", f"{name}.png"))
    return write_picture(volume, codes, saved.classes, name, to.folder, to.scan)


def _segment_volume(saved: SavedHead, volume: OCTVolume, source: SourceFile, to: _Output) -> SegmentedFile:
    """Writes all files of one scan."""
    codes, name = segment_volume(saved, volume)
    stem = to.folder / name
    to.record.claim(name, volume.content_hash, [f"{name}{ending}" for ending in HEAD_ENDINGS])
    written = write_classes(stem, codes, saved.classes, volume, source, to.forms)
    is_known = has_slice_direction(volume)
    first = "inferior" if is_known else saved.recipe.first_bscan
    slice_mm, column_mm = slice_positions_mm(volume), np.arange(volume.shape[2]) * volume.spacing_mm[2]
    lines = lines_of(volume.pattern, volume.notes)
    orientation = ScanOrientation(volume.laterality or "", scan_centre(slice_mm, column_mm), first, lines)
    maps = thickness_um(codes, len(saved.classes), volume.spacing_mm[1])
    means, measured = sector_means(maps, slice_mm, column_mm, orientation)
    vertical = "positions" if is_known else f"assumed {first} first"
    table = [
        (label, sector, float(value), "scan", vertical, f"{share:.2f}")
        for label, of_class in zip(saved.classes, means, strict=True)
        for sector, value, share in zip(SECTORS, of_class, measured, strict=True)
    ]
    columns = ("class", "sector", "predicted_um", "centre", "vertical", "measured_share")
    figure = draw_thickness(
        to.folder / f"{name}.svg", maps, means, saved.classes, slice_mm, column_mm, orientation, name
    )
    return SegmentedFile(
        scan=to.scan,
        volume_id=name,
        eye=volume.laterality or "",
        nifti=written.nifti,
        dicom=written.dicom,
        notes=(*written.notes, *_SECTOR_NOTES[lines]),
        etdrs=str(write_table(to.folder / f"{name}.etdrs.tsv", columns, table)),
        figure=str(figure),
        mean_um=dict(zip(saved.classes, _mean_um(maps, slice_widths_mm(slice_mm, 1.0)).tolist(), strict=True)),
    )


def _mean_um(maps: Float[np.ndarray, "K N C"], width: Float[np.ndarray, " N"]) -> Float[np.ndarray, " K"]:
    """Means over the A-scans that have a value, by the width that each B-scan stands for."""
    weights = np.where(np.isfinite(maps), width[:, None], 0.0)
    total = weights.sum(axis=(1, 2))
    sums = (np.nan_to_num(maps) * weights).sum(axis=(1, 2))
    return np.divide(sums, total, out=np.full(len(maps), np.nan), where=total > 0)
