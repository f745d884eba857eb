"""Code that all heads share: windows over a stored volume, the tokens of a window, and the position prior.

Windows slide along B-scans and columns, half a view at most from one to the next. They do not slide in depth:
flattening has put the retina at one depth there, and the encoder knows it at that depth.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int, UInt8
from torch import Tensor, nn

from octjepa.encoders import PretrainedEncoder
from octjepa.encoders.pretrained import equal_counts
from octjepa.recipe import Recipe
from octjepa.views import intensity, tokens
from octjepa.views.geometry import ViewTransform, moved_view
from octjepa.views.sample import select_tissue_tokens, token_positions
from octjepa.volume import CanonicalVolume

Corner = tuple[int, int, int]
LabelledVolume = tuple[CanonicalVolume, UInt8[np.ndarray, "D H W"]]


@dataclass(frozen=True)
class Tokens:
    """Of one window: K features, and the index of each in the raster order of the view's grid."""

    features: Float[np.ndarray, "k dim"]
    index: Int[np.ndarray, " k"]


@dataclass(frozen=True)
class Window:
    """The encoder's input of a window, and its z-scored voxels, which a decoder reads as well."""

    patches: Float[np.ndarray, "k voxels"]
    positions: Float[np.ndarray, "k 3"]
    index: Int[np.ndarray, " k"]
    image: Float[np.ndarray, "d h w"]


_PROFILE_VOLUMES = 4.0  # volumes that the shares at a depth count as, at each position of it
ExtractTokens = Callable[[CanonicalVolume, Corner], Tokens]  # of one window of a volume


def corners(shape: Sequence[int], recipe: Recipe) -> list[Corner]:
    """First voxels of the windows that cover a volume of `shape` along slices and columns, mid-depth."""
    (d, h, w), (slices, depth, columns) = recipe.preprocessing.image_size, shape
    return [(int(a), (depth - h) // 2, int(c)) for a in _starts(slices, d) for c in _starts(columns, w)]


def _starts(size: int, view: int) -> Int[np.ndarray, " n"]:
    count = 1 + -(-(size - view) // max(1, view // 2))
    return np.rint(np.linspace(0, size - view, count)).astype(np.int64)


def window_slices(corner: Corner, recipe: Recipe) -> tuple[slice, slice, slice]:
    """The window at `corner` as slices of a stored volume."""
    first, second, third = (
        slice(start, start + size) for start, size in zip(corner, recipe.preprocessing.image_size, strict=True)
    )
    return first, second, third


@dataclass(frozen=True)
class Cut:
    """Where a window is cut, whether it is mirrored, and how its voxels are changed (only in training)."""

    transform: ViewTransform
    light: intensity.IntensityAugmentation | None = None

    @classmethod
    def at(cls, corner: Corner) -> Cut:
        """The window at `corner` as it is."""
        return cls(ViewTransform(corner))

    def of(self, voxels: np.ndarray, recipe: Recipe) -> np.ndarray:
        """The same window of what lies on the stored volume [..., D, H, W], as labels do."""
        return moved_view(voxels, self.transform, recipe.preprocessing.image_size)


def window(volume: CanonicalVolume, cut: Cut, recipe: Recipe) -> Window:
    """Tokens are selected as in embedding: every patch that holds tissue."""
    view, index, _ = select_tissue_tokens(volume, recipe, cut.transform)
    table = intensity.lookup_table(volume.tissue_mean, volume.tissue_std, cut.light)
    patches = table[tokens.extract_patches(view, recipe.tokens.patch_size, index)]
    return Window(patches, token_positions(index, recipe), index, table[view])


def encode(network: nn.Module, windows: Sequence[Window]) -> list[Float[Tensor, "_ dim"]]:
    """Features of each window's tokens, on the network's device; windows of equal counts share a forward pass."""
    device = next(network.parameters()).device
    by_window: dict[int, Tensor] = {}
    for numbers in equal_counts([len(window.index) for window in windows]):
        batch = [windows[number] for number in numbers]
        patches, positions = (
            np.stack([getattr(window, name) for window in batch]) for name in ("patches", "positions")
        )
        features = network(torch.from_numpy(patches).to(device), torch.from_numpy(positions).to(device))
        by_window.update(zip(numbers, features, strict=True))
    return [by_window[number] for number in range(len(windows))]


def encoder_tokens(encoder: PretrainedEncoder) -> ExtractTokens:
    """Tokens of the frozen encoder."""

    @torch.inference_mode()
    def extract(volume: CanonicalVolume, corner: Corner) -> Tokens:
        sample = window(volume, Cut.at(corner), encoder.recipe)
        return Tokens(encode(encoder.encoder, [sample])[0].float().cpu().numpy(), sample.index)

    return extract


def pixel_tokens(recipe: Recipe) -> ExtractTokens:
    """The z-scored voxels of each selected patch: what a linear map can read without any encoder."""

    def extract(volume: CanonicalVolume, corner: Corner) -> Tokens:
        sample = window(volume, Cut.at(corner), recipe)
        return Tokens(sample.patches, sample.index)

    return extract


@dataclass(frozen=True, eq=False)
class PositionPrior:
    """Shares of the classes [classes, D, H, columns] at each position of the stored volume, over the training volumes.

    What needs no image at all. Columns are coarse, `columns` of them together; slices and depth are whole.
    width: columns of the stored volume; None: the coarse columns fill it.
    """

    shares: Float[np.ndarray, "classes D H C"]
    columns: int
    width: int | None = None

    @classmethod
    def from_labels(cls, labels: Iterable[UInt8[np.ndarray, "D H W"]], classes: int, columns: int) -> PositionPrior:
        """`classes` counts the background. A voxel without a label has no vote; a depth without any is background.

        The shares at each depth count as `_PROFILE_VOLUMES` volumes more at every position of it, so that the lesions
        of a few labelled eyes do not become the expected positions in every eye.
        """
        votes: np.ndarray | None = None
        for volume in labels:
            coarse = coarsen_columns(volume, columns)
            here = np.stack([(coarse == code) for code in range(classes)]).astype(np.float32)
            votes = here if votes is None else votes + here
        assert votes is not None
        by_depth = votes.sum(axis=(1, 3), keepdims=True)
        total = by_depth.sum(axis=0)
        by_depth[0] += total == 0
        votes = votes + _PROFILE_VOLUMES * (by_depth / np.maximum(total, 1))
        return cls((votes / votes.sum(axis=0)).astype(np.float32), columns, volume.shape[2])

    def scores(self, shape: Sequence[int]) -> Float[np.ndarray, "classes D H W"]:
        """For a volume of `shape`, of the stored depth; beyond the stored size the edge is repeated."""
        _, depth, _, columns = self.shares.shape
        width = self.width or columns * self.columns
        slices, across = (
            np.clip(np.arange(size) - (size - stored) // 2, 0, stored - 1)
            for size, stored in ((shape[0], depth), (shape[2], width))
        )
        return refine_columns(self.shares, self.columns, width)[:, slices][..., across]


def coarsen_columns(labels: UInt8[np.ndarray, "D H W"], columns: int) -> UInt8[np.ndarray, "D H C"]:
    """Every `columns`-th column, in the middle; columns that do not fill a whole group are left out on the right."""
    return labels[..., : labels.shape[2] // columns * columns][..., columns // 2 :: columns]


def refine_columns(
    scores: Float[np.ndarray, "classes D H C"], columns: int, size: int
) -> Float[np.ndarray, "classes D H W"]:
    """Coarse columns back to `size` by linear interpolation; the outermost are repeated."""
    position = (np.arange(size) - columns // 2) / columns
    last = scores.shape[-1] - 1
    left = np.clip(np.floor(position).astype(np.int64), 0, last)
    right = np.minimum(left + 1, last)
    share = np.clip(position - left, 0, 1).astype(np.float32)
    return scores[..., left] * (1 - share) + scores[..., right] * share
