"""Splits by person, never by volume: both eyes and all visits of a person are on one side.

`recommended` follows participants.tsv. `stratified` deals people out so that devices, regions, eyes and, if given, the
labels are alike everywhere, by minimisation, as trials do it (Pocock and Simon, Sequential Treatment Assignment with
Balancing for Prognostic Factors, Biometrics 1975). A person scanned on two devices counts for both.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from octjepa.errors import UsageError
from octjepa.keys import key
from octjepa.store.cohort_flow import UNKNOWN, text_column
from octjepa.store.leaks import find_leaks

if TYPE_CHECKING:
    from octjepa.store.folder import Store

SPLITS = ("train", "val", "test")
SHARES = (0.8, 0.1, 0.1)
Shares = tuple[float, float, float]
Labels = Mapping[tuple[str, str], str]  # (person, eye) -> value
_MOST_VALUES = 10  # numbers of more values are dealt by quarters
_MOST_CLASSES = 20


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
            f"{without} of {len(people)} people have no recommended_split in participants.tsv: add --deal-rest to keep "
            "the recommendations and deal the others, as ingest does, or use --by stratified to deal everybody"
        )
    return recommended


def split_the_rest(store: Store, seed: int = 0) -> dict[str, int]:
    """Splits for people who have none: as recommended, else dealt so that all together come near the usual shares.

    Writes them into the store and returns how many people stand by which way: "kept", "recommended", "stratified".
    """
    have = {row["person_id"]: row["split"] for row in store.entries() if row["split"]}
    people = {row["person_id"] for row in store.entries()}
    recommended = {person: split for person, split in _recommendations(store).items() if person not in have}
    fixed = {**have, **recommended}
    dealt = {} if people <= fixed.keys() else split_stratified(store, seed, fixed=fixed)
    # A volume that came later may stand without a split beside others of its person.
    if people - have.keys() or not all(row["split"] for row in store.entries()):
        store.set_split({**dealt, **fixed})
    counts = {"kept": len(have), "recommended": len(recommended), "stratified": len(people - fixed.keys())}
    return {way: count for way, count in counts.items() if count}


def split_stratified(
    store: Store,
    seed: int = 0,
    shares: Shares = SHARES,
    fixed: Mapping[str, str] | None = None,
    labels: Labels | None = None,
) -> dict[str, str]:
    """person -> split, everybody dealt at `shares` of train, val, test so that each trait comes near them too.

    Who stands in `fixed` (person -> split) is not dealt, but counts towards the shares. Depends on the seed and on who
    has which trait, not on the order of files. Raises UsageError: shares that miss 1, labels of nobody.
    """
    if abs(sum(shares) - 1) > 1e-6 or min(shares) < 0:
        raise UsageError(f"shares {shares} of train, val, test must add up to 1")
    traits = traits_of(store, labels)
    dealt = _deal(traits, dict(zip(SPLITS, shares, strict=True)), fixed or {}, seed)
    return _nobody_left_out(dealt, fixed or {}, shares, seed)


def traits_of(store: Store, labels: Labels | None = None) -> dict[str, frozenset[str]]:
    """person -> what must be alike on all sides: "device zeiss_cirrus", "region Macula", "eye OD", "label 2"."""
    found: dict[str, set[str]] = defaultdict(set)
    for column in ("device", "region", "eye"):
        for person, value in zip(store.table["person_id"], text_column(store.table[column]), strict=True):
            found[person].add(f"{column} {value or UNKNOWN}")
    if labels is not None:
        told = _label_traits(labels, found.keys())
        for person, traits in found.items():
            traits |= told.get(person, {f"label {UNKNOWN}"})
    return {person: frozenset(traits) for person, traits in found.items()}


def _label_traits(labels: Labels, people: Iterable[str]) -> dict[str, set[str]]:
    """person -> "label VALUE" of each eye; numbers of many values by quarters. Raises UsageError: labels of nobody."""
    here = set(people)
    known = {whose: value for whose, value in labels.items() if whose[0] in here}
    if not known:
        raise UsageError(f"none of the {len({person for person, _ in labels})} labelled people is in the store")
    values = sorted(set(known.values()))
    name = {value: value for value in values}
    if len(values) > _MOST_VALUES:
        try:
            numbers = {value: float(value) for value in values}
        except ValueError:
            numbers = {}
        if numbers:
            edges = np.quantile([numbers[value] for value in known.values()], (0.25, 0.5, 0.75))
            name = {value: f"quarter {1 + int(np.searchsorted(edges, numbers[value]))}" for value in values}
        elif len(values) > _MOST_CLASSES:
            raise UsageError(
                f"the label has {len(values)} values that are no numbers, at most {_MOST_CLASSES} can be dealt evenly: "
                "is it an id? Name another --target"
            )
    found: dict[str, set[str]] = defaultdict(set)
    for (person, _), value in known.items():
        found[person].add(f"label {name[value]}")
    return found


def _deal(
    traits: Mapping[str, frozenset[str]], shares: Mapping[str, float], fixed: Mapping[str, str], seed: int
) -> dict[str, str]:
    """Each person, in keyed order, to the split that is furthest behind its shares, summed over the person's traits.

    How far behind: its share of all who have the trait and were dealt, this person among them, less whom it got.
    Everybody has the trait "", which keeps the whole near the shares; ties go to the larger share.
    """
    splits = sorted((name for name in shares if shares[name] > 0), key=lambda name: -shares[name])
    got: dict[str, Counter[str]] = defaultdict(Counter)
    dealt: dict[str, str] = {}
    for person in sorted(traits, key=lambda person: (person not in fixed, key("split", seed, person), person)):
        mine = ("", *traits[person])
        if person not in fixed:
            behind = {
                name: sum(shares[name] * (got[trait].total() + 1) - got[trait][name] for trait in mine)
                for name in splits
            }
            dealt[person] = max(behind, key=lambda name: round(behind[name], 9))
        for trait in mine:
            got[trait][fixed.get(person) or dealt[person]] += 1
    return dealt


def _nobody_left_out(dealt: dict[str, str], fixed: Mapping[str, str], shares: Shares, seed: int) -> dict[str, str]:
    """A small cohort rounds a share to nobody; validation and test need one person each, training keeps one."""
    given = Counter([*dealt.values(), *fixed.values()])
    for name, share in zip(SPLITS, shares, strict=True):
        movable = sorted((person for person in dealt if dealt[person] == "train"), key=lambda p: key("move", seed, p))
        if share > 0 and not given[name] and movable and given.total() >= 3 and given["train"] > 1:
            dealt[movable[0]] = name
            given["train"] -= 1
            given[name] += 1
    return dealt


def split_counts(store: Store) -> dict[str, int]:
    """People per split."""
    people = store.table[["person_id", "split"]].drop_duplicates()
    return {name: int((people["split"] == name).sum()) for name in SPLITS}


def apply_split(
    store: Store,
    by: str,
    seed: int = 0,
    shares: Shares = SHARES,
    deal_rest: bool = False,
    labels: Labels | None = None,
) -> dict[str, Any]:
    """Splits the store's people `by` "recommended" or "stratified"; {train, val, test, leaks, strata}.

    `leaks` is `find_leaks` of the result; `strata` counts the people of every trait by split. With `deal_rest`,
    people without a recommendation are dealt around those who have one.
    Raises UsageError: an unknown way, options of the other way, people without a recommendation.
    """
    if by == "stratified":
        if deal_rest:
            raise UsageError("--deal-rest is unused by --by stratified, which deals everybody: drop it")
        splits = split_stratified(store, seed, shares, labels=labels)
    elif by == "recommended":
        if not deal_rest and (labels is not None or shares != SHARES):
            raise UsageError("--shares and --labels are unused by --by recommended: add --deal-rest, or drop them")
        fixed = _recommendations(store) if deal_rest else split_recommended(store)
        splits = {**split_stratified(store, seed, shares, fixed, labels), **fixed} if deal_rest else fixed
    else:
        raise UsageError(f"unknown way to split {by!r}: recommended or stratified")
    store.set_split(splits)
    strata: dict[str, dict[str, int]] = defaultdict(lambda: dict.fromkeys(SPLITS, 0))
    for person, found in sorted(traits_of(store, labels).items()):
        for trait in sorted(found):
            strata[trait][splits[person]] += 1
    return {**split_counts(store), "leaks": find_leaks(store.table), "strata": dict(sorted(strata.items()))}


def read_shares(text: str) -> Shares:
    """ "0.8,0.1,0.1" -> (0.8, 0.1, 0.1). Raises UsageError."""
    try:
        train, val, test = (float(part) for part in text.split(","))
    except ValueError:
        raise UsageError(f"--shares {text!r} is not of the form 0.8,0.1,0.1 (train, val, test)") from None
    return train, val, test
