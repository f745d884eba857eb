"""One volume -> one sample of fixed shapes: two views of the same selected patches, their positions, and a mask.

A sample is a pure function of (recipe, stored volume, epoch). `epoch=None` is the validation sample: geometry, tokens
and mask are drawn as in training, but from the volume id alone, and intensity is not augmented. A centred crop would
give the `position_mean` baseline an alignment that training never shows, which would not be a fair comparison.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import numpy as np
from jaxtyping import Float, Int, UInt8

from octjepa import keys
from octjepa.recipe import Recipe
from octjepa.views import geometry, intensity, masks, tokens
from octjepa.volume import CanonicalVolume


class Sample(NamedTuple):
    """K tokens of one volume, N of them context and M target; `further` masks of the same views: (context, target)."""

    context_view: Float[np.ndarray, "k voxels"]
    target_view: Float[np.ndarray, "k voxels"]
    positions: Float[np.ndarray, "k 3"]
    grid_index: Int[np.ndarray, " k"]
    tissue: Float[np.ndarray, " k"]
    context: Int[np.ndarray, " n"]
    target: Int[np.ndarray, " m"]
    further: tuple[tuple[Int[np.ndarray, " n"], Int[np.ndarray, " m"]], ...] = ()


class Draw(NamedTuple):
    """All that is random in a sample, without a voxel: its transform, its two augmentations, its tokens and masks.

    `context_view` and `target_view` of `sample` are empty, of shape [K, 0].
    """

    transform: geometry.ViewTransform
    augmentations: tuple[intensity.IntensityAugmentation, intensity.IntensityAugmentation]
    sample: Sample


def make_sample(volume: CanonicalVolume, recipe: Recipe, epoch: int | None, background: int = 0) -> Sample:
    """The training sample of `volume` in `epoch`, or (None) its fixed validation sample.

    At least `background` tokens hold no tissue, for metrics of the background.
    """
    draw, view = _draw(volume, recipe, epoch, background)
    noise = _generator(volume, recipe, epoch, "speckle")
    (first, second), index = draw.augmentations, draw.sample.grid_index
    views = [view, view]
    if recipe.views.halves:
        views = _half_views(volume, draw.transform, recipe, epoch)
    context_view = _patch_view(views[0], index, recipe, first, volume, noise)
    target_view = context_view
    if second != first or second.speckle or recipe.views.halves:
        target_view = _patch_view(views[1], index, recipe, second, volume, noise)
    return draw.sample._replace(context_view=context_view, target_view=target_view)


def make_view(volume: CanonicalVolume, recipe: Recipe, epoch: int | None) -> Float[np.ndarray, "d h w"]:
    """The view of `volume` in `epoch`, or (None) without intensity augmentation, as intensities 0..1.

    For networks that take images instead of tokens. The draws are those of `make_sample`'s context view. Gain, gamma
    and speckle are applied about the tissue's mean, which stays.
    """
    transform = view_transform(volume, recipe, epoch)
    view = geometry.apply_transform(volume.pixels, transform, recipe.preprocessing.image_size)
    augmentation, _ = _augmentations(recipe, epoch, _generator(volume, recipe, epoch, "light"))
    if augmentation == intensity.IntensityAugmentation():
        return view.astype(np.float32) / 255
    whole = view.reshape(1, -1)
    if augmentation.blur:
        whole = intensity.blur(whole, recipe.preprocessing.image_size)
    noise = _generator(volume, recipe, epoch, "speckle")
    scores = intensity.apply_intensity(whole, augmentation, volume.tissue_mean, volume.tissue_std, noise)
    pixels = scores.reshape(view.shape) * max(volume.tissue_std, 1.0) + volume.tissue_mean
    return np.asarray(np.clip(pixels / 255, 0, 1), dtype=np.float32)


def draw_sample(volume: CanonicalVolume, recipe: Recipe, epoch: int | None) -> Draw:
    """The random choices of `make_sample`, for views that are cut elsewhere. Crops and flips alone read no voxel of
    `volume`.
    """
    return _draw(volume, recipe, epoch, 0)[0]


def view_transform(volume: CanonicalVolume, recipe: Recipe, epoch: int | None) -> geometry.ViewTransform:
    """Crop, flips, rotation and zoom of the sample of `volume` in `epoch`, or (None) of its validation sample.

    A single B-scan fills one patch along the slice axis and keeps its place there. Moved slices would divide it
    between two patches, and samples would differ in their number of tokens.
    """
    rng = _generator(volume, recipe, epoch, "geometry")
    transform = geometry.sample_transform(recipe.preprocessing, recipe.views, rng)
    if not volume.bscan_slices:
        return transform
    return replace(transform, corner=(recipe.preprocessing.margin[0], *transform.corner[1:]))


def _generator(volume: CanonicalVolume, recipe: Recipe, epoch: int | None, purpose: str) -> np.random.Generator:
    stage = "fixed" if epoch is None else epoch
    return keys.generator(recipe.train.seed, purpose, stage, volume.volume_id)


def mask_counts_of(recipe: Recipe, selected: int) -> tuple[int, int]:
    """(context, target) tokens of a sample with so many tokens: the recipe's, or the same shares of a single B-scan."""
    context, target = recipe.mask_counts
    if selected < recipe.token_count:
        target = max(1, target * selected // recipe.token_count)
        context = max(1, min(context * selected // recipe.token_count, selected - target))
    return context, target


def _draw(volume: CanonicalVolume, recipe: Recipe, epoch: int | None, background: int) -> tuple[Draw, np.ndarray]:
    """The draw, and the view [d, h, w] under its transform."""

    def rng(purpose: str) -> np.random.Generator:
        return _generator(volume, recipe, epoch, purpose)

    transform = view_transform(volume, recipe, epoch)
    view, index, share = select_tokens(volume, recipe, transform, rng("tokens"), background)
    augmentations = _augmentations(recipe, epoch, rng("light"))  # purposes are part of every draw: never rename them
    grid_positions = np.stack(np.unravel_index(index, recipe.grid), axis=-1)  # [k, 3]
    tissue = tokens.holds_tissue(share)[index]
    mask_rng, count = rng("mask"), 1 if epoch is None else recipe.masks.per_target
    counts = mask_counts_of(recipe, len(index))
    (context, target), *further = (
        masks.sample_mask(grid_positions, recipe.grid, recipe.masks, counts, mask_rng, tissue) for _ in range(count)
    )
    positions = token_positions(index, recipe)
    empty = np.empty((len(index), 0), dtype=np.float32)
    sample = Sample(empty, empty, positions, index, share[index], context, target, tuple(further))
    return Draw(transform, augmentations, sample), view


def sample_layers(volume: CanonicalVolume, recipe: Recipe) -> Int[np.ndarray, " grid"]:
    """The layer of `tokens.LAYERS` of each patch of `make_sample`'s fixed views belongs to, -1 for none; raster
    order.
    """
    transform = view_transform(volume, recipe, None)
    mask = geometry.tissue_mask(volume.band, transform, volume.pixels.shape[1], recipe.preprocessing.image_size)
    return tokens.patch_layers(mask, recipe.tokens.patch_size)


def select_tokens(
    volume: CanonicalVolume,
    recipe: Recipe,
    transform: geometry.ViewTransform,
    rng: np.random.Generator,
    background: int = 0,
) -> tuple[np.ndarray, Int[np.ndarray, " k"], Float[np.ndarray, " grid"]]:
    """(view, chosen patches in raster order, tissue share of every patch) under `transform`."""
    view, share = _view_and_tissue(volume, recipe, transform)
    candidates = _candidates(volume, recipe, share)
    if recipe.tokens.select == "all":
        return view, candidates, share
    count = recipe.token_count * len(candidates) // recipe.grid_tokens
    return view, candidates[tokens.select(share[candidates], count, rng, background)], share


def select_tissue_tokens(
    volume: CanonicalVolume, recipe: Recipe, transform: geometry.ViewTransform
) -> tuple[np.ndarray, Int[np.ndarray, " k"], Float[np.ndarray, " grid"]]:
    """As `select_tokens`, with every patch that holds tissue: what a frozen encoder reads. K differs by volume."""
    view, share = _view_and_tissue(volume, recipe, transform)
    candidates = _candidates(volume, recipe, share)
    if recipe.tokens.select == "all":
        return view, candidates, share
    _, depth, columns = recipe.grid
    grid = (len(candidates) // (depth * columns), depth, columns)
    return view, candidates[tokens.select_tissue(share[candidates], grid)], share


def _candidates(
    volume: CanonicalVolume, recipe: Recipe, share: Float[np.ndarray, " grid"]
) -> Int[np.ndarray, " candidates"]:
    """The patches that may be selected: all, or of a single B-scan those at its positions along the slice axis."""
    index = np.arange(recipe.grid_tokens)
    if not volume.bscan_slices:
        return index
    holds_bscan = (share.reshape(recipe.grid[0], -1) > 0).any(axis=1)
    return index.reshape(recipe.grid[0], -1)[holds_bscan].ravel() if holds_bscan.any() else index


def _view_and_tissue(
    volume: CanonicalVolume, recipe: Recipe, transform: geometry.ViewTransform
) -> tuple[np.ndarray, Float[np.ndarray, " grid"]]:
    """(view [d, h, w], tissue share of every patch in raster order)."""
    size = recipe.preprocessing.image_size
    view = geometry.strided_view(volume.pixels, transform, size)
    if transform.moves_whole_voxels:
        band = geometry.band_in_view(volume.band, transform, size)
        return view, tokens.tissue_share_of_band(band, recipe.tokens.patch_size, size[1])
    mask = geometry.tissue_mask(volume.band, transform, volume.pixels.shape[1], size)
    return view, tokens.tissue_share(mask, recipe.tokens.patch_size)


def token_positions(index: Int[np.ndarray, " k"], recipe: Recipe) -> Float[np.ndarray, "k 3"]:
    """Positions of the tokens (slice, depth, column) in the recipe's unit.

    Millimetres count from the scan's centre, and in depth from where flattening puts Bruch's membrane: a
    point in the eye has the same coordinates in a grid of any spacing and size. Coordinates are the view's, after crop
    and zoom, as with token steps.
    """
    preprocessing = recipe.preprocessing
    d, _, w = preprocessing.image_size
    anchor = round(preprocessing.axial_anchor * (preprocessing.stored_size[1] - 1)) + 0.5 - preprocessing.margin[1]
    return tokens.positions(
        index,
        recipe.grid,
        recipe.tokens.patch_size,
        preprocessing.target_spacing_mm,
        recipe.model.position_unit,
        (d / 2, anchor, w / 2),
    )


def _augmentations(
    recipe: Recipe, epoch: int | None, rng: np.random.Generator
) -> tuple[intensity.IntensityAugmentation, intensity.IntensityAugmentation]:
    """Of the context view and of the target view; neutral for validation."""
    if epoch is None:
        return intensity.IntensityAugmentation(), intensity.IntensityAugmentation()
    return intensity.sample_augmentation(recipe.views, rng), intensity.sample_augmentation(recipe.views, rng)


def _half_views(
    volume: CanonicalVolume, transform: geometry.ViewTransform, recipe: Recipe, epoch: int | None
) -> list[UInt8[np.ndarray, "d h w"]]:
    """The views of context and target: each of one half of the B-scans; which half the context has is drawn.

    Raises ValueError where `volume` was read without halves.
    """
    halves = volume.halves
    if halves is None:
        raise ValueError(f"volume {volume.volume_id} has no halves, which views.halves needs")
    first = int(_generator(volume, recipe, epoch, "halves").integers(2))
    return [
        geometry.strided_view(halves[which], transform, recipe.preprocessing.image_size) for which in (first, 1 - first)
    ]


def _patch_view(
    view: UInt8[np.ndarray, "d h w"],
    index: Int[np.ndarray, " k"],
    recipe: Recipe,
    augmentation: intensity.IntensityAugmentation,
    volume: CanonicalVolume,
    rng: np.random.Generator,
) -> Float[np.ndarray, "k voxels"]:
    """The patches `index` of a view under `augmentation`, z-scored."""
    patches = tokens.extract_patches(view, recipe.tokens.patch_size, index)
    if augmentation.blur:
        patches = intensity.blur(patches, recipe.tokens.patch_size)
    return intensity.apply_intensity(patches, augmentation, volume.tissue_mean, volume.tissue_std, rng)
