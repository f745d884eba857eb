"""`plan` counts; here its figures are counted again by hand, or measured."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import pytest
import torch
from benchmarks.peers.memory import peak_memory_bytes

from octjepa.config import load_recipe
from octjepa.errors import UsageError
from octjepa.model import VJEPA3D
from octjepa.train import plan as plan_module
from octjepa.train.data import choose_cohort
from octjepa.train.plan import plan, time_run
from synthetic import TEST_SIZE, MemoryStore, small_recipe


@pytest.mark.slow
def test_the_reference_recipes_plan_to_the_reference_figures(without_memory):
    single = plan(load_recipe("pretrain_vjepa_single_domain"), volumes=1000)
    assert single.tokens == 9216
    assert single.grid == (16, 24, 24)
    assert single.updates == math.ceil(120 * 1000 / 32)
    assert single.target_tokens == round(0.6 * 9216)
    multi = plan(load_recipe("pretrain_vjepa_multi_domain"), volumes=4000)
    assert multi.updates == math.ceil(150 * 4000 / 32)
    assert multi.effective_batch == 32
    assert multi.batch.to_json() == {"micro": 1, "devices": 16, "accumulation": 2}
    smoke = plan(load_recipe("smoke_test"))
    assert (smoke.updates, smoke.effective_batch, smoke.volumes) == (10, 4, 8)
    assert smoke.lr.peak == 1e-4
    assert 0 < smoke.lr.last < smoke.lr.peak


@pytest.mark.slow
def test_eight_gpus_of_one_machine_share_the_batch_of_their_recipe():
    planned = plan(load_recipe("eight_gpus"))
    assert planned.batch.to_json() == {"micro": 32, "devices": 8, "accumulation": 1}
    assert planned.peak_memory_bytes < 20e9  # fits devices of 24 GB


@pytest.mark.slow
def test_parameters_are_those_of_the_model(without_memory):
    recipe = small_recipe()
    model = VJEPA3D.from_recipe(recipe)
    figures = plan(recipe)
    assert figures.parameters == sum(p.numel() for p in model.parameters())
    assert figures.trainable == sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert sum(figures.parameters_by_part.values()) == figures.parameters


@pytest.mark.slow
def test_ema_half_life_of_a_horizon_by_hand(without_memory):
    recipe = small_recipe(objective={"ema_horizon": 0.05}, train={"max_updates": 1000})
    planned = plan(recipe)
    assert planned.ema_half_life_samples == pytest.approx(math.log(0.5) / math.log(1 - 1 / 50) * 4)
    assert 0 < planned.ema_random_start < 1e-3


@pytest.mark.slow
def test_ema_half_life_by_hand(without_memory):
    recipe = small_recipe(objective={"ema_base": 0.996})
    assert plan(recipe).ema_half_life_samples == pytest.approx(math.log(0.5) / math.log(0.996) * 4)


@pytest.mark.slow
def test_arithmetic_grows_with_tokens_and_is_that_of_the_matrices(without_memory):
    """The linear layers of the encoder alone, by hand: 2 x weights x tokens, three times for forward and backward."""
    recipe = small_recipe(model=TEST_SIZE)
    weights = sum(p.numel() for p in VJEPA3D.from_recipe(recipe).context_encoder.parameters() if p.ndim == 2)
    context, _ = recipe.mask_counts
    least = 2 * weights * (3 * context + recipe.token_count)
    assert least < plan(recipe).flops_per_volume < 1.6 * least
    assert (
        plan(small_recipe(model=TEST_SIZE, tokens={"budget": 12})).flops_per_volume
        < 0.6 * plan(recipe).flops_per_volume
    )


@pytest.mark.slow
def test_without_a_store_epochs_count_the_expected_volumes(without_memory):
    recipe = load_recipe("pretrain_vjepa_single_domain", ["data.expected_volumes=64"])
    figures = plan(recipe)
    assert figures.volumes == 64
    assert figures.updates == 240
    unknown = plan(load_recipe("pretrain_vjepa_single_domain", ["data.expected_volumes=null"]))
    assert unknown.volumes_known is False


_DENSE = ["train.precision=fp32", "train.global_batch=96", "machine.micro_batch=48", "objective.name=vjepa_dense"]


@pytest.mark.timeout(900)  # bf16 that is emulated takes minutes
@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").is_file(), reason="reads the peak from /proc")
@pytest.mark.parametrize(
    ("recipe", "overrides"),
    [
        ("tiny_cpu", ["train.precision=fp32", "train.global_batch=64"]),
        ("tiny_cpu_vjepa", ["train.precision=bf16", "train.global_batch=48"]),  # native kernels hold 30 MB themselves
        ("tiny_cpu_vjepa", _DENSE),
    ],
    ids=["mae", "bf16", "dense in micro-batches"],
)
def test_predicted_memory_is_within_15_per_cent_of_the_measured_peak(recipe, overrides):
    """On the CPU, of a batch large enough to stand out of what the interpreter holds anyway."""
    measured = peak_memory_bytes([recipe, *overrides])
    predicted = plan(load_recipe(recipe, overrides)).peak_memory_bytes
    assert 0.85 < predicted / measured < 1.15, (predicted, measured)


LOAD, WORK, STEP = 0.5, 2.0, 0.25  # seconds that each lap is made to take


@pytest.fixture
def laps(monkeypatch):
    """Each lap reads the watch four times and, once there are enough, once more to see whether time is up."""
    lap = [0.0, LOAD, WORK, STEP]
    times = itertools.accumulate([0.0, *(lap * 5), 0.0])
    monkeypatch.setattr(plan_module, "SECONDS", 0.0)  # the least number of laps
    monkeypatch.setattr(plan_module.time, "perf_counter", lambda: next(times))


def timed(updates=7, **machine):
    recipe = small_recipe(machine=machine)
    _, stream = choose_cohort(MemoryStore(recipe.preprocessing), recipe)
    return time_run(recipe, stream, updates)


@pytest.mark.parametrize(
    ("machine", "seconds"),
    [
        ({}, LOAD + WORK + STEP),
        ({"micro_batch": 1}, 4 * (LOAD + WORK) + STEP),
        ({"micro_batch": 1, "devices": 2}, 2 * (LOAD + WORK) + STEP),
        ({"loader_workers": 1}, WORK + STEP),  # loading continues next to the arithmetic
    ],
)
def test_seconds_of_an_update_are_those_of_its_parts(laps, machine, seconds):
    found = timed(**machine)
    assert found.seconds_per_update == pytest.approx(seconds)
    assert found.hours == pytest.approx(7 * seconds / 3600)
    assert found.measured.laps == 3
    assert found.measured.micro_batch == machine.get("micro_batch", 4)


def test_a_micro_batch_too_large_for_memory_is_a_clear_error(monkeypatch):
    def full(*arguments):
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(plan_module, "accumulate", full)
    with pytest.raises(UsageError, match=r"4 volumes at once do not fit .* lower machine.micro_batch"):
        timed()
