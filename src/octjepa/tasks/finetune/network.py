"""The network that is tuned: an encoder, its tokens pooled as for the frozen probe, and a linear head for each target.

Mean, standard deviation and maximum over tokens enter the heads standardised by training volumes, and heads start at
zero: tuning begins where the linear probe does, so that what it gains is the encoder's (Kumar et al. 2022, LP-FT).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from octjepa import keys
from octjepa.checkpoint import PretrainedEncoder
from octjepa.metrics.scores import Task
from octjepa.probe.networks import Outputs
from octjepa.store import CanonicalVolume
from octjepa.tasks.finetune.recipe import FinetuneRecipe
from octjepa.train.learner import layer_decay_groups

POOL = "mean_std_max"
_EPS = 1e-6


def pooled(tokens: Float[Tensor, "b k dim"]) -> Float[Tensor, "b features"]:
    """As the pooling mean_std_max; where all tokens are alike the gradient stays finite."""
    std = (tokens.var(dim=1, correction=0) + _EPS**2).sqrt()
    return torch.cat([tokens.mean(dim=1), std, tokens.amax(dim=1)], dim=1)


class TunedNetwork(nn.Module):
    """`tasks` names each head's task and number of classes (0: a quantity); a head's outputs are those of `Outputs`."""

    mean: Tensor
    std: Tensor

    def __init__(self, pretrained: PretrainedEncoder, tasks: Sequence[tuple[Task, int]]) -> None:
        super().__init__()
        self.pretrained = pretrained  # the same module as `encoder`, with the protocol of evaluation
        self.encoder = pretrained.encoder
        heads = [Outputs(3 * pretrained.dim, task, classes) for task, classes in tasks]
        for head in heads:
            for parameter in head.linear.parameters():
                nn.init.zeros_(parameter)
        self.heads = nn.ModuleList(heads)
        self.register_buffer("mean", torch.zeros(3 * pretrained.dim))
        self.register_buffer("std", torch.ones(3 * pretrained.dim))

    def forward(
        self, patches: Float[Tensor, "b k voxels"], positions: Float[Tensor, "b k 3"], paths: Tensor | None = None
    ) -> Float[Tensor, "b k dim"]:
        """Token features, fp32; `paths` as in `model.blocks.Stack`."""
        self.encoder.blocks.paths = paths
        try:
            features: Tensor = self.encoder(patches, positions)
        finally:
            self.encoder.blocks.paths = None
        return features.float()

    def head_outputs(self, tokens: Float[Tensor, "b k dim"]) -> list[Float[Tensor, "b _"]]:
        """Of each head, from token features: log-probabilities of the classes, or the standardised quantity."""
        x = (pooled(tokens) - self.mean) / self.std
        return [head(x) for head in self.heads]

    @torch.no_grad()
    def pool(self, volumes: Sequence[CanonicalVolume]) -> Float[Tensor, "b features"]:
        """The heads' input of whole volumes as embedding sees them (no augmentation), not yet standardised."""
        features = [torch.from_numpy(one.features[None]) for one in self.pretrained.encode_volumes(volumes)]
        return torch.cat([pooled(tokens.to(self.mean.device)) for tokens in features])

    @torch.no_grad()
    def predict(self, volumes: Sequence[CanonicalVolume]) -> list[Float[Tensor, "b _"]]:
        """`head_outputs` of whole volumes as embedding sees them."""
        x = (self.pool(volumes) - self.mean) / self.std
        return [head(x) for head in self.heads]

    def unfreeze(self, blocks: int) -> None:
        """The heads learn, and the encoder's last `blocks` with its final norm; more than it has: all of it."""
        depth = len(self.encoder.blocks)
        self.encoder.requires_grad_(blocks > depth)
        if 0 < blocks <= depth:
            for part in (*list(self.encoder.blocks)[depth - blocks :], self.encoder.norm):
                part.requires_grad_(True)
        self.heads.requires_grad_(True)

    def groups(self, recipe: FinetuneRecipe) -> list[dict[str, Any]]:
        """AdamW's groups: `peak` the highest rate, `start` the update at which they begin to learn; no decay of 1-D."""
        depth = len(self.encoder.blocks)
        last, everything = recipe.starts
        parts = [(list(self.heads.parameters()), recipe.head_lr, 0)]
        # level 0 is the patch embedding, level n block n
        for level, group in enumerate(layer_decay_groups(self.encoder, recipe.encoder_lr, recipe.layer_decay)):
            early = recipe.stages.last > 0 and level > depth - recipe.last_blocks
            parts.append((group["params"], group["lr"], last if early else everything))
        return [
            {"params": some, "lr": 0.0, "peak": rate, "start": start, "weight_decay": decay}
            for params, rate, start in parts
            for some, decay in (
                ([p for p in params if p.ndim >= 2], recipe.weight_decay), ([p for p in params if p.ndim < 2], 0.0),
            )
            if some
        ]  # fmt: skip


def draw_paths(
    recipe: FinetuneRecipe, depth: int, learning: int, positions: Sequence[int]
) -> Float[Tensor, "depth 2 b"] | None:
    """Drop-path of the samples at `positions` of the stream, of blocks that learn: a function of seed and position."""
    if recipe.drop_path == 0 or learning == 0:
        return None
    rates = recipe.drop_path * np.linspace(0, 1, depth)
    rates[: max(0, depth - learning)] = 0
    drawn = np.stack([keys.generator(recipe.seed, "drop path", p).random((depth, 2)) for p in positions], axis=-1)
    scale = (drawn >= rates[:, None, None]) / (1 - rates[:, None, None])  # depth 2 b
    return torch.from_numpy(scale.astype(np.float32))


def each_loss(
    outputs: Float[Tensor, "b outputs"], truth: Float[Tensor, " b"], weight: Float[Tensor, " classes"] | None,
    smoothing: float,
) -> Float[Tensor, " b"]:  # fmt: skip
    """`networks.loss` volume by volume, so that shares of a batch add up over processes; NaN truth: no label, 0.

    weight: of each class, 1 on average over the training volumes; None: a standardised quantity, squared error.
    """
    known = torch.isfinite(truth)
    if weight is None:
        return torch.where(known, (outputs[:, 0] - truth.nan_to_num()) ** 2, 0.0)
    codes = truth.nan_to_num().long()
    target = F.one_hot(codes, len(weight)) * (1 - smoothing) + smoothing / len(weight)
    return torch.where(known, -weight[codes] * (target * outputs).sum(dim=1), 0.0)
