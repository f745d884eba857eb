"""The losses, each a mean over hidden tokens, so that any split of a batch into equal parts averages to the whole.

`l1` is V-JEPA 2's (Assran et al. 2025): mean |p - t| on layer-normed targets.
`normalized_mse` is the squared distance of unit vectors, *summed* over features. Averaged over D
features an orthogonal guess would read 2/D and look like success; summed, it reads 2.
"""

from __future__ import annotations

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

Tokens = Float[Tensor, "b m w"]


def l1(predicted: Tokens, target: Tokens) -> Float[Tensor, ""]:
    return (predicted.float() - target.float()).abs().mean()


def normalized_mse(predicted: Tokens, target: Tokens) -> Float[Tensor, ""]:
    """In [0, 4]: 0 equal direction, 2 orthogonal. Equals 2 - 2 cosine."""
    p, t = F.normalize(predicted.float(), dim=-1), F.normalize(target.float(), dim=-1)
    return (p - t).square().sum(dim=-1).mean()


def cosine(predicted: Tokens, target: Tokens) -> Float[Tensor, ""]:
    """Mean cosine over hidden tokens, logged beside every loss."""
    return F.cosine_similarity(predicted.float(), target.float(), dim=-1).mean()


def pixel_mse(predicted: Tokens, target: Tokens) -> Float[Tensor, ""]:
    """MAE's (He et al. 2022): squared error of normalised pixels, mean over a patch's pixels; 1 for an empty guess."""
    return (predicted.float() - target.float()).square().mean()


LOSSES = {"vjepa": l1, "vjepa_dense": l1, "normalized_mse": normalized_mse, "mae": pixel_mse}


def loss_of(objective: str, predicted: Tokens, target: Tokens) -> Float[Tensor, ""]:
    """The loss of the objective called so."""
    value: Tensor = LOSSES[objective](predicted, target)
    return value
