"""The spatial transform that both views of a volume share: crop, flips, small rotation and zoom, drawn once for both.

Patch i of one view therefore shows the same tissue as patch i of the other. The depth axis is never flipped: vitreous
is up. The tissue band undergoes the same transform as the voxels.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Int, UInt8

from octjepa.recipe import Preprocessing, ViewRecipe


@dataclass(frozen=True)
class ViewTransform:
    """A crop at `corner`, its first stored voxel (slice, depth, column); flips; rotation and zoom of each B-scan.

    `flip_slow` flips slices, `flip_fast` columns. `column_over_row` is the spacing of columns divided by that of
    rows (depth), so that a rotation turns the eye by its angle.
    """

    corner: tuple[int, int, int]
    flip_slow: bool = False
    flip_fast: bool = False
    rotation_degrees: float = 0.0
    zoom: float = 1.0
    column_over_row: float = 1.0

    @property
    def moves_whole_voxels(self) -> bool:
        """Whether there is neither rotation nor zoom, so that nothing is interpolated."""
        return self.rotation_degrees == 0.0 and self.zoom == 1.0


def center_crop(preprocessing: Preprocessing) -> ViewTransform:
    """The centre crop, without any randomness: the transform for embedding."""
    return ViewTransform(corner=preprocessing.margin)


def sample_transform(preprocessing: Preprocessing, views: ViewRecipe, rng: np.random.Generator) -> ViewTransform:
    """Crop uniform over the stored margin, flips by their probability, rotation and zoom uniform in their limits."""
    offset = rng.integers(0, 2 * np.asarray(preprocessing.margin) + 1)
    flips = rng.random(2)
    angle, zoom = rng.uniform(-1, 1, size=2)
    corner = offset if views.crop else np.asarray(preprocessing.margin)
    _, row_mm, column_mm = preprocessing.target_spacing_mm
    return ViewTransform(
        corner=(int(corner[0]), int(corner[1]), int(corner[2])),
        flip_slow=bool(flips[0] < views.flip_slow),
        flip_fast=bool(flips[1] < views.flip_fast),
        rotation_degrees=float(angle * views.rotation_degrees),
        zoom=float(1.0 + zoom * views.zoom),
        column_over_row=column_mm / row_mm,
    )


def apply_transform(
    pixels: UInt8[np.ndarray, "D H W"], transform: ViewTransform, size: tuple[int, int, int]
) -> UInt8[np.ndarray, "d h w"]:
    """The view `size` of a stored volume. Whole-voxel moves are exact; rotation and zoom interpolate each B-scan."""
    return np.ascontiguousarray(strided_view(pixels, transform, size))


def strided_view(
    pixels: UInt8[np.ndarray, "D H W"], transform: ViewTransform, size: tuple[int, int, int]
) -> UInt8[np.ndarray, "d h w"]:
    """As `apply_transform`, but whole-voxel moves copy nothing: strides may be negative, and `pixels` a memory map."""
    view = moved_view(pixels, transform, size)
    if not transform.moves_whole_voxels:
        view = _rotate_and_zoom(view, transform)
    return view


def moved_view(voxels: np.ndarray, transform: ViewTransform, size: tuple[int, int, int]) -> np.ndarray:
    """Only the crop and flips, without a copy, of what lies on a stored volume [..., D, H, W], as labels do.

    Raises ValueError where the crop leaves the volume.
    """
    (a, b, c), (d, h, w) = transform.corner, size
    view = voxels[..., a : a + d, b : b + h, c : c + w]
    if view.shape[-3:] != size:
        raise ValueError(f"a crop {size} at {transform.corner} leaves the stored volume {voxels.shape}")
    return view[..., :: -1 if transform.flip_slow else 1, :, :: -1 if transform.flip_fast else 1]


def band_in_view(
    band: Int[np.ndarray, "2 D W"], transform: ViewTransform, size: tuple[int, int, int]
) -> Int[np.ndarray, "2 d w"]:
    """First and last depth index of tissue in a view of whole-voxel moves; first > last if there is none.

    Either may be outside the view. Raises ValueError where the transform rotates or zooms: that needs `tissue_mask`.
    """
    if not transform.moves_whole_voxels:
        raise ValueError("a rotated or zoomed view has no first and last tissue index per A-scan: use tissue_mask")
    (a, b, c), (d, h, w) = transform.corner, size
    slow, fast = (-1 if flip else 1 for flip in (transform.flip_slow, transform.flip_fast))
    first, last = band[:, a : a + d, c : c + w][:, ::slow, ::fast].astype(np.int32)
    return np.stack([np.where(first < 0, h, first - b), np.where(first < 0, -1, last - b)])


def tissue_mask(
    band: np.ndarray, transform: ViewTransform, stored_height: int, size: tuple[int, int, int]
) -> Bool[np.ndarray, "d h w"]:
    """The tissue band `[2, D, W]` (first and last depth index, -1 for none) as a mask of the same view."""
    depth_index = np.arange(stored_height, dtype=np.int16)[None, :, None]
    mask = (depth_index >= band[0][:, None]) & (depth_index <= band[1][:, None]) & (band[0][:, None] >= 0)
    return apply_transform(mask.view(np.uint8), transform, size) > 0


def _rotate_and_zoom(view: np.ndarray, transform: ViewTransform) -> np.ndarray:
    """[d, h, w] Every B-scan rotated and zoomed about its centre; beyond its border the nearest pixel."""
    from scipy import ndimage

    radians = np.deg2rad(transform.rotation_degrees)
    cosine, sine, aspect = np.cos(radians), np.sin(radians), transform.column_over_row
    matrix = np.array([[cosine, sine * aspect], [-sine / aspect, cosine]]) / transform.zoom
    centre = (np.asarray(view.shape[1:]) - 1) / 2
    shift = centre - matrix @ centre
    order = 0 if view.max(initial=0) <= 1 else 1  # nearest neighbour keeps a mask binary
    return np.stack([ndimage.affine_transform(bscan, matrix, shift, order=order, mode="nearest") for bscan in view])
