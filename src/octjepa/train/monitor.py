"""Is the encoder learning or collapsing? Metrics of a fixed set of volumes, of tissue and background, per vendor.

The loss does not say: an encoder that forgets all but the position of a token has the lowest loss of all. The set is
chosen once; measuring it costs a few forward passes every so many updates.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from octjepa.distributed.runtime import Runtime
from octjepa.errors import OctjepaError
from octjepa.model import VJEPA3D
from octjepa.model.blocks import uncompiled
from octjepa.objectives import rank_metrics
from octjepa.objectives.regularisers import sigreg
from octjepa.recipe import Recipe
from octjepa.store import Store
from octjepa.views.loader import Batch, LoadedSample, collate, read_or_warn
from octjepa.views.sample import make_sample, sample_layers
from octjepa.views.tokens import holds_tissue

VIEWS = 3  # training views of each volume, for LiDAR
_TOKENS = 2048  # features that go into one metric
_BACKGROUND = 0.25  # of the monitored tokens at least, where tokens are selected: training may see next to none
_VOLUMES_OF_VENDOR = 4  # at least, for separate metrics
_AT_ONCE = 4  # volumes in a forward pass: all of them would take more memory than an update of micro-batch 1


@dataclass(frozen=True)
class MonitorSet:
    """One fixed sample of each volume, in part background, and `VIEWS` training views of each for LiDAR.

    `device_of` names the device of each volume [b]; `layers` are the retinal layers of all grid cells. `of_student`:
    features of the student are measured, because the target is a frozen teacher; otherwise those of the target.
    """

    batch: Batch
    draws: tuple[Batch, ...]
    device_of: tuple[str, ...]
    layers: Int[Tensor, "b grid"]
    of_student: bool = False

    @classmethod
    def choose(cls, store: Store, recipe: Recipe, ids: Sequence[str], count: int) -> MonitorSet:
        """At most `count` of the volumes `ids`, from each vendor in turn. Raises OctjepaError: none can be read."""
        device = dict(zip(store.table["volume_id"], store.table["device"], strict=True))
        by_vendor: dict[str, list[str]] = {}
        for volume_id in sorted(ids):
            by_vendor.setdefault(str(device[volume_id]), []).append(volume_id)
        queues = list(by_vendor.values())
        in_turn = [queue[i] for i in range(max(map(len, queues))) for queue in queues if i < len(queue)]
        readable = (read_or_warn(store, volume_id) for volume_id in in_turn)
        volumes = sorted(islice((v for v in readable if v is not None), count), key=lambda v: v.volume_id)
        if not volumes:
            raise OctjepaError(f"none of {len(in_turn)} volumes for the monitor can be read")
        recipe = recipe.with_whole_views
        background = round(_BACKGROUND * recipe.token_count)
        batch = collate([LoadedSample(v.volume_id, make_sample(v, recipe, None, background)) for v in volumes])
        draws = tuple(
            collate([LoadedSample(v.volume_id, make_sample(v, recipe, epoch)) for v in volumes])
            for epoch in range(VIEWS)
        )
        layers = torch.from_numpy(np.stack([sample_layers(v, recipe) for v in volumes]))
        devices = tuple(str(device[v.volume_id]) for v in volumes)
        return cls(batch, draws, devices, layers, recipe.objective.teacher is not None)

    @cached_property
    def tissue(self) -> Bool[Tensor, "b t"]:
        """Whether each token holds tissue."""
        return torch.from_numpy(np.stack([holds_tissue(share) for share in self.batch.tissue.numpy()]))

    @cached_property
    def layer(self) -> Int[Tensor, "b t"]:
        """The retinal layer of each token, -1 for none."""
        return torch.gather(self.layers, 1, self.batch.grid_index)


def _subsample(
    features: Float[Tensor, "b t w"], chosen: Bool[Tensor, "b t"]
) -> tuple[Float[Tensor, "n w"], Int[Tensor, " n"]]:
    """(at most `_TOKENS` of the chosen tokens' features, their index into b * t), evenly spread."""
    index = chosen.flatten().nonzero()[:, 0]
    index = index[:: max(1, math.ceil(len(index) / _TOKENS))]
    return features.flatten(0, 1)[index], index


def _encode(model: VJEPA3D, batch: Batch, student: bool, device: torch.device) -> Float[Tensor, "b t w"]:
    """Features of the fixed view of each volume on the host, computed for `_AT_ONCE` volumes at once."""
    parts = zip(batch.target_view.split(_AT_ONCE), batch.positions.split(_AT_ONCE), strict=True)
    return torch.cat([model.encode(view.to(device), at.to(device), student).cpu() for view, at in parts])


@uncompiled()
@torch.no_grad()  # XLA does not know inference_mode's tensors
def run_monitor(model: VJEPA3D, runtime: Runtime, monitor_set: MonitorSet, update: int) -> dict[str, float]:
    """All metrics by name: `<metric>_<tissue|background>`, of all volumes and, with `_<vendor>`, of each vendor with
    enough; `lidar`, `cosine`, `loss_over_constant`, and `layer_accuracy` of the target, `layer_accuracy_student`.

    With a frozen teacher all metrics of features, also `target_std` and `lidar`, are of the student.
    `loss_over_constant` is the objective's loss on hidden tokens over that of their mean target, predicted everywhere.
    """
    batch = monitor_set.batch
    training = model.training
    model.eval()
    with runtime.autocast():
        target = _encode(model, batch, student=False, device=runtime.device)
        student = _encode(model, batch, student=True, device=runtime.device)
        predictions: list[tuple[Tensor, Tensor]] = []
        inputs = (tensor.split(_AT_ONCE) for tensor in batch.inputs(torch.device("cpu")))
        for volumes in zip(*inputs, strict=True):
            prediction = model.predict(*(tensor.to(runtime.device) for tensor in volumes))
            predictions.append((prediction.predicted.cpu(), prediction.target.cpu()))
        views = [_encode(model, draw, monitor_set.of_student, runtime.device) for draw in monitor_set.draws]
    pooled = [torch.nn.functional.layer_norm(view, view.shape[-1:]).mean(dim=1) for view in views]
    model.train(training)
    predicted, truth = (torch.cat(parts) for parts in zip(*predictions, strict=True))
    cosine = torch.nn.functional.cosine_similarity(predicted, truth, dim=-1)
    of_hidden = cosine  # [b, m]; of a projector the mean over a volume's views, at each of its hidden tokens
    if model.objective.predictor == "projector":
        of_hidden = cosine.mean(dim=1, keepdim=True).expand(batch.target.shape)
    constant = model.objective.loss(truth.mean(dim=(0, 1)).expand_as(truth), truth)
    accuracy, accuracy_student = (_layer_accuracy(features, monitor_set.layer) for features in (target, student))
    values = {
        "lidar": rank_metrics.lidar(torch.stack(pooled, dim=1)),
        "cosine": float(cosine.mean()),
        "loss_over_constant": float(model.objective.loss(predicted, truth) / constant.clamp_min(1e-6)),
        "layer_accuracy": accuracy,
        "layer_accuracy_student": accuracy_student,
    }
    watched = student if monitor_set.of_student else target
    features = _Features(watched, student, of_hidden, batch.target, batch.grid_index, update)
    vendors = np.asarray(monitor_set.device_of)
    for vendor in (None, *sorted(set(monitor_set.device_of))):
        of_vendor = torch.from_numpy((vendors == vendor) | (vendor is None))
        if vendor is not None and of_vendor.sum() < _VOLUMES_OF_VENDOR:
            continue
        for part, chosen in (("tissue", monitor_set.tissue), ("background", ~monitor_set.tissue)):
            metrics = features.metrics(chosen & of_vendor.unsqueeze(1))
            values |= {"_".join(filter(None, (name, part, vendor))): value for name, value in metrics.items()}
    return values


def _layer_accuracy(features: Float[Tensor, "b t w"], layer: Int[Tensor, "b t"]) -> float:
    """Balanced accuracy of classifying the retinal layer of tokens by their features (`rank_metrics.separability`)."""
    tokens, index = _subsample(features, layer >= 0)
    return rank_metrics.separability(tokens, layer.flatten()[index])


class _Features(NamedTuple):
    """Features of every monitored token, and the cosine of hidden tokens with their prediction."""

    watched: Float[Tensor, "b t w"]
    student: Float[Tensor, "b t w"]
    cosine: Float[Tensor, "b m"]
    target: Int[Tensor, "b m"]
    grid_index: Int[Tensor, "b t"]
    update: int

    def metrics(self, chosen: Bool[Tensor, "b t"]) -> dict[str, float]:
        """Metrics of the tokens `chosen` by name; none of fewer than eight."""
        if chosen.sum() < 8:
            return {}
        tokens, index = _subsample(self.watched, chosen)
        values = {
            "rankme": rank_metrics.rank_me(tokens),
            "alpha_req": rank_metrics.alpha_req(tokens),
            "target_std": rank_metrics.spread(tokens),
            "student_std": rank_metrics.spread(_subsample(self.student, chosen)[0]),
            "pair_cosine": rank_metrics.pair_cosine(tokens),
            "position_share": rank_metrics.position_share(tokens, self.grid_index.flatten()[index]),
            "sigreg": float(sigreg((tokens - tokens.mean(0)) / tokens.std(0).clamp_min(1e-6), self.update)),
        }
        hidden = torch.gather(chosen, 1, self.target)
        if hidden.any():
            values["cosine"] = float(self.cosine[hidden].mean())
        return values
