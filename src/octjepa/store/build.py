"""The ingest job: files to store, over several processes, resumable and idempotent.

Workers read and canonicalise and write pixels; the parent alone writes index and ledger, in the order of the
files' names, so that which of two duplicates is kept depends on neither speed nor worker count.
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import signal
import threading
import time
from collections import Counter, deque
from collections.abc import Generator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing
from multiprocessing import get_context, parent_process
from pathlib import Path
from typing import Any

from octjepa.errors import OctjepaError, TooManyLostError, UsageError, VolumeRejected
from octjepa.ingest import REASONS, Discovery, SourceFile, discover, read_volume
from octjepa.ingest.identity import device_of
from octjepa.ingest.manifest import find_row, row_hash
from octjepa.ingest.reasons import ledger_row, raised_in, rejected
from octjepa.progress import bar
from octjepa.recipe import Preprocessing
from octjepa.store.canonical import Canonicalised, canonicalise, volume_id
from octjepa.store.disk import clear_unfinished, only_writer, swap_in
from octjepa.store.flow import record_ignored
from octjepa.store.folder import Store, file_key, people_unknown, stage_chunk
from octjepa.store.split import split_the_rest
from octjepa.volume import OCTVolume

_log = logging.getLogger(__name__)
FileState = tuple[int, int, str]  # size, mtime_ns, hash of the manifest row
_AHEAD = 4  # files in flight per worker: enough to keep it busy, few enough to stop soon


def _sha256(path: Path) -> str:
    digest = hashlib.sha256()
    try:
        with path.open("rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
    except OSError:
        return ""
    return digest.hexdigest()


def _row(volume: OCTVolume, made: Canonicalised, source: SourceFile, read_as: FileState) -> dict[str, Any]:
    notes = (*volume.notes, *made.notes)
    dz, dy, dx = volume.spacing_mm
    return {
        "volume_id": made.volume.volume_id, "content_hash": volume.content_hash, "person_id": volume.person_id,
        "eye": volume.laterality or "", "laterality_source": volume.laterality_source, "device": volume.device,
        "protocol": volume.protocol, "region": volume.region, "pattern": volume.pattern,
        "sop_instance_uid": volume.sop_instance_uid, "source": source.name,
        "visit": volume.visit, "site": volume.site, "format": volume.format, "personal": ";".join(volume.personal),
        "native_d": volume.shape[0], "native_h": volume.shape[1], "native_w": volume.shape[2],
        "spacing_z_mm": dz, "spacing_y_mm": dy, "spacing_x_mm": dx,
        "provenance_slice": volume.provenance["slice"], "provenance_row": volume.provenance["row"],
        "provenance_column": volume.provenance["column"],
        "uncertain": ";".join(volume.uncertain), "notes": ";".join(dict.fromkeys(notes)), "mirrored": made.mirrored,
        "tissue_mean": made.volume.tissue_mean, "tissue_std": made.volume.tissue_std,
        "tissue_share": made.tissue_share, "quality": made.quality, "split": "",
        "file": source.name, "file_key": source.key,
        "file_size": read_as[0], "file_mtime_ns": read_as[1], "manifest_hash": read_as[2],
    }  # fmt: skip


def _state(source: SourceFile) -> FileState | None:
    """What has to be the same for a file to be done; None where it cannot be looked at."""
    try:
        stat = os.stat(source.path)
    except OSError:
        return None
    return stat.st_size, stat.st_mtime_ns, row_hash(source.row or find_row(source.path))


def _refused(source: SourceFile, sha256: str, stage: str, reason: str, detail: str) -> dict[str, Any]:
    return {"refused": {**ledger_row(source.name, sha256, stage, reason, detail), "file_key": source.key}}


def ingest_one(source: SourceFile, store: Path, preprocessing: Preprocessing) -> dict[str, Any]:
    """One file: {"volume": index row, "chunk": the hidden folder with its pixels} or {"refused": ledger row}.

    The pixels wait beside their place until the parent has judged that this file is no second copy of another.
    """
    stage = "read"
    try:
        before = _state(source)  # before reading: a file that changes meanwhile is read again by the next run
        volume = read_volume(source.path, source.row)
        if before is None:
            raise rejected("unreadable_file", "the file came back while it was read")
        stage = "canonicalise"
        made = canonicalise(volume, preprocessing)
        name = made.volume.volume_id
        chunk = stage_chunk(store / "chunks" / name[:2] / name, made.volume)
        return {"volume": _row(volume, made, source, before), "chunk": chunk}
    except VolumeRejected as error:
        return _refused(source, _sha256(source.path), stage, error.reason, error.detail)
    except UsageError:
        return _refused(source, "", stage, "unreadable_file", "the file went away while it was read")
    except MemoryError:
        return _refused(source, "", stage, "size_implausible", "it does not fit into memory")
    except (OctjepaError, OSError):
        raise  # the disk is full or the store cannot be written: no fault of this file
    except Exception as error:  # one strange scan must not end the ingest of all others
        lines = str(error).splitlines()  # of arrays, not of a header: reading is over
        detail = f"{raised_in(error)}: {lines[0][:160] if lines else 'no message'}"
        return _refused(source, _sha256(source.path), stage, "reader_failed", detail)


def _start_worker() -> None:
    from threadpoolctl import threadpool_limits

    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's; it lets running files end
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    threading.Thread(target=_end_with_parent, daemon=True).start()
    threadpool_limits(1)


def _end_with_parent() -> None:
    """A worker whose parent was killed would wait for its next file for ever: it holds both ends of the queue."""
    parent = parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _submit(pool: ProcessPoolExecutor, *task: Any) -> Future[dict[str, Any]]:
    """Submits with Ctrl-C held back, which the worker this may start inherits: it is not stopped while it starts."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        return pool.submit(ingest_one, *task)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _results(
    files: Sequence[SourceFile], store: Path, preprocessing: Preprocessing, workers: int
) -> Generator[tuple[SourceFile, dict[str, Any]], None, None]:
    """Results in the order of `files`. Raises OctjepaError where a worker died."""
    if workers <= 1:
        for file in files:
            yield file, ingest_one(file, store, preprocessing)
        return
    # Spawned, not forked: the parent may hold threads (BLAS, progress bar) that a fork would freeze.
    pool = ProcessPoolExecutor(workers, mp_context=get_context("spawn"), initializer=_start_worker)
    waiting: deque[tuple[SourceFile, Future[dict[str, Any]]]] = deque()
    todo = iter(files)
    try:
        while True:
            while len(waiting) < workers * _AHEAD and (following := next(todo, None)) is not None:
                waiting.append((following, _submit(pool, following, store, preprocessing)))
            if not waiting:
                return
            file, future = waiting.popleft()
            yield file, future.result()
    except BrokenProcessPool:
        raise OctjepaError(
            "a worker process died (out of memory?); what was finished is in the store: "
            "run the same command again with fewer --workers"
        ) from None
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


class _Seen:
    """Contents and SOP UIDs that stand in the store, to tell a second copy from a file that moved or changed.

    A row counts where its file is among this run's sources and done. What lies elsewhere may have moved here: the same
    pixels then take over its row. Other pixels under its SOP UID are refused, for it may still be there.
    """

    def __init__(self, store: Store, files: Sequence[SourceFile], todo: Sequence[SourceFile]) -> None:
        here, again = {file.key for file in files}, {file.key for file in todo}
        self.by_content: set[str] = set()
        self.by_uid: dict[str, str] = {}
        for row in store.rows():
            if file_key(row) in again:
                continue
            if file_key(row) in here:
                self.by_content.add(row["content_hash"])
            if row["sop_instance_uid"]:
                self.by_uid[row["sop_instance_uid"]] = row["content_hash"]

    def judge(self, row: dict[str, Any]) -> tuple[str, str] | None:
        """(reason, detail) for a duplicate, else None."""
        content, uid = row["content_hash"], row["sop_instance_uid"]
        if content in self.by_content:
            return "duplicate_content", f"the same pixels as volume {row['volume_id']}"
        first = self.by_uid.get(uid, content) if uid else content
        if first != content:
            return "duplicate_sop_uid", f"the SOP instance UID of volume {volume_id(first)}, other pixels"
        self.by_content.add(content)
        if uid:
            self.by_uid[uid] = content
        return None


def _settle(
    store: Store, seen: _Seen, source: SourceFile, result: dict[str, Any], splits: dict[str, str]
) -> dict[str, Any]:
    """Writes one result to index or ledger; a duplicate becomes a ledger row."""
    row = result.get("volume")
    if row is None:
        store.refuse(result["refused"])
        return result
    judged = seen.judge(row)
    if judged is None:
        row["split"] = splits.get(row["person_id"], "")
        swap_in(result["chunk"], store.chunk(row["volume_id"]))
        store.add(row)
        return result
    shutil.rmtree(result["chunk"], ignore_errors=True)
    refused = _refused(source, _sha256(source.path), "index", *judged)
    store.refuse(refused["refused"])
    return refused


def build_store(
    sources: Sequence[str | Path],
    store: str | Path,
    preprocessing: Preprocessing,
    workers: int = 1,
    max_lost: float = 0.2,
    seed: int = 0,
) -> dict[str, Any]:
    """Ingests `sources` into the store at `store` and assigns splits to people who have none.

    Returns {accepted, skipped, quarantined, lost, by_reason, by_device, ignored, files_without_row, notes,
    recommended_split_unknown, split_by, people_unknown, people, eyes, seconds, volumes_per_second}: `accepted` counts
    this run's new volumes, `skipped` the ones that were there already; `quarantined` is the sum of `by_reason`, of
    which `lost` count against `max_lost`; `notes` counts the codes noted on the new volumes, `split_by` the people by
    how they came to their split, `people_unknown` the store's volumes whose person no source names.
    Refused files are tried again by every run, for their cause may be gone.
    Raises UsageError (no such source, nothing to read), ContractError (a store of another contract), TooManyLostError
    after all work is done, OctjepaError (disk full, a worker died). Ctrl-C leaves a store that the next run continues.
    """
    if workers < 1:
        raise UsageError(f"workers must be 1 at least, got {workers}")
    start = time.monotonic()
    found = discover(sources)
    opened = Store.create(store, preprocessing)
    with only_writer(opened.path):
        record_ignored(opened.path, sources, found.ignored)
        return _build(opened, found, workers, max_lost, seed, start)


def _build(store: Store, found: Discovery, workers: int, max_lost: float, seed: int, start: float) -> dict[str, Any]:
    known = store.known_files()
    todo = [file for file in found.files if not _is_done(file, known)]
    skipped = len(found.files) - len(todo)
    splits = {row["person_id"]: row["split"] for row in store.rows() if row["split"]}
    accepted: list[dict[str, Any]] = []
    refused: list[dict[str, str]] = []
    seen = _Seen(store, found.files, todo)
    clear_unfinished(store.path / "chunks")
    try:
        store.add_participants(found.participants)
        with (
            bar("ingest", len(found.files), "files", done=skipped) as progress,
            closing(_results(todo, store.path, store.preprocessing, workers)) as results,
        ):
            for file, result in results:
                settled = _settle(store, seen, file, result, splits)
                if "volume" in settled:
                    accepted.append(settled["volume"])
                else:
                    refused.append(settled["refused"])
                progress.advance()
        for file in found.missing:
            row = _refused(file, "", "discover", "manifest_row_without_file", "listed, not on disk")["refused"]
            store.refuse(row)
            refused.append(row)
        split_by = split_the_rest(store, seed)
    finally:
        clear_unfinished(store.path / "chunks")
        store.consolidate()
    seconds = time.monotonic() - start
    notes = Counter(note.partition("=")[0] for row in accepted for note in row["notes"].split(";") if note)
    by_reason = Counter(row["reason"] for row in refused)
    lost = sum(count for reason, count in by_reason.items() if REASONS[reason].lost)
    table = store.table
    unknown = people_unknown(table)
    if unknown:
        _log.warning(
            "%d volumes of %s have no person id: each counts as a person of its own, so that two eyes of one person "
            "can come to stand in training and in test. Give a manifest.tsv with person_id and filepath and ingest "
            "again.",
            unknown,
            store.path,
        )
    summary = {
        "accepted": len(accepted),
        "skipped": skipped,
        "quarantined": len(refused),
        "lost": lost,
        "by_reason": dict(sorted(by_reason.items())),
        "by_device": dict(sorted(Counter(row["device"] for row in accepted).items())),
        "ignored": dict(sorted(found.ignored.items())),
        "files_without_row": found.files_without_row,
        "notes": dict(sorted(notes.items())),
        "recommended_split_unknown": sum(bool(person["split_unknown"]) for person in found.participants),
        "split_by": split_by,
        "people_unknown": unknown,
        "people": int(table["person_id"].nunique()),
        "eyes": int(table[["person_id", "eye"]].drop_duplicates().shape[0]),
        "seconds": seconds,
        "volumes_per_second": len(accepted) / max(seconds, 1e-9),
    }
    if not len(table):
        raise UsageError(f"none of the {len(found.files)} files can be read:\n{_lost_table(refused)}")
    share = lost / max(1, len(accepted) + skipped + lost)
    if share > max_lost:
        raise TooManyLostError(
            f"ingest is finished, but {lost} of {len(accepted) + skipped + lost} files ({share:.0%}) are lost, more "
            f"than the allowed {max_lost:.0%}:\n{_lost_table(refused)}\n"
            f"see {store.path / 'quarantine.jsonl'}; raise --max-lost if that is as it should be",
            summary,
        )
    return summary


def _is_done(file: SourceFile, known: dict[str, FileState]) -> bool:
    return file.key in known and known[file.key] == _state(file)


def _lost_table(refused: Sequence[dict[str, str]]) -> str:
    """Device (by path) and reason against count, with what to do."""
    counts = Counter((device_of(row["file"]) or "unknown device", row["reason"]) for row in refused)
    width = max((len(device) for device, _ in counts), default=0)
    return "\n".join(
        f"  {device:<{width}}  {count:>5}  {reason}: {REASONS[reason].meaning}; {REASONS[reason].action}"
        for (device, reason), count in sorted(counts.items())
        if REASONS[reason].lost
    )
