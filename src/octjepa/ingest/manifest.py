"""manifest.tsv and participants.tsv of an AI-READI-shaped tree, all three generations, read leniently.

A manifest's `filepath` starts with "/" and is relative to the dataset root, the folder that holds retinal_oct/.
`participant_id` became `person_id` in the third release; both are read.
"""

from __future__ import annotations

import csv
import hashlib
import math
import re
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path

from octjepa.errors import UsageError

MANIFEST = "manifest.tsv"
PARTICIPANTS = "participants.tsv"
SPLITS = ("train", "val", "test")


@dataclass(frozen=True)
class ManifestRow:
    """What a manifest says of one file; "" or None where it says nothing."""

    person_id: str
    manufacturer: str
    model: str
    region: str
    laterality: str
    frames: int | None
    pixel_spacing_mm: tuple[float, float] | None
    slice_thickness_mm: float | None
    sop_instance_uid: str
    path: Path


def row_hash(row: ManifestRow | None) -> str:
    """16 hex digits of all that a row tells the reader, "" without a row: another hash means reading the file again."""
    if row is None:
        return ""
    said = (
        row.person_id, row.manufacturer, row.model, row.region, row.laterality, row.pixel_spacing_mm,
        row.slice_thickness_mm,
    )  # fmt: skip
    return hashlib.sha256(repr(said).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Manifest:
    root: Path
    file: Path
    rows: tuple[ManifestRow, ...]
    by_path: dict[Path, ManifestRow] = field(repr=False)

    def row(self, path: Path) -> ManifestRow | None:
        return self.by_path.get(path.resolve())


def _number(text: str | None) -> float | None:
    try:
        value = float((text or "").strip())
    except ValueError:
        return None
    return value if math.isfinite(value) else None


def _pair(text: str | None) -> tuple[float, float] | None:
    """ "[0.003872, 0.01206]" -> (0.003872, 0.01206); "Varies by frame" -> None."""
    found = re.findall(r"[-+]?\d*\.?\d+(?:[eE][-+]?\d+)?", text or "")
    return (float(found[0]), float(found[1])) if len(found) == 2 else None


def clean_person_id(text: str) -> str:
    """ "AIREADI-1001" and " 1001 " -> "1001"; other ids are kept as they are."""
    return re.sub(r"^AI-?READI[-_ ]*", "", text.strip(), flags=re.IGNORECASE)


def _rows(path: Path) -> list[dict[str, str]]:
    try:
        with path.open(encoding="utf-8-sig", newline="") as lines:
            return [
                {(k or "").strip(): (v or "") for k, v in row.items() if isinstance(v, str | None)}
                for row in csv.DictReader(lines, delimiter="\t")
            ]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise UsageError(f"{path} cannot be read as a tab-separated table: {error}") from None


@lru_cache(maxsize=16)
def _read(path: Path, mtime_ns: int) -> Manifest:
    rows = _rows(path)
    if not rows or "filepath" not in rows[0]:
        found = ", ".join(rows[0]) if rows else "nothing"
        raise UsageError(f"{path} has no column 'filepath' (found {found}): expected an AI-READI manifest.tsv")
    root = path.parent.parent if path.parent.name == "retinal_oct" else path.parent
    kept: list[ManifestRow] = []
    for row in rows:
        relative = row["filepath"].strip().replace("\\", "/").lstrip("/")
        if not relative:
            continue
        frames = _number(row.get("number_of_frames"))
        kept.append(
            ManifestRow(
                person_id=clean_person_id(row.get("person_id") or row.get("participant_id") or ""),
                manufacturer=row.get("manufacturer", "").strip(),
                model=row.get("manufacturers_model_name", "").strip(),
                region=row.get("anatomic_region", "").strip(),
                laterality=row.get("laterality", "").strip(),
                frames=None if frames is None else int(frames),
                pixel_spacing_mm=_pair(row.get("pixel_spacing")),
                slice_thickness_mm=_number(row.get("slice_thickness")),
                sop_instance_uid=row.get("sop_instance_uid", "").strip(),
                path=(root / relative).resolve(),
            )
        )
    return Manifest(root, path, tuple(kept), {row.path: row for row in kept})


def read_manifest(path: Path) -> Manifest:
    """Raises UsageError: not readable, or no column `filepath`."""
    resolved = path.resolve()
    try:
        mtime_ns = resolved.stat().st_mtime_ns
    except OSError:
        raise UsageError(f"no manifest at {path}") from None
    return _read(resolved, mtime_ns)


def find_manifest(folder: Path) -> Path | None:
    """The manifest.tsv that speaks of `folder`: in it, in its retinal_oct/, or above it within the same dataset."""
    for candidate in (folder, folder / "retinal_oct"):
        if (candidate / MANIFEST).is_file():
            return candidate / MANIFEST
    for parent in folder.resolve().parents:
        if parent.name == "retinal_oct" and (parent / MANIFEST).is_file():
            return parent / MANIFEST
    return None


def find_row(path: Path) -> ManifestRow | None:
    """The manifest row of one file, where the tree around it has a manifest."""
    manifest = find_manifest(path.parent)
    return read_manifest(manifest).row(path) if manifest else None


def find_participants(folder: Path, manifest: Path | None) -> Path | None:
    """participants.tsv at the dataset root, in `folder`, or in its retinal_oct/."""
    places = [folder, folder / "retinal_oct"]
    if manifest is not None:
        places = [manifest.parent, manifest.parent.parent, *places]
    for place in places:
        if (place / PARTICIPANTS).is_file():
            return place / PARTICIPANTS
    return None


def read_participants(path: Path) -> list[dict[str, object]]:
    """Rows {person_id, clinical_site, study_group, age, recommended_split, split_unknown}; no other column is taken.

    A recommended split that is none of train, val, test counts as none, and `split_unknown` is then True.
    Raises UsageError: not readable, or no id column.
    """
    rows = _rows(path)
    if rows and not {"person_id", "participant_id"} & set(rows[0]):
        raise UsageError(f"{path} has neither person_id nor participant_id (found {', '.join(rows[0])})")
    people: dict[str, dict[str, object]] = {}
    for row in rows:
        person = clean_person_id(row.get("person_id") or row.get("participant_id") or "")
        if not person:
            continue
        split = row.get("recommended_split", "").strip().lower()
        split = {"validation": "val", "valid": "val"}.get(split, split)
        age = _number(row.get("age"))
        people[person] = {
            "person_id": person,
            "clinical_site": row.get("clinical_site", "").strip(),
            "study_group": row.get("study_group", "").strip(),
            "age": math.nan if age is None else age,
            "recommended_split": split if split in SPLITS else "",
            "split_unknown": bool(split) and split not in SPLITS,
        }
    return list(people.values())
