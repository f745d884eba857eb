"""Splits by person, never by volume: both eyes and all visits of a person are on one side.

`recommended` follows participants.tsv. `stratified` assigns people so that devices, regions, eyes and, if given, the
labels are distributed alike in all splits, by minimisation, as trials do it (Pocock and Simon, Sequential Treatment
Assignment with Balancing for Prognostic Factors, Biometrics 1975). A person scanned on two devices counts for both.
"""

from __future__ import annotations

import logging
import shlex
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from octjepa.cohort.flow import UNKNOWN
from octjepa.cohort.leaks import SplitLeak, find_leaks
from octjepa.errors import UsageError, counted
from octjepa.keys import key
from octjepa.record import Record
from octjepa.store.folder import SPLIT_NAMES, Store
from octjepa.store.index import text_cells

_log = logging.getLogger(__name__)
SHARES = (0.8, 0.1, 0.1)
Shares = tuple[float, float, float]
Labels = Mapping[tuple[str, ...], str]  # (person, eye), or (person, eye, visit) -> value
_MOST_VALUES = 10  # numbers with more values are stratified by quarters
_MOST_CLASSES = 20


def _recommendations(store: Store) -> dict[str, str]:
    """person -> split, of those people in the store for whom participants.tsv recommends one."""
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
            f"{without} of {len(people)} people have no recommended_split in participants.tsv: add --assign-rest to "
            "keep the recommendations and assign the others, as ingest does, or use --by stratified to assign all "
            "people"
        )
    return recommended


def split_the_rest(store: Store, seed: int = 0) -> dict[str, int]:
    """Splits people who have none: as recommended, else so that all together come near the usual shares.

    Writes the splits into the store and returns how many people got theirs in which way: "kept", "recommended",
    "stratified". Warns if people keep another split than participants.tsv recommends.
    """
    existing = {entry.person_id: entry.split for entry in store.entries() if entry.split}
    people = {entry.person_id for entry in store.entries()}
    recommended = _recommendations(store)
    if differing := sum(existing.get(person, split) != split for person, split in recommended.items()):
        _log.warning(
            "%s of %s keep another split than participants.tsv recommends. `octjepa split %s` applies the "
            "recommendations; encoders that were trained before may have seen people who are then test people.",
            *(counted(differing, "person"), store.location, shlex.quote(store.location)),
        )
    recommended = {person: split for person, split in recommended.items() if person not in existing}
    fixed = {**existing, **recommended}
    assigned = {} if people <= fixed.keys() else split_stratified(store, seed, fixed=fixed)
    # A volume that was added later may have no split though others of its person have one.
    if people - existing.keys() or not all(entry.split for entry in store.entries()):
        store.set_split({**assigned, **fixed})
    counts = {"kept": len(existing), "recommended": len(recommended), "stratified": len(people - fixed.keys())}
    return {way: count for way, count in counts.items() if count}


def split_stratified(
    store: Store,
    seed: int = 0,
    shares: Shares = SHARES,
    fixed: Mapping[str, str] | None = None,
    labels: Labels | None = None,
) -> dict[str, str]:
    """person -> split, at `shares` of train, val, test, so that each stratum comes near these shares too.

    People in `fixed` (person -> split) keep their split but count towards the shares. Depends on the seed and on who
    is in which stratum, not on the order of files. Raises UsageError: shares that do not add up to 1, labels without
    people.
    """
    if not abs(sum(shares) - 1) <= 1e-6 or min(shares) < 0:
        raise UsageError(f"shares {shares} of train, val, test must add up to 1")
    fixed = fixed or {}
    assigned = _minimise(strata_of(store, labels), dict(zip(SPLIT_NAMES, shares, strict=True)), fixed, seed)
    return _fill_empty_splits(assigned, fixed, shares, seed)


def strata_of(store: Store, labels: Labels | None = None) -> dict[str, frozenset[str]]:
    """person -> the strata to balance: "device zeiss_cirrus", "region Macula", "eye OD", "label 2"."""
    strata: dict[str, set[str]] = defaultdict(set)
    for column in ("device", "region", "eye"):
        for person, value in zip(store.table["person_id"], text_cells(store.table[column]), strict=True):
            strata[person].add(f"{column} {value or UNKNOWN}")
    if labels is not None:
        by_label = _label_strata(labels, strata.keys())
        for person, traits in strata.items():
            traits |= by_label.get(person, {f"label {UNKNOWN}"})
    return {person: frozenset(traits) for person, traits in strata.items()}


def _label_strata(labels: Labels, people: Iterable[str]) -> dict[str, set[str]]:
    """person -> "label VALUE" of each eye and visit; numbers of many values by quarters.

    Raises UsageError: labels without people.
    """
    present = set(people)
    present_labels = {eye: value for eye, value in labels.items() if eye[0] in present}
    if not present_labels:
        raise UsageError(f"none of the {len({person for person, *_ in labels})} labelled people is in the store")
    values = sorted(set(present_labels.values()))
    if len(values) == 1:
        raise UsageError(f"every labelled eye of the store has the value {values[0]}: there is nothing to balance")
    name = {value: value for value in values}
    if len(values) > _MOST_VALUES:
        try:
            numbers = {value: float(value) for value in values}
        except ValueError:
            numbers = {}
        if numbers:
            edges = np.quantile([numbers[value] for value in present_labels.values()], (0.25, 0.5, 0.75))
            name = {value: f"quarter {1 + int(np.searchsorted(edges, numbers[value]))}" for value in values}
        elif len(values) > _MOST_CLASSES:
            raise UsageError(
                f"the label has {len(values)} values that are not numbers, at most {_MOST_CLASSES} can be balanced: "
                "is it an id? Name another --target"
            )
    strata: dict[str, set[str]] = defaultdict(set)
    for (person, *_), value in present_labels.items():
        strata[person].add(f"label {name[value]}")
    return strata


def _minimise(
    strata: Mapping[str, frozenset[str]], shares: Mapping[str, float], fixed: Mapping[str, str], seed: int
) -> dict[str, str]:
    """Assigns each person, in keyed order, to the split that is furthest behind its share, summed over their strata.

    Behind by: its share of the people of the stratum so far, this person included, less those it has. Every person is
    in the stratum "", which keeps the whole near the shares; ties go to the larger share.
    """
    splits = sorted((name for name in shares if shares[name] > 0), key=lambda name: -shares[name])
    counts: dict[str, Counter[str]] = defaultdict(Counter)  # stratum -> people per split
    assigned: dict[str, str] = {}
    for person in sorted(strata, key=lambda person: (person not in fixed, key("split", seed, person), person)):
        person_strata = ("", *strata[person])
        if person not in fixed:
            behind = {
                name: sum(
                    shares[name] * (counts[stratum].total() + 1) - counts[stratum][name] for stratum in person_strata
                )
                for name in splits
            }
            assigned[person] = max(behind, key=lambda name: round(behind[name], 9))
        for stratum in person_strata:
            counts[stratum][fixed.get(person) or assigned[person]] += 1
    return assigned


def _fill_empty_splits(assigned: dict[str, str], fixed: Mapping[str, str], shares: Shares, seed: int) -> dict[str, str]:
    """Moves one person into an empty val or test: a small cohort rounds a share to no person. Training keeps one."""
    counts = Counter([*assigned.values(), *fixed.values()])
    for name, share in zip(SPLIT_NAMES, shares, strict=True):
        movable = sorted((p for p in assigned if assigned[p] == "train"), key=lambda p: key("move", seed, p))
        if share > 0 and not counts[name] and movable and counts.total() >= 3 and counts["train"] > 1:
            assigned[movable[0]] = name
            counts["train"] -= 1
            counts[name] += 1
    return assigned


def split_counts(store: Store) -> dict[str, int]:
    """{split: number of people}."""
    people = store.table[["person_id", "split"]].drop_duplicates()
    return {name: int((people["split"] == name).sum()) for name in SPLIT_NAMES}


@dataclass(frozen=True)
class AppliedSplit(Record):
    """The people of each split, the leaks between splits, and the people of every stratum by split."""

    train: int
    val: int
    test: int
    leaks: list[SplitLeak]
    strata: dict[str, dict[str, int]]


def apply_split(
    store: Store,
    by: str,
    seed: int = 0,
    shares: Shares = SHARES,
    assign_rest: bool = False,
    labels: Labels | None = None,
) -> AppliedSplit:
    """Splits the store's people `by` "recommended" or "stratified".

    With `assign_rest`, people without a recommendation are assigned around those who have one.
    Raises UsageError: another `by`, options that `by` does not use, people without a recommendation.
    """
    if by == "stratified":
        if assign_rest:
            raise UsageError("--assign-rest is unused by --by stratified, which assigns all people: drop it")
        splits = split_stratified(store, seed, shares, labels=labels)
    elif by == "recommended":
        if not assign_rest and (labels is not None or shares != SHARES):
            raise UsageError("--shares and --labels are unused by --by recommended: add --assign-rest, or drop them")
        fixed = _recommendations(store) if assign_rest else split_recommended(store)
        splits = {**split_stratified(store, seed, shares, fixed, labels), **fixed} if assign_rest else fixed
    else:
        raise UsageError(f"unknown way to split {by!r}: recommended or stratified")
    store.set_split(splits)
    strata: dict[str, dict[str, int]] = defaultdict(lambda: dict.fromkeys(SPLIT_NAMES, 0))
    for person, traits in strata_of(store, labels).items():
        for stratum in traits:
            strata[stratum][splits[person]] += 1
    for stratum, counts in sorted(strata.items()):
        if stratum.startswith("label ") and 0 in counts.values():
            shown = ", ".join(f"{split} {count}" for split, count in counts.items())
            _log.warning("%s is not in every split (people: %s)", stratum, shown)
    return AppliedSplit(**split_counts(store), leaks=find_leaks(store.table), strata=dict(sorted(strata.items())))


def read_shares(text: str) -> Shares:
    """ "0.8,0.1,0.1" -> (0.8, 0.1, 0.1). Raises UsageError."""
    try:
        train, val, test = (float(part) for part in text.split(","))
    except ValueError:
        raise UsageError(f"--shares {text!r} is not of the form 0.8,0.1,0.1 (train, val, test)") from None
    return train, val, test
