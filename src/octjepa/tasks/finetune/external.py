"""Encoders of other projects (RETFound, DINOv2, your module) in fine-tuning.

They take images instead of tokens of octjepa's grid, so that they have separate batches; heads, stages, labels and
measurement are those of octjepa's encoders. Their blocks are the longest list of modules in the network. BatchNorm and
dropout stay as in evaluation, and drop-path is not applied.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from octjepa.checkpoint.weights import Which
from octjepa.encoders import PretrainedEncoder
from octjepa.encoders.external import ExternalEncoder
from octjepa.encoders.external.prepared import PATTERNS, PreparedExternal, one_bscan
from octjepa.encoders.locate import open_encoder
from octjepa.errors import UsageError
from octjepa.evaluate.networks import TokenBatch
from octjepa.metrics.scores import Task
from octjepa.recipe import DataRecipe, Preprocessing, Recipe, TokenRecipe, TrainRecipe
from octjepa.tasks.finetune.network import TunableEncoder, TunedNetwork
from octjepa.views.loader import LoadedSample
from octjepa.views.sample import make_view, view_transform
from octjepa.views.tokens import grid_coordinates
from octjepa.volume import CanonicalVolume


class TunableExternal(PreparedExternal):
    """An encoder of another project in the place of a pretrained one.

    Its `recipe` holds only the preprocessing; all other settings of it mean nothing.
    """

    which: Which = "target"

    def __init__(self, external: ExternalEncoder, preprocessing: Preprocessing) -> None:
        super().__init__(external, preprocessing)
        self.encoder = external.network
        self.recipe = Recipe(
            name="external",
            data=DataRecipe(patterns=PATTERNS),
            preprocessing=preprocessing,
            tokens=TokenRecipe(patch_size=(1, 1, 1), select="all"),
            train=TrainRecipe(max_updates=1),
        )


@dataclass(frozen=True)
class ViewBatch:
    """Views of a batch, as `views.loader.Batch` has patches."""

    views: Float[Tensor, "b d h w"]
    volume_ids: tuple[str, ...]
    unreadable: tuple[tuple[str, str], ...] = ()

    def micro_batch(self, start: int, stop: int) -> ViewBatch:
        """Samples start..stop."""
        return ViewBatch(self.views[start:stop], self.volume_ids[start:stop])


def collate_views(items: Sequence[LoadedSample]) -> ViewBatch:
    """Samples stacked along a new batch axis."""
    views = torch.from_numpy(np.stack([item.sample for item in items]))
    return ViewBatch(
        views, tuple(item.volume_id for item in items), tuple(pair for item in items for pair in item.unreadable)
    )


def make_bscan_view(volume: CanonicalVolume, recipe: Recipe, epoch: int | None) -> Float[np.ndarray, "d h w"]:
    """`make_view`, of a single B-scan as one slice: for encoders that read each B-scan by itself."""
    view = make_view(volume, recipe, epoch)
    return one_bscan(view, volume, view_transform(volume, recipe, epoch)) if volume.bscan_slices else view


class TunedExternal(TunedNetwork):
    """A network of another project with the heads of `TunedNetwork`; its tokens are those of whole views."""

    make_sample = staticmethod(make_view)
    collate = staticmethod(collate_views)

    def __init__(self, pretrained: TunableExternal, tasks: Sequence[tuple[Task, int]]) -> None:
        super().__init__(pretrained, tasks)
        self.source = pretrained
        if pretrained.external.reads_bscans:
            self.make_sample = make_bscan_view

    def encode_batch(self, batch: Any, paths: Tensor | None = None) -> TokenBatch:
        """The tokens of every view, one view after the other; `paths` are not applied."""
        device = self.mean.device
        features = torch.stack([self.source.external.features(view) for view in batch.views.to(device)])
        count = features.shape[1]
        coordinates = grid_coordinates(np.arange(count), self.source.token_grid(count))
        each = torch.from_numpy(coordinates).to(device).expand(len(features), -1, -1)
        return TokenBatch(features.float(), each, torch.ones(features.shape[:2], dtype=torch.bool, device=device))


def load_start(location: str | Path, preprocessing: Preprocessing | None) -> TunableEncoder:
    """The encoder at `location`, octjepa's or another project's, as `encoders.locate.open_encoder` finds it."""
    start = open_encoder(location, preprocessing)
    if isinstance(start, PreparedExternal):
        return TunableExternal(start.external, start.preprocessing)
    if not isinstance(start, PretrainedEncoder):
        raise UsageError(
            f"{location} is the segmentation network, whose tokens are frozen: fine-tune phantom-truth, or train the "
            "network itself by `octjepa segment adapt`"
        )
    return start


def tuned_network(pretrained: TunableEncoder, tasks: Sequence[tuple[Task, int]]) -> TunedNetwork:
    """The network that is tuned, of octjepa's encoder or another's."""
    return (
        TunedExternal(pretrained, tasks) if isinstance(pretrained, TunableExternal) else TunedNetwork(pretrained, tasks)
    )
