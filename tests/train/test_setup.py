"""A global batch is dealt over the processes by whole equal shares, or refused with what would fit."""

from __future__ import annotations

import shutil

import pytest

from octjepa.config import load_run_recipe
from octjepa.distributed.runtime import Runtime
from octjepa.errors import UsageError
from octjepa.locks import writer_lock
from octjepa.train import loop
from octjepa.train.data import BatchShares, batch_shares
from octjepa.train.plan import plan
from synthetic import MemoryStore, small_recipe


def recipe_of(batch, micro=None, **machine):
    return small_recipe(train={"global_batch": batch}, machine={"micro_batch": micro, **machine})


@pytest.mark.parametrize(
    ("batch", "micro", "processes", "shares"),
    [
        (32, None, 1, BatchShares(32, 32, 1)),
        (32, 1, 16, BatchShares(2, 1, 2)),  # the reference run
        (32, 8, 8, BatchShares(4, 4, 1)),  # a micro-batch above the share is the share
        (30, 4, 3, BatchShares(10, 4, 3)),  # the last part is short
    ],
)
def test_shares_by_hand(batch, micro, processes, shares):
    assert batch_shares(recipe_of(batch, micro), processes) == shares


@pytest.mark.parametrize(
    ("batch", "processes", "parts"),
    [
        (32, 5, ["start 4 or 8 of them", "to 30 or 35"]),
        (4, 6, ["over 6 processes", "start 4 of them", "to 6 ("]),
    ],
)
def test_a_batch_that_does_not_fit_is_refused_with_what_would(batch, processes, parts):
    with pytest.raises(UsageError) as refused:
        batch_shares(recipe_of(batch), processes)
    assert all(part in str(refused.value) for part in parts), refused.value


@pytest.mark.parametrize(
    ("batch", "objective", "message"),
    [
        (4, {}, "over 3 processes"),
        (
            6,
            {"variance_covariance": 0.1},
            "objective.variance_covariance needs the whole batch .* 3 processes .* Start one process",
        ),
        (6, {"variance_covariance": 0.1, "sigreg": 0.1}, "set objective.variance_covariance to 0"),
    ],
)
def test_a_run_and_its_plan_refuse_it_before_anything_is_written(tmp_path, monkeypatch, batch, objective, message):
    recipe = small_recipe(train={"global_batch": batch}, machine={"devices": 3}, objective=objective)
    with pytest.raises(UsageError, match=message):
        plan(recipe)
    monkeypatch.setattr(Runtime, "world_size", property(lambda self: 3))
    with pytest.raises(UsageError, match=message):
        loop.pretrain(recipe, MemoryStore(recipe.preprocessing), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_meter_and_a_regulariser_on_one_process_are_free():
    assert batch_shares(small_recipe(objective={"variance_covariance": 0}), 2) == BatchShares(2, 2, 1)
    assert batch_shares(small_recipe(objective={"variance_covariance": 0.1}), 1) == BatchShares(4, 4, 1)


def test_sigreg_is_shared_by_processes():
    assert batch_shares(small_recipe(objective={"sigreg": 0.1}), 2) == BatchShares(2, 2, 1)


def test_checkpoints_elsewhere_are_locked_and_the_run_names_their_new_folder(tmp_path):
    sections = {"train": {"max_updates": 2, "global_batch": 2, "precision": "fp32"}, "monitor": {"every_updates": None}}
    first = small_recipe(checkpoint={"every_updates": 1, "dir": str(tmp_path / "one")}, **sections)
    store = MemoryStore(first.preprocessing)
    with writer_lock(tmp_path / "one"), pytest.raises(UsageError, match="one"):
        loop.pretrain(first, store, tmp_path / "run")
    loop.pretrain(first, store, tmp_path / "run")
    shutil.move(tmp_path / "one", tmp_path / "other")
    other = small_recipe(checkpoint={"every_updates": 1, "dir": str(tmp_path / "other")}, **sections)
    (tmp_path / "run" / "summary.json").unlink()
    loop.pretrain(other, store, tmp_path / "run", resume=True)
    assert load_run_recipe(tmp_path / "run" / "recipe.yaml") == other
