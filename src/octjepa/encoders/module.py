"""A pretrained encoder as a plain `nn.Module` on batches of images, for your training loops.

encoder = octjepa.load_encoder("run")
images = DataLoader(octjepa.Store.open("store"), batch_size=4, collate_fn=encoder.collate)
tokens, pooled = encoder.module()(next(iter(images)))
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from octjepa.errors import UsageError
from octjepa.model.encoder import Encoder
from octjepa.recipe import Preprocessing, Recipe
from octjepa.views import geometry, intensity
from octjepa.views.sample import token_positions
from octjepa.volume import CanonicalVolume, OCTVolume


class VolumeEncoder(nn.Module):
    """Every patch of an image through the encoder; the weights are the pretrained encoder's own, not a copy.

    `grid` is the number of patches along slice, depth and column, `width` that of a token's features. Unlike `embed`,
    which leaves patches without tissue out, it takes the whole grid, so that all images give equally many tokens.
    """

    positions: Tensor

    def __init__(self, encoder: Encoder, recipe: Recipe) -> None:
        super().__init__()
        self.encoder, self.width = encoder, encoder.width
        self.image_size, self.patch, self.grid = recipe.preprocessing.image_size, recipe.tokens.patch_size, recipe.grid
        positions = token_positions(np.arange(recipe.grid_tokens), recipe)
        self.register_buffer("positions", torch.from_numpy(positions), persistent=False)

    def forward(
        self, images: Float[Tensor, "b 1 d h w"]
    ) -> tuple[Float[Tensor, "b tokens width"], Float[Tensor, "b width"]]:
        """(tokens in raster order over slice, depth and column, their mean), of images as `collate_images` makes them.

        Raises UsageError: images of another size than the encoder was pretrained on.
        """
        if images.shape[1:] != (1, *self.image_size):
            expected = " x ".join(map(str, ("B", 1, *self.image_size)))
            shape_text = " x ".join(map(str, images.shape))
            raise UsageError(
                f"images of {shape_text}, and this encoder takes {expected} (batch, channel, slice, depth, column)"
            )
        (d, h, w), (p, q, r) = self.grid, self.patch
        tiles = images.reshape(len(images), d, p, h, q, w, r).permute(0, 1, 3, 5, 2, 4, 6)  # [b, d, h, w, p, q, r]
        patches = tiles.reshape(len(images), d * h * w, p * q * r)
        tokens = self.encoder(patches, self.positions.expand(len(images), -1, -1))
        return tokens, tokens.mean(dim=1)


def prepare_volume(volume: str | Path | OCTVolume | CanonicalVolume, preprocessing: Preprocessing) -> CanonicalVolume:
    """Any volume by the contract `preprocessing`; one of a store as it is.

    Raises VolumeRejected for a file that cannot be read, UsageError for an array, which has no spacing.
    """
    if isinstance(volume, CanonicalVolume):
        return volume
    if not isinstance(volume, str | Path | OCTVolume):
        raise UsageError(
            f"a volume is a path or an octjepa.OCTVolume, not {type(volume).__name__}: an array has no spacing. Use "
            "octjepa.OCTVolume(pixels, spacing_mm=(slice, depth, column), provenance={}, person_id=..., device=...)"
        )
    from octjepa.canonical.pipeline import canonicalise
    from octjepa.read.reader import read_volume

    native = volume if isinstance(volume, OCTVolume) else read_volume(volume)
    return canonicalise(native, preprocessing).volume


def collate_images(volumes: Sequence[CanonicalVolume], preprocessing: Preprocessing) -> Float[Tensor, "b 1 d h w"]:
    """Prepared volumes as a batch: the centre of each, in z-scores over its tissue, as the encoder was trained on."""
    crop, size = geometry.center_crop(preprocessing), preprocessing.image_size
    images = [
        intensity.lookup_table(volume.tissue_mean, volume.tissue_std)[geometry.strided_view(volume.pixels, crop, size)]
        for volume in volumes
    ]
    return torch.from_numpy(np.stack(images)[:, None])
