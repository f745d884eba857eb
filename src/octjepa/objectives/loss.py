"""The quantity that an update minimises: the objective's loss, plus the regularisers that a recipe adds to it.

Regularisers act on the student's features: with a weight they train, with weight 0 they only measure.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from octjepa.objectives.base import Prediction, gather_tokens, get_objective
from octjepa.objectives.regularisers import Total, sigreg, unchanged, variance_covariance, view_sigreg, zone_sigreg
from octjepa.recipe import ObjectiveRecipe, Recipe
from octjepa.views.tokens import regions_at


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
    grid: tuple[int, int, int],
    update: int,
    total: Total = unchanged,
) -> tuple[Float[Tensor, ""], dict[str, Tensor]]:
    """(the sum to minimise, its parts by name, detached). `grid_positions` are positions in tokens.

    Every part is a mean over samples, so that equal shares of a batch average to the whole, except the regularisers,
    which measure the spread within what they are given. `total` adds the sums of a divided batch, for
    regularisers with a weight: first of `sigreg`, then of `zone_sigreg`.
    """
    objective = get_objective(recipe.name)
    loss = objective.loss(prediction.predicted, prediction.target)
    parts = {"hidden": loss.detach()}
    if prediction.visible is not None:
        visible = objective.visible_loss(*prediction.visible, distance_weight(grid_positions, context, target))
        parts["visible"] = visible.detach()
        loss = loss + recipe.weight_of_visible * visible

    def of_batch(weight: float | None) -> Total:
        return total if weight else unchanged  # a meter measures what it is given

    student = prediction.context
    features = student.flatten(0, 1)  # [r, n, w] -> [r n, w]
    terms: dict[str, tuple[float | None, Callable[[], Tensor]]] = {
        "variance_covariance": (recipe.variance_covariance, lambda: variance_covariance(features)),
        "sigreg": (recipe.weight_of_sigreg, lambda: sigreg(features, update, of_batch(recipe.weight_of_sigreg))),
        "zone_sigreg": (
            recipe.zone_sigreg,
            lambda: _of_zones(student, grid_positions, context, grid, update, of_batch(recipe.zone_sigreg)),
        ),
    }
    if objective.predictor == "projector":
        views = prediction.predicted.unflatten(0, (-1, len(grid_positions))).transpose(0, 1).flatten(1, 2)  # [b, v, p]
        weight = recipe.weight_of_sigreg
        terms["sigreg"] = (weight, lambda: view_sigreg(views, update, of_batch(weight)))
    for name, (weight, term) in terms.items():
        if weight is None:
            continue
        with torch.set_grad_enabled(weight > 0 and torch.is_grad_enabled()):
            value = term()
        parts[name] = value.detach()
        if weight > 0:
            loss = loss + weight * value
    return loss, parts


def _of_zones(
    features: Float[Tensor, "r q w"],
    grid_positions: Float[Tensor, "b t 3"],
    context: Int[Tensor, "r n"],
    grid: tuple[int, int, int],
    update: int,
    total: Total,
) -> Float[Tensor, ""]:
    """`zone_sigreg` of the student's features, of visible tokens, or of every token where the predictor is an MLP."""
    every = features.shape[1] == grid_positions.shape[1]
    regions = regions_at(grid_positions if every else gather_tokens(grid_positions, context), grid).long()
    return zone_sigreg(features, regions, len(context) // len(grid_positions), update, total)
