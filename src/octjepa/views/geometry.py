"""The geometry that both views of a volume share: crop, flips, small rotation and zoom, sampled once for both.

Patch i of one view therefore shows the same tissue as patch i of the other. The depth axis is never flipped: vitreous
is up. The tissue band undergoes the same transform as the voxels.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, UInt8
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
    (a, b, c), (d, h, w) = geometry.corner, size
    view = pixels[a : a + d, b : b + h, c : c + w]
    if view.shape != size:
        raise ValueError(f"a crop {size} at {geometry.corner} leaves the stored volume {pixels.shape}")
    view = view[:: -1 if geometry.flip_slow else 1, :, :: -1 if geometry.flip_fast else 1]
    if geometry.rotation_degrees or geometry.zoom != 1.0:
        view = _rotate_and_zoom(view, geometry)
    return np.ascontiguousarray(view)


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
