"""A machine that lets nothing be read: the run ends with a checkpoint and the cause; no volume is called damaged."""

from __future__ import annotations

import errno
import json
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest

from octjepa.checkpoint import folder
from octjepa.errors import OctjepaError, ResourceError
from octjepa.files import read_json_lines
from octjepa.recipe import Recipe
from octjepa.store.storage import reading_chunk
from octjepa.train.loop import pretrain
from octjepa.views import loader
from octjepa.views.loader import TrainingDataset
from octjepa.volume import CanonicalVolume
from ranks import assert_same, losses_of, weights_of
from synthetic import MemoryStore, small_recipe


def recipe_of(**machine: Any) -> Recipe:
    return small_recipe(
        train={"max_updates": 6, "global_batch": 2, "base_lr": 1e-3, "precision": "fp32"},
        checkpoint={"every_updates": 2, "keep_last": 9},
        monitor={"every_updates": None},
        validation={"max_samples": 2},
        machine=machine,
    )


class Refusing(MemoryStore):
    """Read number `first` and those after it, `times` of them, meet an error of the system, as chunks on disks do."""

    def __init__(self, recipe: Recipe, first: int, times: float = float("inf"), number: int = errno.EMFILE) -> None:
        super().__init__(recipe.preprocessing)
        self.first, self.times, self.number, self.requests = first, times, number, 0

    def read(self, volume_id: str, halves: bool = False) -> CanonicalVolume:
        self.requests += 1
        with reading_chunk(f"chunks/{volume_id}"):
            if self.first <= self.requests < self.first + self.times:
                raise OSError(self.number, os.strerror(self.number))
        return super().read(volume_id)


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loader, "_WAITS_SECONDS", (0.0, 0.0, 0.0))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("whole") / "run"
    pretrain(recipe_of(), MemoryStore(recipe_of().preprocessing), out)
    return out


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 1])
def test_the_run_ends_with_a_checkpoint_and_goes_on_with_the_same_volumes(
    tmp_path: Path, whole: Path, workers: int
) -> None:
    recipe = recipe_of(loader_workers=workers)
    with pytest.raises(OctjepaError) as outputs:
        pretrain(recipe, Refusing(recipe, first=8), tmp_path / "run")
    assert re.fullmatch(
        r"chunks/volume\d+ cannot be read: Too many open files. The volume is not at fault: raise the limit of open "
        r"files \(ulimit -n\).*; stopped after update 3 of 6; its checkpoint is written. Continue with --resume.",
        str(outputs.value),
    )
    assert outputs.value.exit_code == 1
    assert (tmp_path / "run" / "quarantine.jsonl").read_text() == ""
    assert folder.list_checkpoints(tmp_path / "run" / "checkpoints")[-1].name == "step-00000003"
    pretrain(recipe, MemoryStore(recipe.preprocessing), tmp_path / "run", resume=True)
    assert not any("unread" in line for line in read_json_lines(tmp_path / "run" / "metrics.jsonl"))
    assert_same(weights_of(whole), weights_of(tmp_path / "run"))
    assert losses_of(whole) == losses_of(tmp_path / "run")


@pytest.mark.slow
def test_what_passes_is_waited_for(tmp_path: Path, whole: Path) -> None:
    recipe = recipe_of()
    pretrain(recipe, Refusing(recipe, first=8, times=3, number=errno.ENOMEM), tmp_path / "run")
    assert_same(weights_of(whole), weights_of(tmp_path / "run"))
    assert (tmp_path / "run" / "quarantine.jsonl").read_text() == ""


def test_where_nothing_can_be_written_either_both_are_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe, honest = recipe_of(), folder.save_file
    store = Refusing(recipe, first=8)

    def write(tensors: Any, path: Path, *about: Any) -> None:
        if "step-00000003" in str(path):  # that of the end
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        honest(tensors, path, *about)

    monkeypatch.setattr(folder, "save_file", write)
    with pytest.raises(OctjepaError, match=r"cannot be read: Too many open files.*; then could not write checkpoint"):
        pretrain(recipe, store, tmp_path / "run")
    assert folder.list_checkpoints(tmp_path / "run" / "checkpoints")[-1].name == "step-00000002"


@pytest.mark.slow
def test_a_refused_volume_judges_all_the_same_or_ends_the_run(tmp_path: Path) -> None:
    recipe = recipe_of()
    store = Refusing(recipe, first=13)  # after six batches of two: the validation
    with pytest.raises(ResourceError, match="Too many open files"):
        pretrain(recipe, store, tmp_path / "run")
    store.first = 10**9
    assert pretrain(recipe, store, tmp_path / "run", resume=True).updates == 6


@pytest.mark.slow
def test_what_is_absent_or_torn_is_damaged_and_replaced_as_before(tmp_path: Path) -> None:
    recipe = recipe_of()
    pretrain(recipe, Refusing(recipe, first=8, times=1, number=errno.ENOENT), tmp_path / "run")
    rows = [json.loads(line) for line in (tmp_path / "run" / "quarantine.jsonl").read_text().splitlines()]
    assert [row["reason"] for row in rows] == ["unreadable_file"]


def test_where_some_are_left_out_and_no_other_can_be_read_the_search_ends() -> None:
    recipe = recipe_of()
    store = Refusing(recipe, first=0, number=errno.ENOENT)
    stream = TrainingDataset(store, recipe, sorted(store.volumes))
    stream.exclude(["volume0003"])
    signal.alarm(20)  # it went round and round
    try:
        with pytest.raises(OctjepaError, match=r"^16 training volumes in a row cannot be read; the last: "):
            stream[0]
    finally:
        signal.alarm(0)
    assert store.requests == 16, "a bucket that is gone costs minutes a volume"


def test_the_volumes_of_an_update_are_those_that_it_trained_on() -> None:
    recipe = recipe_of()
    store = Refusing(recipe, first=1, times=1, number=errno.ENOENT)
    stream = TrainingDataset(store, recipe, sorted(store.volumes))
    expected = stream.volume_ids_of_update(0)
    sample = stream[0]
    ((unreadable, _),) = sample.unreadable
    assert unreadable == expected[0]
    stream.unreadable = {unreadable}
    assert stream.volume_ids_of_update(0)[0] == sample.volume_id
