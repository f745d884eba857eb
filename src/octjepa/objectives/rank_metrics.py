"""Label-free metrics of a set of features that show collapse or usefulness; none of them trains anything.

`features` is `[n, w]`: n tokens (or volumes) of w features. Each is cheap for a few thousand tokens.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

Features = Float[Tensor, "n w"]
_TINY = 1e-12


def rank_me(features: Features) -> float:
    """RankMe (Garrido et al. 2023): exp of the entropy of the normalised singular values. Low means collapse."""
    singular = torch.linalg.svdvals(features.double())
    share = singular / singular.sum().clamp_min(_TINY) + _TINY
    return float(torch.exp(-(share * share.log()).sum()))


def alpha_req(features: Features) -> float:
    """alpha-ReQ (Agrawal et al. 2022): the exponent of the power law that the covariance's eigenvalues follow.

    The slope of log eigenvalue over log rank by least squares, sign turned. Near 1 is considered healthy. Far above,
    a few directions carry all variance. Near 0, features are noise.
    """
    centred = features.double() - features.double().mean(dim=0)
    values = torch.linalg.svdvals(centred).square()
    values = values[values > values.max() * 1e-10]
    if len(values) < 3:
        return math.inf
    rank = torch.arange(1, len(values) + 1, dtype=torch.float64).log()
    log_values = values.log()
    slope = ((rank - rank.mean()) * (log_values - log_values.mean())).sum() / (rank - rank.mean()).square().sum()
    return -float(slope)


def lidar(groups: Float[Tensor, "volumes views w"]) -> float:
    """LiDAR (Thilak et al. 2024): effective rank of the variance between volumes, whitened by that within them.

    `groups` are features of several views of each volume. exp of the entropy of the normalised eigenvalues of
    W^-1/2 B W^-1/2, W the covariance within volumes, B that of the volumes' means. 0 if nothing separates them.

    The paper has 1,000 samples of 50 views and adds 1e-4 to W's diagonal. With 32 of 3 that would make a full rank of
    only noise, because W has no more than 64 directions and the means carry a third of the noise. So W is shrunk, and
    of each eigenvalue only what exceeds the largest that noise would give counts (the edge of Marchenko and Pastur);
    how much noise whitening leaves is estimated from one half's W in units of the other's. NaN for fewer than two
    volumes or views.
    """
    values = groups.double()
    volumes, views, _ = values.shape
    if volumes < 2 or views < 2:
        return math.nan
    means = values.mean(dim=1)
    apart = means - means.mean(dim=0)
    _, shrunk = _within(values)
    level, basis = torch.linalg.eigh(shrunk)
    # B has rank below the number of volumes: its eigenvalues are those of a small Gram matrix.
    between = torch.linalg.svdvals(apart @ basis / level.sqrt()).square() / (volumes - 1)
    (first, one_shrunk), (other, other_shrunk) = _within(values[::2]), _within(values[1::2])
    noise = float((torch.linalg.solve(one_shrunk, other) + torch.linalg.solve(other_shrunk, first)).trace()) / 2
    edge = (math.sqrt(noise / (volumes - 1)) + 1) ** 2 / views
    signal = (between - edge).clamp_min(0)
    if float(signal.sum()) == 0:
        return 0.0
    share = signal / signal.sum() + _TINY
    return float(torch.exp(-(share * share.log()).sum()))


def _within(values: Float[Tensor, "volumes views w"]) -> tuple[Float[Tensor, "w w"], Float[Tensor, "w w"]]:
    """The covariance within volumes, and the same shrunk towards its mean variance (Ledoit and Wolf 2004)."""
    volumes, views, width = values.shape
    residuals = (values - values.mean(dim=1, keepdim=True)).flatten(0, 1) * math.sqrt(views / (views - 1))
    covariance = residuals.T @ residuals / len(residuals)
    even = (covariance.trace() / width).clamp_min(_TINY) * torch.eye(width, dtype=torch.float64)
    error = (residuals.square().sum(dim=1).square().mean() - covariance.square().sum()) / (volumes * (views - 1))
    weight = (error / (covariance - even).square().sum().clamp_min(_TINY)).clamp(1e-6, 1)  # 0 would leave a null space
    return covariance, covariance.lerp(even, weight)


def spread(features: Features) -> float:
    """Mean standard deviation of a feature over the tokens: 0 when all are equal."""
    return float(features.float().std(dim=0).mean())


def pair_cosine(features: Features) -> float:
    """Mean cosine over all pairs of different tokens: 1 when all point the same way."""
    unit = F.normalize(features.double(), dim=-1)
    count = len(unit)
    together = unit.sum(dim=0).square().sum() - unit.square().sum()
    return float(together / max(count * (count - 1), 1))


def position_share(features: Features, position: Int[Tensor, " n"]) -> float:
    """Share of the features' variance that the grid position explains: between positions over total, 0 to 1.

    Near 1 the features encode where a token is and not what is there. Positions that occur once are left out, because
    they would explain themselves.
    """
    names, index, counts = position.unique(return_inverse=True, return_counts=True)
    repeated = counts[index] > 1
    if not bool(repeated.any()):
        return math.nan
    values, index = features.double()[repeated], index[repeated]
    sums = torch.zeros(len(names), values.shape[1], dtype=torch.float64).index_add_(0, index, values)
    means = sums / counts.clamp_min(1).unsqueeze(1)
    total = (values - values.mean(dim=0)).square().sum()
    within = (values - means[index]).square().sum()
    positions = int((counts > 1).sum())
    # Adjusted for the positions' own degrees of freedom, as in adjusted R squared: random features read 0.
    spare = (len(values) - 1) / max(len(values) - positions, 1)
    return float((1 - within / total.clamp_min(_TINY) * spare).clamp(0, 1))


def separability(features: Features, kind: Int[Tensor, " n"]) -> float:
    """Balanced accuracy of classifying `kind` by the nearest class mean of the other half of the tokens.

    Chance is 1 / kinds. Kinds that occur in one half only are left out; NaN with fewer than two left.
    """
    unit = F.normalize(features.double() - features.double().mean(dim=0), dim=-1)
    half = torch.arange(len(kind)) % 2
    names = kind.unique()
    names = names[torch.isin(names, kind[half == 0]) & torch.isin(names, kind[half == 1])]
    if len(names) < 2:
        return math.nan
    hits = torch.zeros(len(names), dtype=torch.float64)
    for side in (0, 1):
        means = torch.stack([unit[(kind == name) & (half == side)].mean(dim=0) for name in names])
        chosen = names[(unit[half != side] @ means.T).argmax(dim=1)]
        truth = kind[half != side]
        hits += torch.stack([(chosen[truth == name] == name).double().mean() for name in names]) / 2
    return float(hits.mean())
