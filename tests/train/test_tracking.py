"""What trackers are told, what they must never be told, and that none of them can harm a run."""

from __future__ import annotations

import getpass
import json
import logging
import os
import platform
import socket
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from octjepa.config import science_hash
from octjepa.errors import RecipeError, install_command
from octjepa.files import read_json_lines
from octjepa.recipe import TRACKERS
from octjepa.train import loop
from octjepa.train.loop import pretrain
from octjepa.train.tracking import base, logger, open_logger
from octjepa.train.tracking.picture import DARK, HIDDEN, TARGET, draw
from octjepa.views.loader import ValidationDataset, validation_batches
from synthetic import MemoryStore, small_recipe

FAST = {
    "train": {"max_updates": 3, "global_batch": 2, "base_lr": 1e-3, "precision": "fp32"},
    "validation": {"max_samples": 2},
    "monitor": {"every_updates": None},
    "checkpoint": {"every_updates": 2},
}
PNG = b"\x89PNG"


def recipe_of(**tracking):
    return small_recipe(**FAST, tracking=tracking)


def batch_of(recipe, count=2):
    store = MemoryStore(recipe.preprocessing, train=6, val=2)
    return next(validation_batches(ValidationDataset(store, recipe, list(store.volumes)[:count]), count))


def outputs(path, recipe, rank=0, first=0):
    """A logger that was given two lines and a picture."""
    path.mkdir(exist_ok=True)
    with open_logger(path, recipe, rank, first) as given:
        given.show(first + 1, batch_of(recipe))
        given.write(first + 1, {"train/loss": 0.5, "skipped": ["volume0001", "volume0002"]})
        given.write(first + 1, {"val/loss": 0.25, "alarms": {"collapse": "a sentence"}})


HOST, USER = "clinic-workstation-7", "dr-grey"


def secrets_of(path):
    """What nothing that is sent may hold: this machine, this user, where things lie, which volumes they are."""
    return [part.encode() for part in (str(path), HOST, USER, "volume0001", "a sentence")]


@pytest.fixture
def no_environment(monkeypatch):
    """A machine and a user with names of their own, and nothing set that a library would follow."""
    monkeypatch.setattr(socket, "gethostname", lambda: HOST)
    monkeypatch.setattr(platform, "node", lambda: HOST)
    monkeypatch.setattr(getpass, "getuser", lambda: USER)
    for name in ("WANDB_MODE", "WANDB_API_KEY", "WANDB_BASE_URL", "MLFLOW_TRACKING_URI"):
        monkeypatch.delenv(name, raising=False)
    for name in ("WANDB_ERROR_REPORTING", "WANDB_SILENT", "MLFLOW_ALLOW_FILE_STORE", "MLFLOW_DISABLE_TELEMETRY"):
        monkeypatch.setenv(name, os.environ.get(name, "true"))  # what a backend sets is put back
    monkeypatch.setenv("WANDB_ERROR_REPORTING", "false")
    monkeypatch.setattr(logger, "SECONDS_AT_THE_END", 60.0)  # a loaded machine takes long to import W&B


def test_a_run_leaves_lines_pictures_and_events(tmp_path, no_environment):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    recipe = recipe_of(backends=["tensorboard"], pictures_every_updates=2)
    pretrain(recipe, MemoryStore(recipe.preprocessing, train=6, val=2), tmp_path / "run")
    pictures = sorted(path.name for path in (tmp_path / "run" / "pictures").iterdir())
    assert pictures == ["update-00000001.png", "update-00000002.png"]
    lines = read_json_lines(tmp_path / "run" / "metrics.jsonl")
    events = EventAccumulator(str(tmp_path / "run" / "tracking" / "tensorboard"))
    events.Reload()
    wanted = {
        "train/loss",
        "train/cosine",
        "train/lr",
        "train/grad_norm",
        "train/ema_momentum",
        "train/epoch",
        "volumes_per_second",
        "data_wait_share",
        "memory/process_bytes",
        "val/loss",
    }
    assert wanted <= set(events.Tags()["scalars"])
    assert wanted <= {key for line in lines for key in line}
    got = {event.step: event.value for event in events.Scalars("train/loss")}
    assert got == pytest.approx({line["update"]: line["train/loss"] for line in lines if "train/loss" in line})
    assert [event.step for event in events.Images(base.PICTURE)] == [1, 2]
    assert lines[0]["memory/process_bytes"] > 50e6
    held = b"".join(path.read_bytes() for path in (tmp_path / "run" / "tracking").rglob("events*"))
    assert not [secret for secret in secrets_of(tmp_path) if secret in held]


@pytest.mark.slow
def test_a_resumed_run_goes_on_in_the_same_events(tmp_path, no_environment):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    recipe = recipe_of(backends=["tensorboard"], pictures_every_updates=None)
    tmp_path.joinpath("run").mkdir()
    for first, values in ((0, (1.0, 2.0, 3.0)), (2, (9.0, 4.0))):
        with open_logger(tmp_path / "run", recipe, 0, first) as given:
            for n, value in enumerate(values):
                given.write(first + n + 1, {"train/loss": value})
        time.sleep(1.1)  # an event file is named by its second
    events = EventAccumulator(str(tmp_path / "run" / "tracking" / "tensorboard"))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("train/loss")] == [(1, 1), (2, 2), (3, 9), (4, 4)]


@pytest.mark.slow
def test_wandb_is_recorded_offline_without_network_or_login(tmp_path, no_environment, monkeypatch):
    monkeypatch.setattr(socket.socket, "connect", _only_local(socket.socket.connect))
    outputs(tmp_path / "run", recipe_of(backends=["wandb_offline"], project="eyes", name="first"))
    (folder,) = (tmp_path / "run" / "tracking" / "wandb").glob("offline-run-*")
    run_id = (tmp_path / "run" / "tracking" / "wandb.id").read_text()
    known = (b"eyes", b"first", b"train/loss", b"train/skipped_volumes", b"alarm/collapse", b"science_hash")
    until = time.monotonic() + 10  # W&B's own process writes the file
    while not all(part in (sent := (folder / f"run-{run_id}.wandb").read_bytes()) for part in known):
        assert time.monotonic() < until, [part for part in known if part not in sent]
        time.sleep(0.1)
    assert not [secret for secret in secrets_of(tmp_path) if secret in sent]
    assert not list(folder.rglob("*.png")), "pictures of scans are sent when asked for alone"

    monkeypatch.chdir(tmp_path)  # W&B's process, begun above, stays where it was
    outputs(Path("run"), recipe_of(backends=["wandb_offline"], send_pictures=True), first=1)
    assert (tmp_path / "run" / "tracking" / "wandb.id").read_text() == run_id, "a resumed run is the same run"
    remaining = list((tmp_path / "run" / "tracking" / "wandb").rglob("*.wandb"))
    assert {path.name for path in remaining} == {f"run-{run_id}.wandb"}
    assert len({path.parent for path in remaining}) == len(remaining) == 2, (
        "each start of the run has a file of its own"
    )
    assert list((tmp_path / "run" / "tracking" / "wandb").rglob("files/media/**/*.png"))


def _only_local(connect):
    def checked(self, address):
        assert self.family == socket.AF_UNIX or address[0] in {"127.0.0.1", "::1", "localhost"}, address
        return connect(self, address)

    return checked


@pytest.mark.slow
def test_mlflow_writes_files_and_goes_on_in_the_same_run(tmp_path, no_environment):
    recipe = recipe_of(backends=["mlflow"], project="eyes", send_pictures=True)
    outputs(tmp_path / "run", recipe)
    outputs(tmp_path / "run", recipe, first=1)
    store = tmp_path / "run" / "tracking" / "mlflow"
    (loss,) = store.rglob("metrics/train/loss")
    assert [line.split()[1:] for line in loss.read_text().splitlines()] == [["0.5", "1"], ["0.5", "2"]]
    assert len(list(store.rglob("metrics/train/skipped_volumes"))) == 1
    run = loss.parents[2]
    assert run.name == (tmp_path / "run" / "tracking" / "mlflow.id").read_text()
    assert (run / "params" / "science_hash").read_text() == science_hash(recipe)
    assert [path.read_bytes()[:4] for path in sorted((run / "artifacts").rglob("*.png"))] == [PNG, PNG]
    about = (run / "meta.yaml").read_text()
    assert "status: 3" in about, "finished"
    assert "user_id: unknown" in about
    held = b"".join(p.read_bytes() for kind in ("metrics", "params", "tags") for p in (run / kind).rglob("*.*"))
    assert not [secret for secret in secrets_of(tmp_path) if secret in held]
    assert not list((tmp_path / "run" / "tracking").glob("*.png"))


def test_what_is_sent_of_a_recipe_holds_no_path():
    sections = {"model": {"warm_start": "a/person"}, "objective": {"teacher": "a/person"}}
    recipe = small_recipe(**sections, checkpoint={"dir": "gs://lab/secret"})
    assert (config := logger.config_of(recipe))["model.warm_start"] is config["objective.teacher"] is True
    assert config["train.base_lr"] == recipe.train.base_lr
    assert not [value for value in config.values() if "person" in str(value) or "secret" in str(value)]


def test_a_line_becomes_finite_numbers():
    line = {"train/loss": float("nan"), "epoch": 1, "skipped": ["a", "b"], "alarms": {"x": "why"}, "text": "t"}
    assert logger.numbers_of(line) == {"epoch": 1.0, "train/skipped_volumes": 2.0, "alarm/x": 1.0}


def test_only_the_first_rank_writes_and_tracks(tmp_path):
    outputs(tmp_path / "run", recipe_of(backends=["tensorboard", "mlflow"]), rank=1)
    assert list((tmp_path / "run").iterdir()) == []


# What goes wrong


class Bad:
    """A tracker whose `fault` is called at the n-th metrics."""

    def __init__(self, fault, at=1):
        self.fault, self.left, self.taken = fault, at, []

    def metrics(self, update, values):
        self.left -= 1
        if not self.left:
            self.fault()
        self.taken.append(update)

    def picture(self, update, image):
        pass

    def close(self, finished):
        self.taken.append(finished)


def refuse():
    raise ConnectionError("no route to https://me:hunter2@server.example\nsecond line")


def run_with(tracker, tmp_path, monkeypatch, name="run"):
    monkeypatch.setattr(TRACKERS, "get", lambda name: lambda run: tracker)
    recipe = recipe_of(backends=["tensorboard"], pictures_every_updates=None)
    return pretrain(recipe, MemoryStore(recipe.preprocessing, train=6, val=2), tmp_path / name)


def test_a_tracker_that_fails_is_reported_once_and_the_run_goes_on(tmp_path, monkeypatch, caplog):
    tracker = Bad(refuse, at=2)
    assert run_with(tracker, tmp_path, monkeypatch).updates == 3
    assert tracker.taken == [1], "nothing more is sent to it"
    output = [entry.getMessage() for entry in caplog.records if "tracker" in entry.getMessage()]
    assert len(output) == 1
    assert "tracker tensorboard failed (ConnectionError: no route to https://server.example second line)" in output[0]
    assert len([line for line in read_json_lines(tmp_path / "run" / "metrics.jsonl") if "train/loss" in line]) == 3


@pytest.mark.slow
def test_a_tracker_that_hangs_neither_slows_nor_holds_a_run(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(logger, "SECONDS_AT_THE_END", 0.3)
    free = threading.Event()
    tracker = Bad(free.wait)
    started = time.monotonic()
    assert run_with(tracker, tmp_path, monkeypatch).updates == 3
    took = time.monotonic() - started
    free.set()
    assert took < 30
    assert "did not take everything in time" in caplog.text


def test_a_tracker_that_falls_behind_is_let_go(monkeypatch, caplog):
    monkeypatch.setattr(logger, "MOST_MESSAGES", 3)
    free = threading.Event()
    line = logger.TrackerThread("slow", lambda: Bad(free.wait))
    for update in range(8):
        line.metrics(update, {})
    line.end(True)
    free.set()
    line.wait(5)
    assert caplog.text.count("tracker slow is 3 messages behind") == 1


def test_a_run_that_failed_is_closed_as_failed(tmp_path, monkeypatch):
    tracker = Bad(refuse, at=99)
    monkeypatch.setattr(loop, "accumulate", _fail_at_the_second(loop.accumulate))
    with pytest.raises(ZeroDivisionError):
        run_with(tracker, tmp_path, monkeypatch)
    assert tracker.taken == [1, False]


def _fail_at_the_second(honest):
    calls = []

    def accumulate(*arguments):
        calls.append(1)
        return honest(*arguments) if len(calls) == 1 else 1 / 0

    return accumulate


def test_a_library_that_is_not_installed_is_named_with_its_extra(tmp_path, monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "mlflow", None)
    outputs(tmp_path / "run", recipe_of(backends=["mlflow"]))
    assert f"tracker mlflow is not installed ({install_command('mlflow')})" in caplog.text
    assert len(read_json_lines(tmp_path / "run" / "metrics.jsonl")) == 2


def test_a_folder_that_cannot_be_made_costs_the_trackers_alone(tmp_path, caplog):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "tracking").write_text("a file in the way")
    outputs(tmp_path / "run", recipe_of(backends=["tensorboard"]))
    assert "cannot be made" in caplog.text
    assert len(read_json_lines(tmp_path / "run" / "metrics.jsonl")) == 2


@pytest.mark.slow
@pytest.mark.parametrize("login", [True, False])
def test_wandb_without_login_or_server_is_recorded_offline(tmp_path, monkeypatch, caplog, no_environment, login):
    import wandb

    monkeypatch.setenv("WANDB_BASE_URL", "http://127.0.0.1:9")
    monkeypatch.setattr(wandb, "login", lambda **requested: login)
    begun = []
    whole = wandb.init

    def init(**requested):
        begun.append(requested["mode"])
        if requested["mode"] == "online":
            raise wandb.errors.CommError("connection refused")
        return whole(**requested)

    monkeypatch.setattr(wandb, "init", init)
    caplog.set_level(logging.WARNING)
    outputs(tmp_path / "run", recipe_of(backends=["wandb"]))
    assert begun == (["online", "offline"] if login else ["offline"])
    assert (
        f"W&B takes no run now ({'CommError: connection refused' if login else 'UsageError: no login'})" in caplog.text
    )
    assert "wandb sync" in caplog.text
    assert list((tmp_path / "run" / "tracking" / "wandb").glob("offline-run-*/*.wandb"))


# The picture


def test_a_picture_shows_views_and_masks():
    recipe = recipe_of()
    batch = batch_of(recipe, 3)
    image = draw(batch, recipe)
    d, h, w = recipe.preprocessing.image_size
    slabs = min(4, recipe.grid[0])
    assert image.shape == (4 * (h + 4) - 4, slabs * (w + 4) - 4, 3)
    p, q, r = recipe.tokens.patch_size
    # The first sample's second row, token by token: colour says what each is.
    below = image[h + 4 : 2 * h + 4]
    roles = {int(i): "context" for i in batch.grid_index[0][batch.context[0]]}
    roles |= {int(i): "target" for i in batch.grid_index[0][batch.target[0]]}
    _, rows, columns = recipe.grid
    for cell in range(recipe.grid_tokens):
        slab, row, column = np.unravel_index(cell, recipe.grid)
        patch = below[row * q : (row + 1) * q, slab * (w + 4) + column * r :][:, :r].astype(int)
        intensity = (patch[..., 0] == patch[..., 1]).all() and (patch[..., 1] == patch[..., 2]).all()
        role = roles.get(cell, "hidden" if cell in batch.grid_index[0] else "none")
        if role == "target":
            assert (patch[..., 0] - patch[..., 2] > 0.4 * (TARGET[0] - TARGET[2])).all()
        elif role == "hidden":
            assert (patch[..., 2] - patch[..., 0] > 0.4 * (HIDDEN[2] - HIDDEN[0])).all()
        else:
            assert intensity
            assert (patch == DARK).all() == (role == "none")
    above = image[:h]
    shown = sum(
        (above[row * q, slab * (w + 4) + column * r] != DARK).any()
        or (above[row * q : (row + 1) * q, slab * (w + 4) + column * r :][:, :r] != DARK).any()
        for slab in range(slabs)
        for row in range(rows)
        for column in range(columns)
    )
    assert shown == batch.context.shape[1], "the student sees context tokens alone"
    assert p * slabs == d


def test_pictures_can_be_switched_off(tmp_path):
    outputs(tmp_path / "run", recipe_of(pictures_every_updates=None))
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["metrics.jsonl"]
    outputs(tmp_path / "on", recipe_of())
    with Image.open(tmp_path / "on" / "pictures" / "update-00000001.png") as picture:
        assert picture.size[0] > 64


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"backends": ["wandb", "wandb_offline"]}, "same run twice"),
        ({"backends": ["tensorboard", "tensorboard"]}, "listed twice"),
        ({"backends": ["comet"]}, "tracking.backends"),
        ({"send_pictures": True}, "unused"),
        ({"backends": ["mlflow"], "send_pictures": True, "pictures_every_updates": None}, "unused"),
    ],
)
def test_useless_settings_are_refused(given, message):
    with pytest.raises(RecipeError, match=message):
        recipe_of(**given)


def test_tracking_does_not_change_what_a_run_is():
    assert science_hash(recipe_of()) == science_hash(recipe_of(backends=["mlflow"], name="x", project="y"))
    assert "tracking" not in json.dumps(sorted(logger.config_of(recipe_of())))


def test_a_package_of_a_user_adds_a_tracker(tmp_path, install_package):
    install_package(
        *("my_package", "octjepa.trackers", "lines = my_package:Lines"),
        "class Lines:\n"
        "    def __init__(self, run):\n        self.file = (run.folder / 'lines.txt').open('w')\n"
        "    def metrics(self, update, values):\n        print(update, sorted(values)[0], file=self.file)\n"
        "    def picture(self, update, image):\n        pass\n"
        "    def checkpoint(self, update, address):\n        pass\n"
        "    def close(self, finished):\n        print('finished', finished, file=self.file)\n"
        "        self.file.close()\n",
    )
    recipe = recipe_of(backends=["lines"], pictures_every_updates=None)
    pretrain(recipe, MemoryStore(recipe.preprocessing, train=6, val=2), tmp_path / "run")
    lines = (tmp_path / "run" / "tracking" / "lines.txt").read_text().splitlines()
    assert lines[-1] == "finished True"
    assert {line.split()[0] for line in lines[:-1]} >= {"1", "2", "3"}
    with pytest.raises(RecipeError, match="unknown tracker 'line': one of lines, mlflow, tensorboard, wandb"):
        recipe_of(backends=["line"])
