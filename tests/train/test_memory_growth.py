"""Nothing piles up in memory: after its first updates a run holds as many tensors, and as many bytes in them, as ever.

`git show 7f034832:benchmarks/memory_growth.py` watches 10,000 updates of a run from outside.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from octjepa.train import loop
from octjepa.train.loop import pretrain
from synthetic import MemoryStore, small_recipe

pytestmark = pytest.mark.slow

UPDATES, EVERY = 60, 15


def held_in_a_run(out: Path, patch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """(tensors, bytes in them) before update 30, 45, 60 of a run that does everything that a run does."""
    found: list[tuple[int, int]] = []
    honest = loop.learning_rate

    def counting(update: int, *arguments: Any) -> float:
        if update > EVERY and (update + 1) % EVERY == 0:
            gc.collect()
            # by type: torch keeps tensors without storage of whatever was exported in this process
            tensors = [one for one in gc.get_objects() if type(one) in (torch.Tensor, torch.nn.Parameter)]
            found.append((len(tensors), sum(one.untyped_storage().nbytes() for one in tensors)))
        return honest(update, *arguments)

    patch.setattr(loop, "learning_rate", counting)
    recipe = small_recipe(
        train={"max_updates": UPDATES, "global_batch": 2, "base_lr": 1e-3, "precision": "fp32"},
        checkpoint={"every_updates": 10},
        monitor={"every_updates": 10, "volumes": 4},
        validation={"every_updates": 20, "max_samples": 2},
        tracking={"pictures_every_updates": 10},
    )
    pretrain(recipe, MemoryStore(recipe.preprocessing), out)
    return found


def test_a_run_holds_as_much_at_its_end_as_at_its_beginning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held = held_in_a_run(tmp_path / "run", monkeypatch)
    assert len(held) == 3
    assert len(set(held)) == 1, held


def test_a_planted_leak_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    honest: Callable[..., Any] = loop.accumulate
    remaining: list[Any] = []

    def leaking(*arguments: Any) -> Any:
        figures = honest(*arguments)
        remaining.append(figures["train/loss"])
        return figures

    monkeypatch.setattr(loop, "accumulate", leaking)
    held = held_in_a_run(tmp_path / "run", monkeypatch)
    assert [tensors - held[0][0] for tensors, _ in held] == [0, EVERY, 2 * EVERY]
