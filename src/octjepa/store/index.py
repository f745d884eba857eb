"""The index of a store: its volumes, refused files, people and labels.

`volumes.parquet` has an entry per volume with the fields of `IndexEntry`; `quarantine.jsonl` has an entry per refused
file; `participants.parquet` has one per person; `labels.tsv` lists the labels that came inside the files, for
`octjepa probe`, with the columns volume_id, person_id, eye and one per label. `past_splits.json` has the split of each
person whose volumes have all left the store: a file that was refused and is accepted again comes back into its split.
"""

from __future__ import annotations

import json
import logging
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from octjepa.errors import OctjepaError, UsageError, counted
from octjepa.notes import read_notes
from octjepa.parsing import parse_json_object, read_object, read_parquet
from octjepa.record import Record

if TYPE_CHECKING:
    import pandas as pd

PARTICIPANT_COLUMNS = ("person_id", "clinical_site", "study_group", "age", "recommended_split")
LABELS_FILE = "labels.tsv"
PAST_SPLITS_FILE = "past_splits.json"
_LABEL_KEYS = ("volume_id", "person_id", "eye")
_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class IndexEntry(Record):
    """The entry of one volume: a row of `volumes.parquet`, whose columns are these fields in this order.

    Lists of codes (`notes`, `uncertain`, `personal`) have the stored form of `octjepa.notes`, `labels` that of
    `encode_labels`. A table or a line of the journal may lack fields with a default. `personal` has none, so that a
    store without it is not taken for one whose files hold no personal data.
    """

    volume_id: str
    content_hash: str
    person_id: str
    eye: str
    laterality_source: str = ""
    device: str = ""
    protocol: str = ""
    region: str = ""
    pattern: str = ""
    sop_instance_uid: str = ""
    source: str = ""
    visit: str = ""
    site: str = ""
    format: str = ""
    personal: str
    enface_hash: str = ""
    labels: str = ""
    native_d: int = 0
    native_h: int = 0
    native_w: int = 0
    spacing_z_mm: float = math.nan
    spacing_y_mm: float = math.nan
    spacing_x_mm: float = math.nan
    provenance_slice: str = ""
    provenance_depth: str = ""
    provenance_column: str = ""
    uncertain: str = ""
    notes: str
    mirrored: bool = False
    tissue_mean: float = math.nan
    tissue_std: float = math.nan
    tissue_share: float = math.nan
    quality: float = math.nan
    snr_db: float = math.nan
    blank_share: float = math.nan
    clipped_share: float = math.nan
    motion_um: float = math.nan
    fill_share: float = math.nan
    torn_share: float = math.nan
    implausible_share: float = math.nan
    retina_score: float = math.nan
    outside_slice: float = math.nan
    outside_depth: float = math.nan
    outside_column: float = math.nan
    split: str
    chunk_hash: str = ""
    file: str
    file_key: str = ""
    file_size: int = 0
    file_mtime_ns: int = 0
    manifest_hash: str = ""
    user_spacing_mm: str = ""

    @property
    def key(self) -> str:
        """The key of the file that the volume came from; its relative path if it has no key."""
        return self.file_key or self.file

    @property
    def shape(self) -> tuple[int, int, int]:
        """Slices, depth and columns of the native scan."""
        return int(self.native_d), int(self.native_h), int(self.native_w)

    @property
    def spacing_mm(self) -> tuple[float, float, float]:
        """Spacing of slices, depth and columns of the native scan."""
        return float(self.spacing_z_mm), float(self.spacing_y_mm), float(self.spacing_x_mm)

    @property
    def provenance(self) -> tuple[str, str, str]:
        """The source of the spacing of slices, depth and columns."""
        return self.provenance_slice, self.provenance_depth, self.provenance_column

    @property
    def stated_spacing_mm(self) -> tuple[float, float, float] | None:
        """The spacing (slice, depth, column) that the user stated for the file with `--spacing`; or None."""
        if not self.user_spacing_mm:
            return None
        dz, dy, dx = map(float, self.user_spacing_mm.split(","))
        return dz, dy, dx

    @property
    def file_state(self) -> FileState:
        """The state of the file when ingest read it."""
        return FileState(int(self.file_size), int(self.file_mtime_ns), self.manifest_hash, self.stated_spacing_mm)


COLUMNS = tuple(field.name for field in fields(IndexEntry))
_NEEDED = tuple(field.name for field in fields(IndexEntry) if field.default is MISSING)


@dataclass(frozen=True)
class FileState:
    """A file as it was when ingest read it; the file is read again if any of this differs.

    `manifest_hash` is the hash of the manifest's row, "" without one. `user_spacing_mm` is the spacing (slice, depth,
    column) that the user stated for the file with `--spacing`.
    """

    size: int
    mtime_ns: int
    manifest_hash: str
    user_spacing_mm: tuple[float, float, float] | None = None

    @property
    def user_spacing_text(self) -> str:
        """`user_spacing_mm` as an index entry holds it."""
        return ",".join(map(repr, self.user_spacing_mm or ()))


@dataclass(frozen=True)
class IndexChange(Record):
    """A line of the journal: the entry of a volume that was added, or the quarantine entry of a refused file."""

    OMITTED: ClassVar[tuple[str, ...]] = ("volume", "refused")
    volume: IndexEntry | None = None
    refused: dict[str, str] | None = None


def refused_file_key(entry: Mapping[str, str]) -> str:
    """The key of the file of a quarantine entry; its relative path if it has no key."""
    return str(entry.get("file_key") or entry["file"])


def entries_of(table: pd.DataFrame) -> list[IndexEntry]:
    """The entries of a table of volumes; columns that it lacks are empty, and other columns are left out."""
    if not len(table):  # pandas takes milliseconds to walk through so many empty columns
        return []
    columns = [(field.name, _READERS[str(field.type)]) for field in fields(IndexEntry)]
    rows = table.reindex(columns=list(COLUMNS)).itertuples(index=False, name=None)
    return [IndexEntry(**{name: read(value) for (name, read), value in zip(columns, row, strict=True)}) for row in rows]


def _or(default: Any, value: Any) -> Any:
    """A cell of a table, `default` for a missing value."""
    return default if value is None or value != value else value


# The value of a cell by the type of its field.
_READERS: Mapping[str, Callable[[Any], Any]] = {
    "str": lambda value: str(_or("", value)),
    "int": lambda value: _or(0, value),
    "float": lambda value: _or(math.nan, value),
    "bool": lambda value: str(value) == "True",
}


@cache
def _empty_table(columns: tuple[str, ...]) -> pd.DataFrame:
    """A table without lines. It is made once, because pandas takes milliseconds for so many columns."""
    import pandas as pd

    return pd.DataFrame(columns=list(columns))


def read_volumes(folder: Path, location: str) -> pd.DataFrame:
    """volumes.parquet of the store in `folder`; empty if there is none.

    Raises UsageError, which names the store by its `location`: the file is damaged.
    """
    path = folder / "volumes.parquet"
    if not path.is_file():
        return _empty_table(COLUMNS).copy()
    try:
        table = read_parquet(path)
        if absent := [name for name in _NEEDED if name not in table]:
            raise ValueError(f"column {absent[0]!r} is absent")
        return table
    except (OSError, ValueError) as error:
        raise UsageError(
            f"volumes.parquet of the store {location} is damaged ({error}): restore it from a copy, or remove it and "
            "ingest again, which assigns all splits anew"
        ) from error


def read_people(folder: Path, location: str) -> pd.DataFrame:
    """participants.parquet of the store in `folder`; empty if there is none.

    Raises UsageError: it is damaged; OctjepaError: the folder was removed.
    """
    path = folder / "participants.parquet"
    if not path.is_file():
        if not folder.is_dir():
            raise OctjepaError(f"the index of the store {location} was removed from {folder}: run the command again")
        return _empty_table(PARTICIPANT_COLUMNS).copy()
    try:
        return read_parquet(path, PARTICIPANT_COLUMNS)
    except (OSError, ValueError) as error:
        raise UsageError(
            f"participants.parquet of the store {location} is damaged ({error}): remove it and "
            "ingest again with the participants.tsv it came from"
        ) from None


def read_past_splits(folder: Path, location: str) -> dict[str, str]:
    """The past splits of the store in `folder`; empty if no person left it, and for a store from before this file.

    Raises UsageError: the file is damaged.
    """
    path = folder / PAST_SPLITS_FILE
    if not path.is_file():
        return {}
    try:
        return {person: str(split) for person, split in read_object(path).items()}
    except (OSError, ValueError) as error:
        raise UsageError(
            f"{PAST_SPLITS_FILE} of the store {location} is damaged ({error}): restore it from a copy, or remove it; "
            "then people whose files were refused get a new split when these are accepted again"
        ) from None


def _key_of_past(person_id: str) -> str:
    """The key of a person among past splits: the pseudonym, because a later file may show that the id is a name."""
    from octjepa.read.personal_data import pseudonym  # whoever only reads a store needs none of the readers

    return person_id if re.fullmatch("p-[0-9a-f]{12}", person_id) else pseudonym(person_id)


class Index:
    """Entries in memory: `volumes` by volume id, `quarantine` by file key. A file is in one of the two.

    `past_splits` also holds splits of people who still have volumes; `forget_present` removes these.
    `table` holds the volumes as they were read. Their entries, eight times as large, are made when the first is needed.
    """

    def __init__(
        self, table: pd.DataFrame, quarantine: Iterable[dict[str, str]], past_splits: Mapping[str, str] | None = None
    ) -> None:
        self._table = table
        self.past_splits = dict(past_splits or {})
        self.quarantine = {refused_file_key(entry): entry for entry in quarantine}

    @property
    def table(self) -> pd.DataFrame | None:
        """The volumes as a table; None once there are entries, which may have changed."""
        return None if "volumes" in self.__dict__ else self._table

    @cached_property
    def volumes(self) -> dict[str, IndexEntry]:
        """volume id -> entry."""
        return {entry.volume_id: entry for entry in entries_of(self._table)}

    @cached_property
    def _volume_by_file(self) -> dict[str, str]:
        return {entry.key: name for name, entry in self.volumes.items()}

    def apply(self, change: IndexChange) -> str:
        """Applies a line of the journal. Returns the id of the volume that this removes from the index, or ""."""
        if change.refused is not None:
            return self._refuse(change.refused)
        return "" if change.volume is None else self._add(change.volume)

    def _refuse(self, refused: dict[str, str]) -> str:
        from octjepa.reasons import REASONS  # training refuses no file

        file = refused_file_key(refused)
        self.quarantine[file] = refused
        reason = REASONS.get(refused["reason"])  # None: a code of another version
        return "" if reason and reason.keeps_volume else self._remove_volume_of(file)

    def _add(self, entry: IndexEntry) -> str:
        is_same = self._volume_by_file.get(entry.key) == entry.volume_id
        removed = "" if is_same else self._remove_volume_of(entry.key)
        self.quarantine.pop(entry.key, None)
        if replaced := self.volumes.get(entry.volume_id):
            self._volume_by_file.pop(replaced.key, None)
            self._remember_split(replaced)
        self.volumes[entry.volume_id] = entry
        self._volume_by_file[entry.key] = entry.volume_id
        return removed

    def _remove_volume_of(self, file: str) -> str:
        """Removes the volume that came from a file and returns its id, "" if there is none."""
        removed = self._volume_by_file.pop(file, "")
        if entry := self.volumes.pop(removed, None):
            self._remember_split(entry)
        return removed

    def _remember_split(self, entry: IndexEntry) -> None:
        if entry.split:
            self.past_splits[_key_of_past(entry.person_id)] = entry.split

    def past_split(self, person_id: str) -> str:
        """The split of a person whose volumes have left; "" for none."""
        return self.past_splits.get(_key_of_past(person_id), "") if self.past_splits else ""

    def forget_present(self) -> None:
        """Removes the past splits of people who have volumes: theirs is in the entries."""
        if self.past_splits:
            for person_id in {entry.person_id for entry in self.volumes.values()}:
                self.past_splits.pop(_key_of_past(person_id), None)


_REFUSAL_TEXTS = ("file", "reason", "detail")


def read_change(data: Mapping[str, object], where: str) -> IndexChange:
    """A line of a journal. Raises OctjepaError, which names the journal `where`: an entry lacks a field."""
    volume = _read_entry(data["volume"], where) if "volume" in data else None
    return IndexChange(volume, read_refusal(data["refused"], where) if "refused" in data else None)


def _read_entry(data: object, where: str) -> IndexEntry:
    values = _checked(data, _NEEDED, where)
    return IndexEntry.from_json(values)


def read_refusal(data: object, where: str) -> dict[str, str]:
    """A quarantine entry. Raises OctjepaError, which names the file `where`: it lacks a field."""
    return _checked(data, _REFUSAL_TEXTS, where)


def _checked(data: object, texts: Sequence[str], where: str) -> dict[str, Any]:
    """`data` as an object with these texts; other values are not checked."""
    if not isinstance(data, dict) or not all(isinstance(data.get(name), str) for name in texts):
        raise OctjepaError(
            f"{where} is damaged (an entry without {', '.join(texts)}): restore it, or remove it and ingest again"
        )
    return data


def merge_participants(stored: pd.DataFrame, added: list[dict[str, object]]) -> pd.DataFrame:
    """One entry per person, sorted by id; the last filled value of each column counts. Warns where filled values of a
    person differ.
    """
    import pandas as pd

    entries = pd.DataFrame([*stored.to_dict("records"), *added], columns=list(PARTICIPANT_COLUMNS))
    by_person = entries.where(entries != "").groupby("person_id")  # a blank is NaN, which is skipped
    changed = int((by_person.nunique() > 1).any(axis=1).sum())
    if changed:
        _log.warning(
            "participants.tsv differs from before for %s (split, site, group or age): the later table counts. Two "
            "studies may use the same ids by chance: ingest them into separate stores.",
            counted(changed, "person"),
        )
    merged = (
        by_person.last().reset_index().fillna(dict.fromkeys(("clinical_site", "study_group", "recommended_split"), ""))
    )
    return merged.sort_values("person_id", key=lambda ids: ids.astype(str), ignore_index=True)


def people_unknown(table: pd.DataFrame) -> int:
    """Volumes of a store's table whose person no source names: each counts as a separate person."""
    return sum("person_unknown" in read_notes(cell) for cell in table["notes"])


def encode_labels(labels: Mapping[str, float | str]) -> str:
    """The labels of one volume as its index entry keeps them; "" for none."""
    return json.dumps(dict(labels), sort_keys=True, allow_nan=False) if labels else ""


def decode_labels(cell: str) -> dict[str, float | str]:
    """The labels that `encode_labels` wrote."""
    labels: dict[str, float | str] = parse_json_object(cell) if cell else {}
    return labels


def format_labels(entries: Iterable[IndexEntry]) -> str:
    """The text of labels.tsv, sorted by volume; "" if no volume has labels.

    A label named like one of the first three columns gets a trailing "_". A volume without a label has an empty cell.
    """
    import pandas as pd

    from octjepa.tables import format_table  # only ingest writes labels

    lines = []
    for entry in entries:
        if labels := decode_labels(entry.labels):
            named = {f"{name}_" if name in _LABEL_KEYS else name: value for name, value in labels.items()}
            shown = {k: f"{value:.12g}" if isinstance(value, float | int) else value for k, value in named.items()}
            lines.append({"volume_id": entry.volume_id, "person_id": entry.person_id, "eye": entry.eye, **shown})
    if not lines:
        return ""
    table = pd.DataFrame(lines).sort_values("volume_id")
    names = sorted(set(table.columns) - set(_LABEL_KEYS))
    columns = [*_LABEL_KEYS, *names]
    return format_table(columns, table[columns].itertuples(index=False, name=None))


def text_cells(column: pd.Series) -> list[str]:
    """The cells of a text column of the index, with "" for missing values; pandas takes a millisecond for a few."""
    return [cell if isinstance(cell, str) else "" for cell in column.tolist()]


def text_column(column: pd.Series) -> pd.Series:
    """A column of the index as text, with "" for missing values."""
    return column.astype(object).where(column.notna(), "").astype(str)
