"""The geometry that both views of a volume share: crop, flips, small rotation and zoom, sampled once for both.

Patch i of one view therefore shows the same tissue as patch i of the other. The depth axis is never flipped: vitreous
is up. The tissue band undergoes the same transform as the voxels.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Int, UInt8
from scipy import ndimage

from octjepa.recipe import Preprocessing, ViewRecipe


@dataclass(frozen=True)
class Geometry:
    """`corner` is the first stored voxel of the crop `[D, H, W]`; flips come after the crop, then the affine."""

    corner: tuple[int, int, int]
    flip_slow: bool = False
    flip_fast: bool = False
    rotation_degrees: float = 0.0
    zoom: float = 1.0

    @property
    def moves_whole_voxels(self) -> bool:
        """Crop and flips alone, which interpolate nothing."""
        return self.rotation_degrees == 0.0 and self.zoom == 1.0


def center_crop(preprocessing: Preprocessing) -> Geometry:
    """The centre crop, without any randomness: the geometry of embedding."""
    return Geometry(corner=preprocessing.margin)


def sample_geometry(preprocessing: Preprocessing, views: ViewRecipe, rng: np.random.Generator) -> Geometry:
    """Crop uniform over the stored margin, flips by their probability, rotation and zoom uniform in their limits."""
    offset = rng.integers(0, 2 * np.asarray(preprocessing.margin) + 1)
    flips = rng.random(2)
    angle, zoom = rng.uniform(-1, 1, size=2)
    corner = offset if views.crop else np.asarray(preprocessing.margin)
    return Geometry(
        corner=(int(corner[0]), int(corner[1]), int(corner[2])),
        flip_slow=bool(flips[0] < views.flip_slow),
        flip_fast=bool(flips[1] < views.flip_fast),
        rotation_degrees=float(angle * views.rotation_degrees),
        zoom=float(1.0 + zoom * views.zoom),
    )


def apply_geometry(
    pixels: UInt8[np.ndarray, "D H W"], geometry: Geometry, size: tuple[int, int, int]
) -> UInt8[np.ndarray, "d h w"]:
    """The view `size` of a stored volume. Whole-voxel moves are exact; rotation and zoom interpolate each B-scan."""
    return np.ascontiguousarray(strided_view(pixels, geometry, size))


def strided_view(
    pixels: UInt8[np.ndarray, "D H W"], geometry: Geometry, size: tuple[int, int, int]
) -> UInt8[np.ndarray, "d h w"]:
    """As `apply_geometry`, but whole-voxel moves copy nothing: strides may be negative, and `pixels` a memory map."""
    (a, b, c), (d, h, w) = geometry.corner, size
    view = pixels[a : a + d, b : b + h, c : c + w]
    if view.shape != size:
        raise ValueError(f"a crop {size} at {geometry.corner} leaves the stored volume {pixels.shape}")
    view = view[:: -1 if geometry.flip_slow else 1, :, :: -1 if geometry.flip_fast else 1]
    if not geometry.moves_whole_voxels:
        view = _rotate_and_zoom(view, geometry)
    return view


def band_in_view(
    band: Int[np.ndarray, "2 D W"], geometry: Geometry, size: tuple[int, int, int]
) -> Int[np.ndarray, "2 d w"]:
    """First and last depth index of tissue in a view of whole-voxel moves; first > last where there is none.

    Either may lie outside the view. Raises ValueError where the geometry rotates or zooms: that needs `tissue_mask`.
    """
    if not geometry.moves_whole_voxels:
        raise ValueError("a band is no band any more after a rotation or zoom: use tissue_mask")
    (a, b, c), (d, h, w) = geometry.corner, size
    slow, fast = (-1 if flip else 1 for flip in (geometry.flip_slow, geometry.flip_fast))
    first, last = band[:, a : a + d, c : c + w][:, ::slow, ::fast].astype(np.int32)
    return np.stack([np.where(first < 0, h, first - b), np.where(first < 0, -1, last - b)])


def tissue_mask(
    band: np.ndarray, geometry: Geometry, stored_height: int, size: tuple[int, int, int]
) -> Bool[np.ndarray, "d h w"]:
    """The tissue band `[2, D, W]` (first and last depth index, -1 for none) as a mask of the same view."""
    depth_index = np.arange(stored_height, dtype=np.int16)[None, :, None]
    mask = (depth_index >= band[0][:, None]) & (depth_index <= band[1][:, None]) & (band[0][:, None] >= 0)
    return apply_geometry(mask.view(np.uint8), geometry, size) > 0


def _rotate_and_zoom(view: np.ndarray, geometry: Geometry) -> np.ndarray:
    radians = np.deg2rad(geometry.rotation_degrees)
    matrix = np.array([[np.cos(radians), np.sin(radians)], [-np.sin(radians), np.cos(radians)]]) / geometry.zoom
    centre = (np.asarray(view.shape[1:]) - 1) / 2
    shift = centre - matrix @ centre
    order = 0 if view.max(initial=0) <= 1 else 1  # nearest neighbour keeps a mask binary
    return np.stack([ndimage.affine_transform(s, matrix, shift, order=order, mode="nearest") for s in view])
