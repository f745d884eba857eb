"""The network that is tuned: an encoder, its tokens pooled in two ways, and a linear head for each target.

A head reads the mean, standard deviation and maximum over tokens, standardised by training volumes, and next to them
what a separate query finds by attention among tokens that know their positions, as in the attentive probe
(`evaluate.networks.AttentivePooling`). Heads start at zero: tuning begins where the linear probe does, so that what it
gains is the encoder's (Kumar et al. 2022, LP-FT).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from octjepa import keys
from octjepa.checkpoint.weights import Which
from octjepa.encoders.base import FrozenEncoder
from octjepa.encoders.pooling import TokenFeatures
from octjepa.evaluate.networks import WIDTH, AttentivePooling, Outputs, TokenBatch
from octjepa.metrics.scores import Task
from octjepa.recipe import Recipe
from octjepa.tasks.finetune.lora import Adapters, add_adapters
from octjepa.tasks.finetune.recipe import FinetuneRecipe
from octjepa.train.learner import layer_decay_groups, network_blocks, parameters_by_level
from octjepa.views.loader import collate
from octjepa.views.sample import make_sample, token_positions
from octjepa.views.tokens import grid_coordinates
from octjepa.volume import CanonicalVolume

TUNED_POOL = "mean_std_max+attention"
_EPS = 1e-6


def pooled(tokens: Float[Tensor, "b k dim"]) -> Float[Tensor, "b features"]:
    """As the pooling mean_std_max; where all tokens are alike the gradient stays finite."""
    std = (tokens.var(dim=1, correction=0) + _EPS**2).sqrt()
    return torch.cat([tokens.mean(dim=1), std, tokens.amax(dim=1)], dim=1)


@runtime_checkable
class TunableEncoder(FrozenEncoder, Protocol):
    """A frozen encoder that can be tuned. encoder: its network, whose blocks are the longest list of modules in it."""

    @property
    def encoder(self) -> Any: ...
    @property
    def recipe(self) -> Recipe: ...
    @property
    def which(self) -> Which: ...


class TunedNetwork(nn.Module):
    """`tasks` names each head's task and number of classes (0: a quantity); a head's outputs are those of `Outputs`."""

    mean: Tensor
    std: Tensor
    middle: Tensor
    half_size: Tensor
    reference_mean: Tensor
    reference_std: Tensor
    reference_limit: Tensor
    make_sample: Callable[..., Any] = staticmethod(make_sample)  # of a volume, for training
    collate: Callable[..., Any] = staticmethod(collate)  # samples -> what `encode_batch` takes

    def __init__(self, pretrained: TunableEncoder, tasks: Sequence[tuple[Task, int]]) -> None:
        super().__init__()
        self.pretrained = pretrained  # the same module as `encoder`, with the protocol of evaluation
        self.encoder = pretrained.encoder
        dim, recipe = pretrained.dim, pretrained.recipe
        heads = [Outputs(3 * dim + WIDTH, task, classes) for task, classes in tasks]
        for head in heads:
            for parameter in head.linear.parameters():
                nn.init.zeros_(parameter)
        self.heads = nn.ModuleList(heads)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)  # the same start whatever was drawn before, on every rank and after a resume
            self.pooling = AttentivePooling(torch.zeros(dim), torch.ones(dim), queries=len(heads))
        self._adapters: Adapters | None = None
        self.register_buffer("mean", torch.zeros(3 * dim))
        self.register_buffer("std", torch.ones(3 * dim))
        self.register_buffer("reference_mean", torch.zeros(3 * dim))  # of the training volumes after tuning
        self.register_buffer("reference_std", torch.ones(3 * dim))
        self.register_buffer("reference_limit", torch.tensor(float("inf")))  # of `distance`, beyond it a scan is unlike
        corners = token_positions(np.array([0, recipe.grid_tokens - 1]), recipe)
        middle = torch.from_numpy((corners[0] + corners[1]) / 2)
        half = torch.from_numpy((corners[1] - corners[0]) / 2) / (1 - 1 / torch.tensor(recipe.grid))
        self.register_buffer("middle", middle, persistent=False)  # of the grid, in the encoder's unit of positions
        self.register_buffer("half_size", half.nan_to_num(1.0), persistent=False)

    def forward(
        self, patches: Float[Tensor, "b k voxels"], positions: Float[Tensor, "b k 3"], paths: Tensor | None = None
    ) -> TokenBatch:
        """Token features, fp32, with their places in the grid; `paths` as in `model.blocks.Stack`."""
        self.encoder.blocks.paths = paths
        try:
            features: Tensor = self.encoder(patches, positions)
        finally:
            self.encoder.blocks.paths = None
        coordinates = (positions - self.middle) / self.half_size
        return TokenBatch(features.float(), coordinates, torch.ones_like(coordinates[..., 0], dtype=torch.bool))

    def encode_batch(self, batch: Any, paths: Tensor | None = None) -> TokenBatch:
        """`forward` of a batch as `collate` makes it, on the network's device."""
        device = self.mean.device
        tokens: TokenBatch = self(
            batch.context_view.to(device), batch.positions.to(device), None if paths is None else paths.to(device)
        )
        return tokens

    @property
    def depth(self) -> int:
        """Number of the encoder's blocks."""
        return len(network_blocks(self.encoder))

    def set_scale(self, volumes: Float[Tensor, "n features"]) -> None:
        """Standardises what the heads read by `pool` of (some of) the training volumes."""
        self.mean.copy_(volumes.mean(dim=0))
        self.std.copy_(volumes.std(dim=0, correction=0).clamp_min(1e-6))
        means, deviations, _ = volumes.chunk(3, dim=1)
        self.pooling.mean.copy_(means.mean(dim=0))
        variance = (deviations**2).mean(dim=0) + means.var(dim=0, correction=0)
        self.pooling.std.copy_(variance.sqrt().clamp_min(1e-6))

    def set_reference(self, training: Float[Tensor, "n features"], held_out: Float[Tensor, "m features"]) -> None:
        """How `pool` of training volumes spreads, and how far 99 % of volumes that did not train it are from that.

        Without `held_out` each half of the training volumes is compared with the other: a volume is nearer to a spread
        that it is a part of.
        """
        training, held_out = training.to(self.reference_mean), held_out.to(self.reference_mean)
        even, odd = training[0::2], training[1::2]
        distances = []
        for fitted, others in ((even, odd), (odd, even), (training, held_out)):
            self.reference_mean.copy_(fitted.mean(dim=0))
            self.reference_std.copy_(fitted.std(dim=0, correction=0).clamp_min(1e-6))
            distances.append(self.distance(others))
        compared = distances[2] if len(held_out) else torch.cat(distances[:2])
        self.reference_limit.copy_(compared.quantile(0.99))

    def distance(self, volumes: Float[Tensor, "n features"]) -> Float[Tensor, " n"]:
        """Of each volume's `pool` from the training volumes: root mean square of its features in their deviations."""
        return ((volumes - self.reference_mean) / self.reference_std).square().mean(dim=1).sqrt()

    def head_outputs(self, tokens: TokenBatch) -> list[Float[Tensor, "b _"]]:
        """Of each head, from tokens, none of them filling: log-probabilities of the classes, or the standardised
        quantity."""
        x = (pooled(tokens.features) - self.mean) / self.std
        attended = self.pooling(tokens)  # [b, heads, WIDTH]
        return [head(torch.cat([x, attended[:, number]], dim=1)) for number, head in enumerate(self.heads)]

    @torch.no_grad()
    def pool(self, volumes: Sequence[CanonicalVolume]) -> Float[Tensor, "b features"]:
        """`pooled` of whole volumes as embedding sees them (no augmentation, all tissue), not standardised."""
        return torch.cat([pooled(tokens.features) for tokens in self._whole(volumes)])

    @torch.no_grad()
    def predict_with_distance(self, volumes: Sequence[CanonicalVolume]) -> tuple[list[Float[Tensor, "b _"]], Tensor]:
        """`predict`, and the `distance` of each volume."""
        each, distances = [], []
        for tokens in self._whole(volumes):
            each.append(self.head_outputs(tokens))
            distances.append(self.distance(pooled(tokens.features)))
        return [torch.cat(outputs) for outputs in zip(*each, strict=True)], torch.cat(distances)

    @torch.no_grad()
    def predict(self, volumes: Sequence[CanonicalVolume]) -> list[Float[Tensor, "b _"]]:
        """`head_outputs` of whole volumes as embedding sees them."""
        each = [self.head_outputs(tokens) for tokens in self._whole(volumes)]
        return [torch.cat(outputs) for outputs in zip(*each, strict=True)]

    @torch.no_grad()
    def attention(self, volume: CanonicalVolume) -> tuple[Int[np.ndarray, " k"], Float[np.ndarray, "heads k"]]:
        """The index of each token of a whole volume in the raster of the grid, and its share for each target."""
        (tokens,) = self.pretrained.encode_volumes([volume])
        shares = self.pooling.attention(self._batch(tokens))[0]  # [queries, HEADS, k]
        return tokens.grid_index, shares.mean(dim=1).cpu().numpy()

    def _whole(self, volumes: Sequence[CanonicalVolume]) -> Iterator[TokenBatch]:
        """The tokens of each volume, which differ in number."""
        yield from map(self._batch, self.pretrained.encode_volumes(volumes))

    def _batch(self, tokens: TokenFeatures) -> TokenBatch:
        device = self.mean.device
        coordinates = torch.from_numpy(grid_coordinates(tokens.grid_index, tokens.grid)[None])
        valid = torch.ones(coordinates.shape[:2], dtype=torch.bool, device=device)
        return TokenBatch(torch.from_numpy(tokens.features[None]).to(device), coordinates.to(device), valid)

    def add_adapters(self, recipe: FinetuneRecipe, volume: CanonicalVolume) -> None:
        """Only adapters of the encoder learn from now on; `volume` shows that it uses them. Raises UsageError."""
        self._adapters = add_adapters(self.encoder, recipe.lora, recipe.seed)
        self._adapters.require_calls(lambda: self.pool([volume]))

    def merge_adapters(self) -> None:
        """Adds what the adapters learned to the encoder's weights and removes them; without adapters nothing."""
        if self._adapters is not None:
            self._adapters.merge()
            self._adapters = None

    @property
    def learning_parameters(self) -> set[nn.Parameter]:
        """Parameters of the encoder that tuning may change: all, or those of adapters."""
        return set(self.encoder.parameters() if self._adapters is None else self._adapters.parameters)

    def unfreeze(self, blocks: int) -> None:
        """The heads learn, and the encoder's last `blocks` with its final norm; more than it has: all of it.

        With adapters only those in these blocks.
        """
        levels, learning = parameters_by_level(self.encoder), self.learning_parameters
        frozen = len(levels) - blocks
        for level, parameters in enumerate(levels):
            for parameter in parameters:
                parameter.requires_grad_(level >= frozen and parameter in learning)
        self.heads.requires_grad_(True)
        self.pooling.requires_grad_(True)

    def groups(self, recipe: FinetuneRecipe) -> list[dict[str, Any]]:
        """AdamW's groups. `peak`: the highest rate. `start`: the first update that trains the group. 1-D weights do not
        decay."""
        depth, learning = self.depth, self.learning_parameters
        last, everything = recipe.starts
        parts = [([*self.heads.parameters(), *self.pooling.parameters()], recipe.head_lr, 0)]
        # level 0 is the patch embedding, level n block n
        for level, group in enumerate(layer_decay_groups(self.encoder, recipe.encoder_lr, recipe.layer_decay)):
            early = recipe.stages.last > 0 and level > depth - min(recipe.last_blocks, depth)
            params = [parameter for parameter in group["params"] if parameter in learning]
            parts.append((params, group["lr"], last if early else everything))
        return [
            {"params": parameters, "lr": 0.0, "peak": rate, "start": start, "weight_decay": decay}
            for params, rate, start in parts
            for parameters, decay in (
                ([p for p in params if p.ndim >= 2], recipe.weight_decay),
                ([p for p in params if p.ndim < 2], 0.0),
            )
            if parameters
        ]


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
    outputs: Float[Tensor, "b outputs"],
    truth: Float[Tensor, " b"],
    weight: Float[Tensor, " classes"] | None,
    smoothing: float,
) -> Float[Tensor, " b"]:
    """`networks.loss` volume by volume, so that shares of a batch add up over processes; NaN truth: no label, 0.

    weight: of each class, 1 on average over the training volumes; None: a standardised quantity, squared error.
    """
    is_known = torch.isfinite(truth)
    if weight is None:
        return torch.where(is_known, (outputs[:, 0] - truth.nan_to_num()) ** 2, 0.0)
    codes = truth.nan_to_num().long()
    target = F.one_hot(codes, len(weight)) * (1 - smoothing) + smoothing / len(weight)
    return torch.where(is_known, -weight[codes] * (target * outputs).sum(dim=1), 0.0)
