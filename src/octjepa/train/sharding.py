"""Weights, gradients, moments and the EMA target dealt over the ranks (FSDP2): for models that do not fit one device.

Both encoders and the predictor are sharded block by block alike, so that a shard of the target averages the same shard
of the student. Checkpoints stay whole: a sharded run goes on replicated, and the other way round.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, distribute_tensor

from octjepa.distributed.runtime import Runtime
from octjepa.model import VJEPA3D
from octjepa.model.blocks import Block
from octjepa.recipe import Recipe
from octjepa.train.optimizer import build_optimizer

_ENTRIES = ("predict", "encode", "targets")  # ways into the model beside forward; none of them calls another


def shard(
    model: VJEPA3D, optimizer: torch.optim.AdamW, recipe: Recipe, runtime: Runtime
) -> tuple[VJEPA3D, torch.optim.AdamW]:
    """A model and an optimizer that are whole and alike on every rank -> the same, each rank with its part."""
    moments = {
        name: optimizer.state[parameter] for name, parameter in model.named_parameters() if parameter in optimizer.state
    }
    mesh = init_device_mesh(runtime.device.type, (runtime.world_size,))
    for block in [module for module in model.modules() if isinstance(module, Block)]:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    for entry in _ENTRIES:
        register_fsdp_forward_method(model, entry)
    dealt = build_optimizer(model, recipe.train)
    for name, parameter in model.named_parameters():
        for kind, value in moments.get(name, {}).items():
            dealt.state[parameter][kind] = _part(value, parameter) if kind != "step" else value
    return model, dealt


def _part(whole: Tensor, like: Tensor) -> Tensor:
    assert isinstance(like, DTensor)
    return distribute_tensor(whole, like.device_mesh, like.placements, src_data_rank=None)
