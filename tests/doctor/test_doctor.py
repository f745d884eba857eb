"""The doctor finds what is wrong, says what to do, and is quiet where nothing is."""

from __future__ import annotations

import base64
import json
from collections import namedtuple
from collections.abc import Iterable
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from command_line import call
from octjepa.config import load_recipe
from octjepa.doctor import inputs, install, machine
from octjepa.doctor.checks import Check, Setup
from octjepa.errors import UsageError, install_command
from octjepa.train.plan import plan
from synthetic import MemoryStore, small_recipe
from tiny_frames import CODED, frames

Usage = namedtuple("Usage", "total used free")


def by_name(found: Iterable[Check]) -> dict[str, Check]:
    return {check.name: check for check in found}


def only_cheap_checks(monkeypatch):
    """Leaves out the decoders and devices, which take seconds."""
    monkeypatch.setattr(install, "NATIVE", ())
    monkeypatch.setattr(install, "compressed", dict)
    monkeypatch.setattr(machine, "every_device", list)


@pytest.mark.slow
def test_all_is_well_here(tmp_path):
    message = call("doctor", "--out", tmp_path / "not" / "yet", "--recipe", "smoke_test", "--json")
    assert message.code == 0, message.err
    found = message.json
    assert found["ok"] is True
    assert all(set(check) == {"name", "state", "found", "expected", "to_do"} for check in found["checks"])
    assert {check["state"] for check in found["checks"]} <= {"ok", "warning"}
    names = {check["name"] for check in found["checks"]}
    parts = {
        "python",
        "octjepa",
        "libraries",
        "codecs",
        "recipe",
        "threads",
        "compile",
        "attention",
        "loader workers",
        "memory",
        "disk",
        "output folder",
        "clock",
    }
    assert parts | {"extra wandb", "extra s3", "device cpu", "bf16 on cpu"} <= names
    assert list(tmp_path.iterdir()) == [], "it leaves nothing behind"


def test_a_failed_check_is_shown_with_what_to_do_and_exits_1(tmp_path, monkeypatch):
    only_cheap_checks(monkeypatch)
    message = call("doctor", "--out", tmp_path, "--store", tmp_path / "none")
    assert message.code == 1
    assert "octjepa: not ready. Fix store first: " in message.err
    lines = message.out.splitlines()
    at = next(n for n, line in enumerate(lines) if line.startswith("failed"))
    assert "no store at" in lines[at]
    assert "expected: a store" in lines[at + 1]
    assert "octjepa ingest" in lines[at + 2]


def test_a_recipe_that_is_none_is_a_usage_error(tmp_path):
    message = call("doctor", "--recipe", "nonsense", "--json")
    assert message.code == 2
    assert "no recipe 'nonsense'" in message.err


# Codecs


def test_every_syntax_that_is_read_has_a_frame():
    assert set(install.compressed()) == {*(str(kind.syntax) for kind in CODED), "1.2.840.10008.1.2.5"}
    assert set(frames()) == set(install.compressed())


def test_lossless_frames_are_exact():
    lossless = [str(kind.syntax) for kind in CODED if kind.error == 0]
    for syntax in (*install.NATIVE, "1.2.840.10008.1.2.5", *lossless):
        assert np.array_equal(install.decoded(syntax)[0], install.frame()), syntax


def test_a_decoder_that_lies_or_fails_is_named(monkeypatch):
    whole = install.compressed()
    bad = {**whole, "1.2.840.10008.1.2.4.80": whole["1.2.840.10008.1.2.4.80"][:40]}
    monkeypatch.setattr(install, "compressed", lambda: bad)
    (check,) = install.codec_check(Setup(Path()))
    assert check.state == "failed"
    assert check.found.startswith("JPEG-LS Lossless")
    assert check.found.count("(") == 1
    monkeypatch.setattr(install, "decoded", lambda syntax: np.zeros((4, 16, 16), np.uint8))
    (check,) = install.codec_check(Setup(Path()))
    assert "off by" in check.found


# Devices


def test_a_device_without_gradient_fails_and_one_without_bf16_warns(monkeypatch):
    monkeypatch.setattr(machine, "gradient_norm", lambda device, precision, recipe: 0.0)
    found = by_name(machine.device_checks(Setup(Path())))
    assert found["device cpu"].state == "failed"
    assert found["bf16 on cpu"].state == "warning"
    assert "train.precision=fp32" in found["bf16 on cpu"].to_do


def test_a_device_that_raises_is_reported_not_raised(monkeypatch):
    def broken(device, precision, recipe):
        raise RuntimeError("no kernel image is available")

    monkeypatch.setattr(machine, "gradient_norm", broken)
    assert (
        by_name(machine.device_checks(Setup(Path())))["device cpu"].found
        == "RuntimeError: no kernel image is available"
    )


def test_the_gradient_is_that_of_the_whole_model():
    recipe = load_recipe("smoke_test")
    fp32, bf16 = (machine.gradient_norm(torch.device("cpu"), kind, recipe) for kind in ("fp32", "bf16"))
    assert 0.01 < fp32 < 100
    assert fp32 == pytest.approx(bf16, rel=0.1)
    assert fp32 != bf16


# Installation


def requires(monkeypatch, *needs):
    monkeypatch.setattr(install.importlib.metadata, "requires", lambda name: list(needs))


def test_libraries_and_extras_are_held_against_their_limits(monkeypatch):
    extras = ["nothing-such>=1; extra == 'far'", "numpy>=99; extra == 'new'", "numpy>=1; extra == 'here'"]
    requires(monkeypatch, "torch<2.1,>=2.0", "numpy>=1.26", *extras, "octjepa[far]; extra == 'dev'")
    found = by_name(install.library_checks(Setup(Path())))
    assert found["libraries"].state == "failed"
    assert found["libraries"].found == f"torch {version('torch')} is not < 2.1"
    assert (found["extra far"].state, found["extra far"].to_do) == ("ok", install_command("far"))
    assert found["extra far"].found == "nothing-such is not installed"
    assert found["extra new"].state == "warning"
    assert (found["extra here"].state, found["extra here"].to_do) == ("ok", "")
    assert "extra dev" not in found


def test_what_pyproject_asks_for_is_understood():
    found = by_name(install.library_checks(Setup(Path())))
    assert found["libraries"].state == "ok"
    assert int(found["libraries"].expected.split()[0]) > 15


# The machine


def machine_with(tmp_path, recipe=None, planned=None):
    setup = Setup(tmp_path, recipe, planned)
    found = [
        machine.choice_checks,
        machine.memory_check,
        machine.disk_check,
        machine.shared_memory_check,
        machine.output_check,
        machine.clock_check,
    ]
    return by_name(check for function in found for check in function(setup))


@pytest.mark.slow
def test_memory_and_disk_are_held_against_the_plan(tmp_path, monkeypatch):
    recipe = small_recipe()
    planned = plan(recipe)
    monkeypatch.setattr(machine, "free_device_bytes", lambda device: 3e9)
    monkeypatch.setattr(machine.shutil, "disk_usage", lambda path: Usage(0, 0, 5e8))
    found = machine_with(tmp_path, recipe, planned)
    assert found["memory"].state == "ok"
    # 3 kept + best + the one being written, of weights and two moments
    wanted = 5 * 4 * (planned.parameters + 2 * planned.trainable) + 1e8
    assert f"{wanted / 1e9:.1f} GB" in found["disk"].expected
    assert found["disk"].state == ("ok" if wanted <= 5e8 else "failed")
    planned = replace(planned, peak_memory_bytes=4 * 10**9, disk_bytes=10**9)
    found = machine_with(tmp_path, recipe, planned)
    assert (found["memory"].state, found["disk"].state) == ("failed", "failed")
    assert "machine.micro_batch" in found["memory"].to_do
    off = small_recipe(checkpoint={"dir": None})
    assert machine_with(tmp_path, off, planned)["disk"].state == "ok", "no checkpoints, no room for them"
    assert machine_with(tmp_path)["disk"].state == "warning", "5e8 is little, but nobody asked for more"


@pytest.mark.slow
def test_small_shared_memory_fails_only_with_loader_processes(tmp_path, monkeypatch):
    monkeypatch.setattr(machine.shutil, "disk_usage", lambda path: Usage(0, 0, 64e6))
    if not Path("/dev/shm").is_dir():
        pytest.skip("no /dev/shm on this system")
    assert machine_with(tmp_path)["shared memory"].state == "warning"
    recipe = small_recipe(machine={"loader_workers": 2})
    found = machine_with(tmp_path, recipe, plan(recipe))["shared memory"]
    assert found.state == "failed"
    assert "--shm-size" in found.to_do


def test_threads_beyond_the_cores_are_a_warning(tmp_path, monkeypatch):
    monkeypatch.setattr("octjepa.train.hardware_settings.cores", lambda: 2)
    monkeypatch.setattr(machine.torch, "get_num_threads", lambda: 8)
    found = machine_with(tmp_path)["threads"]
    assert (found.state, found.to_do) == ("warning", "set OMP_NUM_THREADS=2")


@pytest.mark.slow
def test_every_choice_of_a_run_is_named_with_its_reason(tmp_path, monkeypatch):
    recipe = small_recipe(machine={"loader_workers": 3})
    monkeypatch.setattr("octjepa.train.hardware_settings.cores", lambda: 2)
    monkeypatch.setattr(machine.torch, "get_num_threads", lambda: 2)
    found = by_name(machine.choice_checks(Setup(tmp_path, recipe)))
    assert list(found) == ["threads", "compile", "attention", "loader workers", "data on"]
    assert {found[name].state for name in ("threads", "compile", "attention")} == {"ok"}
    assert found["compile"].found.startswith("no: ")
    assert found["attention"].found.startswith("scaled_dot_product_attention: fp32 on ")
    assert found["data on"].found == "host: views are made on a GPU or by the host, and this is cpu"
    assert found["loader workers"].state == "warning"
    assert found["loader workers"].found == "3: 3 loader processes in one process share 2 cores"
    recipe = small_recipe(machine={"compile": True})
    found = by_name(machine.choice_checks(Setup(tmp_path, recipe, replace(plan(recipe), updates=4, volumes=12))))
    assert found["compile"].found == "yes: the recipe asks for it"


def test_a_folder_that_cannot_be_written_fails(tmp_path):
    (tmp_path / "file").write_text("in the way")
    found = machine_with(tmp_path / "file")
    assert found["output folder"].state == "failed"
    assert machine.nearest(tmp_path / "a" / "b") == tmp_path


def test_files_dated_otherwise_are_a_warning(tmp_path, monkeypatch):
    monkeypatch.setattr(machine.time, "time", lambda: 1e9)
    assert machine_with(tmp_path)["clock"].state == "warning"


def test_equal_clocks_have_no_difference_of_minus_zero():
    assert machine._dated(-0.01) == "files are dated by the same clock"
    assert machine._dated(-0.2) == "files are dated -0.2 s from it"


# Recipe and store


def opened(monkeypatch, store):
    store.describe = lambda: SimpleNamespace(
        volumes=len(store.table), by_split=dict(store.table["split"].value_counts())
    )
    monkeypatch.setattr(inputs.Store, "open", classmethod(lambda cls, location: store))


def store_checked(recipe):
    (found,) = inputs.store_check(Setup(Path(), recipe, store="somewhere"))
    return found


def test_a_store_is_opened_read_and_held_against_the_recipe(monkeypatch):
    recipe = small_recipe()
    store = MemoryStore(recipe.preprocessing, train=6, val=2)
    opened(monkeypatch, store)
    found = store_checked(recipe)
    assert (found.state, found.found) == ("ok", "8 volumes (train 6, val 2); one was read")
    other = small_recipe(preprocessing={"image_size": [8, 128, 64]})
    found = store_checked(other)
    assert found.state == "failed"
    assert "image_size: store (8, 64, 64), recipe (8, 128, 64)" in found.found
    store.table["split"] = ""
    assert store_checked(recipe).state == "warning"
    store.table = store.table.iloc[:0]
    assert store_checked(recipe).state == "failed"


def test_a_recipe_whose_batch_cannot_be_assigned_fails(tmp_path, monkeypatch):
    only_cheap_checks(monkeypatch)
    recipe = tmp_path / "odd.yaml"
    recipe.write_text(
        "tokens: {select: all}\ntrain: {max_updates: 4, global_batch: 4}\nmachine: {devices: 3}\n"
        "tracking: {backends: [mlflow]}\n"
    )
    message = call("doctor", "--out", tmp_path, "--recipe", recipe, "--json")
    assert message.code == 1
    found = {check["name"]: check for check in message.json["checks"]}
    assert "cannot be divided evenly over 3 processes" in found["recipe"]["found"]
    assert found["tracker mlflow"]["state"] == "ok"
    with pytest.raises(UsageError):
        plan(load_recipe(recipe))


def test_frames_are_small_enough_to_ship():
    text = (Path(install.__file__).parent / "frames.json").read_text()
    assert len(text) < 10_000
    assert all(base64.b64decode(code) for code in json.loads(text).values())
