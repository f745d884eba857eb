"""Regularisers of the student's features: terms of the loss, or metrics of a run when their weight is 0.

`variance_covariance` is VICReg without invariance, and `sigreg` is LeJEPA's test against a standard normal.
`zone_sigreg` is LeJEPA on regions of the eye: the features pooled over a region should agree between two masks of the
same eye and be spread out over eyes. Balestriero and LeCun 2025 (arXiv 2511.08544) pool whole views of an image. Here
the views are the masks of an eye, and each region that `embed` pools (`octjepa.views.tokens.regions_at`) is pooled and
tested separately. The features are the encoder's output, without LeJEPA's projector. `view_sigreg` tests the
projections of views (LeVJEPA).

SIGReg is a function of sums over a batch: of sines and cosines, and of counts. If a batch is divided, `total`
replaces the sums of a part by those of the whole batch (`octjepa.train.step.BatchSums`).
"""

from __future__ import annotations

from collections.abc import Callable

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

Total = Callable[[Float[Tensor, " n"]], Float[Tensor, " n"]]


def unchanged(sums: Float[Tensor, " n"]) -> Float[Tensor, " n"]:
    """The total of a batch that is not divided."""
    return sums


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


def sigreg(features: Float[Tensor, "n w"], step: int, total: Total = unchanged) -> Float[Tensor, ""]:
    """LeJEPA's regulariser (Balestriero and LeCun 2025) by the statistic of Epps and Pulley (1983).

    n times the squared distance between the features' empirical characteristic function and a standard normal's along
    random directions, weighted by exp(-t^2 / 2), mean over directions. The directions are unit vectors drawn from the
    step number, so that a run repeats. t runs over 17 points of [0, 3] by the trapezoid rule; the other half of the
    axis adds as much. It is 1.05 on average for n draws of a standard normal, whatever n, and grows with n otherwise.
    """
    sums = sums_of_sets(features[:, None], torch.ones(len(features), 1, device=features.device), step)
    return sigreg_of_sums(total(sums), 1)[1][0]


def view_sigreg(views: Float[Tensor, "n v p"], step: int, total: Total = unchanged) -> Float[Tensor, ""]:
    """`sigreg` of each view number by itself over the `n` volumes, mean over the views: views of a volume are not
    independent draws."""
    sums = sums_of_sets(views, torch.ones(views.shape[:2], device=views.device), step)
    return sigreg_of_sums(total(sums), views.shape[1])[1].mean()


def sums_of_sets(
    features: Float[Tensor, "n sets w"], member: Float[Tensor, "n sets"], step: int
) -> Float[Tensor, " sums"]:
    """Sums for `sigreg_of_sums`: of each set (rows with `member` 1) the number of rows, and the sums of cosines and
    sines along the directions of `step`. Those of a batch are the sums of its parts'."""
    rng = torch.Generator().manual_seed(key("sigreg", step) % 2**63)
    basis = F.normalize(torch.randn(features.shape[-1], DIRECTIONS, generator=rng), dim=0).to(features.device)
    points = torch.linspace(0.0, _RANGE, _POINTS, device=features.device)
    angles = (features.float() @ basis).unsqueeze(-1) * points  # [n, sets, directions, points]
    shown = member[..., None, None]
    waves = [(angles.cos() * shown).sum(dim=0), (angles.sin() * shown).sum(dim=0)]
    return torch.cat([member.sum(dim=0), *(wave.flatten() for wave in waves)])


def sigreg_of_sums(sums: Float[Tensor, " sums"], sets: int) -> tuple[Float[Tensor, " sets"], Float[Tensor, " sets"]]:
    """(rows, `sigreg`) of each set, from `sums_of_sets`; 0 of a set of none."""
    points = torch.linspace(0.0, _RANGE, _POINTS, device=sums.device)
    normal = torch.exp(-points.square() / 2)
    count = sums[:sets]
    real, imaginary = sums[sets:].view(2, sets, DIRECTIONS, _POINTS) / count.clamp_min(1.0)[:, None, None]
    gap = (real - normal).square() + imaginary.square()  # [sets, directions, points]
    return count, count * 2.0 * torch.trapezoid(gap * normal, points, dim=-1).mean(dim=-1)


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
    features: Float[Tensor, "r n w"], regions: Int[Tensor, "r n"], masks: int, step: int, total: Total = unchanged
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
    apart = ((by_mask - centre).square().mean(dim=-1) * compared).sum()
    sets, member = (
        by_mask.transpose(0, 1).flatten(1, 2),
        seen.transpose(0, 1).flatten(1, 2),
    )  # [b, masks * regions(, w)]
    sums = total(torch.cat([torch.stack([apart, compared.sum()]), sums_of_sets(sets, member, step)]))
    invariance = sums[0] / sums[1].clamp_min(1.0)
    rows, statistic = sigreg_of_sums(sums[2:], sets.shape[1])
    tested = (rows >= FEWEST).float()
    spread = (statistic * tested).sum() / tested.sum().clamp_min(1.0)
    return (1.0 - SIGREG_SHARE) * invariance + SIGREG_SHARE * spread
