"""Is the encoder collapsing, or learning? Meters on a fixed audit set, on tissue and background apart, per vendor.

Loss does not tell: an encoder that forgets all but the place of a token has the lowest loss of all. The audit set is
drawn once; measuring it costs a few forward passes every so many updates.
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
from torch import Tensor

from octjepa.distributed.runtime import Runtime
from octjepa.errors import OctjepaError
from octjepa.model import VJEPA3D
from octjepa.model.blocks import uncompiled
from octjepa.objective import rank_metrics
from octjepa.objective.loss import sigreg
from octjepa.recipe import Recipe
from octjepa.store import Store
from octjepa.views.loader import Batch, LoadedSample, collate, read_or_warn
from octjepa.views.sample import make_sample, sample_layers
from octjepa.views.tokens import TISSUE_SHARE

VIEWS = 3  # training draws of each audit volume, for LiDAR
_ROWS = 2048  # of features that go into one figure
_BACKGROUND = 0.25  # of the audit's tokens at least, where tokens are selected: training may see next to none
_VOLUMES_OF_VENDOR = 4  # at least, for figures of its own


@dataclass(frozen=True)
class Audit:
    """Fixed samples of volumes chosen in turn from each vendor, in part background, and `VIEWS` training draws of each
    for LiDAR."""

    batch: Batch
    draws: tuple[Batch, ...]
    device_of: tuple[str, ...]
    layers: Tensor

    @classmethod
    def choose(cls, store: Store, recipe: Recipe, ids: Sequence[str], count: int) -> Audit:
        """At most `count` of `ids`."""
        device = dict(zip(store.table["volume_id"], store.table["device"], strict=True))
        by_vendor: dict[str, list[str]] = {}
        for volume_id in sorted(ids):
            by_vendor.setdefault(str(device[volume_id]), []).append(volume_id)
        queues = list(by_vendor.values())
        in_turn = [queue[i] for i in range(max(map(len, queues))) for queue in queues if i < len(queue)]
        known = (read_or_warn(store, volume_id) for volume_id in in_turn)
        volumes = sorted(islice((v for v in known if v is not None), count), key=lambda v: v.volume_id)
        if not volumes:
            raise OctjepaError(f"none of {len(in_turn)} volumes for the monitor can be read")
        background = round(_BACKGROUND * recipe.token_count)
        batch = collate([LoadedSample(v.volume_id, make_sample(v, recipe, None, background)) for v in volumes])
        draws = tuple(
            collate([LoadedSample(v.volume_id, make_sample(v, recipe, epoch)) for v in volumes])
            for epoch in range(VIEWS)
        )
        layers = torch.from_numpy(np.stack([sample_layers(v, recipe, None) for v in volumes]))
        return cls(batch, draws, tuple(str(device[v.volume_id]) for v in volumes), layers)

    @cached_property
    def tissue(self) -> Tensor:
        """[b, t] True for tokens that hold tissue."""
        return self.batch.tissue >= TISSUE_SHARE

    @cached_property
    def layer(self) -> Tensor:
        """[b, t] layer of each token, -1 for none."""
        return torch.gather(self.layers, 1, self.batch.grid_index)


def _rows(features: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor]:
    """(at most `_ROWS` of the chosen rows, their flat index), evenly spread."""
    index = chosen.flatten().nonzero()[:, 0]
    index = index[:: max(1, math.ceil(len(index) / _ROWS))]
    return features.flatten(0, 1)[index], index


@uncompiled()
@torch.no_grad()  # XLA does not know inference_mode's tensors
def measure(model: VJEPA3D, runtime: Runtime, audit: Audit, update: int) -> dict[str, float]:
    """All meters by name: `<meter>_<tissue|background>`, of all volumes and, with `_<vendor>`, of each vendor that has
    enough; `lidar`, `cosine`, `layer_accuracy` and `loss_over_constant`.

    `loss_over_constant` is the objective's loss on hidden tokens over that of their mean target, said everywhere.
    """
    batch = audit.batch
    positions = batch.positions.to(runtime.device)
    view = batch.target_view.to(runtime.device)
    training = model.training
    model.eval()
    with runtime.autocast():
        teacher = model.encode(view, positions).cpu()
        student = model.encode(view, positions, student=True).cpu()
        outcome = model.predict(*batch.inputs(runtime.device))
        looks = [
            model.encode(draw.target_view.to(runtime.device), draw.positions.to(runtime.device)) for draw in audit.draws
        ]
    pooled = [torch.nn.functional.layer_norm(look, look.shape[-1:]).mean(dim=1).cpu() for look in looks]
    model.train(training)
    said, truth = outcome.predicted.cpu(), outcome.target.cpu()
    agreement = torch.nn.functional.cosine_similarity(said, truth, dim=-1)
    constant = model.objective.loss(truth.mean(dim=(0, 1)).expand_as(truth), truth)
    rows, index = _rows(teacher, audit.layer >= 0)
    found = {
        "lidar": rank_metrics.lidar(torch.stack(pooled, dim=1)),
        "cosine": float(agreement.mean()),
        "loss_over_constant": float(model.objective.loss(said, truth) / constant.clamp_min(1e-6)),
        "layer_accuracy": rank_metrics.separability(rows, audit.layer.flatten()[index]),
    }
    features = _Features(teacher, student, agreement, batch.target, batch.grid_index, update)
    vendors = np.asarray(audit.device_of)
    for vendor in (None, *sorted(set(audit.device_of))):
        mine = torch.from_numpy((vendors == vendor) | (vendor is None))
        if vendor is not None and mine.sum() < _VOLUMES_OF_VENDOR:
            continue
        for part, chosen in (("tissue", audit.tissue), ("background", ~audit.tissue)):
            figures = features.figures(chosen & mine.unsqueeze(1))
            found |= {"_".join(filter(None, (name, part, vendor))): value for name, value in figures.items()}
    return found


class _Features(NamedTuple):
    """Of every audit token [b, t, w], and how well hidden ones [b, m] were predicted."""

    teacher: Tensor
    student: Tensor
    agreement: Tensor
    target: Tensor
    grid_index: Tensor
    update: int

    def figures(self, chosen: Tensor) -> dict[str, float]:
        """Meters of the tokens `chosen` [b, t] by name; none of fewer than eight."""
        if chosen.sum() < 8:
            return {}
        rows, index = _rows(self.teacher, chosen)
        found = {
            "rankme": rank_metrics.rank_me(rows),
            "alpha_req": rank_metrics.alpha_req(rows),
            "target_std": rank_metrics.spread(rows),
            "student_std": rank_metrics.spread(_rows(self.student, chosen)[0]),
            "pair_cosine": rank_metrics.pair_cosine(rows),
            "position_share": rank_metrics.position_share(rows, self.grid_index.flatten()[index]),
            "sigreg": float(sigreg((rows - rows.mean(0)) / rows.std(0).clamp_min(1e-6), self.update)),
        }
        hidden = torch.gather(chosen, 1, self.target)
        if hidden.any():
            found["cosine"] = float(self.agreement[hidden].mean())
        return found
