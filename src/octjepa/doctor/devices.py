"""Every device of this machine does one forward and one backward pass of the small model, in both precisions."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial

import numpy as np
import torch

from octjepa.config import load_recipe
from octjepa.doctor.check import Check, gigabytes, tried
from octjepa.model import VJEPA3D
from octjepa.objective.loss import token_steps, training_loss
from octjepa.recipe import Recipe
from octjepa.views.sample import token_positions


def every_device() -> list[torch.device]:
    """The CPU, and each accelerator that torch knows."""
    found = [torch.device("cpu")]
    accelerator = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    if accelerator is not None:
        found += [torch.device(accelerator.type, n) for n in range(torch.accelerator.device_count())]
    return found


def checks() -> Iterator[Check]:
    recipe = load_recipe("smoke_test")
    for device in every_device():
        expected = "a finite gradient norm above 0 after one forward and backward pass"
        to_do = "run octjepa doctor again with this device alone visible; if it fails again, check its driver and torch"
        yield tried(f"device {device}", expected, to_do, partial(_fp32, device, expected, recipe))
        bf16 = "as in fp32, under bf16 autocast"
        to_do = "train there with train.precision=fp32"
        yield tried(f"bf16 on {device}", bf16, to_do, partial(_bf16, device, bf16, recipe))


def _fp32(device: torch.device, expected: str, recipe: Recipe) -> Check:
    started = time.perf_counter()
    norm = gradient_norm(device, "fp32", recipe)
    seconds = time.perf_counter() - started
    found = f"{_name(device)}; gradient norm {norm:.3g}, {seconds:.2f} s"
    if math.isfinite(norm) and norm > 0:
        return Check(f"device {device}", "ok", found, expected)
    return Check(f"device {device}", "failed", found, expected, "do not train there: check its driver and torch")


def _bf16(device: torch.device, expected: str, recipe: Recipe) -> Check:
    norm = gradient_norm(device, "bf16", recipe)
    name, found = f"bf16 on {device}", f"gradient norm {norm:.3g}"
    if math.isfinite(norm) and norm > 0:
        return Check(name, "ok", found, expected)
    return Check(name, "warning", found, expected, "train there with train.precision=fp32")


def gradient_norm(device: torch.device, precision: str, recipe: Recipe) -> float:
    """Of the whole model of `recipe`, after one sample of noise."""
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
    steps = token_steps(torch.from_numpy(index)[None].to(device), recipe.grid)
    loss, _ = training_loss(recipe.objective, outcome, steps, context, target, 0)
    loss.backward()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    return float(torch.linalg.vector_norm(torch.stack([g.norm() for g in gradients])))


def _name(device: torch.device) -> str:
    if device.type == "cpu":
        return f"{torch.get_num_threads()} threads"
    free, total = torch.accelerator.get_memory_info(device)
    return f"{gigabytes(free)} of {gigabytes(total)} free"
