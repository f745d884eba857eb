"""An encoder of another project for volumes of one preprocessing: it then has the protocol of ours."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import ClassVar, Literal, Self

import numpy as np
from jaxtyping import Shaped, UInt8
from torch import nn

from octjepa.checkpoint.location import Location
from octjepa.encoders.base import EncoderBase, hash_weights
from octjepa.encoders.external.base import ExternalEncoder
from octjepa.encoders.pooling import POSITION_FREE_POOL, TokenFeatures
from octjepa.errors import OctjepaError
from octjepa.recipe import Preprocessing
from octjepa.views import geometry
from octjepa.volume import CanonicalVolume

PATTERNS: tuple[Literal["raster"]] = ("raster",)  # the scans that encoders of other projects are given


def one_bscan(
    view: Shaped[np.ndarray, "d h w"], volume: CanonicalVolume, transform: geometry.ViewTransform
) -> Shaped[np.ndarray, "1 h w"]:
    """The middle slice of those that the single B-scan `volume` fills, of its view under `transform`.

    The stored pixels decide which slices are filled: an augmented view may have other values than zero in padding.
    """
    stored = geometry.moved_view(volume.pixels, transform, view.shape)
    filled = np.flatnonzero(stored.any(axis=(1, 2)))
    middle = int(filled[len(filled) // 2]) if len(filled) else len(view) // 2
    return view[middle : middle + 1]


class PreparedExternal(EncoderBase[UInt8[np.ndarray, "d h w"]]):
    """The network of `external` on the centred views of volumes prepared by `preprocessing`.

    Every token of a view is taken. Where a token has no position, tokens are numbered along the first axis.
    """

    patterns = PATTERNS
    token_choice: ClassVar[str] = "all"
    default_pools = (POSITION_FREE_POOL,)

    def __init__(self, external: ExternalEncoder, preprocessing: Preprocessing) -> None:
        self.external, self._preprocessing, self.name = external, preprocessing, external.name

    @cached_property
    def grid(self) -> tuple[int, int, int] | None:
        """(slices, depth, columns) of the tokens of a view; None where a token has no position."""
        return self.external.grid(self.preprocessing.image_size)

    @cached_property
    def dim(self) -> int:
        """The width of a token's features."""
        return self.external.width(self.preprocessing.image_size)

    @property
    def network(self) -> nn.Module:
        """The network with its weights."""
        return self.external.network

    @property
    def preprocessing(self) -> Preprocessing:
        """By which its volumes are prepared."""
        return self._preprocessing

    @property
    def recorded_training(self) -> frozenset[str]:
        """The content ids of what it was fine-tuned on by octjepa; nothing is known of its pretraining."""
        return frozenset() if self.external.tuned_on is None else self.external.tuned_on.volume_ids

    @property
    def location(self) -> Location | None:
        """The checkpoint of its fine-tuning by octjepa; None if there was none."""
        return None if self.external.tuned_on is None else self.external.tuned_on.folder

    @property
    def origin(self) -> Mapping[str, str]:
        """Source, licence and checksum of the weights, as far as they are known."""
        return self.external.origin

    def untrained(self) -> Self:
        """The same architecture with its initial weights, drawn by a fixed seed."""
        twin = type(self)(self.external.untrained(), self.preprocessing)
        twin.__dict__.update(grid=self.grid, dim=self.dim)  # of a network that says neither a forward pass finds them
        return twin

    def weights_hash(self) -> str:
        """SHA-256 over class and description of the network, its images included, and names and values of the
        weights."""
        description = json.dumps(self.external.architecture(), sort_keys=True)
        return hash_weights(self.network, type(self.network).__name__ + description)

    def select_tokens(self, volume: CanonicalVolume) -> UInt8[np.ndarray, "d h w"]:
        """The centred view of a prepared volume; a single B-scan as one slice for an encoder that reads B-scans."""
        crop = geometry.center_crop(self.preprocessing)
        view = geometry.apply_transform(volume.pixels, crop, self.preprocessing.image_size)
        return one_bscan(view, volume, crop) if volume.bscan_slices and self.external.reads_bscans else view

    def encode_tokens(self, selected: Sequence[UInt8[np.ndarray, "d h w"]]) -> list[TokenFeatures]:
        """All tokens of each view. Raises UsageError: features that are not finite."""
        encoded = []
        for view in selected:
            features = self.external.tokens(view)
            count = np.arange(len(features))
            encoded.append(TokenFeatures(features, count, self.token_grid(len(count)), np.ones(len(count), np.float32)))
        return encoded

    def token_grid(self, count: int) -> tuple[int, int, int]:
        """(slices, depth, columns) of `count` tokens, also those of one B-scan.

        Raises OctjepaError: the encoder's grid has another number.
        """
        grid = self.grid or (count, 1, 1)
        if self.external.reads_bscans and count == grid[1] * grid[2]:
            grid = (1, *grid[1:])
        if math.prod(grid) != count:
            raise OctjepaError(f"{self.name} gives {count} tokens, and its grid is {grid}")
        return grid
