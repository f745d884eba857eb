"""The ingest job: files to store, over several processes or machines, resumable and idempotent.

Workers read, canonicalise and write pixels; only the parent writes index and quarantine, in the order of the files'
names, so that which of two duplicates is accepted depends on neither speed nor the number of workers.
"""

from __future__ import annotations

import logging
import shlex
import shutil
import time
from collections import Counter
from collections.abc import Collection, Generator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Literal

from threadpoolctl import ThreadpoolController

from octjepa.canonical.near_duplicates import near_duplicates_across_people
from octjepa.cohort.flow import site_by_person
from octjepa.cohort.leaks import connected
from octjepa.cohort.split import split_the_rest
from octjepa.errors import NothingReadError, TooManyLostError, UsageError, VolumeRejected, counted
from octjepa.files import remove_unfinished, replace_folder
from octjepa.ingest.note_warnings import note_warnings
from octjepa.ingest.one_file import PreparedVolume, Result, Spacing, ingest_one, is_done, refused, sha256
from octjepa.ingest.person_claims import ABOUT_PERSON, CONTRADICTED_NOTE, CONTRADICTION_KINDS, PersonClaims
from octjepa.ingest.ray_pool import ray_results
from octjepa.ingest.sibling_names import SiblingNames
from octjepa.ingest.source_file import Discovery, SourceFile
from octjepa.ingest.source_flow import record_ignored
from octjepa.ingest.sources import WARNED_REASONS, discover
from octjepa.ingest.worker_pool import Work, WorkerPool, worker_count
from octjepa.notes import count_codes, read_codes, read_notes, write_notes
from octjepa.progress import bar
from octjepa.read.devices import parse_device
from octjepa.read.personal_data import StatedPerson, count_fields, pseudonym
from octjepa.reasons import REASONS, with_action
from octjepa.recipe import Preprocessing
from octjepa.record import Record
from octjepa.store.folder import Store
from octjepa.store.index import IndexEntry, people_unknown, refused_file_key, text_cells
from octjepa.time_limit import SECONDS_PER_FILE, time_limit
from octjepa.volume import volume_id

_log = logging.getLogger(__name__)
Engine = Literal["local", "ray"]
_OF_PARTS = {"single_frame_series", "too_few_frames"}  # of a file with one B-scan of a scan
_UNREADABLE = "unreadable_folder"


def run_files(
    files: Sequence[SourceFile], work: Work, engine: Engine, workers: int | None, seconds_per_file: float, store: Path
) -> Generator[tuple[SourceFile, Result], None, None]:
    """(file, result of `work`) in the order of `files`, from this process, a pool of processes or a Ray cluster."""
    if engine == "ray":
        yield from ray_results(files, work, workers, seconds_per_file, store)
    elif workers == 1:
        threads = ThreadpoolController()
        for file in files:
            with threads.limit(limits=1):  # as in a worker: a product of matrices rounds otherwise on several threads
                try:
                    with time_limit(seconds_per_file):
                        result = work(file)
                except VolumeRejected as error:
                    result = refused(file, "read", error.reason, error.detail)
            yield file, result
    else:
        with WorkerPool(work, workers or 1, seconds_per_file) as pool:
            yield from pool.results(files)


class DuplicateCheck:
    """Tells a second copy of a scan from a file that moved or changed, by content hash and SOP instance UID.

    A content counts as present where its file is among this run's `files` and is not read again: a volume from
    elsewhere may have moved here, and the same pixels then take over its entry. Other pixels under its SOP UID are
    refused, because that file may still be there.
    """

    def __init__(self, store: Store, files: Sequence[SourceFile], todo: Sequence[SourceFile]) -> None:
        here, again = {file.key for file in files}, {file.key for file in todo}
        self.across_people = 0  # second copies under another person's id
        self.changed_owner = 0  # entries that this run's file takes over with another person id or eye
        self._owner_by_content: dict[str, tuple[str, str]] = {}  # person, eye
        self._elsewhere: dict[str, IndexEntry] = {}  # by content, entries whose file is not among this run's
        self._content_by_uid: dict[str, str] = {}
        for entry in store.entries():
            if entry.key in again:
                continue
            if entry.key in here:
                self._owner_by_content[entry.content_hash] = entry.person_id, entry.eye
            else:
                self._elsewhere[entry.content_hash] = entry
            if entry.sop_instance_uid:
                self._content_by_uid[entry.sop_instance_uid] = entry.content_hash

    def refusal(self, entry: IndexEntry) -> tuple[str, str] | None:
        """(reason, detail) for a duplicate; None for a new scan, which is remembered."""
        content, uid = entry.content_hash, entry.sop_instance_uid
        if content in self._owner_by_content:
            person, eye = self._owner_by_content[content]
            another = person != entry.person_id
            self.across_people += another
            whose = ", which is stored under another person id" if another else ""
            if eye and entry.eye and eye != entry.eye:
                whose += f", and there as the other eye ({eye}; here {entry.eye}): one of the two files is mislabelled"
            return "duplicate_content", f"the same pixels as volume {entry.volume_id}{whose}"
        first = self._content_by_uid.get(uid, content) if uid else content
        if first != content:
            return "duplicate_sop_uid", f"the SOP instance UID of volume {volume_id(first)}, other pixels"
        if before := self._elsewhere.get(content):
            self.changed_owner += _is_of_another(before, entry)
        self._owner_by_content[content] = entry.person_id, entry.eye
        if uid:
            self._content_by_uid[uid] = content
        return None


def _is_of_another(before: IndexEntry, entry: IndexEntry) -> bool:
    """Whether two entries of the same pixels state different people or eyes; an unknown one differs from none."""
    is_named = "person_unknown" not in read_notes(before.notes)
    differs = is_named and before.person_id not in {entry.person_id, pseudonym(entry.person_id)}
    return differs or bool(before.eye and entry.eye and before.eye != entry.eye)


def record_result(store: Store, duplicates: DuplicateCheck, source: SourceFile, result: Result) -> Result:
    """Writes one result to index or quarantine and returns it; a duplicate becomes a refusal."""
    if isinstance(result, PreparedVolume):
        refusal = duplicates.refusal(result.entry)
        if refusal is None:
            replace_folder(result.chunk, store.chunk_folder(result.entry.volume_id))
            store.add(result.entry)
            return result
        shutil.rmtree(result.chunk, ignore_errors=True)
        result = refused(source, "index", *refusal, sha256(source), result.person)
    store.refuse(result.entry)
    return result


@dataclass(frozen=True)
class IngestOptions:
    """Settings of an ingest that few runs change.

    `seed` decides the split of people without one. With `engine` "ray" a Ray cluster reads the files. A file that takes
    longer than `seconds_per_file` is refused. With `bscan_slices` every picture and one-frame DICOM file is a single
    B-scan, which fills so many stored slices: those of a patch of the encoder.
    """

    seed: int = 0
    engine: Engine = "local"
    seconds_per_file: float = SECONDS_PER_FILE
    bscan_slices: int = 0


_USUAL = IngestOptions()


@dataclass(frozen=True)
class IngestSummary(Record):
    """The result of an ingest: counts over this run and over the store.

    accepted: this run's new volumes. quarantined: the sum of by_reason, of which `lost` count against `max_lost`.
    notes: note codes of the new volumes. people_unknown: volumes of the store whose person no source names.
    near_duplicates_across_people: pairs of equal or near-duplicate scans under two person ids. people_at_several_sites:
    ids that more than one institution uses. people_contradicted: ids under which files state different people
    (`person_claims`). personal_data: this run's files by the field of personal data that they hold (it stays there).
    eyes_with_several_scans, people, eyes: of the store.
    skipped: files whose volume was there already. split_by: people by how they came to
    their split. spacing_overridden: files that keep the spacing that an earlier run was given.
    """

    accepted: int
    quarantined: int
    lost: int
    by_reason: dict[str, int]
    by_device: dict[str, int]
    ignored: dict[str, int]
    files_without_row: int
    notes: dict[str, int]
    recommended_split_unknown: int
    people_unknown: int
    near_duplicates_across_people: int
    people_at_several_sites: int
    people_contradicted: int
    eyes_with_several_scans: int
    personal_data: dict[str, int | str | bool]
    people: int
    eyes: int
    skipped: int = 0
    split_by: dict[str, int] = field(default_factory=dict)
    spacing_overridden: int = 0
    seconds: float = 0.0
    volumes_per_second: float = 0.0


def build_store(
    sources: Sequence[str | Path],
    store: str | Path,
    preprocessing: Preprocessing,
    workers: int | None = 1,
    max_lost: float = 0.2,
    spacing_mm: Spacing = None,
    halves: bool = False,
    options: IngestOptions = _USUAL,
) -> IngestSummary:
    """Ingests `sources` into the store at `store` and assigns splits to people who have none.

    `workers` processes of this machine share the work; 1 is the calling process, which a file that crashes a decoder
    takes with it. With `options.engine` "ray" they are files at once, None for one per CPU of the cluster. `spacing_mm`
    (slice, depth, column) takes precedence over what the files say; another one reads them again, "file" those that
    were read with one. None keeps what was given before and warns. `halves`: a new store also holds what every other
    B-scan shows (`CanonicalVolume.halves`).
    Refused files are tried again by every run, for their cause may be gone.
    Raises UsageError (no such source, nothing to read), ContractError (a store of another contract), OctjepaError (disk
    full, no worker can be started); after all work is done TooManyLostError, or NothingReadError where the store holds
    no volume. Ctrl-C leaves a store that the next run continues.
    """
    if workers is not None and workers < 1:
        raise UsageError(f"workers must be 1 at least, got {workers}")
    seconds_per_file = options.seconds_per_file
    if options.engine == "local":
        workers = worker_count(workers)
    if not seconds_per_file > 0:
        raise UsageError(f"seconds per file must be above 0, got {seconds_per_file}")
    start = time.monotonic()
    discovery = discover(sources, single_bscans=options.bscan_slices > 0)
    opened = Store.create(store, preprocessing, halves, options.bscan_slices)
    with opened.writing():
        record_ignored(opened.path, sources, discovery.ignored)
        known_files = opened.known_files()
        stated_mm = {entry.key: stated for entry in opened.entries() if (stated := entry.stated_spacing_mm)}
        todo = [file for file in discovery.files if not is_done(file, known_files.get(file.key), spacing_mm)]
        read_now = {file.key for file in todo}
        opened.clear_refusals(file.key for file in discovery.files if file.key not in read_now)
        opened.clear_refusals(_settled_refusals(opened, discovery))
        overridden = sum(
            file.key in stated_mm for file in discovery.files if spacing_mm is None or file.key not in read_now
        )
        if overridden and spacing_mm is None:
            _log.warning(
                "%d volumes keep the spacing that an earlier run was given by hand (--spacing). `--spacing file` reads "
                "them again with what their files say.",
                overridden,
            )
        duplicates = DuplicateCheck(opened, discovery.files, todo)
        work = partial(
            ingest_one,
            store=opened.path,
            preprocessing=preprocessing,
            spacing_mm=spacing_mm,
            earlier_mm={key: stated for key, stated in stated_mm.items() if key in read_now},
            halves=opened.halves,
            bscan_slices=opened.bscan_slices,
        )
        results = run_files(todo, work, options.engine, workers, seconds_per_file, opened.path)
        try:
            accepted, refusals = _ingest(opened, discovery, duplicates, results, len(todo))
            opened.clear_refusals(_moved_refusals(opened, discovery, refusals))
            split_by = split_the_rest(opened, options.seed)
        finally:
            remove_unfinished(opened.path / "chunks")
            opened.consolidate()
        alike = near_duplicates_across_people(opened.table) if accepted else []
        _warn_of_copies(opened, alike, duplicates.across_people)
        if duplicates.changed_owner:
            _log.warning(
                "%s had another person id or eye, from a file that this command does not read. The index now has those "
                "of the file with the same pixels that it reads, because the data set may have moved. If both files "
                "are still there, find which is right and remove the other.",
                counted(duplicates.changed_owner, "volume"),
            )
        summary = _summary(opened, discovery, accepted, refusals, len(alike) + duplicates.across_people)
        seconds = time.monotonic() - start
        summary = replace(
            summary,
            skipped=len(discovery.files) - len(todo),
            split_by=split_by,
            spacing_overridden=overridden,
            seconds=seconds,
            volumes_per_second=len(accepted) / max(seconds, 1e-9),
        )
        _check_lost(opened, summary, refusals, len(discovery.files), max_lost)
        _advise(refusals)
        return summary


def _settled_refusals(store: Store, discovery: Discovery) -> list[str]:
    """Keys of refusals whose cause is gone.

    These are files that are now parts of a scan or were found to hold several scans, folders in which files were
    found, and what an earlier search of the same sources refused unread and this one does not.
    """
    refused = {key: entry["reason"] for key, entry in store.index.quarantine.items()}
    settled = {replace(file, member="").key for file in discovery.files if file.member}
    again = {refusal.source.key for refusal in discovery.refused}
    # Where a folder could not be listed, what was refused in it may still be there.
    not_seen = {discovery.found_in[source.key] for source, reason, _ in discovery.refused if reason == _UNREADABLE}
    searched = discovery.searched - not_seen
    settled.update(
        key for key, entry in store.index.quarantine.items() if entry.get("found_in") in searched and key not in again
    )
    # Stores of earlier versions list a link under the key of its target.
    targets = {replace(refusal.source, is_link=False).key for refusal in discovery.refused if refusal.source.is_link}
    settled.update(key for key in targets - again if refused.get(key) == "path_escapes")
    if set(refused.values()) & _OF_PARTS:
        settled.update(key for file in discovery.files for key in file.part_keys())
    if _UNREADABLE in refused.values():
        paths = [file.location for file in discovery.files if isinstance(file.location, Path)]
        keys = {SourceFile(folder, "").key for folder in {folder for path in paths for folder in path.parents}}
        settled.update(key for key in keys if refused.get(key) == _UNREADABLE)
    return sorted(settled)


def _moved_refusals(store: Store, discovery: Discovery, refusals: Sequence[dict[str, str]]) -> list[str]:
    """Keys of files that earlier runs refused and that this run refuses in another place: the data set has moved.

    The same content under the same name counts as the same file. Files without content are all alike, so that they
    stay listed.
    """
    here = {file.key for file in discovery.files} | {refusal.source.key for refusal in discovery.refused}
    now = {(entry["file"], entry["hash"]) for entry in refusals if entry["reason"] != "empty_file"}
    return [
        key
        for key, entry in store.index.quarantine.items()
        if key not in here and entry.get("hash") and (entry["file"], entry["hash"]) in now
    ]


def _ingest(
    store: Store,
    discovery: Discovery,
    duplicates: DuplicateCheck,
    results: Generator[tuple[SourceFile, Result], None, None],
    count: int,
) -> tuple[list[IndexEntry], list[dict[str, str]]]:
    """Records every result: (index entries of the accepted volumes, quarantine entries of the refused files)."""
    splits = {entry.person_id: entry.split for entry in store.entries() if entry.split}
    accepted: list[str] = []
    refusals: list[dict[str, str]] = []
    names, claims, read = SiblingNames(), PersonClaims(), set[str]()
    remove_unfinished(store.path / "chunks")
    store.add_participants(discovery.participants)
    total = len(discovery.files)
    with bar("ingest", total, "files", done=total - count) as progress, closing(results):
        for file, result in results:
            if isinstance(result, PreparedVolume):
                result = replace(result, entry=_with_stored_split(store, splits, result.entry))
            names.learn(file.name, result.person)
            read.add(file.key)
            recorded = record_result(store, duplicates, file, result)
            if isinstance(recorded, PreparedVolume):
                accepted.append(recorded.entry.volume_id)
                claims.learn(recorded.entry, result.person)
            else:
                refusals.append(recorded.entry)
            progress.advance()
    for source, reason, detail in discovery.refused:
        entry = refused(source, "discover", reason, detail).entry
        refusals.append({**entry, "found_in": discovery.found_in[source.key]})
        store.refuse(refusals[-1])
    partly_known = _learn_stored_people(store, discovery, names, claims, read)
    _note_contradictions(store, claims, partly_known)
    _mask_siblings(store, discovery, names)
    _join_pseudonyms(store)
    store.add_participants(_participants_under_pseudonyms(store))
    _take_sites(store)
    return [store.entry(volume_id) for volume_id in accepted], refusals


def _with_stored_split(store: Store, splits: Mapping[str, str], entry: IndexEntry) -> IndexEntry:
    """`entry` with the split of its person in the store, who may have no volume there at the moment; "" for none.

    The same pixels of an unknown person keep the person id that they have: earlier versions derived it from the path.
    """
    before = store.index.volumes.get(entry.volume_id)
    if before and all("person_unknown" in read_notes(each.notes) for each in (before, entry)):
        return replace(entry, person_id=before.person_id, visit=before.visit or entry.visit, split=before.split)
    return replace(entry, split=splits.get(entry.person_id) or store.index.past_split(entry.person_id))


def _note_contradictions(store: Store, claims: PersonClaims, partly_known: Collection[str]) -> None:
    """Notes the volumes of person ids under which files state different people, with the kinds of contradiction.

    Kinds that an earlier ingest noted stay for the ids `partly_known`, some of whose files this ingest did not look at.
    For any other id they stay if they are not about the person: the index holds only one site of a person.
    """
    contradictions = claims.contradictions()
    for entry in store.entries():
        notes = read_notes(entry.notes)
        kinds = {kind for note in notes if note.code == CONTRADICTED_NOTE for kind in note.detail.split("+")}
        if entry.person_id not in partly_known and kinds & ABOUT_PERSON:
            kinds = set()
        kinds.update(contradictions.get(entry.person_id, ()))
        detail = "+".join(kind for kind in CONTRADICTION_KINDS if kind in kinds)
        others = [note for note in notes if note.code != CONTRADICTED_NOTE]
        noted = write_notes([*others, *([f"{CONTRADICTED_NOTE}={detail}"] if detail else [])])
        if noted != entry.notes:
            store.change(replace(entry, notes=noted))


def _learn_stored_people(
    store: Store, discovery: Discovery, names: SiblingNames, claims: PersonClaims, read: Collection[str]
) -> set[str]:
    """Learns whom the DICOM files state that are in the store and were not `read` in this run, from their headers.

    Headers in a bucket are not fetched again, because every run would then send a request for each stored scan.
    Returns the person ids with a file that is not among this run's, that cannot be read now, or that states its
    person elsewhere than in a DICOM header on the disk.
    """
    sources = {file.key: file for file in discovery.files}
    partly_known = set()
    for entry in store.entries():
        source = sources.get(entry.key)
        has_header = entry.format == "dicom" and source is not None and isinstance(source.location, Path)
        is_unseen = entry.personal and not has_header and entry.key not in read
        if source is None or is_unseen or entry.key in store.index.quarantine:
            partly_known.add(entry.person_id)
        if source is None or source.key in read:
            continue
        person = StatedPerson()
        if entry.format == "dicom" and entry.personal and isinstance(source.location, Path):
            person = source.stated_person()
            names.learn(source.name, person)
        claims.learn(entry, person)
    return partly_known


def _mask_siblings(store: Store, discovery: Discovery, names: SiblingNames) -> None:
    """Masks in index and quarantine names and birth dates that files state, in the paths and ids of their siblings."""
    refused_files = (refusal.source for refusal in discovery.refused)
    sources = {file.key: file for file in (*discovery.files, *refused_files)}
    splits = {entry.person_id: entry.split for entry in store.entries() if entry.split}
    for entry in store.entries():
        source = sources.get(entry.key)
        if source is None:
            continue
        masked = replace(
            entry, file=names.masked(source.name, entry.file), source=names.masked(source.name, entry.source)
        )
        if names.identifies(source.name, entry.person_id):
            person_id = pseudonym(entry.person_id)
            notes = write_notes([*read_notes(entry.notes), "person_id_pseudonymised"])
            masked = replace(masked, person_id=person_id, split=splits.get(person_id, entry.split), notes=notes)
        store.change(masked)
    for refusal in store.quarantine:
        source = sources.get(refused_file_key(refusal))
        if source is not None:
            refusal["file"] = names.masked(source.name, refusal["file"])


def _join_pseudonyms(store: Store) -> None:
    """Gives the ids whose pseudonym is also an id of the store that pseudonym: it is one person's.

    Some of the person's files state a name that the id repeats, and others, perhaps in another folder, state none.
    """
    people = {entry.person_id for entry in store.entries()}
    joined = {person: name for person in people if (name := pseudonym(person)) in people}
    splits = {entry.person_id: entry.split for entry in store.entries() if entry.split}
    for entry in [entry for entry in store.entries() if entry.person_id in joined]:
        person_id = joined[entry.person_id]
        notes = write_notes([*read_notes(entry.notes), "person_id_pseudonymised"])
        store.change(replace(entry, person_id=person_id, split=splits.get(person_id, entry.split), notes=notes))


def _participants_under_pseudonyms(store: Store) -> list[dict[str, object]]:
    """The participants whose id became a pseudonym because files state it as a name, with the pseudonym as their id."""
    people = {entry.person_id for entry in store.entries()}
    listed = store.participants
    renamed = listed.assign(person_id=[pseudonym(str(person)) for person in listed["person_id"]])
    rows = renamed[renamed["person_id"].isin(people)].to_dict("records")
    return [{str(column): value for column, value in row.items()} for row in rows]


def _take_sites(store: Store) -> None:
    """Gives each volume the site that participants.tsv states for its person, also if the table was corrected since."""
    sites = site_by_person(store)
    for entry in store.entries():
        site = sites.get(entry.person_id)
        if site and site != entry.site:
            store.change(replace(entry, site=site))


def _warn_of_copies(store: Store, pairs: Sequence[tuple[str, str, int]], copies: int) -> None:
    """Warns of near-duplicates under two person ids, with the files of the first groups, and of exact copies."""
    if copies:
        _log.warning(
            "Left out as exact copies of a volume under another person id: %d (duplicate_content in quarantine.jsonl). "
            "Find which id is right.",
            copies,
        )
    if not pairs:
        return
    files = {entry.volume_id: entry.file for entry in store.entries()}
    groups = sorted(sorted(files[name] for name in group) for group in connected([(a, b) for a, b, _ in pairs]))
    shown = "; ".join(", ".join(group[:4]) + (", ..." if len(group) > 4 else "") for group in groups[:3])
    _log.warning(
        "Found %s of volumes with the same eye under two person ids. Either a copy lacks its person id, or a person "
        "has two ids. %d volumes in %s: %s%s. Give the files of one eye one person_id in a manifest.tsv and ingest "
        "again. Until then `octjepa split %s --assign-rest` lists those in two splits (near_duplicate).",
        counted(len(pairs), "pair"),
        sum(map(len, groups)),
        counted(len(groups), "group"),
        shown,
        "; ..." if len(groups) > 3 else "",
        shlex.quote(store.location),
    )


def _is_contradicted(notes: str) -> bool:
    """Whether a cell of notes says that files of the person state different people."""
    return any(note.code == CONTRADICTED_NOTE for note in read_notes(notes))


def _summary(
    store: Store,
    discovery: Discovery,
    accepted: Sequence[IndexEntry],
    refusals: Sequence[dict[str, str]],
    near_duplicates: int,
) -> IngestSummary:
    """Counts over this run and the store; warns of what needs the user's attention."""
    table = store.table
    notes = count_codes(read_notes(entry.notes) for entry in accepted)
    by_reason = Counter(entry["reason"] for entry in refusals)
    personal = count_fields(read_codes(entry.personal) for entry in accepted)
    people, eyes, sites = (text_cells(table[name]) for name in ("person_id", "eye", "site"))
    sites_of_people = Counter(person for person, _ in {pair for pair in zip(people, sites, strict=True) if pair[1]})
    unknown, several_sites = people_unknown(table), sum(count > 1 for count in sites_of_people.values())
    contradicted = len({person for person, cell in zip(people, table["notes"], strict=True) if _is_contradicted(cell)})
    scans_of_eyes = Counter(zip(people, eyes, strict=True))
    several_scans = sum(count > 1 for (_, eye), count in scans_of_eyes.items() if eye)
    for count, noun, message in (
        (
            unknown,
            "volume",
            f"of {store.location} without a person id: each counts as a separate person, so that two "
            "eyes of one person can come into training and into test. Give a manifest.tsv with person_id and "
            "filepath and ingest again.",
        ),
        (
            several_scans,
            "eye",
            f"of {store.location} with several scans under one person id: they stay together in one split. If they "
            "show different people, give a manifest.tsv with separate ids and ingest again.",
        ),
        *note_warnings(notes),
        (
            contradicted,
            "person id",
            f"of {store.location} under which files state different people: two people may share the id. "
            f"The note {CONTRADICTED_NOTE} in volumes.parquet says what differs. If they do, give a manifest.tsv "
            "with separate ids and ingest again.",
        ),
        (
            several_sites,
            "person id",
            f"of {store.location} from several institutions: two people may share an id. "
            "If they do, give a manifest.tsv with separate ids and ingest again.",
        ),
    ):
        if count:
            _log.warning("%s %s", counted(count, noun), message)
    return IngestSummary(
        accepted=len(accepted),
        quarantined=len(refusals),
        lost=sum(count for reason, count in by_reason.items() if REASONS[reason].lost),
        by_reason=dict(sorted(by_reason.items())),
        by_device=dict(sorted(Counter(entry.device for entry in accepted).items())),
        ignored=dict(sorted(discovery.ignored.items())),
        files_without_row=discovery.files_without_row,
        notes=dict(sorted(notes.items())),
        recommended_split_unknown=sum(bool(person["split_unknown"]) for person in discovery.participants),
        people_unknown=unknown,
        near_duplicates_across_people=near_duplicates,
        people_at_several_sites=several_sites,
        people_contradicted=contradicted,
        eyes_with_several_scans=several_scans,
        personal_data={name: counts["files"] for name, counts in personal.items()},
        people=len(set(people)),
        eyes=len(scans_of_eyes),
    )


def _explanation(reason: str, details: Sequence[str]) -> str:
    """The finding in the files of a reason, and the advice: the detail of the files if they share it."""
    detail = details[0] if len(set(details)) == 1 else ""
    return with_action(reason, detail or REASONS[reason].meaning)


def _advise(refusals: Sequence[dict[str, str]]) -> None:
    """Says what a person must do before all can be read. Too many lost files are an error that says it."""
    for reason in WARNED_REASONS:
        details = [entry["detail"] for entry in refusals if entry["reason"] == reason]
        if details:
            _log.warning("%d %s: %s", len(details), reason, _explanation(reason, details))


def _check_lost(
    store: Store, summary: IngestSummary, refusals: Sequence[dict[str, str]], files: int, max_lost: float
) -> None:
    """Raises NothingReadError where the store is empty, TooManyLostError where more than `max_lost` are lost."""
    details: dict[tuple[str, str], list[str]] = {}
    for entry in refusals:
        if REASONS[entry["reason"]].lost or not len(store.table):  # without a volume, also what was rightly left out
            device = parse_device(entry["file"]) or "unknown device"
            details.setdefault((device, entry["reason"]), []).append(entry["detail"])
    width = max((len(device) for device, _ in details), default=0)
    lines = "\n".join(
        f"  {device:<{width}}  {len(of_files):>5}  {reason}: {_explanation(reason, of_files)}"
        for (device, reason), of_files in sorted(details.items())
    )
    if not len(store.table):
        raise NothingReadError(f"no file can be read, of {files}:\n{lines}", summary.to_json())
    lost = summary.lost
    total = summary.accepted + summary.skipped + lost
    if lost / max(1, total) > max_lost:
        raise TooManyLostError(
            f"ingest is finished, but it lost {lost} of {counted(total, 'file')} ({lost / total:.0%}), more "
            f"than the allowed {max_lost:.0%}:\n{lines}\n"
            f"see quarantine.jsonl in {store.location}; raise --max-lost if that is as it should be",
            summary.to_json(),
        )
