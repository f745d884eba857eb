"""A volume larger than the encoder's view, window by window; and the tokens of a window.

Windows slide along B-scans and columns, half a view at most from one to the next. They do not slide in depth:
flattening has laid the retina at one height there, and the encoder knows it at that height.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor, nn

from octjepa import keys
from octjepa.checkpoint import PretrainedEncoder
from octjepa.recipe import Recipe
from octjepa.store import CanonicalVolume
from octjepa.views import intensity, tokens
from octjepa.views.geometry import Geometry
from octjepa.views.sample import select_tokens, token_positions

Corner = tuple[int, int, int]


@dataclass(frozen=True)
class Tokens:
    """Of one window: K features, and where each lies in the raster order of the view's grid."""

    features: Float[np.ndarray, "k dim"]
    index: Int[np.ndarray, " k"]


@dataclass(frozen=True)
class Window:
    """What an encoder takes of a window, and its z-scored voxels, which a decoder may look at."""

    patches: Float[np.ndarray, "k voxels"]
    positions: Float[np.ndarray, "k 3"]
    index: Int[np.ndarray, " k"]
    image: Float[np.ndarray, "d h w"]


Featurise = Callable[[CanonicalVolume, Corner], Tokens]  # of one window of a volume


def corners(shape: Sequence[int], recipe: Recipe) -> list[Corner]:
    """First voxels of the windows that cover a volume of `shape` along slices and columns, rows in the middle."""
    (d, h, w), (depth, height, width) = recipe.preprocessing.image_size, shape
    return [(int(a), (height - h) // 2, int(c)) for a in _starts(depth, d) for c in _starts(width, w)]


def _starts(size: int, view: int) -> Int[np.ndarray, " n"]:
    count = 1 + -(-(size - view) // max(1, view // 2))
    return np.rint(np.linspace(0, size - view, count)).astype(np.int64)


def window(volume: CanonicalVolume, corner: Corner, recipe: Recipe) -> Window:
    """Tokens are chosen as in embedding: tissue first, by chance that volume and window alone decide."""
    rng = keys.generator("segment", volume.volume_id, *corner)
    view, index, _ = select_tokens(volume, recipe, Geometry(corner=corner), rng)
    table = intensity.lookup_table(volume.tissue_mean, volume.tissue_std)
    patches = table[tokens.extract_patches(view, recipe.tokens.patch_size, index)]
    return Window(patches, token_positions(index, recipe), index, table[view])


def encode(network: nn.Module, windows: Sequence[Window]) -> Float[Tensor, "b k dim"]:
    """Features of the windows' tokens, on the network's device."""
    device = next(network.parameters()).device
    patches, positions = (np.stack([getattr(one, name) for one in windows]) for name in ("patches", "positions"))
    found: Tensor = network(torch.from_numpy(patches).to(device), torch.from_numpy(positions).to(device))
    return found


def of_encoder(encoder: PretrainedEncoder) -> Featurise:
    """Tokens of the frozen encoder."""

    @torch.inference_mode()
    def featurise(volume: CanonicalVolume, corner: Corner) -> Tokens:
        seen = window(volume, corner, encoder.recipe)
        return Tokens(encode(encoder.encoder, [seen])[0].float().cpu().numpy(), seen.index)

    return featurise


def of_pixels(recipe: Recipe) -> Featurise:
    """The z-scored voxels of each chosen patch: what a linear map can read without any encoder."""

    def featurise(volume: CanonicalVolume, corner: Corner) -> Tokens:
        seen = window(volume, corner, recipe)
        return Tokens(seen.patches, seen.index)

    return featurise


def cut_labels(labels: UInt8[np.ndarray, "D H W"], corner: Corner, recipe: Recipe) -> UInt8[np.ndarray, "d h w"]:
    """The labels of a window."""
    (a, b, c), (d, h, w) = corner, recipe.preprocessing.image_size
    return labels[a : a + d, b : b + h, c : c + w]
