"""A V-JEPA update as its papers describe it, in plain PyTorch: the peer `sparse` of `make bench ARGS="step"`.

Written from the description in V-JEPA (Bardes et al. 2024) and V-JEPA 2 (Assran et al. 2025): every patch of the volume
is a token; two mask families a volume, whose context tokens alone pass the student; one pass of the EMA target encoder
over all tokens serves both; a narrow transformer predicts layer-normed features at the hidden positions. Blocks, loop
and optimizer are what torch offers; positions are added once, which is cheaper than rotating queries and keys.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from benchmarks.peers.alternating_runs import Comparison
from benchmarks.peers.data import WHOLE_GRID, bench_recipe, random_batch
from benchmarks.peers.step import UPDATES, Work, comparison, plain_adamw, plain_step, update_of
from jaxtyping import Float, Int
from torch import Tensor, nn

from octjepa.distributed.precision import wait_for
from octjepa.distributed.runtime import Runtime
from octjepa.objectives.base import gather_tokens
from octjepa.recipe import Recipe

FAMILIES = 2


class Block(nn.Module):
    """Pre-norm attention and MLP."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Float[Tensor, "b t w"]) -> Float[Tensor, "b t w"]:
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, -1)
        )
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(-2))
        return x + self.mlp(self.norm2(x))


class Transformer(nn.Module):
    """A linear layer into `width`, learned positions of the grid, blocks, a norm, and a linear layer out of it."""

    def __init__(self, inputs: int, tokens: int, size: tuple[int, int, int], outputs: int | None = None) -> None:
        super().__init__()
        width, depth, heads = size
        self.embed = nn.Linear(inputs, width)
        self.positions = nn.Parameter(torch.randn(1, tokens, width) * 0.02)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.leave = nn.Identity() if outputs is None else nn.Linear(width, outputs)

    def forward(self, x: Float[Tensor, "b n i"], index: Int[Tensor, "b n"] | None = None) -> Float[Tensor, "b n w"]:
        """`index`: which tokens of the grid `x` holds; None: all of them."""
        positions = self.positions if index is None else gather_tokens(self.positions.expand(len(x), -1, -1), index)
        features: Tensor = self.leave(self.norm(self.blocks(self.embed(x) + positions)))
        return features


class Predictor(nn.Module):
    """Context features, and a mask token at each hidden position -> features there."""

    def __init__(self, width: int, tokens: int, size: tuple[int, int, int]) -> None:
        super().__init__()
        self.inner = Transformer(width, tokens, size, width)
        self.mask_token = nn.Parameter(torch.zeros(1, 1, width))

    def forward(
        self, features: Float[Tensor, "b n w"], context: Int[Tensor, "b n"], hidden: Int[Tensor, "b m"]
    ) -> Float[Tensor, "b m w"]:
        masks = self.mask_token.expand(*hidden.shape, -1)
        found: Tensor = self.inner(torch.cat([features, masks], dim=1), torch.cat([context, hidden], dim=1))
        return found[:, features.shape[1] :]


def sparse_update(recipe: Recipe) -> Work:
    """`UPDATES` updates; each volume is seen under `FAMILIES` masks."""
    runtime, size = Runtime(recipe.train.precision), recipe.model.encoder_size
    student = Transformer(
        math.prod(recipe.tokens.patch_size), recipe.grid_tokens, (size.width, size.depth, size.heads)
    ).to(runtime.device)
    inner = size.predictor_width, size.predictor_depth, size.predictor_heads
    predictor = Predictor(size.width, recipe.grid_tokens, inner).to(runtime.device)
    teacher = copy.deepcopy(student).requires_grad_(False)
    learned = nn.ModuleList([student, predictor])
    optimizer = plain_adamw(learned, recipe.train)
    batch = random_batch(recipe)
    volumes = len(batch.volume_ids)

    def work() -> int:
        for _ in range(UPDATES):
            seen, whole, _, contexts, hiddens = batch.inputs(runtime.device)
            with runtime.autocast():
                with torch.no_grad():
                    features = teacher(whole).float()
                    truth = F.layer_norm(features, features.shape[-1:])
                loss = torch.zeros((), device=runtime.device)
                for context, hidden in zip(contexts.split(volumes), hiddens.split(volumes), strict=True):
                    predicted = predictor(student(gather_tokens(seen, context), context), context, hidden)
                    loss = loss + F.l1_loss(predicted.float(), gather_tokens(truth, hidden)) / FAMILIES
            loss.backward()
            plain_step(learned, optimizer, teacher, student, recipe.train)
        wait_for(runtime.device)
        return UPDATES * recipe.train.global_batch

    return work


@contextmanager
def compare_with_sparse(*ours: str) -> Iterator[Comparison]:
    """Both take two masks of each volume: ours the tokens that the recipe with keys `ours` chooses, the peer all."""
    masks = f"masks.per_target={FAMILIES}"
    recipe = bench_recipe(masks, *ours)
    yield comparison(update_of(recipe), sparse_update(bench_recipe(masks, *WHOLE_GRID)), recipe)
