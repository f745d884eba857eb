"""The most memory that an update will hold, found by running it on tensors without storage.

torch's fake tensors have shapes, types and lifetimes, but no bytes: the very model, loss, backward pass and optimizer
are run on them, and every storage is counted from its first use until it dies. What a kernel takes for itself, and
what an allocator keeps back, is not in it. A test holds the figure within 15 % of the peak measured on a CPU.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from octjepa.model import VJEPA3D
from octjepa.objective.ema import update_target
from octjepa.objective.loss import training_loss
from octjepa.recipe import Recipe
from octjepa.train.optimizer import build_optimizer


class Peak(TorchDispatchMode):
    """While open, adds up the storages that live; `peak` is the most there was, in bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = self._held = 0
        self._known: dict[int, int] = {}

    def __torch_dispatch__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        made = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(made):
            if isinstance(tensor, Tensor):
                self._count(tensor.untyped_storage())
        return made

    def _count(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key not in self._known:
            self._known[key] = storage.nbytes()
            self._held += storage.nbytes()
            self.peak = max(self.peak, self._held)
            weakref.finalize(storage, self._forget, key)

    def _forget(self, key: int) -> None:
        self._held -= self._known.pop(key, 0)


def peak_bytes(recipe: Recipe, micro: int) -> int:
    """Of one device that takes `micro` volumes at once: two updates, the first of which makes the moments."""
    tokens, (context_count, target_count) = recipe.token_count, recipe.mask_counts
    voxels = math.prod(recipe.tokens.patch_size)
    with torch.device("meta"):
        model = VJEPA3D.from_recipe(recipe)
    with FakeTensorMode(allow_non_fake_inputs=True), Peak() as held:
        model = model.to_empty(device="cpu")
        optimizer = build_optimizer(model, recipe.train)
        for update in range(2):
            seen, target_view = torch.empty(micro, tokens, voxels), torch.empty(micro, tokens, voxels)
            positions = torch.empty(micro, tokens, 3)
            index = torch.empty(micro, tokens, dtype=torch.int64)
            context, target = index[:, :context_count], index[:, context_count : context_count + target_count]
            with torch.autocast("cpu", torch.bfloat16, enabled=recipe.train.precision == "bf16"):
                outcome = model.predict(seen, target_view, positions, context, target)
            loss, _ = training_loss(recipe.objective, outcome, positions, context, target, update)
            loss.backward()
            del outcome, loss
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            update_target(model.target_encoder, model.context_encoder, 0.99)
            optimizer.zero_grad(set_to_none=True)
    return held.peak
