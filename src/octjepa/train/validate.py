"""Validation: how well hidden tokens of held-out people are predicted, next to trivial predictors.

The trivial predictors do not learn, and a network must beat them on the same targets of the same people. `constant`
predicts the mean target everywhere, `position_mean` the mean target at that grid position, both computed on training
people. `copy_nearest` predicts the target feature of the nearest visible token of the same volume; since neighbouring
B-scans are nearly copies, a mask that this solves teaches nothing. An objective that compares views predicts no tokens:
its only trivial predictor is `constant`, the mean projection of the volumes of a validation batch.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from octjepa.distributed.runtime import Runtime
from octjepa.model import VJEPA3D
from octjepa.model.blocks import uncompiled
from octjepa.objectives.base import cosine, gather_tokens
from octjepa.objectives.loss import token_grid_positions
from octjepa.objectives.rank_metrics import rank_me
from octjepa.recipe import Recipe
from octjepa.store import Store
from octjepa.views.loader import Batch, ValidationDataset, validation_batches

_FIT_TIMES = 4  # times as many training volumes fit the trivial predictors as evaluate them
_RANK_TOKENS_A_VOLUME = 64
_RANK_TOKENS = 2048  # a singular value decomposition of 2048 x width stays well under a second


@uncompiled()
@torch.no_grad()
def fit_means(model: VJEPA3D, runtime: Runtime, batches: Iterable[Batch], grid_tokens: int) -> PositionMeans:
    """Mean target features of training people, overall and per grid cell: what the trivial predictors know."""
    means: PositionMeans | None = None
    for batch in batches:
        with runtime.autocast():
            targets = model.targets(batch.target_view.to(runtime.device), batch.positions.to(runtime.device))
        means = means or PositionMeans(grid_tokens, targets.shape[-1])
        means.add(targets, batch.grid_index)
    if means is None:
        raise ValueError("no training batch to fit the trivial predictors to")
    return means


def _features(model: VJEPA3D, runtime: Runtime, batch: Batch, student: bool) -> torch.Tensor:
    """The encoder's features, if the targets are not the features of tokens of the encoder that is exported."""
    with runtime.autocast():
        features = model.encode(batch.target_view.to(runtime.device), batch.positions.to(runtime.device), student)
    return torch.nn.functional.layer_norm(features, features.shape[-1:]).cpu()


@uncompiled()
@torch.no_grad()
def validate(
    model: VJEPA3D,
    runtime: Runtime,
    batches: Iterable[Batch],
    means: PositionMeans | None,
    recipe: Recipe,
) -> dict[str, float]:
    """Means over all samples of all ranks: loss, cosine, rankme, and `baseline/` and `baseline_loss/` by predictor.

    means: of training people; None for an objective that compares views. `rankme` is of the exported encoder: of the
    student where the target is a frozen teacher.
    """
    model.eval()
    taught = recipe.objective.teacher is not None
    student = taught or model.objective.exported_encoder == "student"
    sums: dict[str, torch.Tensor] = {}
    samples = torch.zeros(())
    features = []
    for batch in batches:
        with runtime.autocast():
            prediction = model.predict(*batch.inputs(runtime.device))
        truth, targets = prediction.target.cpu(), prediction.all_targets.cpu()
        if means is None:
            guesses = {"constant": truth.mean(dim=(0, 1)).expand_as(truth)}
        else:
            index = torch.gather(batch.grid_index, 1, batch.target)
            # not millimetres: a step of any axis is one neighbour
            grid_positions = token_grid_positions(batch.grid_index, recipe.grid)
            guesses = {
                "constant": means.constant().expand_as(truth),
                "position_mean": means.at(index),
                "copy_nearest": copy_nearest(targets, grid_positions, batch.context, batch.target),
            }
        values = {"loss": model.objective.loss(prediction.predicted.cpu(), truth)}
        values["cosine"] = cosine(prediction.predicted.cpu(), truth)
        for name, guess in guesses.items():
            values[f"baseline/{name}"] = cosine(guess, truth)
            values[f"baseline_loss/{name}"] = model.objective.loss(guess, truth)
        count = len(batch.volume_ids)
        for key, value in values.items():
            sums[key] = sums.get(key, torch.zeros(())) + value * count
        samples += count
        of_tokens = means is not None and not model.objective.predicts_pixels and not taught
        last = targets if of_tokens else _features(model, runtime, batch, student)
        width = model.target_encoder.width
        features.append(last[..., -width:].flatten(0, 1)[:: max(1, last.shape[1] // _RANK_TOKENS_A_VOLUME)])
    model.train()
    result = {key: float(runtime.mean_over_ranks(total, samples)) for key, total in sums.items()}
    tokens = torch.cat(features)
    step = -(-len(tokens) // _RANK_TOKENS)  # every step-th token, from all volumes alike
    result["rankme"] = rank_me(tokens[::step])
    return result


def evaluate(
    model: VJEPA3D, runtime: Runtime, store: Store, train_ids: list[str], ids: list[str], recipe: Recipe
) -> dict[str, float]:
    """`validate` on the volumes `ids`, with trivial predictors fitted to fixed samples of the training volumes."""
    limit = recipe.validation.max_samples
    batch = recipe.machine.micro_batch or recipe.train.global_batch
    means = None
    if model.objective.predictor != "projector":
        fitted = ValidationDataset(store, recipe, train_ids[: limit and _FIT_TIMES * limit])
        means = fit_means(model, runtime, validation_batches(fitted, batch), recipe.grid_tokens)
    samples = ValidationDataset(store, recipe, ids[:limit])
    return validate(model, runtime, validation_batches(samples, batch), means, recipe)


def without_augmentation(recipe: Recipe) -> Recipe:
    """The recipe with every view centred: there the mean of a position predicts best, and is hardest to beat."""
    centred = {"crop": False, "flip_slow": 0.0, "flip_fast": 0.0, "rotation_degrees": 0.0, "zoom": 0.0}
    return recipe.model_copy(update={"views": recipe.views.model_copy(update=centred)})


class PositionMeans:
    """Mean of targets, overall and at each of `grid_tokens` positions; the overall mean if none was added."""

    def __init__(self, grid_tokens: int, width: int) -> None:
        self.sums = torch.zeros(grid_tokens, width, dtype=torch.float64)
        self.counts = torch.zeros(grid_tokens, dtype=torch.float64)

    def add(self, targets: Float[Tensor, "b t w"], grid_index: Int[Tensor, "b t"]) -> None:
        """Adds the target features of a batch to the sums."""
        flat = targets.detach().flatten(0, 1).cpu().double()
        index = grid_index.flatten().cpu()
        self.sums.index_add_(0, index, flat)
        self.counts.index_add_(0, index, torch.ones(len(index), dtype=torch.float64))

    def constant(self) -> Float[Tensor, " w"]:
        """The mean over all positions."""
        return (self.sums.sum(0) / self.counts.sum().clamp_min(1)).float()

    def at(self, grid_index: Int[Tensor, "b m"]) -> Float[Tensor, "b m w"]:
        """The mean of each position in `grid_index`; of a position never seen, the mean over all."""
        means = (self.sums / self.counts.clamp_min(1).unsqueeze(-1)).float()
        means[self.counts == 0] = self.constant()
        return means[grid_index]


def copy_nearest(
    targets: Float[Tensor, "b t w"],
    positions: Float[Tensor, "b t 3"],
    context: Int[Tensor, "b n"],
    target: Int[Tensor, "b m"],
) -> Float[Tensor, "b m w"]:
    """The target feature of the visible token nearest in `positions`; ties go to the lower token index."""
    distance = torch.cdist(gather_tokens(positions, target).float(), gather_tokens(positions, context).float())
    return gather_tokens(targets, torch.gather(context, 1, distance.argmin(dim=-1)))
