"""One update: the global norm limits the step and is told as it was before, and bf16 stays within the arithmetic."""

from __future__ import annotations

import re

import pytest
import torch

from octjepa.checkpoint import folder
from octjepa.distributed.runtime import Runtime
from octjepa.files import read_json_lines
from octjepa.model import VJEPA3D
from octjepa.train.engine import take_step
from octjepa.train.loop import pretrain
from octjepa.train.step import accumulate
from octjepa.views.loader import TrainingDataset, collate
from synthetic import DEVICE, MemoryStore, small_recipe


class Noting:
    """Stands in for the optimizer: notes the length of the gradient that it is given, and changes nothing."""

    def __init__(self, model: VJEPA3D) -> None:
        self.model, self.given = model, 0.0

    def step(self) -> None:
        gradients = [one.grad for one in self.model.parameters() if one.grad is not None]
        self.given = float(torch.stack([gradient.norm() for gradient in gradients]).norm())

    def zero_grad(self, set_to_none: bool) -> None:
        pass


def update(clip_norm: float | None) -> tuple[float, float]:
    """(norm that is told, length of the gradient that the optimizer gets) of one update."""
    recipe = small_recipe()
    torch.manual_seed(0)
    model = VJEPA3D.from_recipe(recipe).to(DEVICE)
    store = MemoryStore(recipe.preprocessing)
    stream = TrainingDataset(store, recipe, list(store.volumes))
    runtime, optimizer = Runtime("fp32"), Noting(model)
    metrics = accumulate(model, collate([stream[i] for i in range(4)]), recipe, runtime)
    metrics = take_step(model, optimizer, metrics, runtime, clip_norm, float("inf"))  # type: ignore[arg-type]
    return float(metrics["grad_norm"]), optimizer.given


def test_the_gradient_is_cut_to_the_global_norm_and_reported_as_it_was():
    whole, given = update(None)
    assert given == pytest.approx(whole, rel=1e-5)
    assert update(whole / 10) == pytest.approx((whole, whole / 10), rel=1e-5)
    assert update(10 * whole) == pytest.approx((whole, whole), rel=1e-5)


@pytest.mark.slow
def test_bf16_computes_and_weights_moments_and_target_stay_fp32(tmp_path):
    losses = {}
    for precision in ("fp32", "bf16"):
        train = {"max_updates": 2, "global_batch": 4, "base_lr": 1e-3, "precision": precision}
        recipe = small_recipe(train=train, checkpoint={"every_updates": 2})
        pretrain(recipe, MemoryStore(recipe.preprocessing), tmp_path / precision)
        losses[precision] = read_json_lines(tmp_path / precision / "metrics.jsonl")[0]["train/loss"]
    assert losses["bf16"] != losses["fp32"]
    assert losses["bf16"] == pytest.approx(losses["fp32"], rel=0.02)
    saved = folder.list_checkpoints(tmp_path / "bf16" / "checkpoints")[-1]
    remaining = folder.read_tensors(saved, "model.safetensors") | folder.read_tensors(saved, "optimiser.safetensors")
    assert {tensor.dtype for tensor in remaining.values()} == {torch.float32}
    for part in ("context_encoder", "target_encoder", "exp_avg", "exp_avg_sq"):  # no bf16 numbers in wider boxes either
        values = torch.cat([remaining[name].flatten() for name in remaining if re.split("[./]", name)[0] == part])
        values = values[values != 0]
        assert float((values.bfloat16().float() != values).float().mean()) > 0.9, part
