"""What happens at odd moments: a clock that runs backwards, a file that changes, NaN weights, a reader that left."""

from __future__ import annotations

import logging
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch

from command_line import COMMAND
from oct_dicom import make_dataset, retina, save
from octjepa.checkpoint import folder
from octjepa.checkpoint.state import MODEL_FILE, OPTIMIZER_FILE
from octjepa.errors import CheckpointError, UsageError
from octjepa.ingest import build_store, one_file
from octjepa.read.reader import read_volume
from octjepa.store import Store
from octjepa.train import loop
from octjepa.train.learner import load_weights
from ranks import BEGIN, assert_same, finish, run_alone, start_ranks, weights_of
from synthetic import MemoryStore, small_recipe

# -- clocks --


def test_durations_come_from_a_clock_that_never_jumps(root: Path) -> None:
    """The time of day can jump, back too. Only dates of files are compared with it, and records hold it."""
    source = root / "src" / "octjepa"
    readers = {
        str(path.relative_to(source))
        for path in source.rglob("*.py")
        if re.search(r"\btime\.time(_ns)?\(", path.read_text(encoding="utf-8"))
    }
    assert readers == {"doctor/machine.py", "remote/cache.py", "store/bucket.py", "train/tracking/mlflow.py"}


def test_files_dated_in_the_future_or_at_the_epoch_are_ingested_once(tmp_path: Path) -> None:
    for number, seconds in enumerate((0, 4102444800, 2**33)):
        path = tmp_path / "scans" / f"{number}.dcm"
        save(make_dataset(retina(seed=number)), path)
        os.utime(path, (seconds, seconds))
    preprocessing = small_recipe().preprocessing
    first = build_store([tmp_path / "scans"], tmp_path / "store", preprocessing, workers=1)
    again = build_store([tmp_path / "scans"], tmp_path / "store", preprocessing, workers=1)
    assert (first.accepted, again.accepted, again.skipped) == (3, 0, 3)


# -- files that change while they are read --


def test_a_file_that_changes_while_it_is_read_is_refused_and_read_by_the_next_ingest(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "scans" / "eye.dcm"
    save(make_dataset(retina(seed=1)), path)
    complete = path.read_bytes()
    path.write_bytes(complete)

    def read_and_grow(*arguments: Any, **named: Any) -> Any:
        volume = read_volume(*arguments, **named)
        path.write_bytes(complete + b"\0\0")
        return volume

    monkeypatch.setattr(one_file, "read_volume", read_and_grow)
    preprocessing = small_recipe().preprocessing
    with pytest.raises(UsageError):  # no other file
        build_store([path.parent], tmp_path / "store", preprocessing, workers=1, max_lost=1)
    (entry,) = Store.open(tmp_path / "store").quarantine
    assert (entry["reason"], "changed while it was read" in entry["detail"]) == ("unreadable_file", True)
    monkeypatch.undo()
    path.write_bytes(complete)
    build_store([path.parent], tmp_path / "store", preprocessing, workers=1)
    store = Store.open(tmp_path / "store")
    assert (len(store), store.quarantine) == (1, [])


# -- weights that are not finite, with a checksum that fits --


def with_nan(checkpoint: Path, name: str) -> None:
    """Writes NaN into one tensor of a checkpoint, as a faulty program would: the manifest fits."""
    tensors = {file: folder.read_tensors(checkpoint, file) for file in (MODEL_FILE, OPTIMIZER_FILE)}
    key = next(key for key, value in tensors[name].items() if value.ndim > 0)
    tensors[name][key].view(-1)[0] = float("nan")
    about = {k: v for k, v in folder.read_manifest(checkpoint).items() if k not in ("schema", "update", "files")}
    folder.write_folder(checkpoint.parent, folder.update_number(checkpoint), tensors, about)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    recipe = small_recipe(checkpoint={"every_updates": 2})
    run = tmp_path_factory.mktemp("trained") / "run"
    loop.pretrain(recipe, MemoryStore(recipe.preprocessing), run)
    return run


@pytest.mark.slow
@pytest.mark.parametrize("name", [MODEL_FILE, OPTIMIZER_FILE])
def test_a_run_resumes_from_the_checkpoint_before_one_with_nan(
    trained: Path, tmp_path: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    run = Path(shutil.copytree(trained, tmp_path / "run"))
    (run / "summary.json").unlink()
    with_nan(run / "checkpoints" / "step-00000004", name)
    recipe = small_recipe(checkpoint={"every_updates": 2})
    with caplog.at_level(logging.WARNING):
        loop.pretrain(recipe, MemoryStore(recipe.preprocessing), run, resume=True)
    assert "hold NaN or infinite values" in caplog.text
    assert_same(weights_of(trained), weights_of(run))


@pytest.mark.slow
def test_a_run_of_which_every_checkpoint_holds_nan_is_not_resumed(trained: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(trained, tmp_path / "run"))
    (run / "summary.json").unlink()
    for number in (2, 4):
        with_nan(run / "checkpoints" / f"step-{number:08d}", MODEL_FILE)
    recipe = small_recipe(checkpoint={"every_updates": 2})
    with pytest.raises(CheckpointError, match="hold NaN"):
        loop.pretrain(recipe, MemoryStore(recipe.preprocessing), run, resume=True)


def test_heads_with_nan_are_refused() -> None:
    network = torch.nn.Linear(2, 3)
    broken = {name: torch.full_like(value, float("inf")) for name, value in network.state_dict().items()}
    with pytest.raises(CheckpointError, match="hold NaN or infinite"):
        load_weights(network, broken, "head")
    network.register_buffer("limit", torch.zeros(()))
    sound = {**network.state_dict(), "limit": torch.tensor(float("nan"))}
    load_weights(network, sound, "head")  # a buffer that was not measured yet
    assert network.limit.isnan()


# -- output that nobody reads --


@pytest.mark.slow
@pytest.mark.parametrize("words", [("recipes",), ("inspect", "{store}", "--json"), ("--help",)])
def test_a_pipe_that_closes_at_once_leaves_no_traceback(tmp_path: Path, words: tuple[str, ...]) -> None:
    recipe = small_recipe()
    Store.create(tmp_path / "store", recipe.preprocessing)
    words = tuple(word.format(store=tmp_path / "store") for word in words)
    process = subprocess.Popen([*COMMAND, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    process.stdout.close()
    _, err = process.communicate(timeout=120)
    assert "Traceback" not in err
    assert process.returncode in (0, 1, 141), err


# -- a slow rank --

SLOW = (
    BEGIN
    + """
import time
honest = loop.accumulate
def slowly(*arguments):
    time.sleep(0.4 * rank)
    return honest(*arguments)
loop.accumulate = slowly
recipe = recipe_of(4)
pretrain(recipe, MemoryStore(recipe.preprocessing), out / "run")
"""
)


@pytest.mark.slow
def test_the_other_rank_waits_for_a_slow_one(tmp_path: Path) -> None:
    run_alone(tmp_path / "alone", 4)
    ended = finish(start_ranks(SLOW, tmp_path))
    assert [code for code, _, _ in ended] == [0, 0], ended[0][2] + ended[1][2]
    assert_same(weights_of(tmp_path / "alone"), weights_of(tmp_path / "run"))
