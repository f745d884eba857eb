"""Held-out people, fixed samples: how well hidden tokens are predicted, beside trivial predictors."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from octjepa.model import VJEPA3D
from octjepa.model.blocks import uncompiled
from octjepa.objective import trivial
from octjepa.objective.losses import cosine, loss_of
from octjepa.objective.meters import rank_me
from octjepa.objective.total import token_steps
from octjepa.train.runtime import Runtime
from octjepa.views.loader import Batch

_RANK_TOKENS_A_VOLUME = 64
_RANK_TOKENS = 2048  # a singular value decomposition of 2048 x width stays well under a second


@uncompiled()
@torch.inference_mode()
def learn_means(model: VJEPA3D, runtime: Runtime, batches: Iterable[Batch], grid_tokens: int) -> trivial.PlaceMeans:
    """Mean target features of training people, overall and per grid place: what the trivial predictors know."""
    means: trivial.PlaceMeans | None = None
    for batch in batches:
        with runtime.compute():
            targets = model.targets(batch.target_view.to(runtime.device), batch.places.to(runtime.device))
        means = means or trivial.PlaceMeans(grid_tokens, targets.shape[-1])
        means.add(targets, batch.grid_index)
    if means is None:
        raise ValueError("no training batch to learn the trivial predictors from")
    return means


def _features(model: VJEPA3D, runtime: Runtime, batch: Batch) -> torch.Tensor:
    """The encoder's features, where the arm's targets are pixels."""
    depths = (len(model.target_encoder.blocks),)
    with runtime.compute():
        return model.target_levels(batch.target_view.to(runtime.device), batch.places.to(runtime.device), depths).cpu()


@uncompiled()
@torch.inference_mode()
def validate(
    model: VJEPA3D,
    runtime: Runtime,
    batches: Iterable[Batch],
    means: trivial.PlaceMeans,
    grid: tuple[int, int, int],
) -> dict[str, float]:
    """Means over all samples of all ranks: loss, cosine, rankme, and `baseline/` and `baseline_loss/` by predictor."""
    model.eval()
    sums: dict[str, torch.Tensor] = {}
    seen = torch.zeros(())
    features = []
    for batch in batches:
        with runtime.compute():
            outcome = model.predict(*batch.inputs(runtime.device))
        truth, targets = outcome.target.cpu(), outcome.all_targets.cpu()
        index = torch.gather(batch.grid_index, 1, batch.target)
        steps = token_steps(batch.grid_index, grid)  # not millimetres: a step of any axis is one neighbour
        guesses = {
            "constant": means.constant().expand_as(truth),
            "position_mean": means.at(index),
            "copy_nearest": trivial.copy_nearest(targets, steps, batch.context, batch.target),
        }
        values = {"loss": loss_of(model.arm, outcome.predicted.cpu(), truth)}
        values["cosine"] = cosine(outcome.predicted.cpu(), truth)
        for name, guess in guesses.items():
            values[f"baseline/{name}"] = cosine(guess, truth)
            values[f"baseline_loss/{name}"] = loss_of(model.arm, guess, truth)
        count = len(batch.volume_ids)
        for key, value in values.items():
            sums[key] = sums.get(key, torch.zeros(())) + value * count
        seen += count
        last = targets if model.arm != "mae" else _features(model, runtime, batch)
        width = model.target_encoder.width
        features.append(last[..., -width:].flatten(0, 1)[:: max(1, last.shape[1] // _RANK_TOKENS_A_VOLUME)])
    model.train()
    result = {key: float(runtime.mean_over_ranks(total, seen)) for key, total in sums.items()}
    tokens = torch.cat(features)
    step = -(-len(tokens) // _RANK_TOKENS)  # every step-th token, from all volumes alike
    result["rankme"] = rank_me(tokens[::step])
    return result
