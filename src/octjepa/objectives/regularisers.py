"""Regularisers of the student's features: terms of the loss, or metrics of a run when their weight is 0.

`variance_covariance` is VICReg without invariance, and `sigreg` is LeJEPA's test against a standard normal.
`zone_sigreg` is LeJEPA on regions of the eye: the features pooled over a region should agree between two masks of the
same eye and be spread out over eyes. Balestriero and LeCun 2025 (arXiv 2511.08544) pool whole views of an image. Here
the views are the masks of an eye, and each region that `embed` pools (`octjepa.views.tokens.regions_at`) is pooled and
tested separately. The features are the encoder's output, without LeJEPA's projector.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from octjepa.keys import key
from octjepa.views.tokens import REGIONS

DIRECTIONS = 64
_POINTS = 17
_RANGE = 3.0
_STD_EPS = 1e-4
SIGREG_SHARE = 0.05  # of the sum; the rest is invariance (LeJEPA's lambda)
FEWEST = 8  # eyes that show a region; fewer eyes do not show a distribution


def variance_covariance(features: Float[Tensor, "n w"]) -> Float[Tensor, ""]:
    """VICReg's terms without invariance (Bardes, Ponce and LeCun 2022).

    Mean hinge of each feature's standard deviation below 1, plus the squared covariances summed and divided by w.
    """
    centred = features.float() - features.float().mean(dim=0)
    count, width = centred.shape
    std = (centred.square().sum(dim=0) / (count - 1) + _STD_EPS).sqrt()  # [w]
    covariance = centred.T @ centred / (count - 1)  # [w, w]
    off_diagonal = covariance.square().sum() - covariance.diagonal().square().sum()
    return F.relu(1.0 - std).mean() + off_diagonal / width


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


def pool_regions(
    features: Float[Tensor, "r n w"], regions: Int[Tensor, "r n"]
) -> tuple[Float[Tensor, "r regions w"], Float[Tensor, "r regions"]]:
    """(the mean of each region's tokens, 0 if it has none; 1 if it has any, else 0)."""
    every = torch.arange(REGIONS, device=regions.device)
    inside = (regions.unsqueeze(-1) == every).to(features.dtype)  # [r, n, regions]
    counts = inside.sum(dim=1)  # [r, regions]
    means = inside.transpose(1, 2) @ features / counts.clamp_min(1.0).unsqueeze(-1)
    return means, counts.clamp_max(1.0)


def zone_sigreg(
    features: Float[Tensor, "r n w"], regions: Int[Tensor, "r n"], masks: int, step: int
) -> Float[Tensor, ""]:
    """LeJEPA's loss of pooled regions, fp32; row `i * b + j` of the `r` is mask `i` of `masks` of sample `j`.

    Invariance is the mean squared distance of a region's mean from its average over the masks of its eye, where more
    than one of them shows it. SIGReg is the mean over the regions and masks in which at least eight eyes show it: one
    mask at a time, since the masks of an eye are not independent draws.
    """
    pooled, shown = pool_regions(features.float(), regions)
    by_mask, seen = pooled.unflatten(0, (masks, -1)), shown.unflatten(0, (masks, -1))  # [masks, b, regions(, w)]
    seen_by = seen.sum(dim=0)  # [b, regions]
    centre = by_mask.sum(dim=0) / seen_by.clamp_min(1.0).unsqueeze(-1)  # [b, regions, w]: unseen means are 0
    compared = seen * (seen_by > 1)
    invariance = ((by_mask - centre).square().mean(dim=-1) * compared).sum() / compared.sum().clamp_min(1.0)
    sets, member = (
        by_mask.transpose(0, 1).flatten(1, 2),
        seen.transpose(0, 1).flatten(1, 2),
    )  # [b, masks * regions(, w)]
    tested = (member.sum(dim=0) >= FEWEST).float()
    spread = (sigreg_of_sets(sets, member, step) * tested).sum() / tested.sum().clamp_min(1.0)
    return (1.0 - SIGREG_SHARE) * invariance + SIGREG_SHARE * spread
