"""A `RawScan` to an `OCTVolume`: eye, person, pattern, spacing and order are judged here, alike for all formats."""

from __future__ import annotations

from pathlib import PurePath

import numpy as np

from octjepa.ingest.geometry import Geometry, SpacingSources, plausible, resolve
from octjepa.ingest.identity import identify
from octjepa.ingest.manifest import ManifestRow
from octjepa.ingest.orientation import is_transposed, is_upside_down
from octjepa.ingest.personal_data import masked_path
from octjepa.ingest.protocols import protocol_spacing
from octjepa.ingest.raw_scan import RawScan
from octjepa.ingest.reasons import rejection
from octjepa.ingest.scan_pattern import circles, scan_pattern
from octjepa.volume import OCTVolume

LEAST_FRAMES = 4


def _checked_order(pixels: np.ndarray, geometry: Geometry) -> np.ndarray:
    """Frames in the resolved order, unless neighbours are clearly more alike as they were stored."""
    order = geometry.order
    if "frames_unordered" not in geometry.notes:
        return pixels if np.array_equal(order, np.arange(len(order))) else pixels[order]
    small = pixels[:, ::8, ::8].reshape(len(pixels), -1).astype(np.float32)
    small -= small.mean(axis=1, keepdims=True)
    small /= np.linalg.norm(small, axis=1, keepdims=True) + 1e-6

    def likeness(frames: np.ndarray) -> float:
        return float((frames[1:] * frames[:-1]).sum(axis=1).mean())

    if likeness(small) > likeness(small[order]) + 0.02:
        geometry.notes.append("order_by_correlation")
        geometry.positions_mm = None
        if "slice" not in geometry.uncertain:
            geometry.uncertain = (*geometry.uncertain, "slice")
        return pixels
    return pixels[order]


def _turned(scan: RawScan, notes: list[str]) -> tuple[np.ndarray, tuple[float, float] | None]:
    """(pixels, (depth, column) spacing) with A-scans running down and the vitreous on top.

    Raises VolumeRejected not_b_scans.
    """
    pixels, pair = scan.pixels, scan.pixel_spacing_mm
    if is_transposed(pixels):
        notes.append("axes_transposed")
        pixels = np.ascontiguousarray(pixels.swapaxes(1, 2))
        if pair is not None and plausible("depth", pair[1]) and plausible("column", pair[0]):
            pair = (pair[1], pair[0])  # given for the rows and columns as they were stored
    if is_upside_down(pixels):
        notes.append("turned_upright")
        pixels = np.ascontiguousarray(pixels[:, ::-1])
    return pixels, pair


def _against_manifest(scan: RawScan, row: ManifestRow | None, geometry: Geometry) -> list[str]:
    """What a manifest's row says otherwise than the file: its row may be that of another scan."""
    if row is None:
        return []
    uids = {row.sop_instance_uid, scan.header.uid} - {""}
    said = {
        "manifest_uid_disagrees": len(uids) > 1,
        "manifest_frames_disagree": row.frames is not None and row.frames != len(scan.pixels),
        "manifest_spacing_disagrees": row.pixel_spacing_mm is not None
        and not np.allclose(row.pixel_spacing_mm, geometry.spacing_mm[1:], rtol=0.02),
    }
    return [note for note, disagrees in said.items() if disagrees]


def assemble(
    scan: RawScan,
    dataset_path: PurePath,
    row: ManifestRow | None = None,
    spacing_mm: tuple[float, float, float] | None = None,
) -> OCTVolume:
    """The volume of `scan`; `dataset_path` is the path whose folders and name may speak of person, eye and device.

    `spacing_mm` (slice, depth, column) is the user's word, before every other source.
    Raises VolumeRejected: spacing_unknown, too_few_frames, not_b_scans.
    """
    identity = identify(scan.header, dataset_path, row)
    facts, notes = scan.frame_geometry, [*identity.notes, *scan.notes]
    if len(scan.pixels) < LEAST_FRAMES:
        raise rejection("too_few_frames", f"{len(scan.pixels)} B-scans; a volume needs {LEAST_FRAMES} at least")
    pixels, pair = _turned(scan, notes)
    text = f"{identity.protocol} {identity.region}".lower()
    pattern = scan.pattern or scan_pattern(facts, identity.device, text)
    if pattern == "radial" and (round_frames := circles(facts)).any():
        notes.append(f"circle_frames_dropped={int(round_frames.sum())}")
        facts, pixels = facts.take(~round_frames), pixels[~round_frames]
        if len(pixels) < LEAST_FRAMES:
            raise rejection("too_few_frames", f"{len(pixels)} straight B-scans; a volume needs {LEAST_FRAMES} at least")
    frames, height, width = pixels.shape
    shape = (frames, height, width)
    sources = SpacingSources(
        facts=facts,
        shared_pair=pair,
        shared_thickness=scan.thickness_mm,
        manifest_pair=row.pixel_spacing_mm if row else None,
        manifest_thickness=row.slice_thickness_mm if row else None,
        known=protocol_spacing(identity.device, text, shape),
        header=scan.spacing_mm,
        header_is=scan.spacing_from,
        option=spacing_mm,
    )
    geometry = resolve(sources, shape, pattern)
    notes += _against_manifest(scan, row, geometry)
    pixels = _checked_order(pixels, geometry)
    estimated = [axis for axis in scan.uncertain if geometry.provenance[axis] != "option"]
    return OCTVolume(
        pixels=pixels,
        spacing_mm=geometry.spacing_mm,
        provenance=geometry.provenance,
        person_id=identity.person_id,
        device=identity.device,
        laterality=identity.laterality,
        laterality_source=identity.laterality_source,
        pattern=pattern,
        uncertain=tuple(dict.fromkeys([*geometry.uncertain, *estimated])),
        slice_positions_mm=geometry.positions_mm,
        sop_instance_uid=identity.sop_instance_uid,
        protocol=identity.protocol,
        region=identity.region,
        visit=identity.visit,
        site=identity.site,
        format=scan.format,
        labels=dict(scan.labels),
        personal=scan.personal,
        notes=tuple(dict.fromkeys([*notes, *geometry.notes])),
        source=masked_path(dataset_path.as_posix(), scan.header.person_name, scan.header.birth_date),
    )
