"""Part 1, is it right: the device against the CPU, bf16, a kill, memory as planned and run out, ranks, the tests."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
import xml.etree.ElementTree as ElementTree
from math import inf
from pathlib import Path

import torch
from benchmarks.peers.data import random_batch

from octjepa.checkpoint import folder
from octjepa.distributed.precision import with_precision
from octjepa.distributed.runtime import Runtime
from octjepa.doctor import examine
from octjepa.doctor.accelerator import accelerator_checks
from octjepa.errors import OctjepaError
from octjepa.files import read_json_lines
from octjepa.model import VJEPA3D
from octjepa.recipe import Recipe
from octjepa.train import loop
from octjepa.train.engine import take_step
from octjepa.train.optimizer import build_optimizer, update_target
from octjepa.train.plan import peak_bytes
from octjepa.train.step import accumulate

from .campaign import ROOT, Campaign, Figures, Step, kill, tensors_equal
from .device import WaitCounter, driver_waits, forget, peak_memory, pinned

LOSS_TOLERANCE = 1e-4  # relative, of fp32 losses on the device against the CPU's
MEMORY_TOLERANCE = 0.15  # of the planned peak
_CUBLAS = {"CUBLAS_WORKSPACE_CONFIG": ":4096:8", "OCTJEPA_DETERMINISTIC": "1"}


def machine(campaign: Campaign) -> Figures:
    """What the device is, and what `octjepa doctor` says."""
    found = examine(None, campaign.out, campaign.settings.one_gpu[0])
    (card,) = accelerator_checks()[:1]
    version = {"python": sys.version.split()[0], "torch": torch.__version__, "cuda": torch.version.cuda}
    bad = [check for check in found.checks if check.state != "ok"]
    return {
        **version,
        "device": str(campaign.device),
        "card": card.found,
        "cores": os.cpu_count(),
        "right": found.ok,
        "not_ok": {check.name: f"{check.state}: {check.found}" for check in bad},
    }


def small_run(campaign: Campaign, name: str, *overrides: str, **environment: str) -> Path:
    """A training of the small recipe in a process of its own; its folder."""
    out = campaign.work / "runs" / name
    if not (out / "summary.json").is_file():
        store = campaign.store("small", campaign.recipe(campaign.settings.small), campaign.settings.people)
        updates = f"train.max_updates={campaign.settings.updates}"
        recipe = [*campaign.settings.small, updates, "checkpoint.every_updates=2", "checkpoint.keep_last=2", *overrides]
        campaign.child("train", str(store), str(out), *recipe, seconds=300, **environment)
    return out


def losses_of(run: Path) -> list[float]:
    """The loss of every update."""
    return [float(line["train/loss"]) for line in read_json_lines(run / "metrics.jsonl") if "train/loss" in line]


def losses(campaign: Campaign) -> Figures:
    """The losses of a run on the device in fp32, without TF32, against those of the same run on the CPU."""
    fp32 = "train.precision=fp32"
    on_cpu = losses_of(small_run(campaign, "fp32-cpu", fp32, CUDA_VISIBLE_DEVICES=""))
    here = losses_of(small_run(campaign, "fp32-device", fp32))
    apart = [abs(a - b) / abs(a) for a, b in zip(on_cpu, here, strict=True)]
    return {
        "updates": len(here),
        "first": here[0],
        "last": here[-1],
        "apart": max(apart),
        "apart_by_update": [float(f"{value:.2g}") for value in apart],
        "right": max(apart) < LOSS_TOLERANCE,
    }


def bf16(campaign: Campaign) -> Figures:
    """The same run in bf16: finite, and how far its losses are from fp32's."""
    found = losses_of(small_run(campaign, "bf16", "train.precision=bf16"))
    known = losses_of(small_run(campaign, "fp32-device", "train.precision=fp32"))
    apart = max(abs(a - b) / abs(a) for a, b in zip(known, found, strict=True))
    finite = all(map(math.isfinite, found))
    return {"updates": len(found), "last": found[-1], "apart_from_fp32": apart, "right": finite}


def resume(campaign: Campaign) -> Figures:
    """A run that is killed by SIGKILL after its first checkpoint and resumed, against one that was left alone."""
    whole = small_run(campaign, "whole", "train.precision=fp32", **_CUBLAS)
    out = campaign.work / "runs" / "killed"
    if not (out / "summary.json").is_file():
        started = campaign.child("train", *_killed_run(campaign, out), wait=False, **_CUBLAS)
        until = time.monotonic() + 200
        while started.poll() is None and not folder.list_checkpoints(out / "checkpoints"):
            if time.monotonic() > until:
                raise OctjepaError("the run that was to be killed wrote no checkpoint in 200 s")
            time.sleep(0.01)
        kill(started, signal.SIGKILL)
        campaign.child("train", *_killed_run(campaign, out), seconds=300, **_CUBLAS)
    last = [folder.list_checkpoints(run / "checkpoints")[-1] for run in (whole, out)]
    same, worst = tensors_equal(*(folder.read_tensors(one, "model.safetensors") for one in last))
    repeated = small_run(campaign, "fp32-device", "train.precision=fp32")
    apart = max(abs(a - b) / abs(a) for a, b in zip(losses_of(whole), losses_of(repeated), strict=True))
    return {"right": same, "weights_apart": worst, "losses_apart_without_deterministic_sums": apart}


def _killed_run(campaign: Campaign, out: Path) -> list[str]:
    store = campaign.store("small", campaign.recipe(campaign.settings.small), campaign.settings.people)
    recipe = [*campaign.settings.small, f"train.max_updates={campaign.settings.updates}", "checkpoint.every_updates=2"]
    return [str(store), str(out), *recipe, "checkpoint.keep_last=2", "train.precision=fp32"]


def updates_of(recipe: Recipe, micro: int, count: int) -> None:
    """`count` updates of random batches of `micro` volumes."""
    runtime = Runtime(recipe.train.precision)
    model = VJEPA3D.from_recipe(recipe).to(runtime.device)
    optimizer, batch = build_optimizer(model, recipe.train), random_batch(recipe, micro)
    for update in range(count):
        metrics = accumulate(model, batch, recipe, runtime, update, micro)
        metrics = take_step(model, optimizer, metrics, runtime, recipe.train.clip_norm, inf)
        update_target(model.target_encoder, model.context_encoder, 0.99, metrics["healthy"])


def memory(campaign: Campaign) -> Figures:
    """Peak memory of two updates against what `octjepa plan` says; right where all are within the tolerance."""
    found: Figures = {}
    for name, named in campaign.settings.memory.items():
        recipe = resolved(campaign.recipe(named))
        micro = recipe.machine.micro_batch or recipe.train.global_batch
        planned = peak_bytes(recipe, micro)
        with peak_memory(campaign.device) as peak:
            updates_of(recipe, micro, 2)
        found[name] = {
            "micro_batch": micro,
            "planned": planned,
            "measured": peak.bytes,
            "ratio": planned / max(peak.bytes, 1),
            "precision": recipe.train.precision,
        }
    if campaign.device.type == "cpu":
        return found  # what a process holds is not what a plan counts; `make bench ARGS=memory` measures that
    return {**found, "right": all(abs(1 - one["ratio"]) <= MEMORY_TOLERANCE for one in found.values())}


def resolved(recipe: Recipe) -> Recipe:
    """The recipe in the precision of this device."""
    return with_precision(recipe, Runtime(recipe.train.precision).precision)


def out_of_memory(campaign: Campaign) -> Figures:
    """A run for which memory runs out halves its micro-batch and ends; on a GPU torch is given little memory."""
    recipe = campaign.recipe(
        campaign.settings.small,
        "train.max_updates=2",
        "monitor.every_updates=null",
        "checkpoint.dir=null",
        "train.precision=fp32",
        "machine.data_on=host",
        "validation.max_samples=1",
    )
    store, out = campaign.small_store(), campaign.work / "runs" / f"full-{time.time_ns()}"
    forget(campaign.device)
    size, tried, honest = recipe.train.global_batch, [], loop.accumulate
    share = 1.0
    if campaign.device.type == "cuda":  # memory for a micro-batch of half the batch, with a margin
        total = torch.cuda.get_device_properties(campaign.device).total_memory
        room = (peak_bytes(recipe, size // 2) + peak_bytes(recipe, size)) / 2
        share = (torch.cuda.memory_reserved() + room) / total

    def observed(model, batch, recipe, runtime, update, micro_batch):  # type: ignore[no-untyped-def]
        tried.append(micro_batch)
        if campaign.device.type != "cuda" and micro_batch == size:
            raise torch.OutOfMemoryError("out of memory, for the rehearsal")
        return honest(model, batch, recipe, runtime, update, micro_batch)

    loop.accumulate = observed
    try:
        if campaign.device.type == "cuda":
            torch.cuda.set_per_process_memory_fraction(min(1.0, share))
        summary = loop.pretrain(recipe, store, out)
    finally:
        loop.accumulate = honest
        if campaign.device.type == "cuda":
            torch.cuda.set_per_process_memory_fraction(1.0)
    halved = tried[0] == size and tried[-1] < size
    return {"tried": tried, "updates": summary.updates, "right": halved and summary.updates == 2}


def ranks(campaign: Campaign) -> Figures:
    """A process group of one rank over NCCL, replicated and sharded by FSDP2: the losses of no group at all."""
    path = campaign.work / "one_rank.json"
    campaign.child("one_rank", str(path), seconds=200)
    found = json.loads(path.read_text(encoding="utf-8"))
    alone = found["losses"]["alone"]
    apart = {
        name: max(abs(a - b) / abs(a) for a, b in zip(alone, found["losses"][name], strict=True))
        for name in ("replicated", "sharded")
    }
    return {"backend": found["backend"], **apart, "right": max(apart.values()) < LOSS_TOLERANCE}


def waits(campaign: Campaign) -> Figures:
    """Whether the host waits for the device in an update: operations that do, and what CUDA reports."""
    recipe = resolved(campaign.recipe(campaign.settings.small))
    runtime = Runtime(recipe.train.precision)
    model = VJEPA3D.from_recipe(recipe).to(runtime.device)
    optimizer, batch = build_optimizer(model, recipe.train), pinned(random_batch(recipe), campaign.device)
    for update in range(2):  # in the first one, kernels are loaded and moments made
        with driver_waits(campaign.device) as reported, WaitCounter() as counter:
            metrics = accumulate(model, batch, recipe, runtime, update)
            metrics = take_step(model, optimizer, metrics, runtime, recipe.train.clip_norm, inf)
            update_target(model.target_encoder, model.context_encoder, 0.99, metrics["healthy"])
    return {"operations": counter.names, "reported": reported[:10], "right": not counter.names and not reported}


def tests(campaign: Campaign) -> Figures:
    """The project's own tests with the device in place of the CPU; names those that fail."""
    log = campaign.work / "tests.xml"
    command = [sys.executable, "-m", "pytest", "-q", "-m", "not slow", f"--junitxml={log}", "-p", "no:cacheprovider"]
    if (os.cpu_count() or 1) >= 8:
        command += ["-n", "6", "--dist", "loadfile"]
    environment = os.environ | {"OCTJEPA_TEST_DEVICE": campaign.device.type, "OMP_NUM_THREADS": "1"}
    seconds = max(30.0, min(240.0, campaign.seconds_left() - 10))
    try:
        done = subprocess.run(
            [*command, *campaign.settings.tests],
            cwd=ROOT,
            env=environment,
            timeout=seconds,
            capture_output=True,
            text=True,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise OctjepaError(f"the tests took more than {seconds:.0f} s") from None
    if not log.is_file():
        raise OctjepaError(f"pytest ended with code {done.returncode}: {(done.stdout + done.stderr)[-300:]}")
    cases = list(ElementTree.parse(log).iter("testcase"))
    bad = [case for case in cases if case.find("failure") is not None or case.find("error") is not None]
    skipped = sum(case.find("skipped") is not None for case in cases)
    names = [f"{case.get('classname')}.{case.get('name')}" for case in bad]
    return {"tests": len(cases), "skipped": skipped, "failed": names, "right": bool(cases) and not bad}


STEPS = (
    Step("right", "machine", 20, machine),
    Step("right", "losses", 40, losses),
    Step("right", "bf16", 15, bf16),
    Step("right", "ranks", 20, ranks),
    Step("right", "waits", 5, waits),
    Step("right", "memory", 30, memory),
    Step("right", "out_of_memory", 10, out_of_memory),
    Step("right", "resume", 40, resume),
    Step("right", "tests", 150, tests),
)
