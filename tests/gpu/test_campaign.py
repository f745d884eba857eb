"""The campaign on a GPU, without one: its rule, its state, its measurements on a CPU, and a rehearsal of every step."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import torch
from benchmarks.gpu import __main__ as command
from benchmarks.gpu import device, wheels
from benchmarks.gpu.campaign import Campaign, Step, Unfinished
from benchmarks.gpu.fast import micro_batches
from benchmarks.gpu.page import page
from benchmarks.gpu.rule import ALL, FEW, Gain, decide
from benchmarks.gpu.settings import FULL, SMALLEST
from benchmarks.gpu.wheels import applies, collect, name_of, needs_of

from octjepa.doctor.checks import Check
from octjepa.errors import UsageError
from octjepa.train.engine import take_step
from octjepa.train.optimizer import build_optimizer, update_target
from octjepa.train.step import accumulate
from synthetic import small_recipe

CPU = torch.device("cpu")
ROOT = Path(__file__).resolve().parents[2]
GOOD = {
    ("mae", 1, ALL): Gain(0.80, 0.03, 0.01),
    ("mae", 12, ALL): Gain(0.83, 0.06, 0.03),
    ("vjepa", 12, ALL): Gain(0.79, 0.02, 0.01),
    ("mae_coarse", 12, ALL): Gain(0.81, 0.04, 0.03),
}


def test_the_rule_says_yes_where_gain_limit_and_rise_are_there() -> None:
    answers = decide(GOOD, (1, 4, 12))
    assert answers["learns"].startswith("yes: mae gains +0.060")
    assert answers["tokens_were_the_cause"].startswith("no: mae 0.830, mae_coarse 0.810")
    assert answers["latent_objective_fails"].startswith("yes: mae 0.830, vjepa 0.790")


@pytest.mark.parametrize(
    ("key", "gain"),
    [
        (("mae", 12, ALL), Gain(0.83, 0.049, 0.03)),  # too little
        (("mae", 12, ALL), Gain(0.83, 0.06, 0.02)),  # not sure enough
        (("mae", 1, ALL), Gain(0.84, 0.07, 0.05)),  # it does not rise
    ],
)
def test_the_rule_says_no_where_one_of_them_is_not(key: tuple[str, int, str], gain: Gain) -> None:
    few = {("mae", at, FEW): Gain(0.62, 0.02, 0.00) for at in (1, 12)}
    assert decide({**GOOD, **few, key: gain}, (1, 4, 12))["learns"].startswith("no: ")


def test_thirty_labels_can_decide_and_missing_figures_decide_nothing() -> None:
    low = {**GOOD, ("mae", 12, ALL): Gain(0.80, 0.03, 0.01)}
    few = {("mae", 1, FEW): Gain(0.6, 0.02, 0.0), ("mae", 12, FEW): Gain(0.72, 0.11, 0.05)}
    assert decide({**low, **few}, (1, 4, 12))["learns"].startswith("yes: mae gains +0.110")
    assert {answer.partition(":")[0] for answer in decide({}, (1, 4, 12)).values()} == {"undecided"}


def test_a_step_that_is_done_is_not_repeated_and_one_that_fails_costs_no_other(tmp_path: Path) -> None:
    taken: list[str] = []

    def good(campaign: Campaign) -> dict:
        taken.append("good")
        return {"figure": 1.5}

    def bad(campaign: Campaign) -> dict:
        raise ValueError("no such kernel\nat all")

    def long(campaign: Campaign) -> dict:
        raise Unfinished("continues in the next call")

    campaign = Campaign(SMALLEST, tmp_path / "work", tmp_path / "out", 60)
    for name, run in (("good", good), ("bad", bad), ("long", long)):
        campaign.take(Step("right", name, 1, run))
    known = json.loads((tmp_path / "out" / "results.json").read_text())["steps"]
    assert {name: one["state"] for name, one in known.items()} == {
        "good": "done",
        "bad": "failed",
        "long": "unfinished",
    }
    assert known["bad"]["error"] == "ValueError: no such kernel at all"
    again = Campaign(SMALLEST, tmp_path / "work", tmp_path / "out", 60)
    assert again.is_done("good")
    assert again.figures("good") == {"figure": 1.5}
    text = "\n".join(page(again.results, [Step("right", "good", 1, good), Step("fast", "absent", 1, good)]))
    assert "| good | done |" in text
    assert "| absent | missing |" in text
    assert "A rehearsal (smallest)" in text


def test_the_call_ends_before_a_step_that_takes_longer(tmp_path: Path, capsys, monkeypatch) -> None:
    monkeypatch.setattr(command, "STEPS", (Step("fast", "long", 500, lambda campaign: {}),))
    campaign = Campaign(FULL, tmp_path / "work", tmp_path / "out", 60)
    assert command._run(campaign, list(command.STEPS)) == command.MORE
    assert "not done yet, call again: long" in capsys.readouterr().out


def test_large_files_come_back_in_pieces(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("benchmarks.gpu.campaign.PIECE_BYTES", 4)
    campaign = Campaign(SMALLEST, tmp_path / "work", tmp_path / "out", 60)
    (tmp_path / "file").write_bytes(b"0123456789")
    names = campaign.bring_back(tmp_path / "file", "weights")
    assert names == ["weights.part0", "weights.part1", "weights.part2"]
    assert b"".join((tmp_path / "out" / name).read_bytes() for name in names) == b"0123456789"


@pytest.mark.parametrize(
    ("card", "message"),
    [
        (Check("accelerator", "ok", "no NVIDIA GPU", "", ""), "no NVIDIA GPU. Run it on a machine with an NVIDIA GPU"),
        (Check("accelerator", "failed", "GPU 0: too old", "", "use a newer GPU"), "GPU 0: too old. use a newer GPU"),
    ],
)
def test_without_a_fit_gpu_one_line_says_what_to_do(card: Check, message: str, monkeypatch) -> None:
    monkeypatch.setattr(command, "accelerator_checks", lambda: [card])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: card.state == "failed")
    with pytest.raises(UsageError, match=message):
        command._check_device(FULL)


def test_a_gpu_without_bf16_is_refused(monkeypatch) -> None:
    monkeypatch.setattr(command, "accelerator_checks", lambda: [Check("accelerator", "warning", "GPU 0, old", "")])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda including_emulation: False)
    with pytest.raises(UsageError, match="GPU 0, old: half of the campaign measures bf16"):
        command._check_device(FULL)


def test_peak_memory_of_an_accelerator_is_what_its_allocator_counts(monkeypatch) -> None:
    calls = []
    for name, value in (
        ("empty_cache", None),
        ("reset_peak_memory_stats", None),
        ("memory_allocated", 100),
        ("max_memory_allocated", 700),
        ("synchronize", None),
    ):
        monkeypatch.setattr(torch.accelerator, name, lambda *_, name=name, value=value: calls.append(name) or value)
    with device.peak_memory(torch.device("cuda")) as peak:
        calls.append("work")
    assert peak.bytes == 600
    assert calls.index("reset_peak_memory_stats") < calls.index("work") < calls.index("max_memory_allocated")


@pytest.mark.slow
def test_peak_memory_of_a_cpu_sees_a_large_tensor() -> None:
    # In a process of its own: one that ran other tests may hold freed memory, which the tensor takes first.
    code = (
        "import torch; from benchmarks.gpu import device\n"
        "with device.peak_memory(torch.device('cpu')) as peak:\n"
        "    torch.ones(64 << 20, dtype=torch.uint8).add_(1)\n"
        "print(peak.bytes)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert 60e6 < int(done.stdout) < 200e6


def test_no_operation_of_an_update_makes_the_host_wait() -> None:
    from benchmarks.peers.data import random_batch

    from octjepa.distributed.runtime import Runtime
    from octjepa.model import VJEPA3D

    recipe = small_recipe(machine={"micro_batch": 2})
    runtime, model = Runtime("fp32"), VJEPA3D.from_recipe(recipe)
    model = model.to(runtime.device)
    optimizer, batch = build_optimizer(model, recipe.train), random_batch(recipe)
    for _ in range(2):  # the first makes the moments
        with device.WaitCounter() as counter:
            metrics = accumulate(model, batch, recipe, runtime)
            metrics = take_step(model, optimizer, metrics, runtime, 1.0, float("inf"))
            update_target(model.target_encoder, model.context_encoder, 0.99, metrics["healthy"])
    assert counter.names == []
    with device.WaitCounter() as counter:
        float(metrics["train/loss"])
    assert counter.names == ["_local_scalar_dense"]


@pytest.mark.slow
def test_the_micro_batch_is_the_largest_power_of_two_that_fits(monkeypatch) -> None:
    monkeypatch.setattr("benchmarks.gpu.fast.peak_bytes", lambda recipe, micro: 1000 + 100 * micro)
    recipe = small_recipe(train={"global_batch": 16})
    sizes = micro_batches(recipe, int((1000 + 100 * 12) / 0.9) + 1)
    assert sizes == [8, 4, 2, 1]
    assert micro_batches(recipe, 10**12)[0] == 16, "not more than the batch"
    assert micro_batches(recipe, 1) == [1]

    def run(size: int) -> None:
        if size > 2:
            raise torch.OutOfMemoryError("out of memory")

    assert device.largest_that_fits(sizes, run, CPU) == 2
    assert device.largest_that_fits([8, 4], run, CPU) == 0


@pytest.mark.parametrize(
    ("marker", "holds"),
    [
        ("", True),
        ("extra == 'gui'", False),
        ("sys_platform == 'win32'", False),
        ("python_version < '3.11'", False),
        ("python_version >= '3.10'", True),
        ("platform_python_implementation == 'PyPy'", False),
        ("sys_platform == 'linux'", True),
    ],
)
def test_markers_of_other_machines_are_left_out(marker: str, holds: bool) -> None:
    assert applies(marker) is holds


def test_wheels_are_followed_to_what_they_need_and_what_is_there_is_left_out(tmp_path: Path, monkeypatch) -> None:
    needs = {
        "alpha": "Requires-Dist: Beta_x>=1\nRequires-Dist: torch\nRequires-Dist: gui; extra == 'gui'\n",
        "beta-x": "",
    }

    def download(name: str, version: str | None, folder: Path) -> Path | str:
        if name not in needs:
            return "ERROR: no matching distribution"
        path = folder / f"{name.replace('-', '_')}-1-py3-none-any.whl"
        with zipfile.ZipFile(path, "w") as archive:
            archive.writestr(f"{name}-1.dist-info/METADATA", f"Name: {name}\n{needs[name]}")
        return path

    monkeypatch.setattr(wheels, "download", download)
    monkeypatch.setattr(wheels, "wanted", lambda: ["alpha", "gamma", "delta"])
    found, missing = collect(tmp_path / "wheels", {"torch", "delta"})
    assert [name_of(path.name.partition("-")[0]) for path in found] == ["alpha", "beta-x"]
    assert missing == {"gamma": "ERROR: no matching distribution"}
    assert needs_of(found[0]) == ["beta-x", "torch"]


@pytest.mark.slow
@pytest.mark.timeout(2400)  # some 6 minutes next to other tests
def test_every_step_runs_in_the_rehearsal_and_is_not_repeated(tmp_path: Path, root: Path) -> None:
    script = [
        str(root / "scripts" / "gpu" / "campaign"),
        "--out",
        str(tmp_path / "out"),
        "--smallest",
        "--minutes",
        "40",
    ]
    environment = os.environ | {"PYTHON": sys.executable, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(script, env=environment, capture_output=True, text=True, check=False)
    steps = json.loads((tmp_path / "out" / "results.json").read_text())["steps"]
    failed = {name: one.get("error") for name, one in steps.items() if one["state"] != "done"}
    assert not failed, done.stdout + done.stderr
    assert set(steps) == {step.name for step in command.STEPS}
    assert {steps[name]["figures"]["right"] for name in ("losses", "bf16", "resume", "ranks", "waits")} == {True}
    assert (tmp_path / "out" / "mae.safetensors").is_file()
    assert "undecided" in steps["decision"]["figures"]["answers"]["learns"]
    before = (tmp_path / "out" / "results.json").read_text()
    subprocess.run(script, env=environment, capture_output=True, text=True, check=False)
    assert (tmp_path / "out" / "results.json").read_text() == before
