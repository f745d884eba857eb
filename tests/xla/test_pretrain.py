"""A whole run by torch_xla: batches, guard, monitor, checkpoints, validation; held against the same run on the CPU."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from octjepa.distributed.runtime import Runtime
from octjepa.encoders import load_encoder
from octjepa.recipe import Recipe
from octjepa.train.loop import pretrain
from synthetic import MemoryStore, small_recipe

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

UPDATES = 6


def losses(recipe: Recipe, out: Path, resume: bool = False) -> list[float]:
    pretrain(recipe, MemoryStore(recipe.preprocessing), out, resume)
    lines = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [line["train/loss"] for line in lines if "train/loss" in line]


def test_a_run_is_that_of_the_cpu(xla_device: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Losses within 1e-5, weights within 1e-4 after six updates at rates up to 1e-3."""
    if Runtime("fp32").device != xla_device:
        pytest.skip("octjepa.distributed.runtime does not take its device from octjepa.distributed.xla")
    recipe = small_recipe(
        tokens={"budget": 12},
        model={"predictor_depth": 1, "predictor_width": 48},
        train={"max_updates": UPDATES, "global_batch": 4, "base_lr": 1e-3, "precision": "fp32"},
        machine={"micro_batch": 2},
        validation={"max_samples": 4},
        checkpoint={"every_updates": 3},
    )
    by_xla = losses(recipe, tmp_path / "xla")
    monkeypatch.delenv("PJRT_DEVICE")
    assert by_xla == pytest.approx(losses(recipe, tmp_path / "cpu"), rel=1e-5)
    mine, theirs = (load_encoder(tmp_path / name).encoder.state_dict() for name in ("xla", "cpu"))
    torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-4)
    summaries = [json.loads((tmp_path / name / "summary.json").read_text()) for name in ("xla", "cpu")]
    assert summaries[0]["loss"] == pytest.approx(summaries[1]["loss"], rel=1e-4)
