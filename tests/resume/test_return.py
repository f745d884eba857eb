"""Unfit updates in a row: the run returns to a checkpoint and leaves their volumes out, and so does its replay.

A damaged checkpoint is passed over for the one before it.
"""

from __future__ import annotations

import logging

import pytest
import torch

from octjepa.checkpoint import folder
from octjepa.errors import CheckpointError, OctjepaError
from octjepa.files import read_json_lines
from octjepa.train import loop
from octjepa.train.loop import pretrain
from octjepa.views.loader import TrainingDataset, select_volumes
from synthetic import MemoryStore, small_recipe

TIMES = {"seconds", "volumes_per_second", "data_wait_share", "cpu_cores_busy", "memory/process_bytes"}


def recipe_of(updates=14):
    return small_recipe(
        train={"max_updates": updates, "global_batch": 2, "base_lr": 1e-3, "precision": "fp32"},
        checkpoint={"every_updates": 2, "keep_last": 20},
        monitor={"every_updates": None},
        validation={"max_samples": 2},
    )


def store_of(recipe):
    return MemoryStore(recipe.preprocessing, train=40, val=2)


@pytest.fixture
def bad(monkeypatch):
    """The ten volumes of updates 5 to 9 (from 0): a batch that holds one of them gives a gradient of NaN."""
    recipe = recipe_of()
    store = store_of(recipe)
    stream = TrainingDataset(store, recipe, select_volumes(store, recipe, "train").volume_ids)
    names = {name for update in range(5, 10) for name in stream.volume_ids_of_update(update)}
    honest = loop.accumulate

    def poisoned(model, batch, *arguments):
        figures = honest(model, batch, *arguments)
        if names & set(batch.volume_ids):
            next(model.predictor.parameters()).grad.fill_(float("nan"))
        return figures

    monkeypatch.setattr(loop, "accumulate", poisoned)
    return names


def lines_of(run):
    return [
        {key: value for key, value in line.items() if key not in TIMES}
        for line in read_json_lines(run / "metrics.jsonl")
    ]


@pytest.mark.slow
def test_the_run_returns_leaves_the_volumes_out_and_ends_well(tmp_path, bad):
    recipe = recipe_of()
    summary = pretrain(recipe, store_of(recipe), tmp_path / "run")
    assert summary.updates == 14
    returns = [line for line in lines_of(tmp_path / "run") if "left_out" in line]
    assert [(line["update"], set(line["left_out"])) for line in returns] == [(4, bad)]
    updates = [line["update"] for line in lines_of(tmp_path / "run") if "train/loss" in line]
    assert updates == list(range(1, 15))
    assert not any("skipped" in line for line in lines_of(tmp_path / "run"))


@pytest.mark.slow
def test_a_kill_after_the_return_changes_nothing(tmp_path, bad, monkeypatch):
    recipe = recipe_of()
    pretrain(recipe, store_of(recipe), tmp_path / "whole")
    honest, seen = loop.learning_rate, []

    def dying(update, total, train):
        seen.append(update)
        if seen.count(5) == 2:  # update 5 for the second time: the run has returned, and saved nothing since
            raise KeyboardInterrupt
        return honest(update, total, train)

    monkeypatch.setattr(loop, "learning_rate", dying)
    with pytest.raises(KeyboardInterrupt):
        pretrain(recipe, store_of(recipe), tmp_path / "killed")
    monkeypatch.setattr(loop, "learning_rate", honest)
    pretrain(recipe, store_of(recipe), tmp_path / "killed", resume=True)
    assert lines_of(tmp_path / "killed") == lines_of(tmp_path / "whole")
    one, other = (
        folder.read_tensors(folder.list_checkpoints(tmp_path / run / "checkpoints")[-1], "model.safetensors")
        for run in ("killed", "whole")
    )
    assert all(torch.equal(one[name], other[name]) for name in one)


def poison_from(first, monkeypatch):
    """Every update from `first` on has a gradient of NaN, whatever its volumes."""
    honest = loop.accumulate

    def poisoned(model, batch, recipe, runtime, update, micro):
        figures = honest(model, batch, recipe, runtime, update, micro)
        if update >= first:
            next(model.predictor.parameters()).grad.fill_(float("nan"))
        return figures

    monkeypatch.setattr(loop, "accumulate", poisoned)


@pytest.mark.slow
def test_where_leaving_out_does_not_help_the_run_ends(tmp_path, monkeypatch):
    recipe = recipe_of(40)
    poison_from(6, monkeypatch)
    with pytest.raises(OctjepaError, match=r"5 updates in a row from \d+ on .* for the 4th time after step-00000006"):
        pretrain(recipe, MemoryStore(recipe.preprocessing, train=200, val=2), tmp_path / "run")


def damage(checkpoint):
    path = checkpoint / "optimiser.safetensors"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


@pytest.mark.slow
def test_a_damaged_newest_checkpoint_gives_way_to_the_one_before_it(tmp_path, caplog):
    recipe = recipe_of(6)
    pretrain(recipe, store_of(recipe), tmp_path / "whole")
    pretrain(recipe, store_of(recipe), tmp_path / "run")
    saves = folder.list_checkpoints(tmp_path / "run" / "checkpoints")
    for one in saves[1:]:
        damage(one)
    (tmp_path / "run" / "summary.json").unlink()
    with caplog.at_level(logging.WARNING):
        pretrain(recipe, store_of(recipe), tmp_path / "run", resume=True)
    outputs = [record.message for record in caplog.records if "NOT USED" in record.message]
    assert [text.split()[0] for text in outputs] == ["step-00000006", "step-00000004"]
    assert lines_of(tmp_path / "run") == lines_of(tmp_path / "whole")
    assert (tmp_path / "run" / "summary.json").is_file()
    for one in saves:
        damage(one)
    (tmp_path / "run" / "summary.json").unlink()
    with pytest.raises(CheckpointError, match=r"step-00000002.*damaged"):
        pretrain(recipe, store_of(recipe), tmp_path / "run", resume=True)


def test_a_run_that_diverges_is_not_blamed_on_most_of_its_volumes(tmp_path, monkeypatch):
    recipe = recipe_of()
    poison_from(2, monkeypatch)
    store = MemoryStore(recipe.preprocessing, train=12, val=2)
    with pytest.raises(OctjepaError, match=r"5 updates in a row from 3 on .* of 12 were left. .* lower train.base_lr"):
        pretrain(recipe, store, tmp_path / "run")
    assert not any("left_out" in line for line in lines_of(tmp_path / "run"))  # or no resume could ever go on


def test_an_old_checkpoint_that_cannot_be_removed_does_not_end_the_run(tmp_path, monkeypatch, caplog):
    def refused(*_, **__):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(folder, "prune", refused)
    recipe = recipe_of(4)
    assert pretrain(recipe, store_of(recipe), tmp_path / "run").updates == 4
    assert "cannot be removed, training continues" in caplog.text
