"""One file of an ingest: its index entry and staged pixels, or the quarantine entry that says why not."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from octjepa import remote
from octjepa.canonical.pipeline import CanonicalisationResult, canonicalise
from octjepa.canonical.quality import looks_inverted
from octjepa.canonical.single_bscan import canonicalise_bscan
from octjepa.errors import OctjepaError, UsageError, VolumeRejected
from octjepa.ingest.source_file import SourceFile
from octjepa.notes import write_codes, write_notes
from octjepa.read.manifest import row_hash
from octjepa.read.personal_data import StatedPerson, mask_path
from octjepa.read.reader import SpacingOption, read_volume
from octjepa.read.single_bscan import read_bscan_volume
from octjepa.reasons import error_origin, quarantine_record, rejection
from octjepa.recipe import Preprocessing
from octjepa.store.index import FileState, IndexEntry, encode_labels
from octjepa.store.storage import CHUNK_FILES, chunk_folder, chunk_hash, stage_chunk
from octjepa.volume import OCTVolume

Spacing = SpacingOption
_INVERTED = (
    "dark layers on a bright background: the intensities look inverted. A DICOM header has to say MONOCHROME1 then; "
    "of other formats invert the values"
)


@dataclass(frozen=True)
class PreparedVolume:
    """The index entry of a file's volume, and the hidden folder with its pixels.

    `person` is whom the file states, for the paths of its siblings. It is written nowhere.
    """

    entry: IndexEntry
    chunk: Path
    person: StatedPerson


@dataclass(frozen=True)
class RefusedFile:
    """The quarantine entry of a file, and whom the file states."""

    entry: dict[str, str]
    person: StatedPerson


Result = PreparedVolume | RefusedFile


def ingest_one(
    source: SourceFile,
    store: Path,
    preprocessing: Preprocessing,
    spacing_mm: Spacing = None,
    halves: bool = False,
    bscan_slices: int = 0,
    earlier_mm: Mapping[str, tuple[float, float, float]] | None = None,
) -> Result:
    """Reads, canonicalises and stages one file; with `bscan_slices` a single B-scan, which fills so many slices.

    `earlier_mm`, by file key, is the spacing that an earlier ingest was given; it counts where `spacing_mm` is None.
    The parent renames the hidden folder once it knows that the file is not a second copy of another.
    Raises OctjepaError, OSError: the disk is full or the store cannot be written.
    """
    stage = "read"
    if spacing_mm is None and earlier_mm:
        spacing_mm = earlier_mm.get(source.key)
    people: list[StatedPerson] = []
    try:
        before = state(source, spacing_mm)
        with source.local(people) as path:
            stated_mm = None if spacing_mm == "file" else spacing_mm
            if bscan_slices:
                volume = read_bscan_volume(path, source.row, stated_mm, source.dataset_path, people, seconds=math.inf)
            else:
                volume = read_volume(
                    path,
                    source.row,
                    stated_mm,
                    dataset_path=source.dataset_path,
                    member=source.member,
                    people=people,
                    seconds=math.inf,  # the limit is that of the whole ingest of a file
                )
        if before is None:
            raise rejection("unreadable_file", "the file was not accessible when its read began: ingest again")
        if state(source, spacing_mm) != before:  # two halves of different files would look like a scan
            raise rejection("unreadable_file", "it changed while it was read: ingest again when it is complete")
        stage = "canonicalise"
        try:
            result = (
                canonicalise_bscan(volume, preprocessing, bscan_slices)
                if bscan_slices
                else canonicalise(volume, preprocessing, halves)
            )
        except VolumeRejected as error:
            if error.reason == "no_tissue" and looks_inverted(volume.pixels):
                raise rejection("no_tissue", _INVERTED) from None
            raise
        chunk = stage_chunk(chunk_folder(store, result.volume.volume_id), result.volume)
        digest = chunk_hash({name: chunk / name for name in CHUNK_FILES})
        entry = replace(_entry(volume, result, source, before), chunk_hash=digest)
        return PreparedVolume(entry, chunk, people[-1] if people else StatedPerson())
    except VolumeRejected as error:
        return refused(source, stage, error.reason, error.detail, sha256(source), people[-1] if people else None)
    except UsageError as error:
        if isinstance(source.location, str) and not isinstance(error, remote.AbsentObject):
            raise  # access is denied, or credentials expired: the file is not the cause
        detail = "the file went away or changed while it was read: run ingest again"
        if isinstance(source.location, str) and not source.objects:  # its address was joined from the parts of the key
            detail = "its key in the bucket has an empty part (//), which is not read: name the object without it"
        return refused(source, stage, "unreadable_file", detail)
    except MemoryError:
        return refused(source, stage, "size_implausible", "it does not fit into memory")
    except (OctjepaError, OSError):
        raise  # the disk is full, the store cannot be written, a bucket does not answer: no fault of this file
    except Exception as error:  # one strange scan must not end the ingest of all others
        lines = str(error).splitlines()  # of arrays, not of a header: reading is over
        detail = f"{error_origin(error)}: {lines[0][:160] if lines else 'no message'}"
        return refused(source, stage, "reader_failed", detail, sha256(source))


def state(source: SourceFile, spacing_mm: Spacing = None) -> FileState | None:
    """The facts that must be unchanged so that a file is not read again; None where the file is not accessible."""
    now = source.state()
    if now is None:
        return None
    return FileState(*now, row_hash(source.row), None if spacing_mm == "file" else spacing_mm)


def is_done(source: SourceFile, before: FileState | None, spacing_mm: Spacing = None) -> bool:
    """Whether a file that was read in state `before` need not be read again; None keeps a spacing given earlier."""
    now = state(source, spacing_mm)
    if before is None or now is None:
        return False
    return now == (before if spacing_mm is not None else replace(before, user_spacing_mm=None))


def refused(
    source: SourceFile, stage: str, reason: str, detail: str, digest: str = "", person: StatedPerson | None = None
) -> RefusedFile:
    """The quarantine entry of one file as a result; `person` is whom it states, None if that was not read.

    Raises KeyError: a reason that is not on the list.
    """
    if person is None:
        person = source.stated_person()
    entry = quarantine_record(mask_path(source.name, person.name, person.birth_date), digest, stage, reason, detail)
    return RefusedFile({**entry, "file_key": source.key}, person)


def sha256(source: SourceFile) -> str:
    """SHA-256 of a file in hex; "" if it cannot be read, and for a folder."""
    try:
        with source.local() as path, path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except (OSError, UsageError):
        return ""


def _display_name(volume: OCTVolume, source: SourceFile) -> str:
    """The scan's path in its data set, with what identifies the person masked."""
    if volume.source == source.dataset_path.as_posix():
        return source.name
    parts = volume.source.split("/")[-len(source.name.split("/")) :]
    return "/".join(parts) + (f"#{source.member}" if source.member else "")


def _entry(volume: OCTVolume, result: CanonicalisationResult, source: SourceFile, file_state: FileState) -> IndexEntry:
    """The index entry of a volume; its chunk has no hash yet."""
    name = _display_name(volume, source)
    dz, dy, dx = volume.spacing_mm
    return IndexEntry(
        volume_id=result.volume.volume_id,
        content_hash=volume.content_hash,
        person_id=volume.person_id,
        eye=volume.laterality or "",
        laterality_source=volume.laterality_source,
        device=volume.device,
        protocol=volume.protocol,
        region=volume.region,
        pattern=volume.pattern,
        sop_instance_uid=volume.sop_instance_uid,
        source=name,
        visit=volume.visit,
        site=volume.site,
        format=volume.format,
        personal=write_codes(volume.personal),
        labels=encode_labels(volume.labels),
        native_d=volume.shape[0],
        native_h=volume.shape[1],
        native_w=volume.shape[2],
        spacing_z_mm=dz,
        spacing_y_mm=dy,
        spacing_x_mm=dx,
        provenance_slice=volume.provenance["slice"],
        provenance_depth=volume.provenance["depth"],
        provenance_column=volume.provenance["column"],
        uncertain=write_codes(volume.uncertain),
        notes=write_notes((*volume.notes, *result.notes)),
        mirrored=result.mirrored,
        tissue_mean=result.volume.tissue_mean,
        tissue_std=result.volume.tissue_std,
        tissue_share=result.tissue_share,
        **result.measurements,
        enface_hash=result.enface_hash,
        split="",
        chunk_hash="",
        file=name,
        file_key=source.key,
        file_size=file_state.size,
        file_mtime_ns=file_state.mtime_ns,
        manifest_hash=file_state.manifest_hash,
        user_spacing_mm=file_state.user_spacing_text,
    )
