"""The machine around a run: devices, threads, memory, disk, output folder, clock."""

from __future__ import annotations

import math
import os
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import nullcontext
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

import numpy as np
import torch

from octjepa.config import load_recipe
from octjepa.distributed.precision import AUTO, bf16_is_faster, choose_precision, with_precision
from octjepa.distributed.runtime import Runtime, best_device, every_device, free_device_bytes
from octjepa.doctor.checks import Check, Setup, State, attempt, gigabytes, register
from octjepa.files import write_atomic
from octjepa.locks import writer_lock
from octjepa.model import VJEPA3D
from octjepa.objectives.loss import token_grid_positions, training_loss
from octjepa.recipe import Recipe
from octjepa.remote import is_remote
from octjepa.train.hardware_settings import COMPILE_FROM, choose_for_machine, loader_workers
from octjepa.train.plan import METRICS_BYTES
from octjepa.views.sample import token_positions

_MINIMUM_BYTES = 2e9  # of memory or disk that even the smallest run needs
_SHARED_BYTES = 256e6  # of shared memory that loader processes need
_EARLIEST_DATE = datetime(2026, 1, 1, tzinfo=UTC)
_SKEW_SECONDS = 5.0
_WRITABLE = "a folder that can be written, renamed in and locked"
_EXPECTED = {
    "threads": "no more threads than cores",
    "compile": "a compiler, where a run would compile its blocks",
    "attention": "the faster of two ways",
    "loader_workers": "no more processes than cores",
    "data_on": "views made where their voxels fit",
}
_GRADIENT = "a finite gradient norm above 0 after one forward and backward pass"


@register("devices", _GRADIENT)
def device_checks(setup: Setup) -> Iterator[Check]:
    """One forward and one backward pass of the small model on every device, in both precisions."""
    alone = "run octjepa doctor again with only this device visible; if it fails again, check its driver and torch"
    fp32 = "train there with train.precision=fp32"
    requested = None if setup.recipe is None else setup.recipe.train.precision
    for device in every_device():
        yield from attempt(f"device {device}", _GRADIENT, alone, partial(_fp32, device))
        expected = "as in fp32, under bf16 autocast; faster than fp32, where the recipe asks for bf16"
        yield from attempt(f"bf16 on {device}", expected, fp32, partial(_bf16, device, expected, fp32, requested))


def _fp32(device: torch.device) -> list[Check]:
    started = time.perf_counter()
    norm = gradient_norm(device, "fp32", load_recipe("smoke_test"))
    seconds = time.perf_counter() - started
    size = f"{torch.get_num_threads()} threads"
    if device.type != "cpu":
        free, total = torch.accelerator.get_memory_info(device)
        size = f"{gigabytes(free)} of {gigabytes(total)} free"
    measured = f"{size}; gradient norm {norm:.3g}, {seconds:.2f} s"
    if math.isfinite(norm) and norm > 0:
        return [Check(f"device {device}", "ok", measured, _GRADIENT)]
    return [Check(f"device {device}", "failed", measured, _GRADIENT, "do not train there: check its driver and torch")]


def _bf16(device: torch.device, expected: str, to_do: str, requested: str | None) -> list[Check]:
    norm = gradient_norm(device, "bf16", load_recipe("smoke_test"))
    faster, _ = bf16_is_faster(device)
    chosen, reason = choose_precision(AUTO, device)
    name, measured = f"bf16 on {device}", f"gradient norm {norm:.3g}; {reason}: train.precision=auto is {chosen}"
    if math.isfinite(norm) and norm > 0 and (faster or requested != "bf16"):
        return [Check(name, "ok", measured, expected)]
    return [Check(name, "warning", measured, expected, to_do)]


def gradient_norm(device: torch.device, precision: str, recipe: Recipe) -> float:
    """The gradient norm of the whole model of `recipe` after one sample of noise; `precision` is fp32 or bf16."""
    torch.manual_seed(0)
    model = VJEPA3D.from_recipe(recipe).to(device)
    index = np.arange(recipe.token_count)
    positions = torch.from_numpy(token_positions(index, recipe)).to(device)[None]
    view = torch.randn(1, len(index), math.prod(recipe.tokens.patch_size)).to(device)
    order = torch.randperm(len(index))
    seen, hidden = recipe.mask_counts
    context = order[:seen].sort().values[None].to(device)
    target = order[seen : seen + hidden].sort().values[None].to(device)
    compute = torch.autocast(device.type, dtype=torch.bfloat16) if precision == "bf16" else nullcontext()
    with compute:
        outcome = model.predict(view, view, positions, context, target)
    grid_positions = token_grid_positions(torch.from_numpy(index)[None].to(device), recipe.grid)
    loss, _ = training_loss(recipe.objective, outcome, grid_positions, context, target, recipe.grid, 0)
    loss.backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    return float(torch.linalg.vector_norm(torch.stack([g.norm() for g in gradients])))


def nearest(out: Path) -> Path:
    """`out`, or the nearest folder above it that exists."""
    out = out.absolute()
    return next(path for path in (out, *out.parents) if path.exists())


@register("choices", "threads, compile, attention, loader processes and place of the views that suit the machine")
def choice_checks(setup: Setup) -> Iterator[Check]:
    """Hardware settings and memory of the recipe's run; without a recipe, of a long run of the small model."""
    recipe, device = setup.recipe or load_recipe("smoke_test"), Runtime("fp32").device
    recipe = with_precision(recipe, choose_precision(recipe.train.precision, device)[0])
    updates, volumes = COMPILE_FROM, recipe.train.global_batch
    if setup.planned is not None:
        updates, volumes = setup.planned.updates, setup.planned.volumes
    for name, choice in choose_for_machine(recipe, device, updates, volumes).items():
        state: State = "warning" if choice.to_do else "ok"
        yield Check(name.replace("_", " "), state, f"{choice.text}: {choice.reason}", _EXPECTED[name], choice.to_do)


def _enough(name: str, amount: str, enough: bool, expected: str, to_do: str, required: bool) -> Check:
    """Too little is a failure where the run is known to need it, else a warning."""
    if enough:
        return Check(name, "ok", amount, expected)
    return Check(name, "failed" if required else "warning", amount, expected, to_do)


@register("memory", "what the recipe plans")
def memory_check(setup: Setup) -> Iterator[Check]:
    """Free memory against the planned peak."""
    device = best_device()
    free, where = free_device_bytes(device), "this machine" if device.type == "cpu" else "the accelerator"
    needed = _MINIMUM_BYTES if setup.planned is None else float(setup.planned.peak_memory_bytes)
    free_text, expected = f"{gigabytes(free)} free on {where}", f"{gigabytes(needed)} at least"
    to_do = "use a smaller machine.micro_batch, machine.recompute=true, or a machine with more memory"
    yield _enough("memory", free_text, free >= needed, expected, to_do, required=setup.planned is not None)


@register("disk", "room for the checkpoints")
def disk_check(setup: Setup) -> Iterator[Check]:
    """Free disk against the planned checkpoints and the journal."""
    folder, needed, expected = setup.out, _MINIMUM_BYTES, f"{gigabytes(_MINIMUM_BYTES)} at least"
    if setup.recipe is not None and setup.planned is not None:
        checkpoints = setup.recipe.checkpoint.dir
        local = checkpoints is not None and not is_remote(checkpoints)
        needed = float(setup.planned.disk_bytes if local else METRICS_BYTES)
        expected = f"{gigabytes(needed)} for checkpoints and the journal"
        folder = setup.out / checkpoints if local and checkpoints is not None else setup.out
    free = float(shutil.disk_usage(nearest(folder)).free)
    to_do = "free some space, give --out or checkpoint.dir another disk, or lower checkpoint.keep_last"
    required = setup.planned is not None
    yield _enough("disk", f"{gigabytes(free)} free", free >= needed, expected, to_do, required)


@register("shared memory", f"{gigabytes(_SHARED_BYTES)} for loader processes")
def shared_memory_check(setup: Setup) -> Iterator[Check]:
    """/dev/shm, which loader processes need; containers often give 64 MB."""
    folder, expected = Path("/dev/shm"), f"{gigabytes(_SHARED_BYTES)} for loader processes"
    if not folder.is_dir():
        yield Check("shared memory", "ok", "not limited by a folder on this system", expected)
        return
    free = shutil.disk_usage(folder).free
    to_do = "start the container with --shm-size=1g, or train with machine.loader_workers=0"
    required = setup.recipe is not None and loader_workers(setup.recipe, Runtime("fp32").device) > 0
    yield _enough("shared memory", f"{gigabytes(free)} free", free >= _SHARED_BYTES, expected, to_do, required)


@register("output folder", _WRITABLE, "give --out a folder that you may write to, on a file system with locks")
def output_check(setup: Setup) -> Iterator[Check]:
    """Writes, renames and locks a file next to the output folder. Raises what the file system raises."""
    with tempfile.TemporaryDirectory(prefix=".doctor-", dir=nearest(setup.out)) as folder:
        write_atomic(Path(folder) / "written", lambda file: file.write(b"octjepa"))
        with writer_lock(Path(folder)):
            pass
    yield Check("output folder", "ok", "written, renamed and locked", _WRITABLE)


def _dated(skew_seconds: float) -> str:
    """How files are dated compared with this machine's clock, in tenths of a second."""
    tenths = round(skew_seconds, 1)
    return "files are dated by the same clock" if tenths == 0 else f"files are dated {tenths:+.1f} s from it"


@register("clock", "one clock, set", "set the clock")
def clock_check(setup: Setup) -> Iterator[Check]:
    """The date, and the difference between this machine's clock and the file server's."""
    now = datetime.now(UTC)
    with tempfile.NamedTemporaryFile(prefix=".doctor-", dir=nearest(setup.out)) as file:
        before = time.time()
        os.utime(file.fileno())
        skew = os.fstat(file.fileno()).st_mtime - before
    clock_text = f"{now.isoformat(timespec='seconds')}; {_dated(skew)}"
    expected = f"a date after {_EARLIEST_DATE.date()}, files dated within {_SKEW_SECONDS:.0f} s of it"
    if now < _EARLIEST_DATE or abs(skew) > _SKEW_SECONDS:
        yield Check(
            "clock", "warning", clock_text, expected, "set the clock (NTP) of this machine and of its file server"
        )
    else:
        yield Check("clock", "ok", clock_text, expected)
