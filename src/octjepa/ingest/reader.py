"""Any file to an `OCTVolume`, or a `VolumeRejected` that says why: recognise its format, read it, assemble."""

from __future__ import annotations

import warnings
from pathlib import Path, PurePath
from typing import Any, Literal

from octjepa.errors import UsageError, VolumeRejected
from octjepa.ingest.assemble import assemble
from octjepa.ingest.formats import read_scan, recognise
from octjepa.ingest.geometry import LIMITS_MM, plausible
from octjepa.ingest.manifest import ManifestRow, find_row
from octjepa.ingest.reasons import REASONS, error_origin, rejection
from octjepa.volume import OCTVolume

SpacingOption = tuple[float, float, float] | Literal["file"] | None  # slice, depth, column in mm; "file": not by hand


def read_volume(
    path: str | Path,
    manifest_row: ManifestRow | None = None,
    spacing_mm: tuple[float, float, float] | None = None,
    dataset_path: PurePath | None = None,
    member: str = "",
) -> OCTVolume:
    """One OCT scan in its native geometry: pixels uint8 `[D, H, W]`, spacing (dz, dy, dx) in mm with provenance.

    `manifest_row` is looked up in the tree around the file when it is not given. `spacing_mm` takes precedence over the
    file. `dataset_path` is the scan's path in its data set where `path` is a copy of it; its folders and name may state
    person, eye and device. `member` names one of several scans in the file ("1", "2", ...);
    without it the first is read.
    Raises VolumeRejected (a code of `octjepa.ingest.reasons`); UsageError where there is no such file.
    """
    path = Path(path)
    if not path.exists():
        raise UsageError(f"no file at {path}: expected an OCT scan")
    try:
        with warnings.catch_warnings():
            # pydicom converts values when they are asked for, and warns of each that is out of standard: here what is
            # out of standard is judged one by one.
            warnings.simplefilter("ignore")
            row = manifest_row or (find_row(path) if dataset_path is None else None)
            return assemble(read_scan(path, _format_of(path), member), dataset_path or path, row, spacing_mm)
    except (VolumeRejected, UsageError, MemoryError):
        raise
    except Exception as error:  # a damaged header may hold anything; the ledger must name it, not the run end
        raise rejection("reader_failed", error_origin(error)) from error


def parse_spacing(text: str) -> tuple[float, float, float] | Literal["file"]:
    """ "0.047,0.0026,0.0117" to (slice, depth, column) in mm, "file" to itself: what the files say, whatever was asked
    before. Raises UsageError: not three plausible numbers.
    """
    if text.strip() == "file":
        return "file"
    try:
        dz, dy, dx = map(float, text.split(","))
    except ValueError:
        raise UsageError(
            f"spacing {text!r} is not of the form 0.047,0.0026,0.0117: slice, depth, column in mm; nor file"
        ) from None
    for axis, value in (("slice", dz), ("depth", dy), ("column", dx)):
        if not plausible(axis, value):
            low, high = LIMITS_MM[axis]
            raise UsageError(
                f"spacing {text!r}: {value:g} mm along {axis} is outside {low} to {high}; expected slice,depth,column"
            )
    return dz, dy, dx


def _format_of(path: Path) -> str:
    format = recognise(path)
    if format is not None:
        return format
    if path.is_dir():
        raise rejection("unknown_format", "a folder that holds no sequence of B-scan images")
    if path.stat().st_size == 0:
        raise rejection("empty_file", "zero bytes")
    raise rejection("unknown_format", "its first bytes and its suffix are those of no format, or of a single image")


def describe_file(path: str | Path, spacing_mm: SpacingOption = None) -> dict[str, Any]:
    """What `octjepa inspect FILE` says, for an accepted and for a rejected file. Raises UsageError: no such file.

    Keys: kind ("volume" | "rejected"), shape, spacing_mm, provenance, laterality, device, pattern, reasons
    [{reason, detail, meaning, action}], uncertain, notes, protocol, region, content_hash.
    """
    try:
        volume = read_volume(path, spacing_mm=None if spacing_mm == "file" else spacing_mm)
    except VolumeRejected as error:
        reason = REASONS[error.reason]
        explained = {"reason": error.reason, "detail": error.detail, "meaning": reason.meaning, "action": reason.action}
        return {
            "kind": "rejected", "shape": None, "spacing_mm": None, "provenance": {}, "laterality": None, "device": "",
            "pattern": "unknown", "reasons": [explained], "uncertain": [], "notes": [], "protocol": "", "region": "",
            "content_hash": "",
        }  # fmt: skip
    return {
        "kind": "volume",
        "shape": list(volume.shape),
        "spacing_mm": list(volume.spacing_mm),
        "provenance": dict(volume.provenance),
        "laterality": volume.laterality,
        "device": volume.device,
        "pattern": volume.pattern,
        "reasons": [],
        "uncertain": list(volume.uncertain),
        "notes": list(volume.notes),
        "protocol": volume.protocol,
        "region": volume.region,
        "content_hash": volume.content_hash,
    }
