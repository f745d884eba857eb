"""One training update of `tiny_cpu_vjepa`, forward, backward, step and EMA, on random numbers in a batch's shapes.

Ours is what `octjepa pretrain` calls for it: gradients with their figures, the check of the gradient on the
device, the step, the target. `plain` takes the very same network, arm and precision through the loop that a person
writes. `matmul` is the rate of plain matrix products on the same machine. `fp32`, `compiled` and `sincos` change one
key of the recipe. `transformers` and `shipped` are in `bench.transformers_vjepa2`, `sparse` in `bench.sparse_vjepa`,
`videomae`, an update of the default recipe, in `bench.transformers_videomae`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from math import inf

import torch
import torch.nn.functional as F
from benchmarks.peers.alternating_runs import Comparison, rate
from benchmarks.peers.data import bench_recipe, random_batch

from octjepa.distributed.precision import wait_for
from octjepa.distributed.runtime import Runtime, check_compiler
from octjepa.model import VJEPA3D
from octjepa.recipe import Recipe, TrainRecipe
from octjepa.train.engine import take_step
from octjepa.train.optimizer import build_optimizer, update_target
from octjepa.train.plan import plan
from octjepa.train.step import accumulate

UPDATES = 2  # a turn
MOMENTUM = 0.996
Work = Callable[[], int]


def update_of(recipe: Recipe) -> Work:
    """`UPDATES` updates as `octjepa pretrain` takes them; returns how many volumes went through."""
    runtime = Runtime(recipe.train.precision)
    model = VJEPA3D.from_recipe(recipe).to(runtime.device)
    if recipe.machine.compile:
        check_compiler(runtime.device)
        model.compile_blocks()
    optimizer, batch = build_optimizer(model, recipe.train), random_batch(recipe)

    def work() -> int:
        for _ in range(UPDATES):
            metrics = accumulate(model, batch, recipe, runtime)
            metrics = take_step(model, optimizer, metrics, runtime, recipe.train.clip_norm, inf)
            update_target(model.target_encoder, model.context_encoder, MOMENTUM, metrics["healthy"])
        wait_for(runtime.device)
        return UPDATES * recipe.train.global_batch

    return work


def plain_update(recipe: Recipe) -> Work:
    """The same network and loss in a loop without anything around it."""
    runtime = Runtime(recipe.train.precision)
    model = VJEPA3D.from_recipe(recipe).to(runtime.device)
    optimizer, batch = plain_adamw(model, recipe.train), random_batch(recipe)

    def work() -> int:
        for _ in range(UPDATES):
            with runtime.autocast():
                outcome = model.predict(*batch.inputs(runtime.device))
            F.l1_loss(outcome.predicted, outcome.target).backward()
            plain_step(model, optimizer, model.target_encoder, model.context_encoder, recipe.train)
        wait_for(runtime.device)
        return UPDATES * recipe.train.global_batch

    return work


def plain_adamw(model: torch.nn.Module, train: TrainRecipe) -> torch.optim.AdamW:
    """With the defaults of torch."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return torch.optim.AdamW(trained, lr=train.base_lr, betas=train.betas, weight_decay=train.weight_decay)


def plain_step(
    model: torch.nn.Module,
    optimizer: torch.optim.AdamW,
    target: torch.nn.Module,
    student: torch.nn.Module,
    train: TrainRecipe,
) -> None:
    """Clip, step, and the EMA parameter by parameter."""
    clip_and_step(model, optimizer, train)
    with torch.no_grad():
        for old, new in zip(target.parameters(), student.parameters(), strict=True):
            old.lerp_(new, 1 - MOMENTUM)


def clip_and_step(model: torch.nn.Module, optimizer: torch.optim.AdamW, train: TrainRecipe) -> None:
    """As a plain loop does it."""
    if train.clip_norm is not None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), train.clip_norm)
    optimizer.step()
    optimizer.zero_grad()


@contextmanager
def compare_with_plain() -> Iterator[Comparison]:
    """Our update against the plain loop."""
    recipe = bench_recipe()
    yield comparison(update_of(recipe), plain_update(recipe), recipe)


GEMM_SIZE = 1536  # rows and columns: large enough for the best rate of a core, small enough for a tenth of a second


def matmul_rate(recipe: Recipe) -> Work:
    """As many volumes as the machine's best matrix product of the recipe's precision could take in its time."""
    runtime = Runtime(recipe.train.precision)
    dtype = torch.bfloat16 if recipe.train.precision == "bf16" else torch.float32
    a, b = torch.randn(2, GEMM_SIZE, GEMM_SIZE, dtype=dtype, device=runtime.device)
    flops_per_volume = plan(recipe).flops_per_volume
    products = -(-UPDATES * recipe.train.global_batch * flops_per_volume // (2 * GEMM_SIZE**3))

    def work() -> int:
        for _ in range(products):
            torch.mm(a, b)
        wait_for(runtime.device)
        return round(products * 2 * GEMM_SIZE**3 / flops_per_volume)

    return work


@contextmanager
def compare_with_matmul(*changes: str) -> Iterator[Comparison]:
    """The floating-point operations of an update against those of a plain matrix product in the same time."""
    recipe = bench_recipe(*changes)
    yield comparison(update_of(recipe), matmul_rate(recipe), recipe)


@contextmanager
def compare_with_change(change: str) -> Iterator[Comparison]:
    """The same update with one key of the recipe changed."""
    recipe = bench_recipe()
    yield comparison(update_of(recipe), update_of(bench_recipe(change)), recipe)


def comparison(ours: Work, other: Work, recipe: Recipe) -> Comparison:
    """Two updates of one recipe, with what was measured in `setup`."""
    setup = {
        "recipe": recipe.name,
        "size": recipe.model.size,
        "tokens": recipe.token_count,
        "batch": recipe.train.global_batch,
        "precision": recipe.train.precision,
        "updates_a_turn": UPDATES,
        "device": str(Runtime(recipe.train.precision).device),
        "threads": torch.get_num_threads(),
    }
    return Comparison(rate(ours), rate(other), setup)
