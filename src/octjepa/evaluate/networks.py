"""The two probes that are trained by gradient steps: a small MLP on pooled features, and an attentive one on tokens.

The attentive probe is one cross-attention block (one learned query over a volume's tokens, as in V-JEPA; kept narrow,
because wide networks overfit a few thousand volumes), so its pooling is learned from the labels. It knows where each
token is: a learned embedding of the position is added to the features (`TokenPositions`). Both have one output layer
for each task: classes, ordered classes (one score and ordered thresholds, McCullagh 1980), or a quantity.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from octjepa.metrics.scores import Task

WIDTH = 64
HEADS = 4
OCTAVES = 5  # of the sines of a coordinate: the shortest wave is an eighth of the grid


@dataclass(frozen=True)
class TokenBatch:
    """Tokens of n volumes, filled up to k each; `valid` says which are tokens.

    coordinates: (slice, depth, column), from -1 to 1 over the grid.
    """

    features: Float[Tensor, "n k dim"]
    coordinates: Float[Tensor, "n k 3"]
    valid: Bool[Tensor, "n k"]

    def __getitem__(self, volumes: slice | Tensor) -> TokenBatch:
        return TokenBatch(self.features[volumes], self.coordinates[volumes], self.valid[volumes])


class Outputs(nn.Module):
    """Log-probabilities of the classes, or the predicted quantity."""

    def __init__(self, width: int, task: Task, classes: int) -> None:
        super().__init__()
        self.task = task
        ordinal = task == "ordinal"
        self.linear = nn.Linear(width, 1 if ordinal or not classes else classes)
        if ordinal:
            self.first = nn.Parameter(torch.tensor(-(classes - 2) / 2))
            # softplus(0.54) is 1: thresholds a unit apart to begin with
            self.steps = nn.Parameter(torch.full((classes - 2,), 0.54))

    def forward(self, x: Float[Tensor, "n w"]) -> Float[Tensor, "n outputs"]:
        outputs: Tensor = self.linear(x)
        if self.task == "regression":
            return outputs
        if self.task != "ordinal":
            return outputs.log_softmax(dim=1)
        thresholds = torch.cat([self.first[None], self.first + F.softplus(self.steps).cumsum(dim=0)])
        above = torch.sigmoid(outputs - thresholds)
        edge = torch.ones_like(outputs)
        shares = torch.cat([edge, above], dim=1) - torch.cat([above, 0 * edge], dim=1)
        return shares.clamp_min(1e-6).log()


class MLP(nn.Module):
    """One hidden layer."""

    def __init__(self, features: int, task: Task, classes: int) -> None:
        super().__init__()
        self.hidden = nn.Sequential(nn.Linear(features, WIDTH), nn.GELU(), nn.Dropout(0.3))
        self.outputs = Outputs(WIDTH, task, classes)

    def forward(self, x: Float[Tensor, "n features"]) -> Float[Tensor, "n outputs"]:
        return self.outputs(self.hidden(x))


class TokenPositions(nn.Linear):
    """Coordinates from -1 to 1 -> [.., dim]: sines and cosines of `OCTAVES` wavelengths an axis, then one layer."""

    def __init__(self, dim: int) -> None:
        super().__init__(3 * 2 * OCTAVES, dim)

    def forward(self, coordinates: Float[Tensor, "n k 3"]) -> Float[Tensor, "n k dim"]:
        frequencies = math.pi / 2 * 2.0 ** torch.arange(OCTAVES, device=coordinates.device)
        angles = (coordinates[..., None] * frequencies).flatten(-2)  # [n, k, 3 * OCTAVES]
        return super().forward(torch.cat([angles.sin(), angles.cos()], dim=-1))


class AttentivePooling(nn.Module):
    """`queries` learned queries, each of `HEADS` heads, attend to a volume's tokens; one vector a query.

    Tokens are standardised by `mean` and `std`, and a learned embedding of their positions is added.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, mean: Float[Tensor, " dim"], std: Float[Tensor, " dim"], queries: int = 1) -> None:
        super().__init__()
        self.register_buffer("mean", mean)
        self.register_buffer("std", std)
        self.positions = TokenPositions(len(mean))
        self.query = nn.Parameter(torch.randn(queries, HEADS, WIDTH // HEADS) * 0.02)
        self.key, self.value = (nn.Linear(len(mean), WIDTH) for _ in range(2))
        self.out = nn.Linear(WIDTH, WIDTH)

    def attention(self, tokens: TokenBatch) -> Float[Tensor, "n q h k"]:
        """Share of each token, for each query and head; none of what fills a volume up."""
        return self._attention(self._inputs(tokens), tokens.valid)

    def forward(self, tokens: TokenBatch) -> Float[Tensor, "n q w"]:
        x = self._inputs(tokens)
        values = self.value(x).unflatten(-1, (HEADS, -1))
        pooled = torch.einsum("nqhk,nkhf->nqhf", self._attention(x, tokens.valid), values).flatten(2)
        vectors: Tensor = self.out(pooled)
        return vectors

    def _inputs(self, tokens: TokenBatch) -> Float[Tensor, "n k dim"]:
        standardised = (tokens.features - self.mean) / self.std
        return standardised + self.positions(tokens.coordinates)

    def _attention(self, x: Float[Tensor, "n k dim"], valid: Bool[Tensor, "n k"]) -> Float[Tensor, "n q h k"]:
        keys = self.key(x).unflatten(-1, (HEADS, -1))
        scores = torch.einsum("qhf,nkhf->nqhk", self.query, keys) * keys.shape[-1] ** -0.5
        return scores.masked_fill(~valid[:, None, None], -torch.inf).softmax(dim=-1)


class AttentiveProbe(nn.Module):
    """Attention pooling by one query, then an MLP; `mean` and `std` are of the tokens' features."""

    def __init__(self, mean: Float[Tensor, " dim"], std: Float[Tensor, " dim"], task: Task, classes: int) -> None:
        super().__init__()
        self.pooling = AttentivePooling(mean, std)
        self.norm = nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Dropout(0.3), nn.Linear(WIDTH, WIDTH))
        self.outputs = Outputs(WIDTH, task, classes)

    def forward(self, tokens: TokenBatch) -> Float[Tensor, "n outputs"]:
        x = self.pooling(tokens)[:, 0]
        return self.outputs(x + self.mlp(self.norm(x)))


def loss(
    outputs: Float[Tensor, "n outputs"],
    truth: Int[Tensor, " n"] | Float[Tensor, " n"],
    weight: Float[Tensor, " classes"] | None,
    smoothing: float = 0.0,
) -> Tensor:
    """Mean squared error, or cross-entropy in which a volume weighs as its class; `smoothing` of the target is spread
    evenly over the classes (Szegedy et al. 2016)."""
    if weight is None:
        return F.mse_loss(outputs[:, 0], truth)
    target = F.one_hot(truth, len(weight)) * (1 - smoothing) + smoothing / len(weight)
    each = weight[truth]
    return -(each * (target * outputs).sum(dim=1)).sum() / each.sum()
