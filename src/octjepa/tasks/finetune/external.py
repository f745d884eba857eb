"""Encoders of other projects (RETFound, DINOv2, a module of one's own) in fine-tuning.

They take images instead of tokens of octjepa's grid, so that they have batches of their own; heads, stages, labels and
measurement are those of octjepa's encoders. Their blocks are the longest list of modules in the network. BatchNorm and
dropout stay as in evaluation, and drop-path is not applied.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from octjepa.embed.token_folder import grid_coordinates
from octjepa.encoders import PretrainedEncoder, load_encoder
from octjepa.encoders.external import ExternalEncoder, check_address, is_external, load_external
from octjepa.encoders.pooling import TokenFeatures
from octjepa.errors import OctjepaError, UsageError
from octjepa.evaluate.networks import TokenBatch
from octjepa.metrics.scores import Task
from octjepa.recipe import DataRecipe, Preprocessing, Recipe, TokenRecipe, TrainRecipe
from octjepa.tasks.finetune.network import TunedNetwork
from octjepa.views import geometry
from octjepa.views.loader import LoadedSample
from octjepa.views.sample import make_view
from octjepa.volume import CanonicalVolume

PATTERNS: tuple[Literal["raster"]] = ("raster",)


class TunableExternal(PretrainedEncoder):
    """An encoder of another project in the place of a pretrained one, for volumes prepared by `preprocessing`.

    Its `recipe` holds the preprocessing alone; all other settings of it mean nothing.
    """

    def __init__(self, external: ExternalEncoder, preprocessing: Preprocessing) -> None:
        self.external, self.preprocessing = external, preprocessing
        self.encoder = external.network  # type: ignore[assignment] # any module
        self.name, self.which = external.name, "target"
        self.trained_on = frozenset() if external.tuned_on is None else external.tuned_on.volume_ids
        self.trained_on_uids = frozenset()
        self.dim = external.width(preprocessing.image_size)
        self.recipe = Recipe(
            name="external", data=DataRecipe(patterns=PATTERNS), preprocessing=preprocessing,
            tokens=TokenRecipe(patch_size=(1, 1, 1), select="all"), train=TrainRecipe(max_updates=1),
        )  # fmt: skip
        # Tokens without a known position are numbered along the first axis.
        self.grid = external.grid(preprocessing.image_size)

    def untrained(self) -> TunableExternal:
        """The same architecture with its initial weights."""
        return TunableExternal(self.external.untrained(), self.preprocessing)

    def encode_volumes(self, volumes: Sequence[CanonicalVolume]) -> list[TokenFeatures]:
        """All tokens of each volume. Raises UsageError: features that are not finite."""
        crop, size = geometry.center_crop(self.preprocessing), self.preprocessing.image_size
        found = []
        for volume in volumes:
            tokens = self.external.tokens(geometry.apply_transform(volume.pixels, crop, size))
            count = np.arange(len(tokens))
            found.append(TokenFeatures(tokens, count, self.token_grid(len(count)), np.ones(len(count), np.float32)))
        return found

    def token_grid(self, count: int) -> tuple[int, int, int]:
        """(slices, depth, columns) of `count` tokens. Raises OctjepaError: the encoder's grid has another number."""
        grid = self.grid or (count, 1, 1)
        if math.prod(grid) != count:
            raise OctjepaError(f"{self.name} gives {count} tokens, and its grid is {grid}")
        return grid


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


class TunedExternal(TunedNetwork):
    """A network of another project with the heads of `TunedNetwork`; its tokens are those of whole views."""

    make_sample = staticmethod(make_view)
    collate = staticmethod(collate_views)

    def __init__(self, pretrained: TunableExternal, tasks: Sequence[tuple[Task, int]]) -> None:
        super().__init__(pretrained, tasks)
        self.source = pretrained

    def encode_batch(self, batch: Any, paths: Tensor | None = None) -> TokenBatch:
        """The tokens of every view, one view after the other; `paths` are not applied."""
        device = self.mean.device
        features = torch.stack([self.source.external.features(view) for view in batch.views.to(device)])
        count = features.shape[1]
        coordinates = grid_coordinates(np.arange(count), self.source.token_grid(count))
        each = torch.from_numpy(coordinates).to(device).expand(len(features), -1, -1)
        return TokenBatch(features.float(), each, torch.ones(features.shape[:2], dtype=torch.bool, device=device))


def load_start(location: str | Path, preprocessing: Preprocessing | None) -> PretrainedEncoder:
    """The encoder at `location`, octjepa's or another project's.

    preprocessing: of the volumes that another's encoder is to read; one that was tuned here has its own. Raises what
    `load_encoder` and `load_external` raise.
    """
    if not is_external(location):
        check_address(location)
        return load_encoder(location)
    external = load_external(location)
    prepared = preprocessing if external.tuned_on is None else external.tuned_on.preprocessing
    if prepared is None:
        raise UsageError(f"{location} is an encoder of another project that was not tuned here")
    return TunableExternal(external, prepared)


def tuned_network(pretrained: PretrainedEncoder, tasks: Sequence[tuple[Task, int]]) -> TunedNetwork:
    """The network that is tuned, of octjepa's encoder or another's."""
    return (
        TunedExternal(pretrained, tasks) if isinstance(pretrained, TunableExternal) else TunedNetwork(pretrained, tasks)
    )
