"""What a recipe's masks do, measured on the very samples that training draws: a plain dictionary for JSON and figures.

Enters: a recipe and volumes of a store, or none: then tissue bands made up in the recipe's grid, and nothing is said of
pixels. Leaves, for the recipe's mix and for each family alone: how often each place is context, target or left out;
whether borders or the middle are favoured; how far a target is from what is visible; what targets show; and how well
the nearest visible patch, copied, predicts a hidden one in pixels. Light is neutral. See docs/masks.md.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float32, Int

from octjepa import keys
from octjepa.progress import bar
from octjepa.recipe import Recipe
from octjepa.report.mask_bias import axis_bias, ratio
from octjepa.report.mask_nearest import Copies, copies_of, nearest_visible, normalised
from octjepa.store import CanonicalVolume, Store
from octjepa.views import geometry, intensity, masks, tokens
from octjepa.views.sample import select_tokens

AXES = ("slice", "depth", "width")
FAR_STEPS = 3.0  # a target farther than this from every visible token, in token steps, has little to be told from
SAMPLES = 512  # drawn in all, over the volumes; fewer where a sample has many tokens
_MOST_TOKENS = 1 << 20  # of all samples together, about
MOST_VOLUMES = 64
BIAS = 0.05  # a hiding rate off by less than this share is left alone
MIX = "mix"  # the recipe's own families by their weights: what training draws
_RETINA_MM, _PIT_MM, _CHOROID_MM = 0.30, 0.10, 0.15  # of a made-up band: thickness, the fovea's pit, below Bruch's


def only(recipe: Recipe, family: str) -> Recipe:
    """The recipe with `family` alone; `MIX` is the recipe itself."""
    if family == MIX:
        return recipe
    weights = {name: float(name == family) for name in masks.FAMILIES}
    return recipe.model_copy(update={"masks": recipe.masks.model_copy(update=weights)})


def measure_store(
    recipe: Recipe, store: Store, volume_ids: Sequence[str], samples: int | None = None
) -> dict[str, Any]:
    """`measure` on at most `MOST_VOLUMES` of `volume_ids`, chosen by key; intervals are over people."""
    chosen = sorted(volume_ids, key=lambda one: keys.key(recipe.train.seed, "mask report", one))[:MOST_VOLUMES]
    people = dict(zip(store.table["volume_id"], store.table["person_id"], strict=True))
    return measure(recipe, ((str(people[one] or one), store.read(one)) for one in chosen), len(chosen), samples)


def measure_synthetic(recipe: Recipe, samples: int | None = None) -> dict[str, Any]:
    """`measure` on made-up tissue bands."""
    volumes = ((str(number), synthetic_band(recipe, number)) for number in range(MOST_VOLUMES))
    return measure(recipe, volumes, MOST_VOLUMES, samples, pixels=False)


def measure(
    recipe: Recipe,
    volumes: Iterable[tuple[str, CanonicalVolume]],
    number: int,
    samples: int | None = None,
    pixels: bool = True,
) -> dict[str, Any]:
    """Figures over `number` volumes, each with the key of its person; epochs 0, 1, .. until `samples` are drawn."""
    if samples is None:
        samples = min(SAMPLES, _MOST_TOKENS // recipe.token_count)
    epochs = max(1, -(-samples // number))
    names = (MIX, *masks.FAMILIES)
    piles = {name: _Pile(only(recipe, name), pixels) for name in names}
    on_grid: list[tuple[float, float, float]] = []
    with bar("masks", number, "volume") as progress:
        for person, volume in volumes:
            for view, index, share, epoch in _draws(volume, recipe, epochs):
                steps = np.stack(np.unravel_index(index, recipe.grid), axis=-1)
                shown = None
                if pixels:
                    cut = tokens.extract_patches(view, recipe.tokens.patch_size, index)
                    patches = intensity.lookup_table(volume.tissue_mean, volume.tissue_std)[cut]
                    shown = normalised(patches), patches.mean(axis=1)
                tissue = share >= tokens.TISSUE_SHARE
                left_out = np.delete(tissue, index)
                on_grid.append((tissue.mean(), tissue[index].mean(), left_out.sum() / max(tissue.sum(), 1)))
                for name, pile in piles.items():
                    purpose = ("mask",) if name == MIX else ("mask", name)  # the mix is drawn as training draws it
                    rng = keys.generator(recipe.train.seed, *purpose, epoch, volume.volume_id)
                    drawn = masks.sample_mask(
                        steps, recipe.grid, pile.recipe.masks, recipe.mask_counts, rng, tissue[index]
                    )
                    pile.add(person, steps, share[index], drawn, shown)
            progress.advance()
    grid, chosen, lost = np.mean(on_grid, axis=0)
    context, target = recipe.mask_counts
    size, spacing = np.asarray(recipe.tokens.patch_size), np.asarray(recipe.preprocessing.target_spacing_mm)
    return {
        "recipe": recipe.name,
        "volumes": number,
        "samples": epochs * number,
        "synthetic": not pixels,
        "grid": list(recipe.grid),
"token_mm": [round(float(mm), 6) for mm in size * spacing],
        "counts": {
            "tokens": recipe.token_count,
            "context": context,
            "target": target,
            "hidden": recipe.token_count - context,
        },
        "tissue": {"of_grid": float(grid), "of_tokens": float(chosen), "left_out": float(lost)},
        "far_steps": FAR_STEPS,
        "families": {name: pile.figures() for name, pile in piles.items()},
    }  # fmt: skip


def summary(measured: dict[str, Any]) -> dict[str, Any]:
    """The few figures of `measure` that `octjepa plan` prints.

    `biased` names edges and middles that are hidden too often or too seldom by more than `BIAS`, for sure.
    """
    families = measured["families"]
    biased = {
        f"{name}, {axis}, {part}": one[part]["value"]
        for name, family in families.items()
        for axis, one in family["bias"].items()
        for part in ("edge", "centre")
        if one[part]["low"] is not None and not one[part]["low"] - BIAS <= 1 <= one[part]["high"] + BIAS
    }
    said = {
        "samples": measured["samples"],
        "exact": all(one["exact"] for one in families.values()),
        "biased": biased,
        "targets_on_tissue": families[MIX]["targets"]["on_tissue"],
        "targets_far": families[MIX]["targets"]["far"],
    }
    if not measured["synthetic"]:
        said["copy_nearest"] = {name: families[name]["copy_nearest"]["error"]["value"] for name in masks.FAMILIES}
    return said


def synthetic_band(recipe: Recipe, number: int) -> CanonicalVolume:
    """A retina with a pit at its middle, Bruch's membrane about the recipe's anchor; no pixels."""
    d, h, w = recipe.preprocessing.stored_size
    dz, dy, dx = recipe.preprocessing.target_spacing_mm
    rng = keys.generator("synthetic band", number)
    z, x = ((np.arange(n) - (n - 1) / 2) * mm for n, mm in ((d, dz), (w, dx)))
    from_pit = (z[:, None] ** 2 + x**2) / 0.6**2
    thick = _RETINA_MM + rng.normal(0, 0.02) - _PIT_MM * np.exp(-from_pit)
    bruch = recipe.preprocessing.axial_anchor * (h - 1) + rng.normal(0, 0.01) / dy
    band = np.stack([bruch - thick / dy, np.full((d, w), bruch + _CHOROID_MM / dy)])
    band = np.clip(np.rint(band), 0, h - 1).astype(np.int16)
    none = np.broadcast_to(np.uint8(0), (d, h, w))
    return CanonicalVolume(f"synthetic{number:04d}", none, band, 0.0, 1.0, np.zeros((d, w), np.int16))


def _draws(
    volume: CanonicalVolume, recipe: Recipe, epochs: int
) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray, int]]:
    """(view, chosen patches, tissue share of the grid, epoch) as `make_sample` has them."""
    seed = recipe.train.seed
    for epoch in range(epochs):
        geometry_rng = keys.generator(seed, "geometry", epoch, volume.volume_id)
        shape = geometry.sample_geometry(recipe.preprocessing, recipe.views, geometry_rng)
        yield *select_tokens(volume, recipe, shape, keys.generator(seed, "tokens", epoch, volume.volume_id)), epoch


class _Pile:
    """Sums over the draws of one family."""

    def __init__(self, recipe: Recipe, pixels: bool) -> None:
        self.recipe, self.grid = recipe, recipe.grid
        self.patch_mm = np.asarray(recipe.tokens.patch_size) * np.asarray(recipe.preprocessing.target_spacing_mm)
        self.context, self.target, self.hidden, self.chosen = (np.zeros(self.grid) for _ in range(4))
        self.profiles: list[tuple[list[np.ndarray], list[np.ndarray]]] = []
        self.people: list[str] = []
        self.distance_steps: list[np.ndarray] = []
        self.distance_mm: list[np.ndarray] = []
        self.on_tissue: list[tuple[float, float]] = []
        self.copies: list[Copies] | None = [] if pixels else None
        self.exact = True

    def add(
        self,
        person: str,
        steps: Int[np.ndarray, "t 3"],
        share: Float32[np.ndarray, " t"],
        drawn: tuple[np.ndarray, np.ndarray],
        shown: tuple[np.ndarray, np.ndarray] | None,
    ) -> None:
        """One draw: tokens at grid `steps`; `shown` are their normalised pixels and their mean z-scores."""
        context, target = drawn
        both = np.concatenate([context, target])
        counts = (len(context), len(target)) == self.recipe.mask_counts
        inside = both.min() >= 0 and both.max() < len(steps)
        self.exact = bool(self.exact and counts and inside and len(np.unique(both)) == len(both))
        seen, asked, chosen = (np.zeros(self.grid, bool) for _ in range(3))
        for cube, of in ((seen, context), (asked, target), (chosen, np.arange(len(steps)))):
            cube[tuple(steps[of].T)] = True
        hidden = chosen & ~seen
        self.context += seen
        self.target += asked
        self.hidden += hidden
        self.chosen += chosen
        self.profiles.append((_profiles(hidden), _profiles(chosen)))
        self.people.append(person)
        places = steps[target]
        nearest, away = nearest_visible(seen, places)
        self.distance_steps.append(away.astype(np.float32))
        self.distance_mm.append(np.linalg.norm((places - nearest) * self.patch_mm, axis=1).astype(np.float32))
        tissue = share >= tokens.TISSUE_SHARE
        self.on_tissue.append((float(tissue[target].mean()), float((share[target] == 0).mean())))
        if self.copies is not None and shown is not None:
            number_at = np.full(self.grid, -1)
            number_at[tuple(steps.T)] = np.arange(len(steps))
            self.copies.append(copies_of(*shown, tissue, target, number_at, seen, places, nearest))

    def figures(self) -> dict[str, Any]:
        draws = len(self.people)
        steps, mm = np.concatenate(self.distance_steps), np.concatenate(self.distance_mm)
        hidden, chosen = (
            [np.stack(one) for one in zip(*part, strict=True)] for part in zip(*self.profiles, strict=True)
        )
        shares = {"context": self.context / draws, "target": self.target / draws, "left_out": 1 - self.chosen / draws}
        tissue, without = np.mean(self.on_tissue, axis=0)
        ratio_hidden = float(self.hidden.sum() / self.chosen.sum())
        return {
            "exact": bool(self.exact),
            "weights": {name: getattr(self.recipe.masks, name) for name in masks.FAMILIES},
            "map": {name: np.round(part, 4).tolist() for name, part in shares.items()},
            "coverage": {
                axis: {name: _profile(part, number) for name, part in shares.items()}
                for number, axis in enumerate(AXES)
            },
            "bias": {
                axis: axis_bias(hidden[number], chosen[number], ratio_hidden, self.people)
                for number, axis in enumerate(AXES)
                if self.grid[number] > 2
            },
            "distance": {"steps": _spread(steps), "mm": _spread(mm)},
            "targets": {
                "on_tissue": float(tissue),
                "without_tissue": float(without),
                "far": float((steps > FAR_STEPS).mean()),
                **({} if self.copies is None else {"blank": float(np.mean([one.blank for one in self.copies]))}),
            },
            **({} if self.copies is None else {"copy_nearest": self._copied(self.copies)}),
        }  # fmt: skip

    def _copied(self, copies: list[Copies]) -> dict[str, Any]:
        """Squared errors of normalised pixels, as arm mae has them: 0 a perfect copy, 1 saying nothing, 2 chance."""

        def over_people(part: str) -> dict[str, float | None]:
            pairs = np.array([getattr(one, part) for one in copies])
            return ratio(pairs[:, 0], pairs[:, 1], self.people)

        along = np.array([one.along for one in copies])
        targets = along[:, 0, 2].sum()
        return {
            "error": over_people("error"),
            "error_on_tissue": over_people("on_tissue"),
            "empty_guess": over_people("empty"),
            "brightness_unexplained": over_people("brightness"),
            "along": {
                axis: {
                    "share": float(along[:, number, 1].sum() / targets),
                    "error": ratio(along[:, number, 0], along[:, number, 1], self.people),
                }
                for number, axis in enumerate(AXES)
            },
        }  # fmt: skip


def _profiles(cube: np.ndarray) -> list[np.ndarray]:
    """Counts along each axis."""
    return [cube.sum(axis=tuple(other for other in range(3) if other != axis)) for axis in range(3)]


def _profile(cube: np.ndarray, axis: int) -> list[float]:
    """Means along `axis`."""
    means: list[float] = np.moveaxis(cube, axis, 0).reshape(cube.shape[axis], -1).mean(axis=1).tolist()
    return means


def _spread(values: np.ndarray) -> dict[str, float]:
    low, middle, high = np.percentile(values, [5, 50, 95])
    named = {"mean": values.mean(), "p5": low, "median": middle, "p95": high, "max": values.max()}
    return {name: float(value) for name, value in named.items()}
