"""A whole cohort on disk, in the tree, with the tables and under the names that AI-READI uses, plus the truth.

    retinal_oct/structural_oct/{device}/{id}/{id}_{protocol}_oct_{l|r}_{SOPInstanceUID}.dcm
    retinal_oct/manifest.tsv      participants.tsv      truth/eyes.tsv      truth/{SOPInstanceUID}.npz
    truth/broken.tsv (a line per broken file: its defect and what must become of it)

Every person is scanned on one device, both eyes or one. Equal arguments give equal bytes, whatever the number of
workers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Final, Literal, NamedTuple

from octjepa.errors import UsageError
from octjepa.keys import key
from octjepa.locks import LOCK, writer_lock
from octjepa.notes import write_codes, write_notes
from octjepa.phantom.broken import DEFECTS, Defect, defects_for, write_broken
from octjepa.phantom.dialect import Size, dialect_of
from octjepa.phantom.dicom import fundus_uid, sop_uid, spacing_text, thickness_mm, write_eye
from octjepa.phantom.eye import MEASURES, Eye, Visit, eye_measures, make_eye, write_truth
from octjepa.phantom.person import EYES, LESIONS, MAX_PEOPLE, Difficulty, at_visit, make_person
from octjepa.progress import bar
from octjepa.recipe import DEVICES
from octjepa.tables import format_table
from octjepa.volume import Laterality

MANIFEST_COLUMNS: Final = (
    "person_id",
    "manufacturer",
    "manufacturers_model_name",
    "anatomic_region",
    "imaging",
    "laterality",
    "height",
    "width",
    "number_of_frames",
    "pixel_spacing",
    "slice_thickness",
    "sop_instance_uid",
    "filepath",
    "reference_instance_uid",
    "reference_filepath",
)
PARTICIPANT_COLUMNS: Final = (
    "participant_id",
    "clinical_site",
    "study_group",
    "age",
    "study_visit_date",
    "recommended_split",
    "retinal_photography",
    "retinal_oct",
    "retinal_octa",
)
TRUTH_COLUMNS: Final = (
    "person_id",
    "eye",
    "device",
    *LESIONS,
    "fovea_slice_mm",
    "fovea_column_mm",
    *MEASURES,
    "sop_instance_uid",
    "filepath",
)
BROKEN_COLUMNS: Final = (
    "kind",
    "level",
    "fate",
    "reasons",
    "notes",
    "doubtful",
    "person_id",
    "eye",
    "device",
    "frames",
    "spacing_slice_mm",
    "spacing_row_mm",
    "spacing_column_mm",
    "filepath",
)
_SPLITS = ("train", "val", "test")
_SIDES: Final = {"OD": "r", "OS": "l"}


@dataclass(frozen=True)
class EyeTask:
    """One eye to write. `defect` names one of `octjepa.phantom.broken.DEFECTS`, or is "" for a good file.

    `columns` are more columns of the eye's line in truth/eyes.tsv.
    """

    out: Path
    seed: int
    draw: Callable[[], Eye]  # what a worker process can unpickle
    defect: str = ""
    columns: dict[str, Any] = field(default_factory=dict)


class WrittenEye(NamedTuple):
    """Lines of the tables for one eye ({} if it has none) and the number of its files."""

    manifest: dict[str, Any]
    truth: dict[str, Any]
    broken: dict[str, Any]
    files: int


@dataclass(frozen=True)
class CohortDesign:
    """The options of a cohort, in addition to its people and devices.

    `broken` is the number of broken files, which go through the defects of `octjepa.phantom.broken` in turn, each of an
    additional person. `difficulty` and `group_effect` are as in `octjepa.phantom.make_eye`; `group_effect` 0 makes the
    study group invisible. With one eye per person, right and left eyes alternate on each device. Person i is scanned on
    device i + `device_offset`, counted round, so that another folder with another offset and `visit` holds the same
    eyes on other devices and another day, if `devices` are equal and in equal order.
    """

    broken: int = 0
    difficulty: Difficulty = "plain"
    group_effect: float = 1.0
    eyes_per_person: Literal[1, 2] = 2
    visit: int = 0
    device_offset: int = 0


_PLAIN = CohortDesign()


def write_cohort(
    out: Path,
    people: int,
    seed: int = 0,
    devices: Sequence[str] = DEVICES,
    size: Size = "small",
    split_shares: tuple[float, float, float] = (0.7, 0.15, 0.15),
    workers: int = 1,
    design: CohortDesign = _PLAIN,
) -> dict[str, int]:
    """Writes the eyes of `people` persons, spread evenly over `devices`, as `design` says.

    Returns {"people", "volumes", "files", "broken"}: volumes are the good files, files all of retinal_oct.
    Raises UsageError: no person, more people than 4-digit ids, unknown device or size, shares that do not sum to 1,
    neither one nor two eyes, a negative visit, or an `out` that is a file or holds something already.
    """
    check_request(out, people, devices, size, split_shares, workers, design.broken)
    if design.eyes_per_person not in (1, 2) or design.visit < 0:
        raise UsageError(
            f"{design.eyes_per_person} eyes a person, visit {design.visit}: expected 1 or 2 eyes, and visit 0 or more"
        )

    def draw(person: int, laterality: Laterality, device: str) -> Callable[[], Eye]:
        visit = Visit(design.visit, home_device=devices[person % len(devices)])
        return partial(make_eye, seed, person, laterality, device, size, design.difficulty, design.group_effect, visit)

    tasks = [
        EyeTask(out, seed, draw(person, laterality, devices[(person + design.device_offset) % len(devices)]))
        for person in range(people)
        for laterality in (EYES if design.eyes_per_person == 2 else (EYES[person // len(devices) % 2],))
    ]
    good = len(tasks)
    defects = defects_for(tuple(devices))
    for i in range(design.broken):
        defect = defects[i % len(defects)]
        device = _device(defect, devices, i)
        tasks.append(EyeTask(out, seed, draw(people + i, EYES[i % 2], device), defect.name))
    with writer_lock(out):
        written = write_eyes(out, tasks, workers)
        participants = participant_rows(seed, people, devices, split_shares, design.difficulty, design.visit)
        write_tables(out, written, participants, TRUTH_COLUMNS)
        if design.broken:
            write_tsv(out / "truth" / "broken.tsv", BROKEN_COLUMNS, (eye.broken for eye in written))
    return {"people": people, "volumes": good, "files": sum(eye.files for eye in written), "broken": design.broken}


def _device(defect: Defect, devices: Sequence[str], index: int) -> str:
    """Devices take turns, among those that can have the defect."""
    suitable = [device for device in devices if device in defect.devices]
    return suitable[index % len(suitable)]


def check_request(
    out: Path, people: int, devices: Sequence[str], size: Size, shares: tuple[float, ...], workers: int, broken: int
) -> None:
    """Raises UsageError where a cohort cannot be drawn as requested, before anything is written."""
    if people < 1 or broken < 0 or workers < 1:
        raise UsageError(f"people {people}, broken {broken}, workers {workers}: expected at least 1, 0 and 1")
    if people + broken > MAX_PEOPLE:
        raise UsageError(f"{people} people and {broken} broken files: 4-digit ids allow {MAX_PEOPLE} together")
    if not devices or len(set(devices)) < len(devices):
        raise UsageError(f"devices {list(devices)!r}: name each once, at least one of {', '.join(DEVICES)}")
    for device in devices:
        dialect_of(device).grid(size)  # raises for an unknown device or size
    if len(shares) != 3 or min(shares) < 0 or not abs(sum(shares) - 1) <= 1e-6:
        raise UsageError(f"split shares {tuple(shares)}: expected train, val and test, none negative, sum 1")
    if out.exists() and (not out.is_dir() or any(path.name != LOCK for path in out.iterdir())):
        raise UsageError(f"{out} exists and is not an empty folder: name a new one, so that no cohorts mix")


def write_eyes(out: Path, tasks: list[EyeTask], workers: int) -> list[WrittenEye]:
    """Writes the scans and truths of `tasks` by `workers` processes; the lines of their tables in the same order."""
    (out / "truth").mkdir(parents=True, exist_ok=True)
    written: list[WrittenEye] = []
    with bar("phantom eyes", len(tasks), "eyes") as progress:
        for eye in _run(tasks, workers):
            written.append(eye)
            progress.advance()
    return written


def write_tables(
    out: Path, written: Sequence[WrittenEye], participants: Iterable[dict[str, Any]], truth_columns: Sequence[str]
) -> None:
    """Writes manifest, participants and truth of the eyes of a folder."""
    write_tsv(out / "retinal_oct" / "manifest.tsv", MANIFEST_COLUMNS, (eye.manifest for eye in written))
    write_tsv(out / "participants.tsv", PARTICIPANT_COLUMNS, participants)
    write_tsv(out / "truth" / "eyes.tsv", truth_columns, (eye.truth for eye in written))


def _run(tasks: list[EyeTask], workers: int) -> Iterator[WrittenEye]:
    """Results in the order of `tasks`, made by `workers` processes."""
    if workers == 1 or len(tasks) < 2:
        yield from map(_write_one, tasks)
        return
    with ProcessPoolExecutor(min(workers, len(tasks))) as pool:
        yield from pool.map(_write_one, tasks, chunksize=max(1, min(8, len(tasks) // (2 * workers))))


def _write_one(task: EyeTask) -> WrittenEye:
    """Writes one eye and its truth."""
    eye = task.draw()
    uid, person_id = sop_uid(task.seed, eye), eye.person.person_id
    protocol = dialect_of(eye.device).protocol.replace(" ", "_")
    name = f"{person_id}_{protocol}_oct_{_SIDES[eye.laterality]}_{uid}.dcm"
    path = task.out / "retinal_oct" / "structural_oct" / eye.device / person_id / name
    path.parent.mkdir(parents=True, exist_ok=True)
    filepath = "/" + path.relative_to(task.out).as_posix()
    row = manifest_row(eye, uid, filepath, task.seed)
    if task.defect:
        defect = DEFECTS[task.defect]
        files, row = write_broken(path, eye, task.seed, defect, row)
        broken = files[-1] if files else path
        return WrittenEye(row, {}, _broken_row(defect, eye, "/" + broken.relative_to(task.out).as_posix()), len(files))
    write_eye(path, eye, task.seed)
    write_truth(task.out / "truth" / f"{uid}.npz", eye)
    slice_mm, column_mm = eye.truth.fovea_mm
    truth = {
        **_identity(eye),
        **{name: int(present) for name, present in eye.truth.labels.items()},
        "fovea_slice_mm": f"{slice_mm:.4f}",
        "fovea_column_mm": f"{column_mm:.4f}",
        **{name: f"{value:.6g}" for name, value in eye_measures(eye.truth, eye.spacing_mm).items()},
        "sop_instance_uid": uid,
        "filepath": filepath,
        **task.columns,
    }
    return WrittenEye(row, truth, {}, 1)


def _identity(eye: Eye) -> dict[str, Any]:
    return {"person_id": eye.person.person_id, "eye": eye.laterality, "device": eye.device}


def _broken_row(defect: Defect, eye: Eye, filepath: str) -> dict[str, Any]:
    """The truth of a broken file; frames and spacing are those of the eye it was made from."""
    dz, dy, dx = eye.spacing_mm
    return {
        "kind": defect.name,
        "level": defect.level,
        "fate": defect.outcome,
        "reasons": write_codes(defect.reasons),
        "notes": write_notes(defect.notes),
        "doubtful": write_codes(defect.uncertain),
        **_identity(eye),
        "frames": len(eye.pixels) - defect.fewer_frames,
        "spacing_slice_mm": f"{dz:.8g}",
        "spacing_row_mm": f"{dy:.8g}",
        "spacing_column_mm": f"{dx:.8g}",
        "filepath": filepath,
    }


def manifest_row(eye: Eye, uid: str, filepath: str, seed: int) -> dict[str, Any]:
    """The line of manifest.tsv for the file of `eye`."""
    dialect = dialect_of(eye.device)
    frames, depth, columns = eye.pixels.shape
    side, person_id, reference = _SIDES[eye.laterality], eye.person.person_id, fundus_uid(seed, eye)
    photograph = f"{person_id}_{eye.device.split('_')[-1]}_ir_{side}_{reference}.dcm"
    return {
        "person_id": person_id,
        "manufacturer": dialect.manifest_manufacturer,
        "manufacturers_model_name": dialect.manifest_model,
        "anatomic_region": dialect.region,
        "imaging": "OCT",
        "laterality": side.upper(),
        "height": depth,
        "width": columns,
        "number_of_frames": frames,
        "pixel_spacing": spacing_text(eye.spacing_mm[1:]),
        "slice_thickness": f"{thickness_mm(eye):.8g}",
        "sop_instance_uid": uid,
        "filepath": filepath,
        "reference_instance_uid": reference,
        "reference_filepath": f"/retinal_photography/ir/{eye.device}/{person_id}/{photograph}",
    }


def participant_rows(
    seed: int,
    people: int,
    devices: Sequence[str],
    shares: tuple[float, float, float],
    difficulty: Difficulty,
    visit: int = 0,
) -> list[dict[str, Any]]:
    """The lines of participants.tsv, sorted by id."""
    split_of = split_people(seed, people, len(devices), shares)
    rows = []
    for index in range(people):
        person = at_visit(make_person(seed, index, difficulty), visit)
        scanned = {"retinal_photography": "FALSE", "retinal_oct": "TRUE", "retinal_octa": "FALSE"}
        same_name = ("clinical_site", "study_group", "age", "study_visit_date")
        rows.append(
            {
                "participant_id": person.person_id,
                **{column: getattr(person, column) for column in same_name},
                "recommended_split": split_of[index],
                **scanned,
            }
        )
    return sorted(rows, key=lambda row: row["participant_id"])


def split_people(seed: int, people: int, devices: int, shares: tuple[float, float, float]) -> dict[int, str]:
    """Person index -> split: in a random order within each device, everyone gets the split that is most short."""
    order = sorted(range(people), key=lambda index: (index % devices, key("phantom split", seed, index)))
    counts = [0, 0, 0]
    splits: dict[int, str] = {}
    for done, index in enumerate(order, start=1):
        shortfall = [share * done - count for share, count in zip(shares, counts, strict=True)]
        best = max(range(3), key=shortfall.__getitem__)
        counts[best] += 1
        splits[index] = _SPLITS[best]
    return splits


def write_tsv(path: Path, columns: Sequence[str], rows: Iterable[dict[str, Any]]) -> None:
    """Writes a tab-separated table with a header; empty rows are left out."""
    path.parent.mkdir(parents=True, exist_ok=True)
    text = format_table(columns, ([row[name] for name in columns] for row in rows if row))
    path.write_text(text, encoding="utf-8", newline="")
