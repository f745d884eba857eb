"""LeJEPA on pooled zones: what is pooled over a part of the eye, from two masks of it, agrees and is spread out.

Balestriero and LeCun 2025 (arXiv 2511.08544) pool whole views of an image. An eye's views are its masks here, and each
of the regions that `embed` pools (`octjepa.views.tokens.regions_at`) is pooled and tested by itself. The features are
the encoder's own: LeJEPA puts a projector between, which is left away.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor

from octjepa.objective.sigreg import sigreg_of_sets
from octjepa.views.tokens import REGIONS

SIGREG_SHARE = 0.05  # of the sum; the rest is invariance (LeJEPA's lambda)
FEWEST = 8  # eyes that show a region: of fewer no distribution can be told


def pool_regions(
    features: Float[Tensor, "r n w"], regions: Int[Tensor, "r n"]
) -> tuple[Float[Tensor, "r regions w"], Float[Tensor, "r regions"]]:
    """(the mean of each region's tokens, 0 where it has none; 1 where it has any, else 0)."""
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
    mask at a time, since the masks of an eye are no independent draws.
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
