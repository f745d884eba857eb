"""Who stands on two sides: of a split, or of pretraining and evaluation.

A leak is a person, a content, a SOP instance UID or an en face image (near-duplicates) that both sides hold. Leaks are
told by kind and volume id; person ids, hashes and UIDs are compared here and told to nobody.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from octjepa.store.cohort_flow import text_column
from octjepa.store.near_duplicates import near_duplicates

if TYPE_CHECKING:
    import pandas as pd

_COLUMNS = ("person_id", "content_hash", "sop_instance_uid")
NEAR = "near_duplicate"
_HELD_OUT = ("val", "test")


def find_leaks(table: pd.DataFrame) -> list[dict[str, Any]]:
    """[{kind, splits, volumes}] of everything in a store's index that stands in two splits; empty when nothing does.

    kind: "person_id", "content_hash", "sop_instance_uid" or "near_duplicate"; splits: "test;train".
    """
    side = dict(zip(table["volume_id"], text_column(table["split"]), strict=True))
    leaks = []
    for kind, volumes in _groups(table):
        placed = sorted(name for name in volumes if side[name])
        splits = sorted({side[name] for name in placed})
        if len(splits) > 1:
            leaks.append({"kind": kind, "splits": ";".join(splits), "volumes": placed})
    return sorted(leaks, key=lambda leak: (leak["kind"], leak["volumes"]))


@dataclass(frozen=True)
class TrainingSet:
    """What an encoder was trained on: volume ids, and their index rows, as many as are still in their store."""

    volume_ids: frozenset[str]
    rows: pd.DataFrame | None


def pretraining_overlap(table: pd.DataFrame, trained: TrainingSet) -> dict[str, Any]:
    """How much of a store's index `trained` knows: {train, val, test, pretrained_on, compared_by, seen, leaks}.

    train, val, test: people of `table`; seen: {split: {people, volumes}} of whom or of which anything was seen; leaks:
    [{kind, split, volumes}] of val and test, volumes being those of `table`. Without the rows of the pretraining store,
    contents are compared, and people by what `table` itself holds of the volumes trained on.
    """
    import pandas as pd

    here = table.assign(volume_id="1" + text_column(table["volume_id"]))  # sorts behind what was trained on
    known = table[table["volume_id"].isin(trained.volume_ids)]
    if trained.rows is not None:  # of volumes that are gone there, `table` may still know
        known = pd.concat([trained.rows, known[~known["volume_id"].isin(trained.rows["volume_id"])]])
    both = pd.concat([known.assign(volume_id="0" + text_column(known["volume_id"])), here], ignore_index=True)
    side = dict(zip(here["volume_id"], text_column(here["split"]), strict=True))
    person = dict(zip(here["volume_id"], here["person_id"], strict=True))
    seen: dict[str, set[str]] = {}
    leaks: list[dict[str, Any]] = []
    for kind, volumes in _groups(both):
        met = sorted(name for name in volumes if name in side)
        if len(met) == len(volumes) or not met:
            continue  # all here, or all there
        for split in sorted({side[name] for name in met}):
            shared = [name for name in met if side[name] == split]
            seen.setdefault(split, set()).update(shared)
            if split in _HELD_OUT:
                leaks.append({"kind": kind, "split": split, "volumes": [name[1:] for name in shared]})
    splits = text_column(table["split"])
    return {
        **{split: int(table.loc[splits == split, "person_id"].nunique()) for split in ("train", *_HELD_OUT)},
        "pretrained_on": len(trained.volume_ids),
        "compared_by": _compared_by(known, here, trained),
        "seen": {
            split: {"people": len({person[name] for name in names}), "volumes": len(names)}
            for split, names in sorted(seen.items())
        },
        "leaks": sorted(leaks, key=lambda leak: (leak["kind"], leak["split"], leak["volumes"])),
    }


def _compared_by(known: pd.DataFrame, here: pd.DataFrame, trained: TrainingSet) -> list[str]:
    """The kinds of leak that could be found; looks alone count where both sides have hashes of them."""
    if trained.rows is None:
        return list(_COLUMNS[:2])
    looked = all("enface_hash" in side and (text_column(side["enface_hash"]) != "").any() for side in (known, here))
    return [*_COLUMNS, *([NEAR] if looked else [])]


def _groups(table: pd.DataFrame) -> Iterator[tuple[str, list[str]]]:
    """(kind, volume ids) of all that share a person, content or SOP instance UID, or look alike."""
    for column in _COLUMNS:
        holding: dict[str, list[str]] = defaultdict(list)
        for name, volume_id in zip(text_column(table[column]), table["volume_id"], strict=True):
            holding[name].append(volume_id)
        yield from ((column, volumes) for name, volumes in holding.items() if name and len(volumes) > 1)
    if "enface_hash" in table:
        alike = table.assign(enface_hash=text_column(table["enface_hash"]))
        yield from ((NEAR, volumes) for volumes in _joined([(a, b) for a, b, _ in near_duplicates(alike)]))


def _joined(pairs: list[tuple[str, str]]) -> list[list[str]]:
    """Pairs that share a member as groups: of many copies of one scan, only some pairs are listed."""
    group: dict[str, list[str]] = {}
    for a, b in pairs:
        one, other = group.get(a, [a]), group.get(b, [b])
        if one is not other:
            merged = one + other
            group.update(dict.fromkeys(merged, merged))
    return [sorted(members) for name, members in group.items() if name == min(members)]
