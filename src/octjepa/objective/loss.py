"""What an update minimises: the objective's loss, plus the regularisers that a recipe adds to it.

Regularisers act on the student's features: with a weight they train, with weight 0 they only measure.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from octjepa.keys import key
from octjepa.objective.base import Prediction, gather_tokens, get_objective
from octjepa.recipe import ObjectiveRecipe, Recipe

DIRECTIONS = 64
_POINTS = 17
_RANGE = 3.0
_STD_EPS = 1e-4


def distance_weight(
    positions: Float[Tensor, "b t 3"], context: Int[Tensor, "r n"], target: Int[Tensor, "r m"]
) -> Float[Tensor, "r n"]:
    """1 / sqrt(distance to the nearest hidden token), in tokens, at least 1 (V-JEPA 2.1).

    Far from a mask there is little to learn from repeating what is visible.
    """
    between = torch.cdist(gather_tokens(positions, context).float(), gather_tokens(positions, target).float())
    return between.amin(dim=-1).clamp_min(1.0).rsqrt()  # [r, n, m] -> [r, n]


def token_grid_positions(grid_index: Int[Tensor, "b t"], grid: tuple[int, int, int]) -> Float[Tensor, "b t 3"]:
    """Positions in the grid (slice, depth, column), in tokens, from raster indices."""
    _, depths, columns = grid
    plane = depths * columns
    positions = [grid_index // plane, grid_index % plane // columns, grid_index % columns]
    return torch.stack(positions, dim=-1).float()


def recipe_at_update(recipe: Recipe, update: int, total: int) -> Recipe:
    """The recipe with the weight of visible tokens at `update` (from 0) of `total`: it rises linearly to the recipe's.

    At first a visible token is easily repeated and a hidden one is not predicted yet (V-JEPA 2.1).
    """
    objective = recipe.objective
    share = (update + 1) / max(objective.share_of_visible_warmup * total, 1.0)
    if share >= 1.0 or not get_objective(objective.name).supervises_visible:
        return recipe
    warm = objective.model_copy(update={"visible_weight": objective.weight_of_visible * share})
    return recipe.model_copy(update={"objective": warm})


def training_loss(
    recipe: ObjectiveRecipe,
    prediction: Prediction,
    grid_positions: Float[Tensor, "b t 3"],
    context: Int[Tensor, "r n"],
    target: Int[Tensor, "r m"],
    update: int,
) -> tuple[Float[Tensor, ""], dict[str, Tensor]]:
    """(the sum to minimise, its parts by name, detached). `grid_positions` are positions in tokens.

    Every part is a mean over samples, so that equal shares of a batch average to the whole, except the regularisers,
    which measure the spread within what they are given.
    """
    objective = get_objective(recipe.name)
    loss = objective.loss(prediction.predicted, prediction.target)
    parts = {"hidden": loss.detach()}
    if prediction.visible is not None:
        visible = objective.visible_loss(*prediction.visible, distance_weight(grid_positions, context, target))
        parts["visible"] = visible.detach()
        loss = loss + recipe.weight_of_visible * visible
    features = prediction.context.flatten(0, 1)  # [r, n, w] -> [r n, w]
    terms: dict[str, tuple[float | None, Callable[[], Tensor]]] = {
        "variance_covariance": (recipe.variance_covariance, lambda: variance_covariance(features)),
        "sigreg": (recipe.sigreg, lambda: sigreg(features, update)),
    }
    for name, (weight, term) in terms.items():
        if weight is None:
            continue
        with torch.set_grad_enabled(weight > 0 and torch.is_grad_enabled()):
            value = term()
        parts[name] = value.detach()
        if weight > 0:
            loss = loss + weight * value
    return loss, parts


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
    count, width = features.shape
    rng = torch.Generator().manual_seed(key("sigreg", step) % 2**63)
    basis = F.normalize(torch.randn(width, DIRECTIONS, generator=rng), dim=0).to(features.device)  # [w, directions]
    points = torch.linspace(0.0, _RANGE, _POINTS, device=features.device)
    angles = (features.float() @ basis).unsqueeze(-1) * points  # [n, directions, points]
    normal = torch.exp(-points.square() / 2)
    gap = (angles.cos().mean(dim=0) - normal).square() + angles.sin().mean(dim=0).square()  # [directions, points]
    return count * 2.0 * torch.trapezoid(gap * normal, points, dim=-1).mean()
