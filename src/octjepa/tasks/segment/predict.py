"""`octjepa segment HEAD`: what a head predicts for whole scans, back in the geometry of their files.

A scan wider than the encoder's view is prepared whole and read window by window. Per scan: NIfTI, DICOM-SEG where the
scan is DICOM, thickness and ETDRS tables and a picture. Per single B-scan: PNG (`single_bscans`). Names are hashes of
the scan's pixels, never the file's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import ClassVar, Literal

import numpy as np

from octjepa.canonical.native_mapping import NativeMap
from octjepa.canonical.pipeline import CanonicalisationResult, canonicalise
from octjepa.canonical.single_bscan import canonicalise_bscan
from octjepa.errors import UsageError, VolumeRejected
from octjepa.files import write_json
from octjepa.locks import writer_lock
from octjepa.progress import bar
from octjepa.read.reader import read_volume
from octjepa.read.single_bscan import read_bscan_volume
from octjepa.record import Record
from octjepa.tasks.nifti import write_nifti
from octjepa.tasks.segment.dicom_seg import write_segmentation
from octjepa.tasks.segment.folder import SavedHead, load_head
from octjepa.tasks.segment.label_files import SOURCE, UNLABELLED
from octjepa.tasks.segment.labelled_volumes import frames_reversed, scores_to_scan, whole_scan_preprocessing
from octjepa.tasks.segment.single_bscans import SegmentedPicture, write_picture
from octjepa.tasks.segment.thickness import (
    SECTORS,
    ScanOrientation,
    draw_thickness,
    etdrs_means,
    scan_centre,
    thickness_um,
    write_table,
)
from octjepa.volume import OCTVolume


@dataclass(frozen=True)
class SegmentedFile(Record):
    """The files of a segmented scan (nifti, dicom, etdrs, figure) and the mean thickness of each class.

    note: why there is no DICOM Segmentation.
    """

    volume_id: str
    eye: str
    etdrs: str
    figure: str
    mean_um: Mapping[str, float]
    nifti: str | None = None
    dicom: str | None = None
    note: str | None = None
    KEYS: ClassVar[tuple[str, ...]] = ("volume_id", "eye", "nifti", "dicom", "note", "etdrs", "figure", "mean_um")
    OMITTED: ClassVar[tuple[str, ...]] = ("nifti", "dicom", "note")


@dataclass(frozen=True)
class FailedScan(Record):
    """A scan that could not be segmented, by its number, and why."""

    scan: str
    why: str


@dataclass(frozen=True)
class SegmentedFiles(Record):
    """All scans that a head was applied to."""

    classes: tuple[str, ...]
    scans: tuple[SegmentedFile | SegmentedPicture, ...]
    failed: tuple[FailedScan, ...]


Forms = Sequence[Literal["nifti", "dicom"]]


@dataclass(frozen=True)
class SingleBScans:
    """How files of single B-scans are read: (slice, depth, column) in mm takes precedence over the files."""

    spacing_mm: tuple[float, float, float] | None = None


def segment_scans(
    head: str | Path,
    checkpoint: str | None,
    scans: Sequence[Path],
    out: Path,
    forms: Forms = ("nifti", "dicom"),
    single_bscans: SingleBScans | None = None,
) -> SegmentedFiles:
    """Writes the prediction of `head` for each scan into `out`; returns the files and means.

    With `single_bscans` each picture or one-frame DICOM file is a separate B-scan. Raises UsageError (no scan, none
    could be read), ContractError, CheckpointError.
    """
    if not scans:
        raise UsageError("no scan was named: give files with --scan, or --store and --labels to make a head")
    saved = load_head(head, checkpoint)
    done: list[SegmentedFile | SegmentedPicture] = []
    failed: list[FailedScan] = []
    with writer_lock(out), bar("segment", len(scans), "scan") as progress:
        names = {str(code): name for code, name in enumerate(saved.classes, start=1)}
        write_json(out / "classes.json", {**names, SOURCE: f"made automatically by octjepa {version('octjepa')}"})
        for number, scan in enumerate(scans, start=1):
            try:
                done.append(
                    _segment_file(saved, scan, out, forms)
                    if single_bscans is None
                    else _segment_bscan(saved, scan, out, single_bscans)
                )
            except (VolumeRejected, UsageError) as error:
                failed.append(FailedScan(f"number {number}", str(error)))
            progress.advance()
    if not done:
        raise UsageError(f"none of {len(scans)} scans could be segmented; the first: {failed[0].why}")
    return SegmentedFiles(tuple(saved.classes), tuple(done), tuple(failed))


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


def _segment_bscan(saved: SavedHead, file: Path, out: Path, how: SingleBScans) -> SegmentedPicture:
    """Writes the files of one single B-scan. Raises VolumeRejected: refused."""
    volume = read_bscan_volume(file, spacing_mm=how.spacing_mm)
    codes, name = segment_volume(saved, volume)
    return write_picture(volume, codes, saved.classes, name, out)


def _segment_file(saved: SavedHead, scan: Path, out: Path, forms: Forms) -> SegmentedFile:
    """Writes all files of one scan; returns their names, the eye and the mean thickness of each class."""
    volume = read_volume(scan)
    patterns = saved.encoder.recipe.data.patterns
    if volume.pattern not in patterns:
        raise UsageError(f"its pattern is {volume.pattern}: the encoder knows {', '.join(patterns)}")
    turned = frames_reversed(volume.notes)
    codes, name = segment_volume(saved, volume)
    in_file_order = np.ascontiguousarray(codes[::-1] if turned else codes)
    files: dict[str, str] = {}
    if "nifti" in forms:
        files["nifti"] = str(out / f"{name}.nii.gz")
        write_nifti(out / f"{name}.nii.gz", in_file_order, volume.spacing_mm)
    if "dicom" in forms and volume.format == "dicom":
        inside = np.where(in_file_order == UNLABELLED, np.uint8(0), in_file_order)
        if inside.any():
            files["dicom"] = str(out / f"{name}.dcm")
            write_segmentation(out / f"{name}.dcm", inside, saved.classes, volume.spacing_mm, scan)
        else:  # a healthy eye, where the classes are lesions: the standard knows no segmentation without a frame
            (out / f"{name}.dcm").unlink(missing_ok=True)  # of another head
            files["note"] = "no class in any voxel, so there is no DICOM Segmentation of it"
    is_known = volume.provenance["slice"] in ("positions", "frame_location")
    first = "inferior" if is_known else saved.recipe.first_bscan
    orientation = ScanOrientation(volume.laterality or "", scan_centre(volume.shape, volume.spacing_mm), first)
    spacing = volume.spacing_mm[0], volume.spacing_mm[2]
    maps = thickness_um(codes, len(saved.classes), volume.spacing_mm[1])
    means = etdrs_means(maps, spacing, orientation)
    vertical = "positions" if is_known else f"assumed {first} first"
    table = [
        (label, sector, float(value), "scan", vertical)
        for label, of_class in zip(saved.classes, means, strict=True)
        for sector, value in zip(SECTORS, of_class, strict=True)
    ]
    columns = ("class", "sector", "predicted_um", "centre", "vertical")
    return SegmentedFile(
        **files,
        volume_id=name,
        eye=volume.laterality or "",
        etdrs=str(write_table(out / f"{name}.etdrs.tsv", columns, table)),
        figure=str(draw_thickness(out / f"{name}.svg", maps, means, saved.classes, spacing, orientation, name)),
        mean_um=dict(zip(saved.classes, np.nanmean(maps, axis=(1, 2)).tolist(), strict=True)),
    )
