"""Leaks are found by person, content, SOP instance UID and en face image, and told without an id."""

from __future__ import annotations

import secrets
from typing import Any

import numpy as np
import pandas as pd
import pytest

from index_entries import index_entry
from octjepa.cohort.leaks import TrainingSet, find_leaks, pretraining_overlap
from octjepa.record import to_json


def code(seed: int, flipped: int = 0) -> str:
    """An en face hash; `flipped` of its 256 bits turned."""
    bits = np.random.default_rng(seed).integers(0, 2, 256).astype(bool)
    bits[:flipped] ^= True
    return np.packbits(bits).tobytes().hex()


def ids(*numbers: int) -> list[str]:
    return sorted(index_entry(number)["volume_id"] for number in numbers)


@pytest.mark.parametrize(
    ("kind", "shared"),
    [
        ("person_id", {"person_id": "1001"}),
        ("content_hash", {"content_hash": "f" * 64}),
        ("sop_instance_uid", {"sop_instance_uid": "1.2.840"}),
        ("near_duplicate", {"enface_hash": code(1)}),
    ],
)
def test_what_two_splits_share_is_found_and_not_quoted(kind: str, shared: dict[str, str]) -> None:
    result = (("train", code(8)), ("test", code(9)), ("val", ""))
    rows = [index_entry(2 * number, split=split, enface_hash=digits) for number, (split, digits) in enumerate(result)]
    assert find_leaks(pd.DataFrame(rows)) == []
    table = pd.DataFrame([{**rows[0], **shared}, {**rows[1], **shared}, rows[2]])
    assert to_json(find_leaks(table)) == [{"kind": kind, "splits": "test;train", "volumes": ids(0, 2)}]


def test_many_copies_of_one_scan_are_one_leak() -> None:
    splits = ("train", "train", "test", "val", "")
    rows = [index_entry(2 * n, split=split, enface_hash=code(5, 4 * n)) for n, split in enumerate(splits)]
    (leak,) = find_leaks(pd.DataFrame(rows))
    assert (leak.kind, leak.splits, leak.volumes) == ("near_duplicate", "test;train;val", tuple(ids(0, 2, 4, 6)))


def evaluation(**of_the_first: Any) -> list[dict[str, Any]]:
    splits = ("test", "test", "val", "train")
    rows = [index_entry(100 + 2 * n, split=split, enface_hash=code(100 + n)) for n, split in enumerate(splits)]
    return [{**rows[0], **of_the_first}, *rows[1:]]


@pytest.mark.parametrize(
    ("kind", "shared"),
    [
        ("person_id", {"person_id": index_entry(0)["person_id"]}),
        ("content_hash", {"content_hash": index_entry(0)["content_hash"]}),
        ("sop_instance_uid", {"sop_instance_uid": index_entry(0)["sop_instance_uid"]}),
        ("near_duplicate", {"enface_hash": code(0, 20)}),
    ],
)
def test_what_pretraining_saw_of_another_store_is_found(kind: str, shared: dict[str, str]) -> None:
    before = pd.DataFrame([index_entry(2 * n, split="train", enface_hash=code(n)) for n in range(5)])
    trained = TrainingSet(frozenset(before["volume_id"]), before)
    clean = pretraining_overlap(pd.DataFrame(evaluation()), trained).to_json()
    assert (clean["pretrained_on"], clean["seen"], clean["leaks"]) == (5, {}, [])
    assert (clean["train"], clean["val"], clean["test"]) == (1, 1, 2)
    found = pretraining_overlap(pd.DataFrame(evaluation(**shared)), trained).to_json()
    assert found["leaks"] == [{"kind": kind, "split": "test", "volumes": ids(100)}]
    assert found["seen"] == {"test": {"people": 1, "volumes": 1}}
    assert found["compared_by"] == ["person_id", "content_hash", "sop_instance_uid", "near_duplicate"]
    unseen = pretraining_overlap(pd.DataFrame(evaluation()).assign(enface_hash=""), trained).to_json()
    assert "near_duplicate" not in unseen["compared_by"]
    assert not any(person in str(found) for person in before["person_id"])


def test_the_same_store_is_held_against_itself() -> None:
    table = pd.DataFrame([index_entry(n, split="train" if n < 6 else "test") for n in range(10)])
    own = TrainingSet(frozenset(table.loc[table["split"] == "train", "volume_id"]), table[table["split"] == "train"])
    assert pretraining_overlap(table, own).to_json()["leaks"] == []
    assert pretraining_overlap(table, own).to_json()["seen"] == {"train": {"people": 3, "volumes": 6}}
    assigned_anew = table.assign(split=["test" if name in ids(0, 1) else "train" for name in table["volume_id"]])
    found = pretraining_overlap(assigned_anew, own).to_json()
    assert found["seen"]["test"] == {"people": 1, "volumes": 2}
    assert {leak["kind"] for leak in found["leaks"]} == {"person_id", "content_hash", "sop_instance_uid"}


def test_weights_alone_report_contents_and_the_people_they_belong_to() -> None:
    table = pd.DataFrame([index_entry(n, split="test") for n in range(4)])
    found = pretraining_overlap(table, TrainingSet(frozenset([*ids(0), secrets.token_hex(8)]), None)).to_json()
    assert (found["pretrained_on"], found["compared_by"]) == (2, ["person_id", "content_hash"])
    assert found["seen"] == {"test": {"people": 1, "volumes": 2}}
