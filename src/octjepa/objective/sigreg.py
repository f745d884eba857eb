"""SIGReg: a test of features against a standard normal, as a term of the loss or as a meter."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from octjepa.keys import key

DIRECTIONS = 64
_POINTS = 17
_RANGE = 3.0


def sigreg(features: Float[Tensor, "n w"], step: int) -> Float[Tensor, ""]:
    """LeJEPA's regulariser (Balestriero and LeCun 2025) by the statistic of Epps and Pulley (1983).

    n times the squared distance between the features' empirical characteristic function and a standard normal's along
    random directions, weighted by exp(-t^2 / 2), mean over directions. The directions are unit vectors drawn from the
    step number, so that a run repeats. t runs over 17 points of [0, 3] by the trapezoid rule; the other half of the
    axis adds as much. It is 1.05 on average for n draws of a standard normal, whatever n, and grows with n otherwise.
    """
    return sigreg_of_sets(features[:, None], torch.ones(len(features), 1, device=features.device), step)[0]


def sigreg_of_sets(
    features: Float[Tensor, "n sets w"], member: Float[Tensor, "n sets"], step: int
) -> Float[Tensor, " sets"]:
    """`sigreg` of each set of features by itself, which has the rows where `member` is 1; 0 of a set of none."""
    rng = torch.Generator().manual_seed(key("sigreg", step) % 2**63)
    basis = F.normalize(torch.randn(features.shape[-1], DIRECTIONS, generator=rng), dim=0).to(features.device)
    points = torch.linspace(0.0, _RANGE, _POINTS, device=features.device)
    count = member.sum(dim=0)  # [sets]
    angles = (features.float() @ basis).unsqueeze(-1) * points  # [n, sets, directions, points]
    normal = torch.exp(-points.square() / 2)
    shown, rows = member[..., None, None], count.clamp_min(1.0)[:, None, None]
    real, imaginary = (angles.cos() * shown).sum(dim=0) / rows, (angles.sin() * shown).sum(dim=0) / rows
    gap = (real - normal).square() + imaginary.square()  # [sets, directions, points]
    return count * 2.0 * torch.trapezoid(gap * normal, points, dim=-1).mean(dim=-1)
