"""People and scans that are in two splits, or in both pretraining and evaluation.

A leak is a person, a content, a SOP instance UID or an en face image (near-duplicates) that both sides hold. Leaks are
reported by kind and volume id; person ids, hashes and UIDs are compared here and never reported.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from octjepa.canonical.near_duplicates import near_duplicates
from octjepa.cohort.recorded_scans import uid_key
from octjepa.notes import write_codes
from octjepa.record import Record
from octjepa.store.index import text_column

if TYPE_CHECKING:
    import pandas as pd

NEAR = "near_duplicate"
_COLUMNS = ("person_id", "content_hash", "sop_instance_uid")
_HELD_OUT = ("val", "test")


@dataclass(frozen=True)
class SplitLeak(Record):
    """Volumes of several splits (such as "test;train") that share something.

    kind: "person_id", "content_hash", "sop_instance_uid" or "near_duplicate".
    """

    kind: str
    splits: str
    volumes: tuple[str, ...]


@dataclass(frozen=True)
class PretrainingLeak(Record):
    """Volumes of val or test that share something with the pretraining; kind as of a `SplitLeak`."""

    kind: str
    split: str
    volumes: tuple[str, ...]


@dataclass(frozen=True)
class SeenInSplit(Record):
    """People and volumes of a split that the pretraining has seen in part or whole."""

    people: int
    volumes: int


@dataclass(frozen=True)
class PretrainingOverlap(Record):
    """The entries that a store's index shares with the pretraining of an encoder.

    train, val, test: people of the index. pretrained_on: volumes. compared_by: kinds of leak that could be found. seen:
    by split. leaks: of val and test.
    """

    train: int
    val: int
    test: int
    pretrained_on: int
    compared_by: tuple[str, ...]
    seen: Mapping[str, SeenInSplit]
    leaks: tuple[PretrainingLeak, ...]


def find_leaks(table: pd.DataFrame) -> list[SplitLeak]:
    """Everything in a store's index that is in two splits; empty when nothing is."""
    split_of = dict(zip(table["volume_id"], text_column(table["split"]), strict=True))
    leaks = []
    for kind, group in _groups(table):
        volumes = sorted(name for name in group if split_of[name])
        splits = sorted({split_of[name] for name in volumes})
        if len(splits) > 1:
            leaks.append(SplitLeak(kind, write_codes(splits), tuple(volumes)))
    return sorted(leaks, key=lambda leak: (leak.kind, leak.volumes))


@dataclass(frozen=True)
class TrainingSet:
    """The training data of an encoder: volume ids, the index entries of those that are still in their store, UIDs.

    The UIDs as `uid_key`, where weights record them.
    """

    volume_ids: frozenset[str]
    entries: pd.DataFrame | None
    uid_keys: frozenset[str] = frozenset()


def pretraining_overlap(table: pd.DataFrame, trained: TrainingSet) -> PretrainingOverlap:
    """The entries that a store's index shares with `trained`; volumes are those of `table`.

    Without the entries of the pretraining store, contents are compared, UIDs if they are recorded, and people by
    what `table` itself holds of the volumes trained on.
    """
    import pandas as pd

    # Ids are prefixed, so that a volume that is on both sides is compared with itself; "1" sorts behind "0".
    here = table.assign(volume_id="1" + text_column(table["volume_id"]))
    trained_entries = table[table["volume_id"].isin(trained.volume_ids)]
    if trained.entries is not None:  # `table` may still have entries of volumes that are gone there
        trained_entries = pd.concat(
            [trained.entries, trained_entries[~trained_entries["volume_id"].isin(trained.entries["volume_id"])]]
        )
    trained_entries = pd.concat([trained_entries, _known_by_uid(table, trained)])
    both = pd.concat(
        [trained_entries.assign(volume_id="0" + text_column(trained_entries["volume_id"])), here], ignore_index=True
    )
    split_of = dict(zip(here["volume_id"], text_column(here["split"]), strict=True))
    shared: set[str] = set()
    leaks: list[PretrainingLeak] = []
    for kind, group in _groups(both):
        volumes = sorted(name for name in group if name in split_of)
        if len(volumes) == len(group) or not volumes:
            continue  # all here, or all there
        shared.update(volumes)
        for split in sorted({split_of[name] for name in volumes} & {*_HELD_OUT}):
            ids = tuple(name[1:] for name in volumes if split_of[name] == split)
            leaks.append(PretrainingLeak(kind, split, ids))
    splits = text_column(table["split"])
    overlap = here[here["volume_id"].isin(shared)]
    people = {split: int(table.loc[splits == split, "person_id"].nunique()) for split in ("train", *_HELD_OUT)}
    return PretrainingOverlap(
        **people,
        pretrained_on=len(trained.volume_ids),
        compared_by=tuple(_compared_by(trained_entries, here, trained)),
        seen={
            str(split): SeenInSplit(int(group["person_id"].nunique()), len(group))
            for split, group in overlap.groupby(text_column(overlap["split"]))
        },
        leaks=tuple(sorted(leaks, key=lambda leak: (leak.kind, leak.split, leak.volumes))),
    )


def _compared_by(trained_entries: pd.DataFrame, here: pd.DataFrame, trained: TrainingSet) -> list[str]:
    """The kinds of leak that could be found; en face images only if both sides have hashes of them."""
    if trained.entries is None:
        return list(_COLUMNS[: 3 if trained.uid_keys else 2])
    hashed = all(
        "enface_hash" in side and (text_column(side["enface_hash"]) != "").any() for side in (trained_entries, here)
    )
    return [*_COLUMNS, *([NEAR] if hashed else [])]


def _known_by_uid(table: pd.DataFrame, trained: TrainingSet) -> pd.DataFrame:
    """The scans of `table` that were trained on with another content: their UIDs and people are the same."""
    if not trained.uid_keys:
        return table.iloc[:0]
    keys = text_column(table["sop_instance_uid"]).map(uid_key)
    rows = table[keys.isin(trained.uid_keys) & ~table["volume_id"].isin(trained.volume_ids)]
    return rows.assign(content_hash="", **({"enface_hash": ""} if "enface_hash" in rows else {}))


def _groups(table: pd.DataFrame) -> Iterator[tuple[str, list[str]]]:
    """(kind, volume ids) of all that share a person, content or SOP instance UID, or are near-duplicates."""
    for column in _COLUMNS:
        volumes_by_value: dict[str, list[str]] = defaultdict(list)
        for value, volume_id in zip(text_column(table[column]), table["volume_id"], strict=True):
            volumes_by_value[value].append(volume_id)
        yield from ((column, group) for value, group in volumes_by_value.items() if value and len(group) > 1)
    if "enface_hash" in table:
        pairs = near_duplicates(table.assign(enface_hash=text_column(table["enface_hash"])))
        yield from ((NEAR, group) for group in connected([(a, b) for a, b, _ in pairs]))


def connected(pairs: list[tuple[str, str]]) -> list[list[str]]:
    """The connected groups of pairs: of many copies of one scan, only some pairs are listed."""
    group: dict[str, list[str]] = {}
    for a, b in pairs:
        first, other = group.get(a, [a]), group.get(b, [b])
        if first is not other:
            merged = first + other
            group.update(dict.fromkeys(merged, merged))
    return [sorted(members) for name, members in group.items() if name == min(members)]
