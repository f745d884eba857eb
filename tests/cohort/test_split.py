"""Splits by person: near the shares overall and within every trait, whatever the order of files."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from index_entries import index_entry, store_of
from octjepa.cohort.split import apply_split, read_shares, split_stratified, strata_of
from octjepa.errors import UsageError

DEVICES = ("heidelberg_spectralis", "topcon_maestro2", "topcon_triton", "zeiss_cirrus")


def people_of_many_kinds(count: int) -> list[dict[str, Any]]:
    """Two volumes a person: devices 40:30:20:10, a fifth scanned on a second device, a tenth with the disc as well."""
    rows = []
    for number in range(2 * count):
        person = number // 2
        device = DEVICES[0 if person % 10 < 4 else 1 if person % 10 < 7 else 2 if person % 10 < 9 else 3]
        second = number % 2 and person % 5 == 3
        region = "Optic Disc" if number % 2 and person % 10 == 6 else "Macula"
        rows.append(index_entry(number, device="zeiss_cirrus" if second else device, region=region))
    return rows


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_every_stratum_comes_near_the_shares(tmp_path: Path, seed: int) -> None:
    store = store_of(tmp_path / "store", people_of_many_kinds(200))
    labels = {(f"{1001 + person}", eye): "sick" if person % 4 == 0 else "well" for person in range(200) for eye in "RL"}
    splits = split_stratified(store, seed, labels=labels)
    assert Counter(splits.values()) == {"train": 160, "val": 20, "test": 20}
    everybody = strata_of(store, labels)
    for stratum in {name for own in everybody.values() for name in own}:
        having = [splits[person] for person, own in everybody.items() if stratum in own]
        for name, share in (("train", 0.8), ("val", 0.1), ("test", 0.1)):
            assert abs(having.count(name) - share * len(having)) <= 2, (stratum, name, Counter(having))


def test_it_depends_on_the_seed_and_not_on_the_order_of_files(tmp_path: Path) -> None:
    rows = people_of_many_kinds(40)
    one, other = store_of(tmp_path / "one", rows), store_of(tmp_path / "other", reversed(rows))
    assert split_stratified(one, seed=1) == split_stratified(other, seed=1)
    assert split_stratified(one, seed=1) != split_stratified(one, seed=2)


def test_strata_of_one_person_do_not_all_fall_to_training(tmp_path: Path) -> None:
    """Each of 40 people with a region of its own: rounding each stratum by itself would leave validation empty."""
    rows = [index_entry(number, region=f"region {number // 2}") for number in range(80)]
    counted = Counter(split_stratified(store_of(tmp_path / "store", rows)).values())
    assert counted == {"train": 32, "val": 4, "test": 4}


@pytest.mark.parametrize(
    ("people", "expected"), [(1, {"train": 1}), (2, {"train": 2}), (3, {"train": 1, "val": 1, "test": 1})]
)
def test_very_small_cohorts(tmp_path: Path, people: int, expected: dict[str, int]) -> None:
    store = store_of(tmp_path / "store", [index_entry(number) for number in range(2 * people)])
    assert Counter(split_stratified(store).values()) == expected


def test_a_share_of_nothing_gets_nobody(tmp_path: Path) -> None:
    store = store_of(tmp_path / "store", people_of_many_kinds(50))
    assert Counter(split_stratified(store, shares=(0.6, 0.0, 0.4)).values()) == {"train": 30, "test": 20}
    for shares in ((0.8, 0.1, 0.2), (1.2, -0.1, -0.1)):
        with pytest.raises(UsageError, match="must add up to 1"):
            split_stratified(store, shares=shares)


def test_who_is_fixed_stays_and_counts(tmp_path: Path) -> None:
    store = store_of(tmp_path / "store", [index_entry(number) for number in range(40)])
    fixed = {f"{1001 + person}": "test" for person in range(5)}
    splits = split_stratified(store, fixed=fixed)
    assert splits.keys() == {f"{1001 + person}" for person in range(5, 20)}
    assert Counter(splits.values()) == {"train": 14, "val": 1}  # of 20 people, 5 of whom are in test already


def test_people_without_a_recommendation_are_refused_or_assigned(tmp_path: Path) -> None:
    result = [{"person_id": f"{1001 + person}", "recommended_split": "val"} for person in range(3)]
    store = store_of(tmp_path / "store", [index_entry(number) for number in range(20)], result)
    with pytest.raises(UsageError, match=r"7 of 10 people have no recommended_split .* --assign-rest"):
        apply_split(store, "recommended")
    message = apply_split(store, "recommended", assign_rest=True)
    assert {entry.split for entry in store.entries() if entry.person_id in {"1001", "1002", "1003"}} == {"val"}
    assert (message.train + message.val + message.test, message.leaks) == (10, [])
    assert message.train >= 6


def test_what_is_reported_counts_every_trait_and_names_nobody(tmp_path: Path) -> None:
    store = store_of(tmp_path / "store", people_of_many_kinds(30))
    message = apply_split(store, "stratified", shares=(0.5, 0.25, 0.25))
    assert message.strata["eye OD"] == {name: getattr(message, name) for name in ("train", "val", "test")}
    assert sum(message.strata["device zeiss_cirrus"].values()) == 9
    assert not any(person in str(message) for person in set(store.table["person_id"]))


def test_options_that_the_way_does_not_use_are_refused(tmp_path: Path) -> None:
    store = store_of(tmp_path / "store", [index_entry(number) for number in range(8)])
    with pytest.raises(UsageError, match="unknown way to split 'random'"):
        apply_split(store, "random")
    with pytest.raises(UsageError, match="--assign-rest is unused by --by stratified"):
        apply_split(store, "stratified", assign_rest=True)
    with pytest.raises(UsageError, match="--shares and --labels are unused by --by recommended"):
        apply_split(store, "recommended", shares=(0.6, 0.2, 0.2))


def test_labels_are_assigned_as_classes_or_by_quarters(tmp_path: Path) -> None:
    store = store_of(tmp_path / "store", [index_entry(number) for number in range(80)])
    ages = {(f"{1001 + person}", ""): str(20 + person) for person in range(40)}
    found = Counter(stratum for strata in strata_of(store, ages).values() for stratum in strata if "label" in stratum)
    assert found == {f"label quarter {number}": 10 for number in (1, 2, 3, 4)}
    eyes = {("1001", "OD"): "1", ("1001", "OS"): "0"}
    assert {"label 0", "label 1"} <= strata_of(store, eyes)["1001"]
    assert "label unknown" in strata_of(store, eyes)["1002"]
    images = {("1001", "", "v-1"): "drusen", ("1001", "", "v-2"): "normal"}  # labels by image or visit
    assert {"label drusen", "label normal"} <= strata_of(store, images)["1001"]
    with pytest.raises(UsageError, match="none of the 1 labelled people is in the store"):
        strata_of(store, {("9999", ""): "1"})
    with pytest.raises(UsageError, match="40 values that are not numbers"):
        strata_of(store, {whose: f"id-{value}" for whose, value in ages.items()})


def test_shares_are_three_numbers() -> None:
    assert read_shares("0.7, 0.2,0.1") == (0.7, 0.2, 0.1)
    for text in ("0.7,0.3", "a,b,c", ""):
        with pytest.raises(UsageError, match="is not of the form"):
            read_shares(text)
