"""A run, its weights and a store each tell what they were trained on, and an evaluation is held against it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from index_entries import index_entry, store_of
from octjepa.checkpoint import state
from octjepa.cohort.recorded_scans import uid_key
from octjepa.embed.leakage import check_leakage, training_volumes
from octjepa.errors import UsageError
from octjepa.model import VJEPA3D
from octjepa.train.optimizer import build_optimizer
from synthetic import small_recipe


@pytest.fixture
def trained(tmp_path: Path) -> Path:
    """A run folder whose weights saw the training volumes of the store next to it: volumes 0 to 5."""
    rows = [index_entry(number, split="train" if number < 6 else "test") for number in range(10)]
    store_of(tmp_path / "store", rows)
    recipe = small_recipe()
    torch.manual_seed(0)
    model = VJEPA3D.from_recipe(recipe)
    ids = [row["volume_id"] for row in rows if row["split"] == "train"]
    tensors = state.snapshot(model, build_optimizer(model, recipe.train))
    state.save(tmp_path / "run" / "checkpoints", 4, tensors, state.Record(recipe, 0, ids))
    from octjepa.config import to_yaml

    (tmp_path / "run" / "recipe.yaml").write_text(to_yaml(recipe), encoding="utf-8")
    (tmp_path / "run" / "run.json").write_text(json.dumps({"store": "../store"}), encoding="utf-8")
    return tmp_path


def test_run_checkpoint_and_store_know_the_same(trained: Path) -> None:
    of_store = training_volumes(trained / "store")
    for source in (trained / "run", trained / "run" / "checkpoints" / "step-00000004"):
        of_run = training_volumes(source)
        assert of_run.volume_ids == of_store.volume_ids
        assert of_run.entries is not None
        assert set(of_run.entries["person_id"]) == {"1001", "1002", "1003"}


def test_a_person_of_an_evaluation_store_who_was_trained_on_is_found(trained: Path) -> None:
    rows = [
        index_entry(50, split="test", person_id="1002"),
        index_entry(52, split="test"),
        index_entry(54, split="val"),
    ]
    other = store_of(trained / "other", rows)
    found = check_leakage(other, trained / "run").to_json()
    assert found["leaks"] == [{"kind": "person_id", "split": "test", "volumes": [rows[0]["volume_id"]]}]
    assert (found["test"], found["seen"]) == (2, {"test": {"people": 1, "volumes": 1}})


def test_a_volume_that_is_gone_from_the_store_of_pretraining_hides_no_person(trained: Path) -> None:
    left = [index_entry(number, split="train") for number in range(1, 6)]  # volume 0 was taken out since
    store_of(trained / "less", left)
    (trained / "run" / "run.json").write_text(json.dumps({"store": "../less"}), encoding="utf-8")
    rows = [index_entry(50, split="test", person_id="1002"), index_entry(0, split="val"), index_entry(54, split="val")]
    found = check_leakage(store_of(trained / "other", rows), trained / "run").to_json()
    assert found["leaks"] == [
        {"kind": kind, "split": split, "volumes": [row["volume_id"]]}
        for kind, split, row in (
            ("content_hash", "val", rows[1]),
            ("person_id", "test", rows[0]),
            ("person_id", "val", rows[1]),
            ("sop_instance_uid", "val", rows[1]),
        )
    ]


def test_weights_whose_store_is_gone_are_compared_by_content(trained: Path) -> None:
    other = store_of(trained / "other", [index_entry(0, split="test"), index_entry(1, split="test"), index_entry(52)])
    (trained / "store" / "store.json").unlink()
    found = check_leakage(other, trained / "run").to_json()
    assert found["compared_by"] == ["person_id", "content_hash"]
    assert found["seen"] == {"test": {"people": 1, "volumes": 2}}


def test_weights_whose_store_is_gone_know_a_scan_that_was_compressed_anew(trained: Path) -> None:
    seen = index_entry(0)
    manifest = trained / "run" / "checkpoints" / "step-00000004" / "manifest.json"
    message = json.loads(manifest.read_text(encoding="utf-8"))
    message["trained_on"].append(uid_key(seen["sop_instance_uid"]))
    manifest.write_text(json.dumps(message), encoding="utf-8")
    (trained / "store" / "store.json").unlink()
    anew = index_entry(70, split="test", sop_instance_uid=seen["sop_instance_uid"], person_id="7000")
    fellow = index_entry(71, split="test", person_id="7000")
    other = store_of(trained / "other", [anew, fellow, index_entry(52, split="test")])
    found = check_leakage(other, trained / "run").to_json()
    assert found["compared_by"] == ["person_id", "content_hash", "sop_instance_uid"]
    assert found["leaks"] == [
        {"kind": "person_id", "split": "test", "volumes": sorted([anew["volume_id"], fellow["volume_id"]])},
        {"kind": "sop_instance_uid", "split": "test", "volumes": [anew["volume_id"]]},
    ]


def test_what_says_nothing_is_refused(trained: Path) -> None:
    with pytest.raises(UsageError, match="nothing at"):
        training_volumes(trained / "nowhere")
    manifest = trained / "run" / "checkpoints" / "step-00000004" / "manifest.json"
    message = json.loads(manifest.read_text(encoding="utf-8"))
    message["trained_on"] = []
    manifest.write_text(json.dumps(message), encoding="utf-8")
    with pytest.raises(UsageError, match="do not say what they were trained on"):
        training_volumes(trained / "run")
