"""Real eyes: fluid and retinal surfaces in real eyes, learned from one eye and tested on the other, both ways.

A row's head is linear and in closed form: ridge regression from each token, with its depth, to the voxels of its own
patch. The penalty, and the threshold above which a voxel is called fluid, are chosen by cross-validation over the
slabs (the patches' rows of slices) of the eye that it learns from. The row `intensity` segments fluid voxel by voxel
from its intensity, its mean at three widths, and depth. What no token covers counts as no fluid.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from scipy.ndimage import gaussian_filter

from octjepa.metrics.bootstrap import Draws, mean_estimate
from octjepa.recipe import Preprocessing, Recipe
from octjepa.tasks.segment.dice import dice
from octjepa.tasks.segment.linear import PENALTIES, Ridge, patch_cells, with_intercept
from octjepa.views import geometry, intensity

from .measurement_tasks import mean_of_known, projection_of
from .readings import interleave
from .real_eyes import BSCANS, EYES, RealEye, data_folder, disagreement_px, read_eyes, shifted, why_absent
from .results import Finding, LeftOut
from .settings import RESAMPLES
from .surface_head import LabelledEye, SurfaceHead, fitted_ridge, token_eye
from .tokens import Featurise, TokenTable
from .truth import BOUNDARIES
from .unet import train_unet

THRESHOLDS = tuple(float(t) for t in np.round(np.geomspace(0.02, 0.7, 18), 4))
LABELLED = 1  # eye
# Where the labelled eye is learned from: moved down and right by so many voxels, so that surfaces and cysts lie
# everywhere within a patch; the same for every row of tokens.
SHIFTS = ((0, 0), (2, 4), (4, -4), (6, 8), (-2, -8), (-4, 4), (-6, -4), (7, 0))
_RANKS = 1024  # bins of rank for average precision
_WIDTHS = (1.5, 3.0, 6.0)  # of the Gaussian means of intensity, in voxels of depth


@dataclass(frozen=True, eq=False)
class Segmentation:
    """A score of fluid for every voxel of the view, -inf where a row has none, and the threshold that was chosen."""

    scores: Float[np.ndarray, "D H W"]
    threshold: float


Segment = Callable[[RealEye, RealEye], Segmentation]  # learned from the first eye, of the second


def fluid(eyes: Sequence[RealEye], segment: Segment, task: str = "real_fluid") -> Iterator[Finding]:
    """Dice and average precision by voxel: of both ways (their mean for average precision), and of each.

    Intervals are of B-scans: 22 of them, of two people.
    """
    ways = [(first, second) for first, second in (eyes, eyes[::-1])]
    found = [_counts(second, segment(first, second)) for first, second in ways]
    names = [f"{first.name}_to_{second.name}" for first, second in ways]
    scans = [[f"{second.name} {number}" for number in range(BSCANS)] for _, second in ways]
    draws = Draws([scan for way in scans for scan in way], RESAMPLES, 0)

    both = np.concatenate([counts for counts, _ in found])
    together = draws.estimate(partial(dice_of, both), [scan for way in scans for scan in way], "fluid")
    yield Finding(task, "dice", LABELLED, together)
    precision = []
    for name, of_way, (counts, ranks) in zip(names, scans, found, strict=True):
        yield Finding(task, f"dice_{name}", LABELLED, draws.estimate(partial(dice_of, counts), of_way, name))
        precision.append(draws.estimate(partial(precision_of_ranks, ranks), of_way, name))
        yield Finding(task, f"ap_{name}", LABELLED, precision[-1])
    yield Finding(task, "ap", LABELLED, mean_estimate(precision, 2 * BSCANS))


def dice_of(counts: Float[np.ndarray, "n 3"], weights: Float[np.ndarray, "n r"]) -> Float[np.ndarray, " r"]:
    """Dice of (both, found, true) voxels of n scans together, at each column of their weights."""
    return dice(counts[:, None], weights)[0]


def _counts(eye: RealEye, found: Segmentation) -> tuple[Float[np.ndarray, "scans 3"], Float[np.ndarray, "2 scans k"]]:
    """Of each B-scan: (both, found, true) voxels; and true and all voxels in bins of rank over the whole eye."""
    own = slice(0, BSCANS)
    graded, true, scores = eye.graded[own], eye.fluid[own], found.scores[own]
    predicted = (scores >= found.threshold) & graded
    counts = np.stack([part.sum(axis=(1, 2)) for part in (predicted & true, predicted, true)], axis=1).astype(float)
    ordered = np.sort(scores[graded])[::-1]
    edges = np.unique(ordered[np.geomspace(1, len(ordered), _RANKS).astype(np.int64) - 1])[::-1]
    bins = np.searchsorted(-edges, -scores, side="left").clip(max=len(edges) - 1)  # 0 holds the highest scores
    ranks = [
        [np.bincount(of_scan[mask], minlength=len(edges)) for of_scan, mask in zip(bins, which, strict=True)]
        for which in (true, graded)
    ]
    return counts, np.array(ranks, float)


def precision_of_ranks(ranks: Float[np.ndarray, "2 n k"], weights: Float[np.ndarray, "n r"]) -> Float[np.ndarray, " r"]:
    """Average precision from true and all voxels by bin of rank, the highest scores first; NaN without a true one."""
    both, every = (np.cumsum(weights.T @ part, axis=1) for part in ranks)  # [r, k]
    gained = np.diff(both, axis=1, prepend=0)
    total = both[:, -1]
    area = (gained * both / np.maximum(every, 1)).sum(axis=1)
    return np.divide(area, total, out=np.full(len(total), np.nan), where=total > 0)


def fluid_from_tokens(featurise: Featurise, recipe: Recipe) -> Segment:
    """By a linear head on a row's tokens."""

    def segment(train_eye: RealEye, test_eye: RealEye) -> Segmentation:
        eyes = [shifted(train_eye, *shift) for shift in SHIFTS]
        table = token_table_of(featurise, eyes, recipe)
        x, slab = _features(table), _slabs(table)
        true, graded = (
            np.concatenate(
                [
                    patch_cells(mask.view(np.uint8), recipe.grid, table.index[table.of(v)]) > 0
                    for v, mask in enumerate(masks)
                ]
            )
            for masks in ([eye.fluid for eye in eyes], [eye.graded for eye in eyes])
        )
        whole = graded.all(axis=1)

        def fitted(chosen: Bool[np.ndarray, " k"]) -> Ridge:
            return fitted_ridge(x[chosen & whole], true[chosen & whole].astype(float))

        held_out = [(slab == one, fitted(slab != one)) for one in np.unique(slab[whole])]
        penalty, threshold = _choose(
            lambda p: [(_scores(x[here], head, p)[graded[here]], true[here][graded[here]]) for here, head in held_out]
        )
        other = token_table_of(featurise, [test_eye], recipe)
        scores = _scores(_features(other), fitted(np.ones(len(x), bool)), penalty)
        return Segmentation(_paint(scores, other.index, recipe), threshold)

    return segment


def _features(table: TokenTable) -> Float[np.ndarray, "k f"]:
    depth = [_depth_features(table, volume) for volume in range(len(table.offsets) - 1)]
    return interleave([table.features, np.concatenate(depth)])


def _depth_features(table: TokenTable, volume: int) -> Float[np.ndarray, "k 2"]:
    """Depth of each token of a volume, from -1 to 1, and its square."""
    depth = np.unravel_index(table.index[table.of(volume)], table.grid)[1]
    at = (2 * depth + 1) / table.grid[1] - 1
    return np.stack([at, at**2], axis=1).astype(np.float32)


def _choose(held_out: Callable[[float], list[tuple[np.ndarray, np.ndarray]]]) -> tuple[float, float]:
    """(penalty, threshold) of the highest Dice over what was held out: (scores, truth) of each part, at a penalty."""
    best, choice = -1.0, (PENALTIES[0], THRESHOLDS[0])
    for penalty in PENALTIES:
        parts = held_out(penalty)
        scores, true = (np.concatenate(part) for part in zip(*parts, strict=True))
        for threshold in THRESHOLDS:
            predicted = scores >= threshold
            value = 2 * float((predicted & true).sum()) / max(float(predicted.sum() + true.sum()), 1.0)
            if value > best:
                best, choice = value, (penalty, threshold)
    return choice


def _scores(x: Float[np.ndarray, "k f"], head: Ridge, penalty: float) -> Float[np.ndarray, "k outputs"]:
    return np.asarray(with_intercept(x) @ head.weights(penalty))


def _slabs(table: TokenTable) -> Int[np.ndarray, " k"]:
    return np.asarray(np.unravel_index(table.index, table.grid)[0])


def _paint(scores: Float[np.ndarray, "k cells"], index: np.ndarray, recipe: Recipe) -> Float[np.ndarray, "D H W"]:
    """Scores of patches at their voxels, -inf elsewhere."""
    (d, h, w), (p, q, r) = recipe.grid, recipe.tokens.patch_size
    tiles = np.full((d * h * w, p * q * r), -np.inf)
    tiles[index] = scores
    return tiles.reshape(d, h, w, p, q, r).transpose(0, 3, 1, 4, 2, 5).reshape(recipe.preprocessing.image_size)


def token_table_of(featurise: Featurise, eyes: Sequence[RealEye], recipe: Recipe) -> TokenTable:
    """Tokens of real eyes, in the order of `eyes`."""
    found = featurise([eye.volume for eye in eyes])
    offsets = np.cumsum([0, *(len(one.grid_index) for one in found)])
    features, index = (np.concatenate([one[part] for one in found]) for part in (0, 1))
    return TokenTable(features, index, offsets, recipe.grid, recipe.tokens.patch_size)


def fluid_from_voxels(recipe: Recipe) -> Segment:
    """By a linear rule on each voxel of the retina."""

    def segment(train_eye: RealEye, test_eye: RealEye) -> Segmentation:
        (x, retina), (y, where) = (_voxel_features(eye, recipe) for eye in (train_eye, test_eye))
        graded = train_eye.graded & retina
        slab = np.arange(len(graded)) // recipe.tokens.patch_size[0]

        def fitted(chosen: Bool[np.ndarray, "D H W"]) -> Ridge:
            return fitted_ridge(x[chosen], train_eye.fluid[chosen][:, None].astype(float))

        parts = [graded & (slab == one)[:, None, None] for one in np.unique(slab)]
        held_out = [(part, fitted(graded & ~part)) for part in parts if part.any()]
        penalty, threshold = _choose(
            lambda p: [(_scores(x[part], head, p)[:, 0], train_eye.fluid[part]) for part, head in held_out]
        )
        scores = np.full(where.shape, -np.inf)
        scores[where] = _scores(y[where], fitted(graded), penalty)[:, 0]
        return Segmentation(scores, threshold)

    return segment


def _voxel_features(
    eye: RealEye, recipe: Recipe
) -> tuple[Float[np.ndarray, "D H W features"], Bool[np.ndarray, "D H W"]]:
    image, crop = view_of(eye, recipe), geometry.center_crop(recipe.preprocessing)
    retina = geometry.tissue_mask(eye.volume.band, crop, eye.volume.pixels.shape[1], recipe.preprocessing.image_size)
    depth = np.where(retina, np.cumsum(retina, axis=1) / np.maximum(retina.sum(axis=1, keepdims=True), 1), 0)
    levels = [image, *(gaussian_filter(image, (0, width, width / 2)) for width in _WIDTHS)]
    return np.stack([*levels, depth, depth**2, *(one * depth for one in levels)], axis=-1).astype(np.float32), retina


def view_of(eye: RealEye, recipe: Recipe) -> Float[np.ndarray, "D H W"]:
    """The centred view, standardised by tissue."""
    size = recipe.preprocessing.image_size
    view = geometry.apply_transform(eye.volume.pixels, geometry.center_crop(recipe.preprocessing), size)
    return intensity.lookup_table(eye.volume.tissue_mean, eye.volume.tissue_std)[view]


def fluid_from_unet(recipe: Recipe, cpu_seconds: float, seed: int) -> Segment:
    """By a U-Net that is trained on one eye for `cpu_seconds`, each way anew."""

    def segment(train_eye: RealEye, test_eye: RealEye) -> Segmentation:
        own = slice(0, BSCANS)
        net = train_unet(
            view_of(train_eye, recipe)[own], train_eye.fluid[own], train_eye.graded[own], cpu_seconds, seed
        )
        with torch.inference_mode():
            logits = net(torch.from_numpy(view_of(test_eye, recipe))[:, None])[:, 0]
        return Segmentation(logits.numpy(), 0.0)

    return segment


def real_surfaces(eyes: Sequence[RealEye], featurise: Featurise, recipe: Recipe) -> Iterator[Finding]:
    """Mean absolute error in um of four surfaces against the first grader, in scans that were not flattened.

    Read by `SurfaceHead` as in the task `surfaces`, the folds being slabs.
    """
    errors = []
    for train_eye, test_eye in (eyes, eyes[::-1]):
        moved = [shifted(train_eye, *shift) for shift in SHIFTS]
        table = token_table_of(featurise, [*moved, test_eye], recipe)
        project = projection_of(table, range(len(moved)))
        *learned, tested = (
            token_eye(table, number, project(table.features[table.of(number)])) for number in range(len(moved) + 1)
        )
        slab = np.repeat(np.arange(table.grid[0]), table.grid[2])
        head = SurfaceHead([LabelledEye(one, eye.depths[0], slab) for one, eye in zip(learned, moved, strict=True)])
        errors.append(np.nanmean(np.abs(head.depths(tested) - test_eye.depths[0])[:, :BSCANS], axis=2))
    yield from _errors_um(np.concatenate(errors, axis=1), recipe)


def read_fluid(work: Path, kind: str, featurise: Featurise, recipe: Recipe) -> Iterator[Finding | LeftOut]:
    """Fluid by one row of the exam: `intensity` by voxel, others by their tokens."""
    segment = fluid_from_voxels(recipe) if kind == "intensity" else fluid_from_tokens(featurise, recipe)
    return on_real_eyes(work, recipe.preprocessing, "real_fluid", "dice", partial(fluid, segment=segment))


def read_unet(work: Path, recipe: Recipe, cpu_seconds: float, seed: int) -> Iterator[Finding | LeftOut]:
    """Fluid by a U-Net that has `cpu_seconds` for both ways together, as many as the encoder's pretraining had."""
    segment = fluid_from_unet(recipe, cpu_seconds / 2, seed)
    return on_real_eyes(work, recipe.preprocessing, "real_fluid", "dice", partial(fluid, segment=segment))


def read_surfaces(work: Path, featurise: Featurise | None, recipe: Recipe) -> Iterator[Finding | LeftOut]:
    """Surfaces by one row of the exam; without `featurise` by the second grader."""
    measure = (
        partial(graders, recipe=recipe)
        if featurise is None
        else partial(real_surfaces, featurise=featurise, recipe=recipe)
    )
    unflattened = recipe.preprocessing.model_copy(update={"flatten": "none"})
    return on_real_eyes(work, unflattened, "real_surfaces", "error_um", measure)


def on_real_eyes(
    work: Path,
    preprocessing: Preprocessing,
    task: str,
    metric: str,
    measure: Callable[[Sequence[RealEye]], Iterator[Finding]],
) -> Iterator[Finding | LeftOut]:
    """What `measure` finds in the real eyes, or why they are not there."""
    data = data_folder()
    absent = why_absent(data)
    if absent is not None:
        yield LeftOut(task, metric, LABELLED, absent, retry=True)
        return
    yield from measure(read_eyes(work, data, preprocessing))


def graders(eyes: Sequence[RealEye], recipe: Recipe) -> Iterator[Finding]:
    """The two graders against each other, in the same figures as `real_surfaces`."""
    return _errors_um(np.concatenate([disagreement_px(eye) for eye in eyes[::-1]], axis=1), recipe)


def _errors_um(voxels: Float[np.ndarray, "boundaries scans"], recipe: Recipe) -> Iterator[Finding]:
    um = voxels * recipe.preprocessing.target_spacing_mm[1] * 1000
    scans = [f"{name} {number}" for name in EYES[::-1] for number in range(BSCANS)]
    draws = Draws(scans, RESAMPLES, 0)
    for name, values in zip(BOUNDARIES, um, strict=True):
        yield Finding("real_surfaces", f"error_um_{name}", LABELLED, mean_of_known(values, draws, scans, "error"))
    yield Finding("real_surfaces", "error_um", LABELLED, mean_of_known(um.mean(axis=0), draws, scans, "error"))
