"""The two probes that are trained by gradient steps: a small MLP on pooled features, and an attentive one on tokens.

The attentive probe is one cross-attention block (one learned query over a volume's tokens, as in V-JEPA; kept narrow,
for wide ones overfit a few thousand volumes), so its pooling is learned from the labels. Both have one output layer for
each task: classes, ordered classes (one score and ordered thresholds, McCullagh 1980), or a quantity.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from octjepa.metrics.scores import Task

WIDTH = 64
HEADS = 4


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


class AttentiveProbe(nn.Module):
    """A learned query attends to a volume's tokens, then an MLP; tokens enter standardised by `mean` and `std`."""

    mean: Tensor
    std: Tensor

    def __init__(self, mean: Float[Tensor, " dim"], std: Float[Tensor, " dim"], task: Task, classes: int) -> None:
        super().__init__()
        self.register_buffer("mean", mean)
        self.register_buffer("std", std)
        self.query = nn.Parameter(torch.randn(HEADS, WIDTH // HEADS) * 0.02)
        self.key, self.value = (nn.Linear(len(mean), WIDTH) for _ in range(2))
        self.out = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Dropout(0.3), nn.Linear(WIDTH, WIDTH))
        self.outputs = Outputs(WIDTH, task, classes)

    def attention(self, tokens: Float[Tensor, "n k dim"]) -> Float[Tensor, "n h k"]:
        """Share of each token, for each head."""
        keys = self.key((tokens - self.mean) / self.std).unflatten(-1, self.query.shape)
        scores = torch.einsum("hf,nkhf->nhk", self.query, keys) * keys.shape[-1] ** -0.5
        return scores.softmax(dim=-1)

    def forward(self, tokens: Float[Tensor, "n k dim"]) -> Float[Tensor, "n outputs"]:
        values = self.value((tokens - self.mean) / self.std).unflatten(-1, self.query.shape)
        pooled = torch.einsum("nhk,nkhf->nhf", self.attention(tokens), values).flatten(1)
        x = self.out(pooled)
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
