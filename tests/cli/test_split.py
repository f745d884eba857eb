"""`octjepa split`, `plan` and a criterion that leaves nothing, as a user meets them."""

from __future__ import annotations

from pathlib import Path

import pytest

from command_line import call
from index_entries import index_entry, store_of
from octjepa.store import Store
from octjepa.store.index import IndexEntry


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """Ten people, two eyes each, of whom participants.tsv recommends a split for two; no pixels."""
    result = [{"person_id": person, "recommended_split": "test"} for person in ("1001", "1002")]
    store_of(tmp_path / "store", [index_entry(number, region="Macula") for number in range(20)], result)
    return tmp_path / "store"


def test_a_split_is_written_and_reported_without_ids(store: Path) -> None:
    outcome = call("split", store, "--by", "stratified", "--shares", "0.6,0.2,0.2", "--seed", 3, "--json")
    assert outcome.code == 0, outcome.err
    assert (outcome.json["train"], outcome.json["val"], outcome.json["test"]) == (6, 2, 2)
    assert outcome.json["strata"]["eye OD"] == {"train": 6, "val": 2, "test": 2}
    table = Store.open(store).table
    assert table.groupby("person_id")["split"].nunique().eq(1).all()
    assert "1001" not in outcome.out + outcome.err


def test_the_encoder_of_the_package_is_known_by_its_name(store: Path) -> None:
    found = call("inspect", "phantom-tiny", "--json")
    assert (found.json["kind"], found.json["recipe"], found.json["dim"]) == ("checkpoint", "phantom-tiny", 192)
    assert "of the package (phantom-tiny, phantom-truth, phantom-unet)" in call("inspect", "phantom-tine").err
    assigned = call("split", store, "--against", "phantom-tiny", "--json")
    assert assigned.code == 0, assigned.err
    assert assigned.json["leaks"] == []  # no eye of this store was drawn for it
    for drawn_anew in ("phantom-truth", "phantom-unet"):  # of no stored scan
        assigned = call("split", store, "--against", drawn_anew, "--json")
        assert (assigned.code, assigned.json["pretrained_on"], assigned.json["leaks"]) == (0, 0, [])
    names = "of the package (phantom-tiny, phantom-truth, phantom-unet)"
    assert names in call("split", store, "--against", "phantom-tine").err
    refused = call("split", store, "--assign-rest", "--against", "phantom-tiny")
    assert (refused.code, "leave out the options of a split" in refused.err) == (2, True)


def test_people_without_a_recommendation_are_reported_of_and_can_be_assigned(store: Path) -> None:
    refused = call("split", store)
    assert (refused.code, "--assign-rest" in refused.err) == (2, True)
    assigned = call("split", store, "--assign-rest", "--json")
    assert assigned.json["test"] >= 2
    assert set(Store.open(store).table.set_index("person_id")["split"][["1001", "1002"]]) == {"test"}


def test_labels_are_assigned_evenly(store: Path, tmp_path: Path) -> None:
    lines = [f"{1001 + person}\t{'sick' if person < 5 else 'well'}" for person in range(10)]
    (tmp_path / "labels.tsv").write_text("\n".join(["person_id\tgroup", *lines]), encoding="utf-8")
    requested = ("split", store, "--by", "stratified", "--shares", "0.6,0.2,0.2", "--labels", tmp_path / "labels.tsv")
    strata = call(*requested, "--target", "group", "--json").json["strata"]
    assert strata["label sick"] == strata["label well"] == {"train": 3, "val": 1, "test": 1}
    assert "belong together" in call(*requested).err


@pytest.mark.parametrize("shares", ["1", "0.8;0.1;0.1", "0.9,0.1,0.1"])
def test_shares_that_are_none_are_refused(store: Path, shares: str) -> None:
    outcome = call("split", store, "--by", "stratified", "--shares", shares)
    assert outcome.code == 2
    assert "shares" in outcome.err


def test_against_a_store_splits_nothing_and_tells_whom_it_knows(store: Path, tmp_path: Path) -> None:
    rows = [index_entry(0, split="train"), index_entry(50, split="train"), index_entry(52, split="test")]
    store_of(tmp_path / "before", rows)
    call("split", store, "--assign-rest")
    before = (store / "volumes.parquet").read_bytes()
    outcome = call("split", store, "--against", tmp_path / "before", "--json")
    assert outcome.code == 0, outcome.err
    assert outcome.json["pretrained_on"] == 2
    assert outcome.json["seen"] == {"test": {"people": 1, "volumes": 2}}
    assert {leak["kind"] for leak in outcome.json["leaks"]} == {"person_id", "content_hash", "sop_instance_uid"}
    assert (store / "volumes.parquet").read_bytes() == before
    assert call("split", store, "--against", tmp_path / "nothing").code == 2


@pytest.mark.slow
@pytest.mark.usefixtures("without_memory")
def test_plan_counts_the_cohort_and_a_criterion_that_takes_the_last_is_named(tmp_path: Path) -> None:
    from octjepa.config import load_recipe

    recipe = load_recipe("smoke_test")
    made = Store.create(tmp_path / "store", recipe.preprocessing)
    for number in range(8):
        device = ("topcon_triton", "zeiss_cirrus")[number // 6]
        made.add(IndexEntry(**index_entry(number, split="train", device=device)))
    made.consolidate()
    planned = call("plan", "smoke_test", "--store", tmp_path / "store", "data.balance=device", "--json")
    assert planned.code == 0, planned.err
    assert planned.json["volumes"] == 8
    assert planned.json["domains"] == {
        "topcon_triton": {"volumes": 6, "per_epoch": 4},
        "zeiss_cirrus": {"volumes": 2, "per_epoch": 4},
    }
    assert planned.json["flow"]["train"][0]["left"] == {"people": 4, "eyes": 8, "volumes": 8, "files": 8}
    empty = call("plan", "smoke_test", "--store", tmp_path / "store", "data.min_frames=500")
    assert empty.code == 2
    assert "500 B-scans at least took out the last 8" in empty.err
    twice = call("plan", "smoke_test", "data.min_frames=5", "data.max_frames=4")
    assert (twice.code, "nothing can pass" in twice.err) == (2, True)


def test_a_label_that_is_alike_everywhere_or_too_rare_to_balance_is_named(
    store: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    people = sorted(set(Store.open(store).table["person_id"]))
    labels = tmp_path / "labels.tsv"
    words = ("split", store, "--by", "stratified", "--labels", labels, "--target", "disease")
    labels.write_text("person_id\tdisease\n" + "".join(f"{one}\t0\n" for one in people), encoding="utf-8")
    assert "every labelled eye of the store has the value 0" in (done := call(*words)).err
    assert done.code == 2
    labels.write_text(labels.read_text(encoding="utf-8").replace("\t0\n", "\t1\n", 1), encoding="utf-8")
    assert call(*words).code == 0
    assert "label 1 is not in every split (people: " in caplog.text


@pytest.mark.slow
def test_few_test_people_are_named_with_how_many_a_probe_needs(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store_of(tmp_path / "store", [index_entry(number, person_id=str(1000 + number)) for number in range(3)])
    split = call("split", tmp_path / "store", "--by", "stratified", "--shares", "0.4,0.3,0.3")
    assert split.out.split() == ["train", "1", "val", "1", "test", "1"]
    assert "has 1 test person: a probe needs at least 20 of them for a conclusion" in caplog.text


@pytest.mark.slow
@pytest.mark.usefixtures("without_memory")
def test_a_store_of_one_person_names_how_many_people_a_split_and_a_run_need(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store_of(tmp_path / "store", [index_entry(number, person_id="1001") for number in range(2)])
    split = call("split", tmp_path / "store", "--by", "stratified")
    assert split.out.split() == ["train", "1", "val", "0", "test", "0"]
    assert "has 1 person: a split by person needs at least 3 people" in caplog.text
    assert "octjepa segment" in caplog.text
    caplog.clear()
    assert "--assign-rest" in call("split", tmp_path / "store").err
    assert "has 1 person: a split by person needs at least 3 people" in caplog.text  # before the refusal
    planned = call("plan", "tiny_cpu", "--store", tmp_path / "store")
    assert "has 1 person, and pretraining needs at least 20" in planned.out
    assert "split" not in planned.out.partition("verdict")[2]


@pytest.mark.parametrize("by", ["recommended", "stratified"])
def test_a_split_of_one_person_warns_that_val_and_test_are_empty(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, by: str
) -> None:
    person = [{"person_id": "1001", "recommended_split": "train"}]
    store_of(tmp_path / "store", [index_entry(0), index_entry(1)], person)
    outcome = call("split", tmp_path / "store", "--by", by, "--json")
    assert (outcome.code, outcome.json["train"], outcome.json["val"], outcome.json["test"]) == (0, 1, 0, 0)
    assert "no person is in val or test" in caplog.text
    assert "Add scans of at least 3 people to the store" in caplog.text


def test_a_recommended_split_without_val_names_the_stratified_one(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    people = [{"person_id": str(1001 + number), "recommended_split": "train"} for number in range(5)]
    store_of(tmp_path / "my store", [index_entry(2 * number) for number in range(5)], people)
    assert call("split", tmp_path / "my store").code == 0
    assert "no person is in val or test" in caplog.text
    assert f"`octjepa split '{tmp_path / 'my store'}' --by stratified` assigns people" in caplog.text


def test_a_share_of_zero_is_intended(store: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert call("split", store, "--by", "stratified", "--shares", "0.5,0,0.5").code == 0
    assert "no person is in" not in caplog.text
