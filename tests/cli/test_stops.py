"""Stopped half-way by a signal or a full disk: the right exit code, nothing half-written, and a way to continue."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from command_line import call, lines, stop
from narrow_encoder import OVERRIDES

pytestmark = pytest.mark.slow

FAST = ("tokens.select=tissue", "tokens.budget=32", "checkpoint.every_updates=1000", "train.max_updates=20")


def unfinished(folder: Path) -> list[str]:
    """Names of what a write leaves only when it is cut short."""
    return [path.name for path in folder.rglob("*") if path.name.startswith(".") and path.name != ".lock"]


def same_volumes(store: Path, other: Path) -> None:
    """Both stores hold the same volumes, figure by figure and voxel by voxel."""
    ours, theirs = (
        pd.read_parquet(path / "volumes.parquet").sort_values("volume_id", ignore_index=True).drop(columns="split")
        for path in (store, other)
    )
    pd.testing.assert_frame_equal(ours, theirs)
    for pixels in other.rglob("pixels.npy"):
        assert (store / pixels.relative_to(other)).read_bytes() == pixels.read_bytes()


def stopped_ingest(line: Any, store: Path, number: signal.Signals, code: int) -> int:
    """The number of volumes that are in `store` after ingest was sent `number` half-way."""
    words = ["ingest", line.cohort, "--store", store, "--json", "--workers", 2]
    result = stop(words, number, once=lambda: lines(store / "journal.jsonl") >= 2)
    assert result.code == code, result.err
    assert result.out == ""
    assert "Traceback" not in result.err
    assert "run the same command again" in result.err
    assert unfinished(store) == []
    return call("inspect", store, "--json").json["volumes"]


def test_ingest_goes_on_where_ctrl_c_stopped_it(line: Any, tmp_path: Path) -> None:
    store = tmp_path / "store"
    retained = stopped_ingest(line, store, signal.SIGINT, 130)
    assert 2 <= retained < 20
    rest = call("ingest", line.cohort, "--store", store, "--json", "--workers", 1).json
    assert rest["skipped"] == retained
    assert rest["accepted"] == 20 - retained
    same_volumes(store, line.store)


def test_a_terminated_ingest_leaves_a_whole_store(line: Any, tmp_path: Path) -> None:
    assert stopped_ingest(line, tmp_path / "store", signal.SIGTERM, 143) >= 2


def test_workers_of_a_killed_ingest_end(line: Any, tmp_path: Path) -> None:
    store = tmp_path / "store"
    words = ["ingest", line.cohort, "--store", store, "--workers", 2]
    # returns when nobody holds the command's output any more, so a worker left behind is a timeout here
    result = stop(words, signal.SIGKILL, once=lambda: lines(store / "journal.jsonl") >= 1, whole_group=False)
    assert result.code == -signal.SIGKILL


def stopped_run(line: Any, run: Path, number: signal.Signals, code: int) -> list[object]:
    """Sends `number` to a run after its first update; returns the words of its command."""
    words = ["pretrain", "smoke_test", *FAST, "--store", line.store, "--out", run, "--json"]
    result = stop(words, number, once=lambda: lines(run / "metrics.jsonl") >= 1)
    assert result.code == code, result.err
    assert result.out == ""
    assert "Traceback" not in result.err
    assert "Continue with --resume" in result.err
    assert unfinished(run) == []
    (checkpoint,) = (run / "checkpoints").iterdir()
    assert f"stopped after update {int(checkpoint.name.removeprefix('step-'))} of 20" in result.err
    assert call("inspect", checkpoint, "--json").json["kind"] == "checkpoint"
    return words


def test_a_run_goes_on_where_ctrl_c_stopped_it(line: Any, tmp_path: Path) -> None:
    run = tmp_path / "run"
    words = stopped_run(line, run, signal.SIGINT, 130)
    done = call(*words, "--resume")
    assert done.code == 0, done.err
    assert done.json["updates"] == 20
    journal = [json.loads(row) for row in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [row["update"] for row in journal if "train/loss" in row] == list(range(1, 21))


def test_a_terminated_run_leaves_a_checkpoint(line: Any, tmp_path: Path) -> None:
    stopped_run(line, tmp_path / "run", signal.SIGTERM, 143)


def test_a_disk_that_fills_during_ingest(line: Any, small_disk: Callable[[str], Path]) -> None:
    store = small_disk("size=2m") / "store"
    words = ("ingest", line.cohort, "--store", store, "--json", "--workers", 1)
    result = call(*words)
    assert result.code == 1
    assert result.out == ""
    assert "disk is full" in result.err
    assert str(store) in result.err
    small_disk("size=64m")
    assert unfinished(store) == []
    rest = call(*words)
    assert rest.code == 0, rest.err
    assert 0 < rest.json["skipped"] < 20
    assert rest.json["skipped"] + rest.json["accepted"] == 20
    same_volumes(store, line.store)


def test_a_disk_that_fills_with_checkpoints(line: Any, small_disk: Callable[[str], Path]) -> None:
    checkpoint_bytes = sum(path.stat().st_size for path in line.checkpoint.iterdir())
    run = small_disk(f"size={int(1.5 * checkpoint_bytes)}") / "run"
    fast = ("tokens.select=tissue", "tokens.budget=32", "train.max_updates=4", "checkpoint.every_updates=2")
    words = ("pretrain", "smoke_test", *fast, *OVERRIDES, "--store", line.store, "--out", run, "--json")
    result = call(*words)
    assert result.code == 1
    assert result.out == ""
    for word in ("could not write checkpoint", "step-00000004", "No space left", "Free space", "--resume"):
        assert word in result.err
    assert [path.name for path in (run / "checkpoints").iterdir()] == ["step-00000002"]
    small_disk("size=512m")
    done = call(*words, "--resume")
    assert done.code == 0, done.err
    for key in ("updates", "loss", "cosine"):
        assert done.json[key] == line.results["pretrain"][key]


def test_a_disk_that_fills_before_the_embeddings_are_written(line: Any, small_disk: Callable[[str], Path]) -> None:
    disk = small_disk("size=4k")
    out = disk / "table.parquet"
    result = call("embed", line.run, "--store", line.store, "--out", out, "--json")
    assert result.code == 1
    assert "the disk is full" in result.err
    assert str(disk) in result.err
    assert not out.exists()  # parts that are whole may stay: the same command continues from them


def test_a_store_that_may_only_be_read(line: Any, small_disk: Callable[[str], Path]) -> None:
    store = small_disk("size=64m") / "store"
    words = ("ingest", line.scan, "--store", store, "--workers", 1)
    assert call(*words).code == 0
    small_disk("ro")
    assert call("inspect", store, "--json").json["volumes"] == 1
    embeddings = line.root / "of a read-only store.parquet"
    assert call("embed", line.run, "--store", store, "--out", embeddings, "--json").json["rows"] == 1
    for refusing in (words, ("split", store, "--by", "stratified"), ("phantom", store.parent / "new", "--people", 1)):
        result = call(*refusing)
        assert result.code in (1, 2)
        assert "Read-only file system" in result.err
        assert str(store.parent) in result.err
