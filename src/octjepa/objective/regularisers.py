"""Terms against collapse, on the student's features: with a weight they train, with weight 0 they only measure.

`variance_covariance` after VICReg (Bardes, Ponce and LeCun 2022), without its invariance term. `sigreg` after LeJEPA
(Balestriero and LeCun 2025): along random directions the empirical characteristic function of the features is held
against that of a standard normal (the statistic of Epps and Pulley 1983).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from octjepa.keys import key

DIRECTIONS = 64
_POINTS = 17
_REACH = 3.0
_STD_EPS = 1e-4

Features = Float[Tensor, "n w"]


def variance_covariance(features: Features) -> Float[Tensor, ""]:
    """Mean hinge of each feature's standard deviation below 1, plus the squared covariances summed and divided by w."""
    centred = features.float() - features.float().mean(dim=0)
    count, width = centred.shape
    deviation = (centred.square().sum(dim=0) / (count - 1) + _STD_EPS).sqrt()
    covariance = centred.T @ centred / (count - 1)
    off_diagonal = covariance.square().sum() - covariance.diagonal().square().sum()
    return F.relu(1.0 - deviation).mean() + off_diagonal / width


def sigreg(features: Features, step: int, directions: int = DIRECTIONS) -> Float[Tensor, ""]:
    """n times the squared distance of characteristic functions, weighted by exp(-t^2 / 2), mean over directions.

    The directions are unit vectors drawn from the step number, so that a run repeats. t runs over 17 points of [0, 3]
    by the trapezoid rule; the other half of the axis adds as much. 1.05 on average for n draws of a standard
    normal, whatever n; it grows with n for anything else.
    """
    count, width = features.shape
    drawn = torch.Generator().manual_seed(key("sigreg", step) % 2**63)
    basis = F.normalize(torch.randn(width, directions, generator=drawn), dim=0).to(features.device)
    points = torch.linspace(0.0, _REACH, _POINTS, device=features.device)
    angles = (features.float() @ basis).unsqueeze(-1) * points
    normal = torch.exp(-points.square() / 2)
    gap = (angles.cos().mean(dim=0) - normal).square() + angles.sin().mean(dim=0).square()
    return count * 2.0 * torch.trapezoid(gap * normal, points, dim=-1).mean()
