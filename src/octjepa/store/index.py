"""The index of a store: its volumes, refused files, people and labels.

`volumes.parquet` has an entry per volume with the columns `COLUMNS`; `quarantine.jsonl` has an entry per refused file;
`participants.parquet` has one per person; `labels.tsv` lists the labels that came inside the files, for
`octjepa probe`, with the columns volume_id, person_id, eye and one per label.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from octjepa.errors import OctjepaError, UsageError
from octjepa.notes import read_notes
from octjepa.parsing import parse_json_object, read_parquet

if TYPE_CHECKING:
    import pandas as pd

TEXT_COLUMNS = (
    "volume_id",
    "content_hash",
    "person_id",
    "eye",
    "laterality_source",
    "device",
    "protocol",
    "region",
    "pattern",
    "sop_instance_uid",
    "source",
    "visit",
    "site",
    "format",
    "personal",
    "enface_hash",
    "labels",
)
COLUMNS = (
    *TEXT_COLUMNS,
    "native_d",
    "native_h",
    "native_w",
    "spacing_z_mm",
    "spacing_y_mm",
    "spacing_x_mm",
    "provenance_slice",
    "provenance_depth",
    "provenance_column",
    "uncertain",
    "notes",
    "mirrored",
    "tissue_mean",
    "tissue_std",
    "tissue_share",
    "quality",
    "snr_db",
    "blank_share",
    "clipped_share",
    "motion_um",
    "fill_share",
    "torn_share",
    "implausible_share",
    "retina_score",
    "outside_slice",
    "outside_depth",
    "outside_column",
    "split",
    "chunk_hash",
    "file",
    "file_key",
    "file_size",
    "file_mtime_ns",
    "manifest_hash",
    "user_spacing_mm",
)
PARTICIPANT_COLUMNS = ("person_id", "clinical_site", "study_group", "age", "recommended_split")
LABELS_FILE = "labels.tsv"
_LABEL_KEYS = ("volume_id", "person_id", "eye")
LABEL_COLUMNS = (*_LABEL_KEYS, "labels")
# Refusals that say nothing about the file's content: a volume made from it earlier stays valid.
_NOT_READ = {"unreadable_file", "manifest_row_without_file"}
_NEEDED = ("volume_id", "content_hash", "person_id", "eye", "file", "notes", "split")
_HIDDEN_SPACING = " spacing "  # after it, earlier stores keep the user's spacing in `manifest_hash`
_log = logging.getLogger(__name__)


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

    @classmethod
    def of(cls, entry: Mapping[str, Any]) -> FileState:
        """The state that an index entry records."""
        size, mtime_ns = int(entry["file_size"]), int(entry["file_mtime_ns"])
        return cls(size, mtime_ns, str(entry["manifest_hash"]), user_spacing_mm(entry))

    def columns(self) -> dict[str, int | str]:
        """The columns of an index entry that record the state."""
        return {
            "file_size": self.size,
            "file_mtime_ns": self.mtime_ns,
            "manifest_hash": self.manifest_hash,
            "user_spacing_mm": ",".join(map(repr, self.user_spacing_mm or ())),
        }


def user_spacing_mm(entry: Mapping[str, Any]) -> tuple[float, float, float] | None:
    """The spacing (slice, depth, column) in mm that the user stated for the file of an index entry; or None."""
    text = entry.get("user_spacing_mm")
    if not isinstance(text, str) or not text:
        return None
    dz, dy, dx = map(float, text.split(","))
    return dz, dy, dx


def file_key(entry: Mapping[str, Any]) -> str:
    """The key of the file that an index or quarantine entry came from; its relative path if it has no key."""
    return str(entry.get("file_key") or entry["file"])


def entries_of(table: pd.DataFrame) -> list[dict[str, Any]]:
    """The lines of a table of volumes, column -> value."""
    return cast("list[dict[str, Any]]", table.to_dict("records")) if len(table) else []


def read_volumes(folder: Path, location: str) -> pd.DataFrame:
    """volumes.parquet of the store in `folder`; empty if there is none.

    Raises UsageError, which names the store by its `location`: the file is damaged.
    """
    import pandas as pd

    path = folder / "volumes.parquet"
    if not path.is_file():
        return pd.DataFrame(columns=list(COLUMNS))
    try:
        table = read_parquet(path)
        if absent := [name for name in _NEEDED if name not in table]:
            raise ValueError(f"column {absent[0]!r} is absent")
        if "provenance_row" in table:  # earlier stores call the depth axis "row"
            table = table.rename(columns={"provenance_row": "provenance_depth"})
            table["uncertain"] = table["uncertain"].str.replace(r"\brow\b", "depth", regex=True)
        if "user_spacing_mm" not in table and "manifest_hash" in table:
            parts = text_column(table["manifest_hash"]).str.partition(_HIDDEN_SPACING)
            table = table.assign(manifest_hash=parts[0], user_spacing_mm=parts[2])
        return table
    except (OSError, ValueError) as error:
        raise UsageError(f"volumes.parquet of the store {location} is damaged: {error}") from error


def read_people(folder: Path, location: str) -> pd.DataFrame:
    """participants.parquet of the store in `folder`; empty if there is none.

    Raises UsageError: it is damaged; OctjepaError: the folder was removed.
    """
    import pandas as pd

    path = folder / "participants.parquet"
    if not path.is_file():
        if not folder.is_dir():
            raise OctjepaError(f"the index of the store {location} was removed from {folder}: run the command again")
        return pd.DataFrame(columns=list(PARTICIPANT_COLUMNS))
    try:
        return read_parquet(path, PARTICIPANT_COLUMNS)
    except (OSError, ValueError) as error:
        raise UsageError(
            f"participants.parquet of the store {location} is damaged ({error}): remove it and "
            "ingest again with the participants.tsv it came from"
        ) from None


class Index:
    """Entries in memory: `volumes` by volume id, `quarantine` by file key. A file is in one of the two.

    `table` holds the volumes as they were read. Their entries, eight times as large, are made when the first is needed.
    """

    def __init__(self, table: pd.DataFrame, quarantine: Iterable[dict[str, str]]) -> None:
        self._table = table
        self.quarantine = {file_key(entry): entry for entry in quarantine}

    @property
    def table(self) -> pd.DataFrame | None:
        """The volumes as a table; None once there are entries, which may have changed."""
        return None if "volumes" in self.__dict__ else self._table

    @cached_property
    def volumes(self) -> dict[str, dict[str, Any]]:
        """volume id -> entry."""
        return {entry["volume_id"]: entry for entry in entries_of(self._table)}

    @cached_property
    def _volume_by_file(self) -> dict[str, str]:
        return {file_key(entry): name for name, entry in self.volumes.items()}

    def apply(self, change: Mapping[str, Any]) -> str:
        """Applies a journal line {"volume": entry} or {"refused": entry}.

        Returns the id of the volume that this removes from the index, or "".
        """
        entry = dict(change.get("volume") or change.get("refused") or {})
        if not entry:
            return ""
        if "volume" in change and "user_spacing_mm" not in entry:  # a journal that an earlier version left
            row, _, spacing = str(entry.get("manifest_hash") or "").partition(_HIDDEN_SPACING)
            entry["manifest_hash"], entry["user_spacing_mm"] = row, spacing
        file = file_key(entry)
        before = self._volume_by_file.get(file, "")
        if "refused" in change:
            self.quarantine[file] = entry
            removed = "" if entry["reason"] in _NOT_READ else before
        else:
            removed = before if before != entry["volume_id"] else ""
        if removed:
            del self.volumes[removed], self._volume_by_file[file]
        if "volume" in change:
            self.quarantine.pop(file, None)
            if replaced := self.volumes.get(entry["volume_id"]):
                self._volume_by_file.pop(file_key(replaced), None)
            self.volumes[entry["volume_id"]] = entry
            self._volume_by_file[file] = entry["volume_id"]
        return removed


_ENTRY_TEXTS = {"volume": ("volume_id", "file"), "refused": ("file", "reason", "detail")}


def check_entry(kind: str, entry: object, where: str) -> dict[str, Any]:
    """An index entry (`kind` "volume") or quarantine entry ("refused") as it is.

    Raises OctjepaError, which names the file `where`: it lacks what every such entry has.
    """
    texts = _ENTRY_TEXTS[kind]
    if not isinstance(entry, dict) or not all(isinstance(entry.get(name), str) for name in texts):
        raise OctjepaError(f"{where} is damaged (an entry without {', '.join(texts)}): restore it, or ingest again")
    return entry


def merge_participants(known: pd.DataFrame, added: list[dict[str, object]]) -> pd.DataFrame:
    """One entry per person, sorted by id; the last one counts. Warns where entries of one person differ."""
    import pandas as pd

    columns = list(PARTICIPANT_COLUMNS)
    merged = pd.DataFrame([*known.to_dict("records"), *added], columns=columns)
    changed = int((merged.astype(str).drop_duplicates().groupby("person_id").size() > 1).sum())
    if changed:
        _log.warning(
            "participants.tsv differs from before for %d people (split, site, group or age): the later table "
            "counts. Splits already assigned are kept; `octjepa split STORE --by recommended` follows the table. Two "
            "studies may use the same ids by chance: ingest them into separate stores.",
            changed,
        )
    merged = merged.drop_duplicates("person_id", keep="last")
    return merged.sort_values("person_id", key=lambda ids: ids.astype(str), ignore_index=True)


def people_unknown(table: pd.DataFrame) -> int:
    """Volumes of a store's table whose person no source names: each counts as a separate person."""
    return sum("person_unknown" in read_notes(cell) for cell in table["notes"])


def encode_labels(labels: Mapping[str, float | str]) -> str:
    """The labels of one volume as its index entry keeps them; "" for none."""
    return json.dumps(dict(labels), sort_keys=True, allow_nan=False) if labels else ""


def decode_labels(entry: Mapping[str, Any]) -> dict[str, float | str]:
    """The labels of an index entry; the first stores have no such column."""
    text = entry.get("labels")
    labels: dict[str, float | str] = parse_json_object(text) if isinstance(text, str) and text else {}
    return labels


def format_labels(entries: Iterable[Mapping[str, Any]]) -> str:
    """The text of labels.tsv, sorted by volume; "" if no volume has labels.

    A label named like one of the first three columns gets a trailing "_". A volume without a label has an empty cell.
    """
    import pandas as pd

    from octjepa.tables import format_table  # only ingest writes labels

    lines = []
    for entry in entries:
        if labels := decode_labels(entry):
            named = {f"{name}_" if name in _LABEL_KEYS else name: value for name, value in labels.items()}
            shown = {k: f"{value:.12g}" if isinstance(value, float | int) else value for k, value in named.items()}
            lines.append({**{key: str(entry[key]) for key in _LABEL_KEYS}, **shown})
    if not lines:
        return ""
    table = pd.DataFrame(lines).sort_values("volume_id")
    names = sorted(set(table.columns) - set(_LABEL_KEYS))
    columns = [*_LABEL_KEYS, *names]
    return format_table(columns, table[columns].itertuples(index=False, name=None))


def text_column(column: pd.Series) -> pd.Series:
    """A column of the index as text, with "" for missing values."""
    return column.astype(object).where(column.notna(), "").astype(str)
