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


def _recommendations(store: Store) -> dict[str, str]:
    """person -> split, of the store's people whom participants.tsv recommends one for."""
    participants = store.participants
    recommended = dict(zip(participants["person_id"], participants["recommended_split"], strict=True))
    people = sorted(set(store.table["person_id"]))
    return {person: str(recommended[person]) for person in people if recommended.get(person)}


def split_recommended(store: Store) -> dict[str, str]:
    """person -> split as participants.tsv recommends. Raises UsageError where a person has none."""
    recommended = _recommendations(store)
    people = set(store.table["person_id"])
    without = len(people - recommended.keys())
    if without:
        raise UsageError(
            f"{without} of {len(people)} people have no recommended_split in participants.tsv: use --by stratified"
        )
    return recommended


def split_the_rest(store: Store, seed: int = 0) -> dict[str, int]:
    """Splits for people who have none: as recommended, else dealt so that all together come near the usual shares.

    Writes them into the store and returns how many people stand by which way: "kept", "recommended", "stratified".
    """
    have = {row["person_id"]: row["split"] for row in store.rows() if row["split"]}
    people = {row["person_id"] for row in store.rows()}
    recommended = {person: split for person, split in _recommendations(store).items() if person not in have}
    fixed = {**have, **recommended}
    dealt = {} if people <= fixed.keys() else split_stratified(store, seed, fixed=fixed)
    # A volume that came later may stand without a split beside others of its person.
    if people - have.keys() or not all(row["split"] for row in store.rows()):
        store.set_split({**dealt, **fixed})
    counts = {"kept": len(have), "recommended": len(recommended), "stratified": len(people - fixed.keys())}
    return {way: count for way, count in counts.items() if count}


def split_stratified(
    store: Store,
    seed: int = 0,
    shares: tuple[float, float, float] = (0.8, 0.1, 0.1),
    fixed: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """person -> split, people dealt within strata of (devices, eyes), at `shares` of train, val, test.

    Who stands in `fixed` (person -> split) is not dealt, but counts towards the shares.
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
    fixed = fixed or {}
    for person in devices.keys() - fixed.keys():
        strata[(*sorted(devices[person]), "|", *sorted(eyes[person]))].append(person)
    # One queue: stratum after stratum, shuffled within. Cutting it at even steps gives each stratum its share.
    queue = [
        person
        for stratum in sorted(strata)
        for person in sorted(strata[stratum], key=lambda person: key("split", seed, person))
    ]
    given = {name: sum(fixed[person] == name for person in devices.keys() & fixed.keys()) for name in SPLITS}
    return _deal(queue, shares, given)


def _deal(queue: list[str], shares: tuple[float, float, float], given: dict[str, int]) -> dict[str, str]:
    """Gives each person to the split that is furthest behind its share; ties go to the larger share.

    `given` counts the people whom each split has already, and is counted on.
    """
    dealt: dict[str, str] = {}
    for number, person in enumerate(queue, start=1 + sum(given.values())):
        behind = {name: share * number - given[name] for name, share in zip(SPLITS, shares, strict=True) if share > 0}
        split = max(behind, key=lambda name: behind[name])
        given[split] += 1
        dealt[person] = split
    for name, share in zip(SPLITS, shares, strict=True):
        # A small cohort rounds a share to nobody; validation and test need one person each.
        movable = [person for person in queue if dealt[person] == "train"]
        if share > 0 and not given[name] and movable and sum(given.values()) >= 3 and given["train"] > 1:
            moved = movable[-1]
            dealt[moved] = name
            given["train"] -= 1
            given[name] += 1
    return dealt


def split_counts(store: Store) -> dict[str, int]:
    """People per split."""
    people = store.table[["person_id", "split"]].drop_duplicates()
    return {name: int((people["split"] == name).sum()) for name in SPLITS}


def find_leaks(store: Store) -> list[dict[str, str]]:
    """Whoever stands on two sides: [{kind, key, splits}] of persons, content hashes and SOP UIDs; empty when none."""
    leaks: list[dict[str, str]] = []
    for kind in ("person_id", "content_hash", "sop_instance_uid"):
        sides: dict[str, set[str]] = defaultdict(set)
        for name, split in zip(store.table[kind], store.table["split"], strict=True):
            if name and split:
                sides[name].add(split)
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
