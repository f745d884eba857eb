"""The segmentation network as an encoder: what it knows of each token, on the volumes of any store.

The network was trained to find layers and fluid in randomised phantoms (`octjepa.tasks.segmenter.train`). A token's
features are the means and maxima of its last feature maps and class probabilities over the token, and the distances
of the token from eight boundaries. On synthetic eyes these tell more of lesions than the tokens of the pretrained 3D
encoders; on real eyes neither is clearly better (docs/decisions/0010-segmentation-network-as-encoder.md). The network
is fully convolutional, so volumes of any spacing are resampled to its own and read by it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, NamedTuple, Self

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from octjepa.checkpoint.boundary_unet import read_boundary_unet
from octjepa.encoders.base import GridEncoder, hash_weights
from octjepa.encoders.external.prepared import one_bscan
from octjepa.encoders.pooling import TokenFeatures
from octjepa.errors import UsageError
from octjepa.model.boundary_unet import BoundaryUNet, decode_boundaries
from octjepa.model.bscan_inference import (
    BATCH,
    Calibration,
    bscan_logits,
    near_bscans,
    prepared_bscans,
    spread_bscans,
    stack_neighbours,
    with_statistics,
)
from octjepa.phantom.random_scene import COLUMN_MM, ROW_MM
from octjepa.recipe import Preprocessing, Recipe, TokenRecipe, TrainRecipe
from octjepa.shipped import SEGMENTER
from octjepa.views import geometry
from octjepa.views.sample import select_tissue_tokens
from octjepa.volume import CanonicalVolume

TOKEN_MM: Final = (1.44, 8 * ROW_MM, 16 * COLUMN_MM)  # as large as a token of `phantom-truth`
_FARTHEST: Final = 8.0  # tokens; boundaries beyond it count as that far


class BScanImages(NamedTuple):
    """B-scans as the network takes them (`prepared_bscans`), and the tokens that are read.

    Of a single B-scan there is one image, whichever of the grid's positions along the slice axis it fills.
    """

    images: Float[np.ndarray, "d h w"]
    grid_index: Int[np.ndarray, " k"]
    tissue: Float[np.ndarray, " k"]


class DenseEncoder(GridEncoder[BScanImages]):
    """The segmentation network for volumes of one preprocessing.

    A token has `2 C + 2 (K - 1) + B` features, of C feature maps, K classes and B boundaries. It learned
    from phantoms only. It is frozen: `octjepa segment adapt` trains the network itself.

    token_mm: about the size of a token; along each axis a token has a whole number of voxels that divides the volume.
    Tokens of one B-scan, (0.36, 0.062, 0.19), tell the depth of surfaces better than the default. Raises UsageError: a
    length that is not positive.
    """

    def __init__(
        self,
        network: BoundaryUNet,
        calibration: Calibration,
        preprocessing: Preprocessing,
        name: str = SEGMENTER,
        token_mm: tuple[float, float, float] = TOKEN_MM,
    ) -> None:
        self._network, self.calibration, self.name = network.eval().requires_grad_(False), calibration, name
        self.token_mm = token_mm
        patch = _patch_size(preprocessing, token_mm)
        # A recipe describes its tokens; nothing is trained by it, so its masks need not fit a grid of any size.
        recipe = Recipe(name=name, tokens=TokenRecipe(select="all"), train=TrainRecipe(max_updates=1))
        tokens = recipe.tokens.model_copy(update={"patch_size": patch, "select": "tissue"})
        self.recipe = recipe.model_copy(update={"preprocessing": preprocessing, "tokens": tokens})
        size = network.size
        self.dim = 2 * size.widths[0] + 2 * (size.classes - 1) + size.boundaries
        self._shape = _image_shape(preprocessing, self.grid)

    @classmethod
    def packaged(
        cls, preprocessing: Preprocessing | None = None, token_mm: tuple[float, float, float] = TOKEN_MM
    ) -> Self:
        """The network of the package for volumes of `preprocessing`; None: the default one."""
        return cls(*read_boundary_unet(), preprocessing or Preprocessing(), token_mm=token_mm)

    @property
    def patterns(self) -> tuple[str, ...]:
        """The scan patterns that it reads."""
        return ("raster",)

    @property
    def recorded_training(self) -> frozenset[str]:
        """Nothing: it learned from phantoms, which are in no store."""
        return frozenset()

    @property
    def network(self) -> BoundaryUNet:
        """The network with its weights."""
        return self._network

    def weights_hash(self) -> str:
        """SHA-256 over names and values of the weights, and over `token_mm` if it is not the default."""
        return hash_weights(self.network, "" if self.token_mm == TOKEN_MM else repr(self.token_mm))

    def untrained(self) -> Self:
        """The same architecture with random weights, the same at every call."""
        with torch.random.fork_rng():
            torch.manual_seed(self.recipe.train.seed)
            network = BoundaryUNet(self.network.size)
        return type(self)(network, self.calibration, self.preprocessing, "untrained", self.token_mm)

    def select_tokens(self, volume: CanonicalVolume) -> BScanImages:
        """The encoder's input for a prepared volume: centre crop, every token that contains tissue."""
        crop = geometry.center_crop(self.preprocessing)
        view, index, share = select_tissue_tokens(volume, self.recipe, crop)
        if volume.bscan_slices:
            view = one_bscan(view, volume, crop)
        images = prepared_bscans(view, self._shape).numpy()
        return BScanImages(images, index, share[index])

    def encode_tokens(self, selected: Sequence[BScanImages]) -> list[TokenFeatures]:
        """The features of several volumes, one after the other: memory is that of one volume."""
        return [
            TokenFeatures(self._features(bscans), bscans.grid_index, self.grid, bscans.tissue.astype(np.float32))
            for bscans in selected
        ]

    @torch.inference_mode()
    def _features(self, selected: BScanImages) -> Float[np.ndarray, "k dim"]:
        images = torch.from_numpy(selected.images).to(self.device)
        near = near_bscans(len(images), self.preprocessing.target_spacing_mm[0], None, sparse=False)
        maps: list[Tensor] = []
        logits: list[Tensor] = []
        with with_statistics(self.network, spread_bscans(images, near), self.calibration.adapt) as network:
            hook = network.up[-1].register_forward_hook(lambda _module, _inputs, output: maps.append(output.float()))  # type: ignore[union-attr,index]
            try:
                for start in range(0, len(images), BATCH):
                    index = np.arange(start, min(start + BATCH, len(images)))
                    logits.append(bscan_logits(network, stack_neighbours(images, near, index), flip=False))
            finally:
                hook.remove()
        _, rows, columns = self.grid
        grid = (1 if len(images) == 1 else self.grid[0], rows, columns)
        every = self._describe(torch.cat(maps), torch.cat(logits), grid)
        return every[torch.from_numpy(selected.grid_index % len(every))].cpu().numpy()

    def _describe(
        self, maps: Float[Tensor, "d c hh ww"], logits: Float[Tensor, "d o h w"], grid: tuple[int, int, int]
    ) -> Float[Tensor, "tokens dim"]:
        """All tokens of `grid`, in raster order."""
        height, width = self._shape
        boundaries = self.network.size.boundaries
        logits = logits[:, :, :, :width]
        temperature = torch.tensor(self.calibration.boundary_temperature, device=logits.device)
        rows = decode_boundaries(logits[:, :boundaries], temperature).rows  # [d, b, w]
        classes = torch.softmax(logits[:, boundaries:, :height] / self.calibration.class_temperature, 1)[:, 1:]
        d, h, w = grid
        mean_rows = rows.reshape(d, len(rows) // d, boundaries, w, width // w).mean(dim=(1, 4))  # [d, b, w]
        token_height = height // h
        centres = (torch.arange(h, device=rows.device) + 0.5) * token_height - 0.5
        distances = (centres[None, :, None, None] - mean_rows[:, None]) / token_height  # [d, h, b, w]
        distances = distances.clamp(-_FARTHEST, _FARTHEST).permute(0, 1, 3, 2).reshape(d * h * w, boundaries)
        half = maps[:, :, : height // 2, : width // 2]
        return torch.cat([*_mean_and_maximum(half, grid), *_mean_and_maximum(classes, grid), distances], dim=1)


def _patch_size(preprocessing: Preprocessing, token_mm: tuple[float, float, float]) -> tuple[int, int, int]:
    """The voxels of a token: along each axis the divisor of the image's size that is nearest to `token_mm`."""
    if not all(length_mm > 0 for length_mm in token_mm):
        raise UsageError(f"token_mm {token_mm}: expected three lengths above 0, along slices, depth and columns")
    sizes = []
    for size, spacing_mm, length_mm in zip(
        preprocessing.image_size, preprocessing.target_spacing_mm, token_mm, strict=True
    ):
        divisors = [n for n in range(1, size + 1) if size % n == 0]
        sizes.append(min(divisors, key=lambda n: abs(np.log(n * spacing_mm / length_mm))))
    return sizes[0], sizes[1], sizes[2]


def _image_shape(preprocessing: Preprocessing, grid: tuple[int, int, int]) -> tuple[int, int]:
    """Rows and columns of a B-scan for the network: about its spacing, an even number in each token."""
    extents_mm = (
        size * spacing_mm
        for size, spacing_mm in zip(preprocessing.image_size[1:], preprocessing.target_spacing_mm[1:], strict=True)
    )
    rows, columns = (
        count * 2 * max(1, round(extent_mm / step_mm / count / 2))
        for extent_mm, step_mm, count in zip(extents_mm, (ROW_MM, COLUMN_MM), grid[1:], strict=True)
    )
    return rows, columns


def _mean_and_maximum(
    maps: Float[Tensor, "d c h w"], grid: tuple[int, int, int]
) -> tuple[Float[Tensor, "tokens c"], Float[Tensor, "tokens c"]]:
    """Mean and maximum of each map over every token of `grid`."""
    (slices, count, height, width), (d, h, w) = maps.shape, grid
    tiles = maps.reshape(d, slices // d, count, h, height // h, w, width // w)
    return tuple(  # type: ignore[return-value]
        values.permute(0, 2, 3, 1).reshape(d * h * w, count)
        for values in (tiles.mean(dim=(1, 4, 6)), tiles.amax(dim=(1, 4, 6)))
    )
