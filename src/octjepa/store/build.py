"""The ingest job: files to store, over several processes or machines, resumable and idempotent.

Workers read and canonicalise and write pixels; the parent alone writes index and ledger, in the order of the
files' names, so that which of two duplicates is kept depends on neither speed nor worker count.
"""

from __future__ import annotations

import logging
import os
import shutil
import time
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any, Literal

from octjepa.errors import NothingReadError, TooManyLostError, UsageError
from octjepa.files import remove_unfinished, replace_folder
from octjepa.ingest import REASONS, Discovery, SourceFile, discover
from octjepa.ingest.identity import parse_device
from octjepa.ingest.personal_data import count_fields
from octjepa.progress import bar
from octjepa.recipe import Preprocessing
from octjepa.store.canonical import volume_id
from octjepa.store.cohort_flow import record_ignored
from octjepa.store.folder import Store, file_key, people_unknown
from octjepa.store.near_duplicates import near_duplicates_across_people
from octjepa.store.one_file import Result, Spacing, by_hand, ingest_one, is_done, refused, sha256
from octjepa.store.ray_pool import ray_results
from octjepa.store.split import split_the_rest
from octjepa.store.worker_pool import Work, WorkerPool

_log = logging.getLogger(__name__)
Engine = Literal["local", "ray"]
SECONDS_PER_FILE = 600.0  # a hundred times what the largest known scan takes


def _results(
    files: Sequence[SourceFile], work: Work, engine: Engine, workers: int | None, seconds_per_file: float, store: Path
) -> Generator[tuple[SourceFile, Result], None, None]:
    """Results in the order of `files`, from this process, from others of this machine or from a Ray cluster."""
    if engine == "ray":
        yield from ray_results(files, work, workers, seconds_per_file, store)
    elif workers == 1:
        for file in files:
            yield file, work(file)
    else:
        with WorkerPool(work, workers or 1, seconds_per_file) as crew:
            yield from crew.results(files)


class _Seen:
    """Contents and SOP UIDs that stand in the store, to tell a second copy from a file that moved or changed.

    A row counts where its file is among this run's sources and done. What lies elsewhere may have moved here: the same
    pixels then take over its row. Other pixels under its SOP UID are refused, for it may still be there.
    """

    def __init__(self, store: Store, files: Sequence[SourceFile], todo: Sequence[SourceFile]) -> None:
        here, again = {file.key for file in files}, {file.key for file in todo}
        self.by_content: dict[str, str] = {}  # content -> whose it is
        self.strangers = 0  # second copies under another person's id
        self.by_uid: dict[str, str] = {}
        for row in store.entries():
            if file_key(row) in again:
                continue
            if file_key(row) in here:
                self.by_content[row["content_hash"]] = row["person_id"]
            if row["sop_instance_uid"]:
                self.by_uid[row["sop_instance_uid"]] = row["content_hash"]

    def judge(self, row: dict[str, Any]) -> tuple[str, str] | None:
        """(reason, detail) for a duplicate, else None."""
        content, uid = row["content_hash"], row["sop_instance_uid"]
        if content in self.by_content:
            stranger = self.by_content[content] != row["person_id"]
            self.strangers += stranger
            whose = ", which stands under another person id" if stranger else ""
            return "duplicate_content", f"the same pixels as volume {row['volume_id']}{whose}"
        first = self.by_uid.get(uid, content) if uid else content
        if first != content:
            return "duplicate_sop_uid", f"the SOP instance UID of volume {volume_id(first)}, other pixels"
        self.by_content[content] = row["person_id"]
        if uid:
            self.by_uid[uid] = content
        return None


def _settle(
    store: Store, seen: _Seen, source: SourceFile, result: Result, splits: dict[str, str], sites: dict[str, str]
) -> Result:
    """Writes one result to index or ledger; a duplicate becomes a ledger row."""
    row = result.get("volume")
    if row is None:
        store.refuse(result["refused"])
        return result
    judged = seen.judge(row)
    if judged is None:
        row["split"] = splits.get(row["person_id"], "")
        row["site"] = sites.get(row["person_id"]) or row["site"]
        replace_folder(result["chunk"], store.chunk_folder(row["volume_id"]))
        store.add(row)
        return result
    shutil.rmtree(result["chunk"], ignore_errors=True)
    duplicate = refused(source, "index", *judged, sha256(source))
    store.refuse(duplicate["refused"])
    return duplicate


def build_store(
    sources: Sequence[str | Path],
    store: str | Path,
    preprocessing: Preprocessing,
    workers: int | None = 1,
    max_lost: float = 0.2,
    seed: int = 0,
    engine: Engine = "local",
    seconds_per_file: float = SECONDS_PER_FILE,
    spacing_mm: Spacing = None,
) -> dict[str, Any]:
    """Ingests `sources` into the store at `store` and assigns splits to people who have none.

    `workers` processes of this machine share the work; 1 is the calling process, which a file that crashes or hangs a
    decoder takes with it. With `engine` "ray" they are files at once, None for one a CPU of the cluster. A file that
    takes longer than `seconds_per_file` is given up. `spacing_mm` (slice, depth, column) precedes that of the files;
    another one reads them again, "file" those that were read with one. None keeps it and says so.
    Returns {accepted, skipped, quarantined, lost, by_reason, by_device, ignored, files_without_row, notes,
    recommended_split_unknown, split_by, people_unknown, near_duplicates_across_people,
    spacing_overridden, people_at_several_sites, personal_data, people, eyes, seconds, volumes_per_second}:
    `accepted` counts this run's new volumes, `skipped` the ones that were there already; `quarantined` is the sum of
    `by_reason`, of which `lost` count against `max_lost`; `notes` counts the codes noted on the new volumes, `split_by`
    the people by how they came to their split, `people_unknown` the store's volumes whose person no source names,
    `near_duplicates_across_people` pairs of equal or near-duplicate scans under two person ids,
    `spacing_overridden` skipped volumes whose spacing an earlier run was given,
    `people_at_several_sites` ids that more than one institution uses,
    `personal_data` this run's files by field of personal data that they hold (it stays there).
    Refused files are tried again by every run, for their cause may be gone.
    Raises UsageError (no such source, nothing to read), ContractError (a store of another contract), OctjepaError (disk
    full, no workers to be had); after all work is done TooManyLostError, or NothingReadError where the store holds no
    volume. Ctrl-C leaves a store that the next run continues.
    """
    if workers is not None and workers < 1:
        raise UsageError(f"workers must be 1 at least, got {workers}")
    if workers is None and engine == "local":
        workers = os.cpu_count() or 1
    if not seconds_per_file > 0:
        raise UsageError(f"seconds per file must be above 0, got {seconds_per_file}")
    start = time.monotonic()
    found = discover(sources)
    opened = Store.create(store, preprocessing)
    with opened.writing():
        work = partial(ingest_one, store=opened.path, preprocessing=preprocessing, spacing_mm=spacing_mm)
        record_ignored(opened.path, sources, found.ignored)

        def results(files: Sequence[SourceFile]) -> Generator[tuple[SourceFile, Result], None, None]:
            return _results(files, work, engine, workers, seconds_per_file, opened.path)

        return _build(opened, found, results, max_lost, seed, start, spacing_mm)


def _build(
    store: Store,
    found: Discovery,
    results_of: Callable[[Sequence[SourceFile]], Generator[tuple[SourceFile, Result], None, None]],
    max_lost: float,
    seed: int,
    start: float,
    spacing_mm: Spacing,
) -> dict[str, Any]:
    known = store.known_files()
    todo = [file for file in found.files if not is_done(file, known.get(file.key), spacing_mm)]
    skipped = len(found.files) - len(todo)
    unread = {file.key for file in todo}
    kept = sum(by_hand(known.get(file.key)) for file in found.files if file.key not in unread)
    if kept and spacing_mm is None:
        _log.warning(
            "%d volumes keep the spacing that an earlier run was given by hand (--spacing). `--spacing file` reads "
            "them again with what their files say.",
            kept,
        )
    splits = {row["person_id"]: row["split"] for row in store.entries() if row["split"]}
    sites = {str(person["person_id"]): str(person["clinical_site"]) for person in found.participants}
    accepted: list[dict[str, Any]] = []
    lines: list[dict[str, str]] = []
    seen = _Seen(store, found.files, todo)
    remove_unfinished(store.path / "chunks")
    try:
        store.add_participants(found.participants)
        with (
            bar("ingest", len(found.files), "files", done=skipped) as progress,
            closing(results_of(todo)) as results,
        ):
            for file, result in results:
                settled = _settle(store, seen, file, result, splits, sites)
                if "volume" in settled:
                    accepted.append(settled["volume"])
                else:
                    lines.append(settled["refused"])
                progress.advance()
        for source, reason, detail in found.refused:
            line = refused(source, "discover", reason, detail)["refused"]
            store.refuse(line)
            lines.append(line)
        split_by = split_the_rest(store, seed)
    finally:
        remove_unfinished(store.path / "chunks")
        store.consolidate()
    seconds = time.monotonic() - start
    notes = Counter(note.partition("=")[0] for row in accepted for note in row["notes"].split(";") if note)
    by_reason = Counter(row["reason"] for row in lines)
    lost = sum(count for reason, count in by_reason.items() if REASONS[reason].lost)
    table = store.table
    unknown = people_unknown(table)
    alike = seen.strangers + (len(near_duplicates_across_people(table)) if accepted else 0)
    if alike:
        _log.warning(
            "%d pairs of volumes look like the same eye under two person ids: a copy without its name, or one person "
            "with two. `octjepa split %s` lists those that stand on two sides (near_duplicate).",
            alike,
            store.path,
        )
    if unknown:
        _log.warning(
            "%d volumes of %s have no person id: each counts as a person of its own, so that two eyes of one person "
            "can come to stand in training and in test. Give a manifest.tsv with person_id and filepath and ingest "
            "again.",
            unknown,
            store.location,
        )
    odd = sum("extent_implausible" in row["notes"].split(";") for row in accepted)
    if odd:
        _log.warning(
            "%d volumes are smaller or larger than any OCT (note extent_implausible): their spacing may be wrong and "
            "is marked uncertain. `octjepa inspect FILE` says where it comes from.",
            odd,
        )
    of_each = table[table["site"].fillna("") != ""].groupby("person_id")["site"].nunique()
    elsewhere = int((of_each > 1).sum())
    if elsewhere:
        _log.warning(
            "%d person ids of %s come from several institutions: two people may share an id. Where they do, give a "
            "manifest.tsv with ids of their own and ingest again.",
            elsewhere,
            store.location,
        )
    summary = {
        "accepted": len(accepted),
        "skipped": skipped,
        "quarantined": len(lines),
        "lost": lost,
        "by_reason": dict(sorted(by_reason.items())),
        "by_device": dict(sorted(Counter(row["device"] for row in accepted).items())),
        "ignored": dict(sorted(found.ignored.items())),
        "files_without_row": found.files_without_row,
        "notes": dict(sorted(notes.items())),
        "recommended_split_unknown": sum(bool(person["split_unknown"]) for person in found.participants),
        "split_by": split_by,
        "people_unknown": unknown,
        "near_duplicates_across_people": alike,
        "spacing_overridden": kept,
        "people_at_several_sites": elsewhere,
        "personal_data": {name: of["files"] for name, of in count_fields(row["personal"] for row in accepted).items()},
        "people": int(table["person_id"].nunique()),
        "eyes": int(table[["person_id", "eye"]].drop_duplicates().shape[0]),
        "seconds": seconds,
        "volumes_per_second": len(accepted) / max(seconds, 1e-9),
    }
    if not len(table):
        raise NothingReadError(f"none of the {len(found.files)} files can be read:\n{_lost_table(lines)}", summary)
    share = lost / max(1, len(accepted) + skipped + lost)
    if share > max_lost:
        raise TooManyLostError(
            f"ingest is finished, but {lost} of {len(accepted) + skipped + lost} files ({share:.0%}) are lost, more "
            f"than the allowed {max_lost:.0%}:\n{_lost_table(lines)}\n"
            f"see quarantine.jsonl in {store.location}; raise --max-lost if that is as it should be",
            summary,
        )
    return summary


def _lost_table(refused: Sequence[dict[str, str]]) -> str:
    """Device (by path) and reason against count, with what to do."""
    counts = Counter((parse_device(row["file"]) or "unknown device", row["reason"]) for row in refused)
    width = max((len(device) for device, _ in counts), default=0)
    return "\n".join(
        f"  {device:<{width}}  {count:>5}  {reason}: {REASONS[reason].meaning}; {REASONS[reason].action}"
        for (device, reason), count in sorted(counts.items())
        if REASONS[reason].lost
    )
