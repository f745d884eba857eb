"""Two processes under torchrun are one run for the trackers; checkpoints are told of by their address alone."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from octjepa.distributed.runtime import Runtime
from octjepa.errors import RecipeError
from octjepa.files import read_json_lines
from octjepa.recipe import TRACKERS
from octjepa.train.loop import pretrain
from octjepa.train.tracking import logger
from ranks import PYTHONPATH
from synthetic import MemoryStore, small_recipe

FAST = {
    "train": {"max_updates": 4, "global_batch": 2, "base_lr": 1e-3, "precision": "fp32"},
    "validation": {"max_samples": 2},
    "monitor": {"every_updates": None},
    "checkpoint": {"every_updates": 2},
}
RUN = f"""
import sys
from pathlib import Path
from octjepa.train.loop import pretrain
from octjepa.train.tracking import logger
from synthetic import MemoryStore, small_recipe
logger.SECONDS_AT_THE_END = 60.0
recipe = small_recipe(**{FAST}, tracking={{"backends": ["wandb_offline", "tensorboard"], "send_addresses": True}})
pretrain(recipe, MemoryStore(recipe.preprocessing, train=6, val=2), Path(sys.argv[1]))
"""


@pytest.fixture(scope="module")
def tracked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run folder of two processes, started as users start them."""
    location = tmp_path_factory.mktemp("tracked")
    (location / "run.py").write_text(RUN)
    environment = os.environ | {
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": PYTHONPATH,
        "WANDB_ERROR_REPORTING": "false",
    }
    environment.pop("WANDB_SERVICE", None)  # W&B's process of a test before, which ends with that test's process
    command = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "run.py", "run"]
    ended = subprocess.run(
        [sys.executable, *command],
        cwd=location,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert "tracker" not in ended.stderr, ended.stderr  # one that fails or comes too late is told of there
    return location / "run"


@pytest.mark.slow
def test_there_is_one_run_in_each_tracker_and_one_line_an_update(tracked: Path) -> None:
    assert len(list((tracked / "tracking" / "wandb").glob("*run-*"))) == 1
    assert len(list((tracked / "tracking" / "wandb").rglob("*.wandb"))) == 1
    assert len(list((tracked / "tracking" / "tensorboard").rglob("events.*"))) == 1
    assert sorted(path.name for path in (tracked / "pictures").iterdir()) == ["update-00000001.png"]
    lines = [line for line in read_json_lines(tracked / "metrics.jsonl") if "train/loss" in line]
    assert [line["update"] for line in lines] == [1, 2, 3, 4]
    assert all(0 < line["cpu_cores_busy"] < 64 for line in lines)


@pytest.mark.slow
def test_wandb_holds_an_artefact_that_refers_to_each_checkpoint(tracked: Path) -> None:
    (remaining,) = (tracked / "tracking" / "wandb").rglob("*.wandb")
    run_id = (tracked / "tracking" / "wandb.id").read_text().encode()
    outputs, until = remaining.read_bytes(), time.monotonic() + 10
    while b"update-4" not in outputs and time.monotonic() < until:
        time.sleep(0.1)
        outputs = remaining.read_bytes()
    assert b"checkpoint-" + run_id in outputs
    for update in (2, 4):
        assert f"update-{update}".encode() in outputs
        assert (tracked / "checkpoints" / f"step-0000000{update}").as_uri().encode() in outputs
    assert not list((tracked / "tracking").rglob("*.safetensors")), "the weights themselves are sent nowhere"


class Listener:
    """A tracker that keeps what it hears of checkpoints, and fails or hangs at them when told to."""

    def __init__(self, at_checkpoint: object = None) -> None:
        self.heard: list[tuple[int, str]] = []
        self._at_checkpoint = at_checkpoint

    def metrics(self, update: int, values: object) -> None: ...

    def picture(self, update: int, image: object) -> None: ...

    def close(self, finished: bool) -> None: ...

    def checkpoint(self, update: int, address: str) -> None:
        if callable(self._at_checkpoint):
            self._at_checkpoint()
        self.heard.append((update, address))


def run_with(listener: Listener, out: Path, patch: pytest.MonkeyPatch, **tracking: object) -> int:
    patch.setattr(TRACKERS, "get", lambda name: lambda run: listener)
    recipe = small_recipe(**FAST, tracking={"backends": ["wandb_offline"], **tracking})
    return int(pretrain(recipe, MemoryStore(recipe.preprocessing, train=6, val=2), out).updates)


@pytest.mark.slow
def test_addresses_are_sent_only_when_requested(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    silent, outputs = Listener(), Listener()
    run_with(silent, tmp_path / "silent", monkeypatch)
    assert silent.heard == []
    run_with(outputs, tmp_path / "told", monkeypatch, send_addresses=True)
    saves = tmp_path / "told" / "checkpoints"
    assert outputs.heard == [(n, (saves / f"step-0000000{n}").as_uri()) for n in (2, 4)]


@pytest.mark.slow
def test_an_artefact_that_fails_or_hangs_stops_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(logger, "SECONDS_AT_THE_END", 0.3)
    assert run_with(Listener(lambda: 1 / 0), tmp_path / "fails", monkeypatch, send_addresses=True) == 4
    assert "tracker wandb_offline failed (ZeroDivisionError: division by zero)" in caplog.text
    free = threading.Event()
    assert run_with(Listener(free.wait), tmp_path / "hangs", monkeypatch, send_addresses=True) == 4
    free.set()
    assert "did not take everything in time" in caplog.text


def test_addresses_without_wandb_are_refused() -> None:
    with pytest.raises(RecipeError, match="send_addresses is unused"):
        small_recipe(tracking={"backends": ["tensorboard"], "send_addresses": True})


def test_device_utilisation_is_what_the_driver_reports_and_is_requested_once_where_it_reports_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """No GPU is needed: torch.cuda.utilization asks the driver through a library that may be missing."""
    runtime, arguments = Runtime("fp32"), []
    assert runtime.utilisation() == {}, "a CPU has no driver that tells"
    monkeypatch.setattr(runtime, "_utilisation", lambda device: 73)
    assert runtime.utilisation() == {"device_utilisation": 0.73}

    def missing(device: object) -> int:
        arguments.append(device)
        raise ModuleNotFoundError("nvidia-ml-py does not seem to be installed or it can't be imported.")

    monkeypatch.setattr(runtime, "_utilisation", missing)
    assert [runtime.utilisation() for _ in range(3)] == [{}, {}, {}]
    assert len(arguments) == 1
