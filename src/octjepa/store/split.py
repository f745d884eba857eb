"""Splits by person, never by volume: both eyes and all visits of a person are on one side.

`recommended` follows participants.tsv; `stratified` deals people out so that device and eye are alike everywhere.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from typing import TYPE_CHECKING

from octjepa.errors import UsageError
from octjepa.keys import key

if TYPE_CHECKING:
    from octjepa.store.folder import Store

SPLITS = ("train", "val", "test")


def split_recommended(store: Store) -> dict[str, str]:
    """person -> split as participants.tsv recommends. Raises UsageError where a person has none."""
    participants = store.participants
    recommended = dict(zip(participants["person_id"], participants["recommended_split"], strict=True))
    people = sorted(set(store.table["person_id"]))
    without = [person for person in people if not recommended.get(person)]
    if without:
        raise UsageError(
            f"{len(without)} of {len(people)} people have no recommended_split in participants.tsv "
            f"(the first: {without[0]}): use --by stratified"
        )
    return {person: str(recommended[person]) for person in people}


def split_stratified(
    store: Store, seed: int = 0, shares: tuple[float, float, float] = (0.8, 0.1, 0.1)
) -> dict[str, str]:
    """person -> split, people dealt within strata of (devices, eyes), at `shares` of train, val, test.

    Depends on the seed and the person ids only, not on the order of files. Raises UsageError: shares that miss 1.
    """
    if abs(sum(shares) - 1) > 1e-6 or min(shares) < 0:
        raise UsageError(f"shares {shares} of train, val, test must add up to 1")
    devices: dict[str, set[str]] = defaultdict(set)
    eyes: dict[str, set[str]] = defaultdict(set)
    for person, device, eye in zip(*(store.table[name] for name in ("person_id", "device", "eye")), strict=True):
        devices[person].add(device)
        eyes[person].add(eye)
    strata: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for person in devices:
        strata[(*sorted(devices[person]), "|", *sorted(eyes[person]))].append(person)
    # One queue: stratum after stratum, shuffled within. Cutting it at even steps gives each stratum its share.
    queue = [
        person
        for stratum in sorted(strata)
        for person in sorted(strata[stratum], key=lambda person: key("split", seed, person))
    ]
    return _deal(queue, shares)


def _deal(queue: list[str], shares: tuple[float, float, float]) -> dict[str, str]:
    """Gives each person to the split that is furthest behind its share; ties go to the larger share."""
    given = dict.fromkeys(SPLITS, 0)
    dealt: dict[str, str] = {}
    for number, person in enumerate(queue, start=1):
        behind = {name: share * number - given[name] for name, share in zip(SPLITS, shares, strict=True) if share > 0}
        split = max(behind, key=lambda name: behind[name])
        given[split] += 1
        dealt[person] = split
    for name, share in zip(SPLITS, shares, strict=True):
        if share > 0 and not given[name] and len(queue) >= 3:
            # A small cohort rounds a share to nobody; validation and test need one person each.
            moved = next(person for person in reversed(queue) if dealt[person] == "train")
            dealt[moved] = name
            given["train"] -= 1
            given[name] += 1
    return dealt


def split_counts(store: Store) -> dict[str, int]:
    """People per split."""
    people = store.table[["person_id", "split"]].drop_duplicates()
    return {name: int((people["split"] == name).sum()) for name in SPLITS}


def find_leaks(store: Store, other: Mapping[str, str] | None = None) -> list[dict[str, str]]:
    """Whoever stands on two sides: [{kind, key, splits}], empty when there is no leak.

    Looks at persons, content hashes and SOP UIDs of the store, and at `other` (person -> split of another cohort).
    """
    leaks: list[dict[str, str]] = []
    for kind in ("person_id", "content_hash", "sop_instance_uid"):
        sides: dict[str, set[str]] = defaultdict(set)
        for name, split in zip(store.table[kind], store.table["split"], strict=True):
            if name and split:
                sides[name].add(split)
        if kind == "person_id":
            for person, split in (other or {}).items():
                if person in sides and split:
                    sides[person].add(split)
        leaks += [
            {"kind": kind, "key": name, "splits": ";".join(sorted(found))}
            for name, found in sorted(sides.items())
            if len(found) > 1
        ]
    return leaks


def apply_split(store: Store, by: str, seed: int = 0) -> dict[str, object]:
    """Splits the store's people `by` "recommended" or "stratified" and says how many stand where, and who on two sides.

    Raises UsageError: an unknown way, people without a recommendation.
    """
    ways = {"recommended": lambda: split_recommended(store), "stratified": lambda: split_stratified(store, seed)}
    if by not in ways:
        raise UsageError(f"unknown way to split {by!r}: {' or '.join(ways)}")
    store.set_split(ways[by]())
    return {**split_counts(store), "leaks": find_leaks(store)}
