"""101 updates of a small run by torch_xla: those of the CPU, one graph, and nothing read back but the figures."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from octjepa.distributed import xla
from octjepa.distributed.runtime import Runtime
from octjepa.model import VJEPA3D
from octjepa.train.engine import take_step
from octjepa.train.optimizer import build_optimizer, cosine_momentum, learning_rate, set_learning_rate, update_target
from octjepa.train.step import accumulate
from octjepa.views.loader import TrainingDataset, training_batches
from synthetic import MemoryStore, small_recipe

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

UPDATES = 101
FIGURES = ["train/loss", "train/cosine", "grad_norm", "healthy"]
RECIPE = small_recipe(
    tokens={"budget": 12},
    model={"predictor_depth": 1, "predictor_width": 48},
    train={"max_updates": UPDATES, "global_batch": 2, "base_lr": 1e-3, "precision": "fp32"},
)


class Run:
    """As pretrain does it: batches of the loader, a new rate and momentum each time, figures read one update late."""

    def __init__(self, device: torch.device) -> None:
        self.runtime = Runtime("fp32")
        self.runtime.device = device
        store = MemoryStore(RECIPE.preprocessing)
        self.batches = training_batches(
            TrainingDataset(store, RECIPE, list(store.volumes)[:12]), 0, UPDATES + 1, workers=0
        )
        torch.manual_seed(0)
        self.model = VJEPA3D.from_recipe(RECIPE).to(device)
        self.optimizer = build_optimizer(self.model, RECIPE.train)
        self.figures: list[list[float]] = []
        self._sent: Tensor | None = None

    def update(self, number: int, norm_limit: float = math.inf) -> None:
        set_learning_rate(self.optimizer, learning_rate(number, UPDATES + 1, RECIPE.train))
        m = cosine_momentum(number, UPDATES + 1, 0.99, 1.0)
        found = accumulate(self.model, next(self.batches), RECIPE, self.runtime, number)
        found = take_step(self.model, self.optimizer, found, self.runtime, 1.0, norm_limit)
        update_target(self.model.target_encoder, self.model.context_encoder, m, found["healthy"])
        packed = torch.stack([found[name].float() for name in FIGURES])
        if self.runtime.device.type == "xla":
            xla.sync()
        self.read()
        self._sent = packed

    def read(self) -> None:
        if self._sent is not None:
            self.figures.append(self._sent.tolist())
        self._sent = None

    def weights(self) -> dict[str, Tensor]:
        return {name: tensor.cpu() for name, tensor in copy.copy(self.model.state_dict()).items()}


class Seen(NamedTuple):
    run: Run
    counts: list[dict[str, float]]  # after the first update and after the last
    early: dict[str, Tensor]  # weights after three updates


@pytest.fixture(scope="module")
def seen(xla_device: torch.device, counted: Callable[[], dict[str, float]]) -> Seen:
    run = Run(xla_device)
    for number in range(3):
        run.update(number)
        if number == 0:
            first = counted()
    early = run.weights()
    before = counted()  # reading the weights is not part of an update
    for number in range(3, UPDATES):
        run.update(number, norm_limit=math.inf if number < 20 else 50.0 + number)
    after = counted()
    change = {name: after[name] - before[name] for name in after}
    return Seen(run, [first, before, after, change], early)


def test_the_updates_are_those_of_the_cpu(seen: Seen) -> None:
    """Loss, cosine and norm within 1e-5 of themselves, weights within 1e-5 after three updates at rates up to 1e-3."""
    cpu = Run(torch.device("cpu"))
    for number in range(3):
        cpu.update(number)
    cpu.read()
    torch.testing.assert_close(torch.tensor(seen.run.figures[:3]), torch.tensor(cpu.figures), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(seen.early, cpu.weights(), rtol=0, atol=1e-5)


def test_it_learns_and_every_update_is_taken(seen: Seen) -> None:
    figures = torch.tensor(seen.run.figures)
    assert len(figures) == UPDATES - 1  # the last is still on its way
    assert figures[:, FIGURES.index("healthy")].eq(1).all()
    assert figures[-10:, 0].mean() < 0.9 * figures[:10, 0].mean()


def test_one_graph_serves_all_updates(seen: Seen) -> None:
    first, *_, after, change = seen.counts
    assert first["compiled"] >= 1
    assert after["compiled"] == first["compiled"]
    assert change["run"] == UPDATES - 3


def test_only_the_figures_are_read_back(seen: Seen) -> None:
    change = seen.counts[-1]
    assert change["read"] == UPDATES - 3
    assert change["bytes_read"] == (UPDATES - 3) * 4 * len(FIGURES)
    assert change["fallbacks"] == 0


def test_a_spike_moves_nothing(seen: Seen) -> None:
    run = seen.run
    before, step = run.weights(), next(iter(run.optimizer.state.values()))["step"].item()
    run.update(UPDATES, norm_limit=1e-9)
    run.read()
    assert run.figures[-1][FIGURES.index("healthy")] == 0
    torch.testing.assert_close(run.weights(), before, rtol=0, atol=0)
    assert next(iter(run.optimizer.state.values()))["step"].item() == step == UPDATES
