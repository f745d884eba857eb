"""What an update minimises: the objective's loss, plus the terms that a recipe adds to it."""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from octjepa.model import Prediction
from octjepa.model.encoder import gather_tokens
from octjepa.objective.losses import loss_of
from octjepa.objective.regularisers import sigreg, variance_covariance
from octjepa.recipe import ObjectiveRecipe


def distance_weight(
    positions: Float[Tensor, "b t 3"], context: Int[Tensor, "b n"], target: Int[Tensor, "b m"]
) -> Float[Tensor, "b n"]:
    """1 / sqrt(distance to the nearest hidden token), in token steps of at least 1: far from a mask there is little
    to learn from repeating what one sees (V-JEPA 2.1)."""
    distance = torch.cdist(gather_tokens(positions, context).float(), gather_tokens(positions, target).float()).amin(
        dim=-1
    )
    return distance.clamp_min(1.0).rsqrt()


def token_steps(grid_index: Int[Tensor, "b t"], grid: tuple[int, int, int]) -> Float[Tensor, "b t 3"]:
    """Places in token steps along (slice, depth, width)."""
    _, rows, columns = grid
    plane = rows * columns
    positions = [grid_index // plane, grid_index % plane // columns, grid_index % columns]
    return torch.stack(positions, dim=-1).float()


def training_loss(
    objective: ObjectiveRecipe,
    outcome: Prediction,
    steps: Float[Tensor, "b t 3"],
    context: Int[Tensor, "b n"],
    target: Int[Tensor, "b m"],
    update: int,
) -> tuple[Float[Tensor, ""], dict[str, Tensor]]:
    """(the sum to minimise, its parts by name, detached). `steps` are positions in token steps.

    Every part is a mean over samples, so that equal shares of a batch average to the whole, except the regularisers,
    which look at the spread within what they are given.
    """
    total = loss_of(objective.name, outcome.predicted, outcome.target)
    parts = {"hidden": total.detach()}
    if outcome.visible is not None:
        said, truth = outcome.visible
        weight = distance_weight(steps, context, target)
        visible = (weight * (said - truth).abs().mean(dim=-1)).mean()
        parts["visible"] = visible.detach()
        total = total + objective.at_visible * visible
    features = outcome.context.flatten(0, 1)
    terms: dict[str, tuple[float | None, Callable[[], Tensor]]] = {
        "variance_covariance": (objective.variance_covariance, lambda: variance_covariance(features)),
        "sigreg": (objective.sigreg, lambda: sigreg(features, update)),
    }
    for name, (weight_of, term) in terms.items():
        if weight_of is None:
            continue
        with torch.set_grad_enabled(weight_of > 0 and torch.is_grad_enabled()):
            value = term()
        parts[name] = value.detach()
        if weight_of > 0:
            total = total + weight_of * value
    return total, parts
