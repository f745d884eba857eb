import torch

from octjepa.model import VJEPA3D
from octjepa.train.optimizer import build_optimizer, set_learning_rate
from synthetic import small_recipe


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
