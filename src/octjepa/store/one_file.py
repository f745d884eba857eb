"""One file of an ingest: its index row and its pixels beside their place, or the ledger row that says why not."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

from octjepa.errors import OctjepaError, UsageError, VolumeRejected
from octjepa.files import CHUNK_FILES, chunk_hash
from octjepa.ingest import SourceFile, read_volume
from octjepa.ingest.manifest import row_hash
from octjepa.ingest.personal_data import masked_name
from octjepa.ingest.reader import SpacingOption
from octjepa.ingest.reasons import error_origin, quarantine_record, rejection
from octjepa.recipe import Preprocessing
from octjepa.store.canonical import CanonicalisationResult, canonicalise
from octjepa.store.chunk import stage_chunk
from octjepa.store.labels import labels_text
from octjepa.volume import OCTVolume

FileState = tuple[int, int, str]  # size, mtime_ns, hash of the manifest row and the spacing that was asked for
Spacing = SpacingOption
_ASKED = " spacing "
Result = dict[str, Any]  # {"volume": index row, "chunk": hidden folder} or {"refused": ledger row}


def ingest_one(source: SourceFile, store: Path, preprocessing: Preprocessing, spacing_mm: Spacing = None) -> Result:
    """One file: {"volume": index row, "chunk": the hidden folder with its pixels} or {"refused": ledger row}.

    The pixels wait beside their place until the parent has judged that this file is no second copy of another.
    Raises OctjepaError, OSError: the disk is full or the store cannot be written.
    """
    stage = "read"
    try:
        before = state(source, spacing_mm)  # before reading: what changes meanwhile is read again by the next run
        with source.local() as path:
            asked = None if spacing_mm == "file" else spacing_mm
            volume = read_volume(path, source.row, asked, dataset_path=source.dataset_path, member=source.member)
        if before is None:
            raise rejection("unreadable_file", "the file came back while it was read")
        stage = "canonicalise"
        made = canonicalise(volume, preprocessing)
        name = made.volume.volume_id
        chunk = stage_chunk(store / "chunks" / name[:2] / name, made.volume)
        written = chunk_hash({part: chunk / part for part in CHUNK_FILES})
        return {"volume": {**_row(volume, made, source, before), "chunk_hash": written}, "chunk": chunk}
    except VolumeRejected as error:
        return refused(source, stage, error.reason, error.detail, sha256(source))
    except UsageError:
        return refused(source, stage, "unreadable_file", "the file went away while it was read")
    except MemoryError:
        return refused(source, stage, "size_implausible", "it does not fit into memory")
    except (OctjepaError, OSError):
        raise  # the disk is full, the store cannot be written, a bucket does not answer: no fault of this file
    except Exception as error:  # one strange scan must not end the ingest of all others
        lines = str(error).splitlines()  # of arrays, not of a header: reading is over
        detail = f"{error_origin(error)}: {lines[0][:160] if lines else 'no message'}"
        return refused(source, stage, "reader_failed", detail, sha256(source))


def state(source: SourceFile, spacing_mm: Spacing = None) -> FileState | None:
    """What has to be the same for a file to be done; None where it cannot be looked at."""
    now = source.state()
    if now is None:
        return None
    row = row_hash(source.row)
    return (*now, row if spacing_mm in (None, "file") else f"{row}{_ASKED}{','.join(map(repr, spacing_mm))}")


def is_done(source: SourceFile, before: FileState | None, spacing_mm: Spacing = None) -> bool:
    """Whether a file that was read as `before` need not be read again; no spacing keeps the one that was asked for."""
    now = state(source, spacing_mm)
    if before is None or now is None:
        return False
    return now == (before if spacing_mm is not None else (*before[:2], before[2].partition(_ASKED)[0]))


def by_hand(before: FileState | None) -> bool:
    """Whether a file was read with a spacing that the user gave."""
    return before is not None and _ASKED in before[2]


def refused(source: SourceFile, stage: str, reason: str, detail: str, digest: str = "") -> Result:
    """The ledger row of one file as a result. Raises KeyError: a reason that is not on the list."""
    name = masked_name(source.location, source.name) if isinstance(source.location, Path) else source.name
    return {"refused": {**quarantine_record(name, digest, stage, reason, detail), "file_key": source.key}}


def sha256(source: SourceFile) -> str:
    """Of a file's bytes, in hex; "" where they cannot be read, and for a folder."""
    try:
        with source.local() as path, path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except (OSError, UsageError):
        return ""


def _told_name(volume: OCTVolume, source: SourceFile) -> str:
    """The scan's path in its data set, with what tells who the person is masked, as the reader found it."""
    if volume.source == source.dataset_path.as_posix():
        return source.name
    parts = volume.source.split("/")[-len(source.name.split("/")) :]
    return "/".join(parts) + (f"#{source.member}" if source.member else "")


def _row(volume: OCTVolume, made: CanonicalisationResult, source: SourceFile, read_as: FileState) -> dict[str, Any]:
    notes = (*volume.notes, *made.notes)
    name = _told_name(volume, source)
    dz, dy, dx = volume.spacing_mm
    return {
        "volume_id": made.volume.volume_id, "content_hash": volume.content_hash, "person_id": volume.person_id,
        "eye": volume.laterality or "", "laterality_source": volume.laterality_source, "device": volume.device,
        "protocol": volume.protocol, "region": volume.region, "pattern": volume.pattern,
        "sop_instance_uid": volume.sop_instance_uid, "source": name,
        "visit": volume.visit, "site": volume.site, "format": volume.format, "personal": ";".join(volume.personal),
        "labels": labels_text(volume.labels),
        "native_d": volume.shape[0], "native_h": volume.shape[1], "native_w": volume.shape[2],
        "spacing_z_mm": dz, "spacing_y_mm": dy, "spacing_x_mm": dx,
        "provenance_slice": volume.provenance["slice"], "provenance_depth": volume.provenance["depth"],
        "provenance_column": volume.provenance["column"],
        "uncertain": ";".join(volume.uncertain), "notes": ";".join(dict.fromkeys(notes)), "mirrored": made.mirrored,
        "tissue_mean": made.volume.tissue_mean, "tissue_std": made.volume.tissue_std,
        "tissue_share": made.tissue_share, **made.figures, "split": "",
        "file": name, "file_key": source.key,
        "file_size": read_as[0], "file_mtime_ns": read_as[1], "manifest_hash": read_as[2],
    }  # fmt: skip
