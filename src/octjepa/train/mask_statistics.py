"""Statistics of a recipe's masks, measured on the samples that training draws, as records for JSON and figures.

The input is a recipe and volumes of a store, or no store: then tissue bands are simulated in the recipe's grid and no
pixel statistics are given. The output describes the recipe's mix and each mask family alone: how often each position is
context, target or left out. Whether borders or the centre are hidden too often. How far a target is from the nearest
visible token. How much tissue targets hold. And how well the nearest visible patch predicts a hidden one when it is
copied. Intensity augmentation is off. See docs/pretext.md.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from jaxtyping import Float32, Int

from octjepa import keys
from octjepa.progress import bar
from octjepa.recipe import Recipe
from octjepa.record import Record
from octjepa.store import Store
from octjepa.train.mask_metrics import (
    AxisBias,
    CopyErrors,
    RatioInterval,
    axis_bias,
    copy_errors,
    nearest_visible,
    normalised_patches,
    ratio_interval,
)
from octjepa.views import intensity, masks, tokens
from octjepa.views.sample import mask_counts_of, select_tokens, view_transform
from octjepa.volume import CanonicalVolume

AXES = ("slice", "depth", "column")
FAR_STEPS = 3.0  # a target farther than this from every visible token, in token steps, can hardly be inferred
SAMPLES = 512  # in all, over the volumes; fewer where a sample has many tokens
MOST_VOLUMES = 64
BIAS = 0.05  # a hiding rate that is off by less than this share is not reported as biased
MIX = "mix"  # the recipe's own families by their weights: what training draws
_MOST_TOKENS = 1 << 20  # of all samples together, about
_RETINA_MM, _PIT_MM, _CHOROID_MM = 0.30, 0.10, 0.15  # simulated: thickness, foveal pit, tissue below Bruch's membrane


@dataclass(frozen=True)
class Distribution(Record):
    """Mean, percentiles and maximum of a quantity."""

    mean: float
    p5: float
    median: float
    p95: float
    max: float


@dataclass(frozen=True)
class TargetDistances(Record):
    """From each target to its nearest visible token, in token steps and in mm."""

    steps: Distribution
    mm: Distribution


@dataclass(frozen=True)
class TargetShares(Record):
    """Shares of targets: on tissue, without any tissue, farther than `FAR_STEPS`, of constant pixels (with pixels)."""

    on_tissue: float
    without_tissue: float
    far: float
    blank: float | None = None
    OMITTED: ClassVar[tuple[str, ...]] = ("blank",)


@dataclass(frozen=True)
class CopyAlong(Record):
    """Copying along one axis: the share of targets with a visible token on their line, and the error there."""

    share: float
    error: RatioInterval


@dataclass(frozen=True)
class CopyStatistics(Record):
    """Squared errors of normalised pixels when the nearest visible patch is copied, as in mae_patch_norm.

    0 is a perfect copy, 1 a prediction of zero, 2 chance. empty_guess: of predicting zero. brightness_unexplained: of
    the mean brightness. along: by axis.
    """

    error: RatioInterval
    error_on_tissue: RatioInterval
    empty_guess: RatioInterval
    brightness_unexplained: RatioInterval
    along: Mapping[str, CopyAlong]


@dataclass(frozen=True)
class FamilyStatistics(Record):
    """The masks of one family. exact: every mask had the requested counts, without a token twice.

    map: by state, the share of draws of each position of the grid. coverage: by axis and state, the same along the
    axis. bias: by axis with more than two positions. copy_nearest: None without pixels.
    """

    exact: bool
    weights: Mapping[str, float]
    map: Mapping[str, list[list[list[float]]]]
    coverage: Mapping[str, Mapping[str, list[float]]]
    bias: Mapping[str, AxisBias]
    distance: TargetDistances
    targets: TargetShares
    copy_nearest: CopyStatistics | None = None
    OMITTED: ClassVar[tuple[str, ...]] = ("copy_nearest",)


@dataclass(frozen=True)
class TokenCounts(Record):
    """Tokens of a sample: in all, visible, to be predicted, and all that are not visible."""

    tokens: int
    context: int
    target: int
    hidden: int


@dataclass(frozen=True)
class TissueShares(Record):
    """Shares of tissue: in the grid, in the selected tokens, and of the grid's tissue that was not selected."""

    of_grid: float
    of_tokens: float
    left_out: float


@dataclass(frozen=True)
class MaskStatistics(Record):
    """Statistics of the masks of a recipe, by family and of their mix; synthetic: on simulated tissue bands."""

    recipe: str
    volumes: int
    samples: int
    synthetic: bool
    grid: tuple[int, ...]
    token_mm: tuple[float, ...]
    counts: TokenCounts
    tissue: TissueShares
    far_steps: float
    families: Mapping[str, FamilyStatistics]


@dataclass(frozen=True)
class MaskSummary(Record):
    """The few statistics that `octjepa plan` prints.

    biased: edges and centres whose hiding rate is off by more than `BIAS` with their whole interval. copy_nearest: by
    family, the error of copying; None without pixels.
    """

    samples: int
    exact: bool
    biased: Mapping[str, float | None]
    targets_on_tissue: float
    targets_far: float
    copy_nearest: Mapping[str, float | None] | None = None
    OMITTED: ClassVar[tuple[str, ...]] = ("copy_nearest",)


def single_family(recipe: Recipe, family: str) -> Recipe:
    """A copy of the recipe that draws only `family`; `MIX` is the recipe itself."""
    if family == MIX:
        return recipe
    weights = {name: float(name == family) for name in masks.FAMILIES}
    return recipe.model_copy(update={"masks": recipe.masks.model_copy(update=weights)})


def measure_store(
    recipe: Recipe, store: Store, volume_ids: Sequence[str], samples: int | None = None
) -> MaskStatistics:
    """`measure` on at most `MOST_VOLUMES` of `volume_ids`, chosen by key; intervals are over people."""
    chosen = sorted(volume_ids, key=lambda volume_id: keys.key(recipe.train.seed, "mask report", volume_id))
    chosen = chosen[:MOST_VOLUMES]
    people = dict(zip(store.table["volume_id"], store.table["person_id"], strict=True))
    volumes = ((str(people[volume_id] or volume_id), store.read(volume_id)) for volume_id in chosen)
    return measure(recipe, volumes, len(chosen), samples)


def measure_synthetic(recipe: Recipe, samples: int | None = None) -> MaskStatistics:
    """`measure` on simulated tissue bands, without pixel statistics."""
    volumes = ((str(number), synthetic_band(recipe, number)) for number in range(MOST_VOLUMES))
    return measure(recipe, volumes, MOST_VOLUMES, samples, pixels=False)


def measure(
    recipe: Recipe,
    volumes: Iterable[tuple[str, CanonicalVolume]],
    number: int,
    samples: int | None = None,
    pixels: bool = True,
) -> MaskStatistics:
    """Statistics over `number` (person, volume) pairs, in epochs 0, 1, ... until `samples` samples are drawn."""
    if samples is None:
        samples = min(SAMPLES, _MOST_TOKENS // recipe.token_count)
    epochs = max(1, -(-samples // number))
    families = {name: _FamilyCounts(single_family(recipe, name), pixels) for name in (MIX, *masks.FAMILIES)}
    tissue_shares: list[tuple[float, float, float]] = []
    counts_of: list[tuple[int, int, int]] = []  # selected, context and target tokens of each sample
    with bar("masks", number, "volume") as progress:
        for person, volume in volumes:
            for view, index, share, epoch in _samples(volume, recipe, epochs):
                steps = np.stack(np.unravel_index(index, recipe.grid), axis=-1)  # [t, 3]
                visible_pixels = None
                if pixels:
                    cut = tokens.extract_patches(view, recipe.tokens.patch_size, index)
                    patches = intensity.lookup_table(volume.tissue_mean, volume.tissue_std)[cut]
                    visible_pixels = normalised_patches(patches), patches.mean(axis=1)
                counts_of.append((len(index), *mask_counts_of(recipe, len(index))))
                tissue = tokens.holds_tissue(share)
                left_out = np.delete(tissue, index)
                tissue_shares.append((tissue.mean(), tissue[index].mean(), left_out.sum() / max(tissue.sum(), 1)))
                for name, family in families.items():
                    purpose = ("mask",) if name == MIX else ("mask", name)  # the mix is drawn as training draws it
                    rng = keys.generator(recipe.train.seed, *purpose, epoch, volume.volume_id)
                    mask = masks.sample_mask(
                        steps, recipe.grid, family.recipe.masks, counts_of[-1][1:], rng, tissue[index]
                    )
                    family.add(person, steps, share[index], mask, visible_pixels)
            progress.advance()
    of_grid, of_tokens, left_out_share = np.mean(tissue_shares, axis=0)
    selected, context, target = Counter(counts_of).most_common(1)[0][0]  # single B-scans have fewer
    token_mm = np.asarray(recipe.tokens.patch_size) * np.asarray(recipe.preprocessing.target_spacing_mm)
    return MaskStatistics(
        recipe=recipe.name,
        volumes=number,
        samples=epochs * number,
        synthetic=not pixels,
        grid=recipe.grid,
        token_mm=tuple(round(float(mm), 6) for mm in token_mm),
        counts=TokenCounts(selected, context, target, hidden=selected - context),
        tissue=TissueShares(float(of_grid), float(of_tokens), float(left_out_share)),
        far_steps=FAR_STEPS,
        families={name: family.statistics() for name, family in families.items()},
    )


def summary(measured: MaskStatistics) -> MaskSummary:
    """The few statistics of `measure` that `octjepa plan` prints."""
    families = measured.families
    biased = {
        f"{name}, {axis}, {part}": rate.value
        for name, family in families.items()
        for axis, rates in family.bias.items()
        for part, rate in (("edge", rates.edge), ("centre", rates.centre))
        if rate.low is not None and rate.high is not None and not rate.low - BIAS <= 1 <= rate.high + BIAS
    }
    copies = {name: families[name].copy_nearest for name in masks.FAMILIES}
    return MaskSummary(
        samples=measured.samples,
        exact=all(family.exact for family in families.values()),
        biased=biased,
        targets_on_tissue=families[MIX].targets.on_tissue,
        targets_far=families[MIX].targets.far,
        copy_nearest=(
            None
            if measured.synthetic
            else {name: copy.error.value for name, copy in copies.items() if copy is not None}
        ),
    )


def synthetic_band(recipe: Recipe, number: int) -> CanonicalVolume:
    """A simulated retina with a central pit and Bruch's membrane near the recipe's anchor; it has no pixels."""
    d, h, w = recipe.preprocessing.stored_size
    dz, dy, dx = recipe.preprocessing.target_spacing_mm
    rng = keys.generator("synthetic band", number)
    z, x = ((np.arange(n) - (n - 1) / 2) * mm for n, mm in ((d, dz), (w, dx)))
    from_pit = (z[:, None] ** 2 + x**2) / 0.6**2  # [D, W]
    thickness = _RETINA_MM + rng.normal(0, 0.02) - _PIT_MM * np.exp(-from_pit)
    bruch = recipe.preprocessing.axial_anchor * (h - 1) + rng.normal(0, 0.01) / dy
    band = np.stack([bruch - thickness / dy, np.full((d, w), bruch + _CHOROID_MM / dy)])  # [2, D, W]
    band = np.clip(np.rint(band), 0, h - 1).astype(np.int16)
    no_pixels = np.broadcast_to(np.uint8(0), (d, h, w))
    return CanonicalVolume(f"synthetic{number:04d}", no_pixels, band, 0.0, 1.0, np.zeros((d, w), np.int16))


def _samples(
    volume: CanonicalVolume, recipe: Recipe, epochs: int
) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray, int]]:
    """(view, selected patches, tissue share of the grid, epoch) as `make_sample` draws them."""
    seed = recipe.train.seed
    for epoch in range(epochs):
        transform = view_transform(volume, recipe, epoch)
        yield *select_tokens(volume, recipe, transform, keys.generator(seed, "tokens", epoch, volume.volume_id)), epoch


class _FamilyCounts:
    """Accumulates the masks of one family and computes their statistics."""

    def __init__(self, recipe: Recipe, pixels: bool) -> None:
        self.recipe, self.grid = recipe, recipe.grid
        self.patch_mm = np.asarray(recipe.tokens.patch_size) * np.asarray(recipe.preprocessing.target_spacing_mm)
        self.counts = {name: np.zeros(self.grid) for name in ("context", "target", "hidden", "selected")}
        self.profiles: list[tuple[list[np.ndarray], list[np.ndarray]]] = []
        self.people: list[str] = []
        self.distances: list[tuple[np.ndarray, np.ndarray]] = []
        self.on_tissue: list[tuple[float, float]] = []
        self.copies: list[CopyErrors] | None = [] if pixels else None
        self.exact = True

    def add(
        self,
        person: str,
        steps: Int[np.ndarray, "t 3"],
        share: Float32[np.ndarray, " t"],
        mask: tuple[np.ndarray, np.ndarray],
        visible_pixels: tuple[np.ndarray, np.ndarray] | None,
    ) -> None:
        """Adds one mask over tokens at the grid positions `steps`.

        share: of tissue in each token. visible_pixels: the tokens' normalised pixels and mean z-scores.
        """
        context, target = mask
        both = np.concatenate([context, target])
        expected_counts = (len(context), len(target)) == mask_counts_of(self.recipe, len(steps))
        inside = both.min() >= 0 and both.max() < len(steps)
        self.exact = bool(self.exact and expected_counts and inside and len(np.unique(both)) == len(both))
        cubes = {name: np.zeros(self.grid, bool) for name in ("context", "target", "selected")}
        for cube, members in zip(cubes.values(), (context, target, np.arange(len(steps))), strict=True):
            cube[tuple(steps[members].T)] = True
        cubes["hidden"] = cubes["selected"] & ~cubes["context"]
        for name, cube in cubes.items():
            self.counts[name] += cube
        self.profiles.append((_axis_counts(cubes["hidden"]), _axis_counts(cubes["selected"])))
        self.people.append(person)
        positions = steps[target]
        nearest, distance = nearest_visible(cubes["context"], positions)
        distance_mm = np.linalg.norm((positions - nearest) * self.patch_mm, axis=1)
        self.distances.append((distance.astype(np.float32), distance_mm.astype(np.float32)))
        tissue = tokens.holds_tissue(share)
        self.on_tissue.append((float(tissue[target].mean()), float((share[target] == 0).mean())))
        if self.copies is not None and visible_pixels is not None:
            token_at = np.full(self.grid, -1)
            token_at[tuple(steps.T)] = np.arange(len(steps))
            self.copies.append(
                copy_errors(*visible_pixels, tissue, target, token_at, cubes["context"], positions, nearest)
            )

    def statistics(self) -> FamilyStatistics:
        """The statistics of all masks that were added."""
        draws = len(self.people)
        steps, mm = (np.concatenate(part) for part in zip(*self.distances, strict=True))
        hidden, selected = (
            [np.stack(axis) for axis in zip(*part, strict=True)] for part in zip(*self.profiles, strict=True)
        )
        shares = {name: self.counts[name] / draws for name in ("context", "target")}
        shares["left_out"] = 1 - self.counts["selected"] / draws
        tissue, without = np.mean(self.on_tissue, axis=0)
        hidden_share = float(self.counts["hidden"].sum() / self.counts["selected"].sum())
        copies = self.copies
        return FamilyStatistics(
            exact=bool(self.exact),
            weights={name: getattr(self.recipe.masks, name) for name in masks.FAMILIES},
            map={name: np.round(part, 4).tolist() for name, part in shares.items()},
            coverage={
                axis: {name: _axis_means(part, number) for name, part in shares.items()}
                for number, axis in enumerate(AXES)
            },
            bias={
                axis: axis_bias(hidden[number], selected[number], hidden_share, self.people)
                for number, axis in enumerate(AXES)
                if self.grid[number] > 2
            },
            distance=TargetDistances(_distribution(steps), _distribution(mm)),
            targets=TargetShares(
                on_tissue=float(tissue),
                without_tissue=float(without),
                far=float((steps > FAR_STEPS).mean()),
                blank=None if copies is None else float(np.mean([copy.blank for copy in copies])),
            ),
            copy_nearest=None if copies is None else self._copy_statistics(copies),
        )

    def _copy_statistics(self, copies: list[CopyErrors]) -> CopyStatistics:
        def over_people(part: str) -> RatioInterval:
            pairs = np.array([getattr(copy, part) for copy in copies])
            return ratio_interval(pairs[:, 0], pairs[:, 1], self.people)

        along = np.array([copy.along for copy in copies])  # [draws, axis, (sum, visible targets, targets)]
        targets = along[:, 0, 2].sum()
        return CopyStatistics(
            error=over_people("error"),
            error_on_tissue=over_people("on_tissue"),
            empty_guess=over_people("empty"),
            brightness_unexplained=over_people("brightness"),
            along={
                axis: CopyAlong(
                    share=float(along[:, number, 1].sum() / targets),
                    error=ratio_interval(along[:, number, 0], along[:, number, 1], self.people),
                )
                for number, axis in enumerate(AXES)
            },
        )


def _axis_counts(cube: np.ndarray) -> list[np.ndarray]:
    """Counts along each of the three axes."""
    return [cube.sum(axis=tuple(other for other in range(3) if other != axis)) for axis in range(3)]


def _axis_means(cube: np.ndarray, axis: int) -> list[float]:
    means: list[float] = np.moveaxis(cube, axis, 0).reshape(cube.shape[axis], -1).mean(axis=1).tolist()
    return means


def _distribution(values: np.ndarray) -> Distribution:
    low, middle, high = (float(value) for value in np.percentile(values, [5, 50, 95]))
    return Distribution(float(values.mean()), low, middle, high, float(values.max()))
