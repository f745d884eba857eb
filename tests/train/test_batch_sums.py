"""A batch in parts, on several ranks or in micro-batches, has the SIGReg and the gradient of the whole batch."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from octjepa.distributed.runtime import Runtime
from octjepa.files import read_json_lines
from octjepa.model import VJEPA3D
from octjepa.recipe import Recipe
from octjepa.train.step import accumulate
from octjepa.views.loader import TrainingDataset, collate
from ranks import BEGIN, finish, recipe_of, run_alone, start_ranks, weights_of
from synthetic import DEVICE, MemoryStore, small_recipe

EYES = 8
TERMS = {
    "sigreg": {"name": "vjepa", "sigreg": 0.5},
    "zone_sigreg": {"name": "vjepa", "zone_sigreg": 2.0},
    "both": {"name": "mae", "sigreg": 0.2, "zone_sigreg": 1.0},
    "levjepa": {"name": "levjepa", "sigreg": 0.5},
}
SECTIONS = {
    "objective": TERMS["both"],
    "masks": {"per_target": 2},
    "train": {"max_updates": 2, "global_batch": EYES, "base_lr": 1e-3, "precision": "fp32"},
}


def gradients(recipe: Recipe, micro_batch: int) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    torch.manual_seed(0)
    model = VJEPA3D.from_recipe(recipe).to(DEVICE)
    store = MemoryStore(recipe.preprocessing)
    stream = TrainingDataset(store, recipe, list(store.volumes))
    batch = collate([stream[i] for i in range(EYES)])
    metrics = accumulate(model, batch, recipe, Runtime("fp32"), update=1, micro_batch=micro_batch)
    return metrics, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.slow
@pytest.mark.parametrize("name", TERMS)
def test_micro_batches_have_the_loss_and_the_gradient_of_the_whole_batch(name: str) -> None:
    recipe = small_recipe(objective=TERMS[name], masks={"per_target": 2}, train={"global_batch": EYES})
    whole, expected = gradients(recipe, EYES)
    for micro_batch in (3, 2):  # 3, 3 and 2 volumes
        metrics, found = gradients(recipe, micro_batch)
        assert metrics.keys() == whole.keys()
        for key, value in whole.items():
            assert float(metrics[key]) == pytest.approx(float(value), rel=1e-4), key
        assert found.keys() == expected.keys()
        for key, gradient in expected.items():
            assert torch.allclose(found[key], gradient, rtol=1e-3, atol=1e-4 * float(gradient.abs().max())), key


RANKS = (
    BEGIN
    + """
dist.init_process_group("gloo")
sections = json.loads(sys.argv[2])
right = loop.accumulate
recipe = recipe_of(**sections)
pretrain(recipe, MemoryStore(recipe.preprocessing), out / "two")
recipe = recipe_of(**sections, machine={"micro_batch": 2})
pretrain(recipe, MemoryStore(recipe.preprocessing), out / "accumulated")

# rank 1 runs out of memory while rank 0 waits for its sums
sizes = []
def full(model, batch, recipe, runtime, update, micro):
    sizes.append(micro)
    def spill(*_):
        if update == 1 and rank == 1 and micro > 1:
            raise RuntimeError("[enforce fail at alloc_cpu.cpp:117] . DefaultCPUAllocator: can't allocate memory")
    handle = model.predictor.register_forward_pre_hook(spill)
    try:
        return right(model, batch, recipe, runtime, update, micro)
    finally:
        handle.remove()
loop.accumulate = full
recipe = recipe_of(**sections, machine={"micro_batch": None})
pretrain(recipe, MemoryStore(recipe.preprocessing), out / "memory")
if rank == 0:
    print(json.dumps(sizes))
"""
)


@pytest.mark.slow
def test_two_ranks_train_the_weights_of_one_and_share_a_failure(tmp_path: Path) -> None:
    sections = {**SECTIONS, "machine": {"micro_batch": None}}
    run_alone(tmp_path / "one", **sections)
    results = finish(start_ranks(RANKS, tmp_path, json.dumps(SECTIONS)))
    assert [code for code, _, _ in results] == [0, 0], results[0][2] + results[1][2]
    assert json.loads(results[0][1].splitlines()[-1]) == [4, 4, 2, 1]
    expected = weights_of(tmp_path / "one")
    for name in ("two", "accumulated", "memory"):
        lines = [
            [
                line[f"train/loss_{term}"]
                for line in read_json_lines(tmp_path / run / "metrics.jsonl")
                if "train/loss" in line
            ]
            for run in ("one", name)
            for term in ("sigreg", "zone_sigreg")
        ]
        assert lines[2] == pytest.approx(lines[0], rel=1e-3), name
        assert lines[3] == pytest.approx(lines[1], rel=1e-3), name
        for key, value in weights_of(tmp_path / name).items():
            if key.startswith("model"):
                assert torch.allclose(value, expected[key], atol=2e-4), (name, key)


def test_the_recipe_of_the_ranks_needs_no_whole_batch() -> None:
    assert recipe_of(**SECTIONS, machine={"micro_batch": 2}).objective.regulariser is None
