"""`octjepa segment HEAD`: what a head says of whole scans, back in the geometry of their files.

A scan wider than the encoder's view is prepared whole and read window by window. Per scan: NIfTI, DICOM-SEG where the
scan is DICOM, thickness and ETDRS tables and a figure. Names are hashes of the scan's pixels, never the file's.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from octjepa.errors import UsageError, VolumeRejected
from octjepa.ingest import read_volume
from octjepa.progress import bar
from octjepa.store.canonical import CanonicalisationResult, canonicalise
from octjepa.store.native_mapping import NativeMap
from octjepa.tasks.segment.dicom_seg import write_segmentation
from octjepa.tasks.segment.figure import draw_thickness
from octjepa.tasks.segment.folder import SavedHead, load_head
from octjepa.tasks.segment.label_files import UNSEEN
from octjepa.tasks.segment.nifti_write import write_nifti
from octjepa.tasks.segment.places import grown, reversed_frames, scores_to_scan
from octjepa.tasks.segment.thickness import SECTORS, Lie, etdrs, scan_centre, thickness_um
from octjepa.volume import OCTVolume

Forms = Sequence[Literal["nifti", "dicom"]]


def segment_scans(
    head: str | Path, checkpoint: str | None, scans: Sequence[Path], out: Path, forms: Forms = ("nifti", "dicom")
) -> dict[str, Any]:
    """Writes what `head` says of each scan into `out`; returns what the verb says.

    Raises UsageError (no scan, none could be read), ContractError, CheckpointError.
    """
    if not scans:
        raise UsageError("no scan was named: give files with --scan, or --store and --labels to make a head")
    saved = load_head(head, checkpoint)
    out.mkdir(parents=True, exist_ok=True)
    (out / "classes.json").write_text(
        json.dumps({str(code): name for code, name in enumerate(saved.classes, start=1)}, indent=1), encoding="utf-8"
    )
    done: list[dict[str, Any]] = []
    failed: list[dict[str, str]] = []
    with bar("segment", len(scans), "scan") as progress:
        for number, scan in enumerate(scans, start=1):
            try:
                done.append(_one(saved, scan, out, forms))
            except (VolumeRejected, UsageError) as error:
                failed.append({"scan": f"number {number}", "why": str(error)})
            progress.advance()
    if not done:
        raise UsageError(f"none of {len(scans)} scans could be segmented; the first: {failed[0]['why']}")
    return {"classes": list(saved.classes), "scans": done, "failed": failed}


def segment_volume(saved: SavedHead, volume: OCTVolume) -> tuple[np.ndarray, str]:
    """(codes [N, R, C] of every voxel of the scan in the order of `volume`, volume id). 255 where rows were cut away.

    Raises VolumeRejected as canonicalisation does.
    """
    whole = grown(saved.encoder.recipe.preprocessing, volume)
    made: CanonicalisationResult = canonicalise(volume, whole)
    shifts, frame_mm = made.volume.frame_shifts, made.volume.frame_mm
    assert shifts is not None
    assert frame_mm is not None
    native = NativeMap(volume.shape, volume.spacing_mm, whole, shifts, frame_mm, made.mirrored)
    return scores_to_scan(saved.head.scores(made.volume), native), made.volume.volume_id


def _one(saved: SavedHead, scan: Path, out: Path, forms: Forms) -> dict[str, Any]:
    volume = read_volume(scan)
    patterns = saved.encoder.recipe.data.patterns
    if volume.pattern not in patterns:
        raise UsageError(f"its pattern is {volume.pattern}: the encoder knows {', '.join(patterns)}")
    turned = reversed_frames(";".join(volume.notes))
    codes, name = segment_volume(saved, volume)
    in_file = np.ascontiguousarray(codes[::-1] if turned else codes)
    told: dict[str, Any] = {"volume_id": name, "eye": volume.laterality or ""}
    if "nifti" in forms:
        told["nifti"] = str(out / f"{name}.nii.gz")
        write_nifti(out / f"{name}.nii.gz", in_file, volume.spacing_mm)
    if "dicom" in forms and volume.format == "dicom":
        told["dicom"] = str(out / f"{name}.dcm")
        inside = np.where(in_file == UNSEEN, np.uint8(0), in_file)
        write_segmentation(out / f"{name}.dcm", inside, saved.classes, volume.spacing_mm, scan)
    known = volume.provenance["slice"] in ("positions", "frame_location")
    first = "inferior" if known else saved.settings.first_bscan
    lie = Lie(volume.laterality or "", scan_centre(volume.shape, volume.spacing_mm), first)
    spacing = volume.spacing_mm[0], volume.spacing_mm[2]
    maps = thickness_um(codes, len(saved.classes), volume.spacing_mm[1])
    means = etdrs(maps, spacing, lie)
    told["etdrs"] = str(out / f"{name}.etdrs.tsv")
    with Path(told["etdrs"]).open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file, delimiter="\t", lineterminator="\n")
        writer.writerow(("class", "sector", "said_um", "centre", "vertical"))
        vertical = "positions" if known else f"assumed {first} first"
        for number, label in enumerate(saved.classes):
            for place, sector in enumerate(SECTORS):
                value = means[number, place]
                writer.writerow((label, sector, f"{value:.1f}" if np.isfinite(value) else "", "scan", vertical))
    told["figure"] = str(draw_thickness(out / f"{name}.svg", maps, means, saved.classes, spacing, lie, name))
    told["mean_um"] = dict(zip(saved.classes, np.nanmean(maps, axis=(1, 2)).tolist(), strict=True))
    return told
