"""What a resume needs next to the weights, and what must not be lost or be there twice after a kill."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from octjepa.checkpoint import folder
from octjepa.distributed.signals import Interrupted
from octjepa.errors import UsageError
from octjepa.files import read_json_lines
from octjepa.recipe import Recipe
from octjepa.train import guards, loop
from octjepa.train.loop import pretrain
from octjepa.volume import CanonicalVolume
from synthetic import MemoryStore, small_recipe

TIMES = {"seconds", "volumes_per_second", "data_wait_share", "cpu_cores_busy", "memory/process_bytes"}


def recipe_of(updates: int = 6, every: int | None = None, **checkpoint: Any) -> Recipe:
    return small_recipe(
        train={"max_updates": updates, "global_batch": 2, "base_lr": 1e-3, "precision": "fp32"},
        checkpoint={"every_updates": 2, "keep_last": 9, **checkpoint},
        monitor={"every_updates": every, "volumes": 2},
        validation={"max_samples": 2},
    )


class Lossy(MemoryStore):
    """One volume is torn."""

    def read(self, volume_id: str, halves: bool = False) -> CanonicalVolume:
        if volume_id == "volume0003":
            raise OSError("torn")
        return super().read(volume_id)


@pytest.fixture
def nervous(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every measurement is alarming, from the third update on."""
    limit = guards.LIMITS["low_rank"]
    monkeypatch.setattr(guards, "LOSS_WINDOW", 1)
    monkeypatch.setitem(guards.LIMITS, "low_rank", guards.Limit(limit.metric, 1e9, limit.below, "it is a test", ()))


@pytest.fixture
def kill_at() -> Iterator[Any]:
    """`kill_at(n)`: the run dies in update n (from 0)."""
    honest = loop.learning_rate
    with pytest.MonkeyPatch.context() as patch:

        def doom(at: int) -> None:
            def dying(update: int, total: int, train: Any) -> float:
                if update == at:
                    raise KeyboardInterrupt
                return honest(update, total, train)

            patch.setattr(loop, "learning_rate", dying)

        yield doom


@pytest.mark.slow
def test_alarms_and_lost_volumes_stand_there_once_whatever_was_killed(
    tmp_path: Path, nervous: None, kill_at: Any
) -> None:
    recipe = recipe_of(every=2)
    whole = pretrain(recipe, Lossy(recipe.preprocessing, train=6), tmp_path / "whole")
    kill_at(5)
    with pytest.raises(KeyboardInterrupt):
        pretrain(recipe, Lossy(recipe.preprocessing, train=6), tmp_path / "killed")
    kill_at(-1)
    again = pretrain(recipe, Lossy(recipe.preprocessing, train=6), tmp_path / "killed", resume=True)
    assert whole.alarms == again.alarms
    assert whole.alarms["low_rank"] in (2, 4)
    lines = [
        [
            {key: value for key, value in line.items() if key not in TIMES}
            for line in read_json_lines(run / "metrics.jsonl")
        ]
        for run in (tmp_path / "whole", tmp_path / "killed")
    ]
    assert lines[0] == lines[1]
    for run in ("whole", "killed"):
        rows = [json.loads(line) for line in (tmp_path / run / "quarantine.jsonl").read_text().splitlines()]
        assert [row["file"] for row in rows] == ["volume0003"]


@pytest.fixture
def stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run that was told to stop after its first update, before a checkpoint was due."""
    stop_in(monkeypatch, 0)
    with pytest.raises(Interrupted, match=r"after update 1 of 6; its checkpoint is written. Continue with --resume"):
        pretrain(recipe_of(), MemoryStore(recipe_of().preprocessing), tmp_path / "run")
    monkeypatch.undo()
    return tmp_path / "run"


def stop_in(monkeypatch: pytest.MonkeyPatch, update: int) -> None:
    honest = loop.accumulate

    def stopping(model: Any, batch: Any, recipe: Any, runtime: Any, now: int, micro: Any) -> Any:
        if now == update:
            os.kill(os.getpid(), signal.SIGTERM)
        return honest(model, batch, recipe, runtime, now, micro)

    monkeypatch.setattr(loop, "accumulate", stopping)


def test_the_same_scans_made_otherwise_are_other_data(stopped: Path) -> None:
    """A corrected spacing: the file's content is what it was, the stored volume is not."""
    store = MemoryStore(recipe_of().preprocessing)
    store.table["chunk_hash"] = "of another spacing"
    with pytest.raises(UsageError, match="no longer holds the 12 training volumes"):
        pretrain(recipe_of(), store, stopped, resume=True)


def test_a_checkpoint_that_is_gone_stops_a_resume_however_young_the_run(stopped: Path, tmp_path: Path) -> None:
    before = (stopped / "metrics.jsonl").read_text()
    elsewhere = recipe_of(dir=str(tmp_path / "elsewhere"))
    with pytest.raises(UsageError, match=r"wrote .*step-00000001, but .*elsewhere holds no checkpoint"):
        pretrain(elsewhere, MemoryStore(elsewhere.preprocessing), stopped, resume=True)
    assert (stopped / "metrics.jsonl").read_text() == before


def test_a_stop_without_checkpoints_promises_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stop_in(monkeypatch, 1)
    recipe = recipe_of(dir=None)
    with pytest.raises(Interrupted, match=r"after update 2 of 6; nothing is kept of it, for checkpoint\.dir is null$"):
        pretrain(recipe, MemoryStore(recipe.preprocessing), tmp_path / "run")


@pytest.mark.slow
def test_a_checkpoint_within_a_row_of_skipped_updates_does_not_drive_out_the_one_to_return_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    honest, seen = loop.accumulate, []

    def bad(model: Any, batch: Any, recipe: Any, runtime: Any, now: int, micro: Any) -> Any:
        figures = honest(model, batch, recipe, runtime, now, micro)
        seen.append(now)
        if 2 <= now < 7 and seen.count(now) == 1:
            next(model.predictor.parameters()).grad.fill_(float("nan"))
        return figures

    monkeypatch.setattr(loop, "accumulate", bad)
    recipe = recipe_of(8, keep_last=1)
    summary = pretrain(recipe, MemoryStore(recipe.preprocessing, train=40, val=2), tmp_path / "run")
    assert summary.skipped_updates == 0
    assert [line["update"] for line in read_json_lines(tmp_path / "run" / "metrics.jsonl") if "left_out" in line] == [2]
    assert len(folder.list_checkpoints(tmp_path / "run" / "checkpoints")) == 1


def test_the_journal_is_on_the_disk_before_the_checkpoint_that_needs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushed: list[str] = []
    honest = os.fsync

    def noting(handle: int) -> None:
        flushed.append(Path(f"/proc/self/fd/{handle}").readlink().name)
        honest(handle)

    monkeypatch.setattr(os, "fsync", noting)
    recipe = recipe_of(2)
    pretrain(recipe, MemoryStore(recipe.preprocessing), tmp_path / "run")
    assert flushed.index("metrics.jsonl") < flushed.index("model.safetensors")
    assert flushed.index("manifest.json") < flushed.index(".step-00000002.partial") < flushed.index("checkpoints")


def test_what_a_kill_left_of_any_checkpoint_goes_with_the_next_write(tmp_path: Path) -> None:
    (tmp_path / ".step-00000703.partial").mkdir()
    folder.write_folder(tmp_path, 1000, {"model.safetensors": {"w": torch.arange(4.0)}}, {})
    assert [path.name for path in tmp_path.iterdir()] == ["step-00001000"]


_WRITER = """
import time
from octjepa.train.checkpointing import CheckpointWriter
try:
    with CheckpointWriter() as writer:
        writer.start(lambda: time.sleep(60))
        print("writing", flush=True)
        time.sleep(60)
except KeyboardInterrupt:
    raise SystemExit(130)
"""


@pytest.mark.slow
def test_ctrl_c_where_nobody_takes_it_leaves_even_a_checkpoint_that_is_being_written() -> None:
    child = subprocess.Popen([sys.executable, "-c", _WRITER], stdout=subprocess.PIPE, text=True)
    assert child.stdout is not None
    assert child.stdout.readline() == "writing\n"
    child.send_signal(signal.SIGINT)
    try:
        assert child.wait(timeout=30) == 130
    finally:
        child.kill()
        child.stdout.close()
