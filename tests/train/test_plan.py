"""`plan` counts; here its figures are counted again by hand, or measured."""

from __future__ import annotations

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from octjepa.config import load_recipe
from octjepa.model import VJEPA3D
from octjepa.train.plan import plan
from synthetic import small_recipe


def test_the_founding_recipes_plan_to_the_founding_figures():
    single = plan(load_recipe("pretrain_vjepa_single_domain"), volumes=1000)
    assert single["tokens"] == 9216
    assert single["grid"] == [16, 24, 24]
    assert single["updates"] == math.ceil(120 * 1000 / 32)
    assert single["target_tokens"] == round(0.6 * 9216)
    multi = plan(load_recipe("pretrain_vjepa_multi_domain"), volumes=4000)
    assert multi["updates"] == math.ceil(150 * 4000 / 32)
    assert multi["effective_batch"] == 32
    assert multi["batch"] == {"micro": 1, "devices": 16, "accumulation": 2}
    smoke = plan(load_recipe("smoke_test"))
    assert (smoke["updates"], smoke["effective_batch"], smoke["volumes"]) == (10, 4, 8)
    assert smoke["lr"]["peak"] == 1e-4
    assert 0 < smoke["lr"]["last"] < smoke["lr"]["peak"]


def test_parameters_are_those_of_the_model():
    recipe = small_recipe()
    model = VJEPA3D.from_recipe(recipe)
    figures = plan(recipe)
    assert figures["parameters"] == sum(p.numel() for p in model.parameters())
    assert figures["trainable"] == sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert sum(figures["parameters_by_part"].values()) == figures["parameters"]


def test_ema_half_life_by_hand():
    recipe = small_recipe(objective={"ema_base": 0.996})
    assert plan(recipe)["ema_half_life_samples"] == pytest.approx(math.log(0.5) / math.log(0.996) * 4)


def test_arithmetic_grows_with_tokens_and_is_that_of_the_matrices():
    """The linear layers of the encoder alone, by hand: 2 x weights x tokens, three times for forward and backward."""
    recipe = small_recipe()
    weights = sum(p.numel() for p in VJEPA3D.from_recipe(recipe).context_encoder.parameters() if p.ndim == 2)
    context, _ = recipe.mask_counts
    least = 2 * weights * (3 * context + recipe.token_count)
    assert least < plan(recipe)["flops_per_volume"] < 1.6 * least
    assert plan(small_recipe(tokens={"budget": 12}))["flops_per_volume"] < 0.6 * plan(recipe)["flops_per_volume"]


def test_without_a_store_epochs_count_the_expected_volumes():
    recipe = load_recipe("pretrain_vjepa_single_domain", ["data.expected_volumes=64"])
    figures = plan(recipe)
    assert figures["volumes"] == 64
    assert figures["updates"] == 240
    unknown = plan(load_recipe("pretrain_vjepa_single_domain", ["data.expected_volumes=null"]))
    assert unknown["volumes_known"] is False


_STEP = """
import sys
import torch
from octjepa.config import load_recipe
from octjepa.model import VJEPA3D
from octjepa.objective.ema import update_target
from octjepa.train.optimiser import build_optimiser
from octjepa.train.runtime import Runtime
from octjepa.train.update import accumulate
from octjepa.views.loader import Batch
recipe = load_recipe(sys.argv[1], sys.argv[2:])
runtime = Runtime(recipe.train.precision)
torch.set_num_threads(1)
def random_batch(size):
    t, (n, m) = recipe.token_count, recipe.mask_counts
    index = torch.arange(t).expand(size, -1)
    view, other = torch.randn(2, size, t, 1024)
    names = tuple(map(str, range(size)))
    return Batch(view, other, torch.rand(size, t, 3), index, torch.ones(size, t), index[:, :n], index[:, n:], names)
def peak():  # not ru_maxrss, which a child inherits from the process that starts it
    (line,) = [line for line in open("/proc/self/status") if line.startswith("VmHWM")]
    return int(line.split()[1]) * 1024
def step(model, optimiser, batch):
    accumulate(model, batch, recipe, runtime)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimiser.step()
    update_target(model.target_encoder, model.context_encoder, 0.99)
    optimiser.zero_grad(set_to_none=True)
def build():
    model = VJEPA3D.from_recipe(recipe)
    return model, build_optimiser(model, recipe.train)
warm = build()
step(*warm, random_batch(1))  # libraries load their kernels
del warm
before = peak()
model, optimiser = build()
for _ in range(2):
    step(model, optimiser, random_batch(recipe.train.global_batch))
print(peak() - before)
"""
# Freed memory goes back to the system at once: else the peak is that of glibc's habits.
_HONEST = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536", "OMP_NUM_THREADS": "1"}


@pytest.mark.skipif(not Path("/proc/self/status").is_file(), reason="reads the peak from /proc")
@pytest.mark.parametrize(
    "overrides",
    [
        ["train.precision=fp32", "train.global_batch=64"],
        ["train.precision=bf16", "train.global_batch=64"],
        ["train.precision=bf16", "train.global_batch=96", "machine.micro_batch=48", "objective.name=vjepa_dense"],
    ],
    ids=["fp32", "bf16", "dense in micro-batches"],
)
def test_predicted_memory_is_within_15_per_cent_of_the_measured_peak(overrides):
    """On the CPU, of a batch large enough to stand out of what the interpreter holds anyway."""
    done = subprocess.run(
        [sys.executable, "-c", _STEP, "tiny_cpu", *overrides],
        capture_output=True, text=True, check=True, env=os.environ | _HONEST,
    )  # fmt: skip
    measured = int(done.stdout)
    predicted = plan(load_recipe("tiny_cpu", overrides))["peak_memory_bytes"]
    assert 0.85 < predicted / measured < 1.15, (predicted, measured)
