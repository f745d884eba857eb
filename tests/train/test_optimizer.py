import math

import pytest
import torch

from octjepa.model import VJEPA3D
from octjepa.recipe import TrainRecipe
from octjepa.train.optimizer import (
    build_optimizer,
    learning_rate,
    lr_curve,
    set_learning_rate,
    total_updates,
    warmup_updates,
)
from synthetic import small_recipe

REFERENCE = TrainRecipe(max_updates=1000, base_lr=1e-4, min_lr_ratio=0.1)


@pytest.mark.slow
def test_only_matrices_decay_and_the_target_is_left_out():
    recipe = small_recipe()
    model = VJEPA3D.from_recipe(recipe)
    decay, plain = build_optimizer(model, recipe.train).param_groups
    names = {id(p): name for name, p in model.named_parameters()}
    assert (decay["weight_decay"], plain["weight_decay"]) == (0.05, 0.0)
    decayed, spared = ({names[id(p)] for p in group["params"]} for group in (decay, plain))
    assert all(name.endswith("weight") and "norm" not in name for name in decayed)
    assert all(name.endswith("bias") or "norm" in name or "mask_token" in name for name in spared)
    assert decayed | spared == {name for name in names.values() if not name.startswith("target_encoder")}


def test_learning_rate_reaches_every_group():
    optimizer = build_optimizer(torch.nn.Linear(3, 3), small_recipe().train)
    set_learning_rate(optimizer, 0.125)
    assert [group["lr"] for group in optimizer.param_groups] == [0.125, 0.125]


def test_reference_schedule_by_hand():
    assert warmup_updates(REFERENCE, 1000) == 30
    assert learning_rate(0, 1000, REFERENCE) == pytest.approx(1e-4 / 30)
    assert learning_rate(29, 1000, REFERENCE) == pytest.approx(1e-4)
    assert learning_rate(515, 1000, REFERENCE) == pytest.approx(0.5 * (1e-4 + 1e-5))
    assert learning_rate(1000, 1000, REFERENCE) == pytest.approx(1e-5)
    assert learning_rate(5000, 1000, REFERENCE) == pytest.approx(1e-5)


@pytest.mark.parametrize("total", [1, 2, 10, 333])
@pytest.mark.parametrize("schedule", ["cosine", "constant"])
def test_positive_from_the_first_update_and_never_rising_after_warmup(total, schedule):
    train = TrainRecipe(max_updates=total, schedule=schedule)
    curve = lr_curve(train, total)
    assert len(curve) == total
    assert min(curve) > 0
    after = curve[warmup_updates(train, total) :]
    assert after == sorted(after, reverse=True)


def test_epochs_count_samples_not_files():
    train = TrainRecipe(epochs=120, global_batch=32)
    assert total_updates(train, 1000) == math.ceil(120 * 1000 / 32)
    assert total_updates(train, 1) == 4
