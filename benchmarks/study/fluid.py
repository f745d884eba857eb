"""Fluid in two real eyes: a head learns from one eye and is asked about the other, then the reverse.

The two eyes are 11 B-scans each, a sparse sample of a raster; they are read with a pitch of 0.36 mm, about their mean
distance and the pitch of the study's volumes, so that each B-scan is one slice of a volume. Everything is judged on
that grid, B-scan by B-scan: Dice over all B-scans of both eyes, its interval a bootstrap over B-scans. With two eyes
that is the chance of the B-scans alone, not of the people.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Bool, Float
from scipy.ndimage import gaussian_filter
from torch import Tensor, nn

from octjepa.config import load_recipe
from octjepa.ingest import read_volume
from octjepa.metrics.bootstrap import Draws
from octjepa.recipe import Recipe
from octjepa.store import CanonicalVolume, Store, build_store
from octjepa.store.native_mapping import NativeMap
from octjepa.tasks.segment.dice import dice
from octjepa.tasks.segment.linear import PENALTIES, Ridge, patch_cells, with_intercept
from octjepa.views import geometry, intensity

from .cohort import native_places
from .dense import THRESHOLDS, curve
from .features import Featurise, Tokens
from .frozen import Say

EYES = ("01", "04")
OTHERS = ("spectralis_macula_145x496x512_j2k.dcm",)
PITCH_MM = (0.36, 0.003872, 0.0117)


def name_of(eye: str, ending: str) -> str:
    return f"duke_dme_eye{eye}_{ending}"


def are_there(data: Path | None) -> bool:
    """Whether `data` holds both eyes with their masks."""
    return data is not None and all(
        (data / name_of(eye, ending)).is_file() for eye in EYES for ending in ("11x496x768.dcm", "fluid.npz")
    )


def real_store(work: Path, data: Path, recipe_name: str) -> Path:
    """The store of the real volumes: both eyes, and what else of `OTHERS` is there, all of it for training alone.

    Eleven B-scans would fall between the slices of an even grid, two blended into each: the last one is given twice.
    """
    place, files = work / "real", work / "real-files"
    preprocessing = load_recipe(recipe_name).preprocessing
    files.mkdir(parents=True, exist_ok=True)
    for eye in EYES:
        scan = read_volume(data / name_of(eye, "11x496x768.dcm"), spacing_mm=PITCH_MM)
        frames = scan.pixels[::-1] if "frames_reversed" in scan.notes else scan.pixels  # as the mask has them
        np.save(files / f"eye{eye}.npy", np.concatenate([frames, frames[-1:]]))
    build_store([files / f"eye{eye}.npy" for eye in EYES], place, preprocessing, spacing_mm=PITCH_MM)
    others = [data / name for name in OTHERS if (data / name).is_file()]
    if others:
        build_store(others, place, preprocessing)
    store = Store.open(place)
    store.set_split(dict.fromkeys(set(store.table["person_id"]), "train"))
    return place


@dataclass(frozen=True, eq=False)
class FluidEye:
    """One real eye: its volume, and of every voxel of the centred view whether it is fluid and lies in the scan."""

    volume: CanonicalVolume
    fluid: Bool[np.ndarray, "D H W"]
    seen: Bool[np.ndarray, "D H W"]


def read_eyes(place: Path, data: Path) -> list[FluidEye]:
    """Both eyes of `real_store`, in the order of EYES."""
    store = Store.open(place)
    found = []
    for eye in EYES:
        row = next(row for row in store.table.to_dict("records") if Path(row["file"]).name == f"eye{eye}.npy")
        with np.load(data / name_of(eye, "fluid.npz"), allow_pickle=False) as file:
            mask = file["fluid"] > 0
        where, inside = native_places(NativeMap.from_store(store, row["volume_id"]), store.preprocessing, 1)
        inside &= where[..., 0] < len(mask)  # not the one given twice
        frame = np.minimum(where[..., 0], len(mask) - 1)
        fluid = mask[frame, where[..., 1], where[..., 2]] & inside
        found.append(FluidEye(store.read(row["volume_id"]), fluid, inside))
    return found


Counts = Float[np.ndarray, "slices 3"]


def with_tokens(featurise: Featurise, recipe: Recipe) -> Callable[[FluidEye, FluidEye], Counts]:
    """A linear head on tokens; penalty and threshold by cross-validation over the slabs of the eye it learns from."""

    def score(learned: FluidEye, asked: FluidEye) -> Counts:
        known, other = (featurise([eye.volume])[0] for eye in (learned, asked))
        slab = np.unravel_index(known.index, recipe.grid)[0]
        left_out = [(slab == out, _fitted(learned, known, slab != out, recipe)) for out in np.unique(slab)]
        penalty, threshold = _choose(
            lambda one: sum(_curve(learned, known, out, head.weights(one), recipe) for out, head in left_out)
        )
        weights = _fitted(learned, known, np.ones(len(slab), bool), recipe).weights(penalty)
        scores = (with_intercept(other.features) @ weights).reshape(len(other.index), -1)
        return _by_slice(asked, _whole(scores, other, recipe) >= threshold)

    return score


def _choose(counts_at: Callable[[float], np.ndarray]) -> tuple[float, float]:
    """(penalty, threshold) of the highest Dice; `counts_at(penalty)` gives (both, found, true) at each threshold."""
    curves = {penalty: np.nan_to_num(dice(counts_at(penalty)[None])[:, 0]) for penalty in PENALTIES}
    penalty = max(curves, key=lambda one: float(curves[one].max()))
    return penalty, THRESHOLDS[int(curves[penalty].argmax())]


def _fitted(eye: FluidEye, found: Tokens, chosen: np.ndarray, recipe: Recipe) -> Ridge:
    wanted = patch_cells(eye.fluid.view(np.uint8), recipe.grid, found.index)
    whole = patch_cells(eye.seen.view(np.uint8), recipe.grid, found.index).mean(axis=1) > 0.5
    head = Ridge(found.features.shape[1], wanted.shape[1])
    head.add(found.features[chosen & whole], wanted[chosen & whole].astype(float))
    return head


def _curve(eye: FluidEye, found: Tokens, chosen: np.ndarray, weights: np.ndarray, recipe: Recipe) -> np.ndarray:
    true = patch_cells(eye.fluid.view(np.uint8), recipe.grid, found.index)[chosen].astype(bool)
    seen = patch_cells(eye.seen.view(np.uint8), recipe.grid, found.index)[chosen].astype(bool)
    return curve((with_intercept(found.features[chosen]) @ weights)[seen], true[seen])


def _whole(scores: np.ndarray, found: Tokens, recipe: Recipe) -> Float[np.ndarray, "D H W"]:
    (d, h, w), (p, q, r) = recipe.grid, recipe.tokens.patch_size
    painted = np.full((d * h * w, p * q * r), -np.inf)
    painted[found.index] = scores
    return painted.reshape(d, h, w, p, q, r).transpose(0, 3, 1, 4, 2, 5).reshape(recipe.preprocessing.image_size)


def _by_slice(eye: FluidEye, said: np.ndarray) -> Counts:
    """(both, found, true) of each slice that lies in the scan."""
    inside = np.flatnonzero(eye.seen.any(axis=(1, 2)))
    said, true = said & eye.seen, eye.fluid
    return np.array([[(said[s] & true[s]).sum(), said[s].sum(), true[s].sum()] for s in inside], float)


def with_intensity(recipe: Recipe) -> Callable[[FluidEye, FluidEye], Counts]:
    """A linear rule on each voxel of the retina: its grey value, that around it at three widths, and its depth."""

    def score(learned: FluidEye, asked: FluidEye) -> Counts:
        (known, retina), (other, place) = (_voxels(eye, recipe) for eye in (learned, asked))
        inside = learned.seen & retina
        slab = np.arange(len(inside)) // recipe.tokens.patch_size[0]
        left_out = []
        for out in np.unique(slab[inside.any(axis=(1, 2))]):
            here = (slab == out)[:, None, None]
            left_out.append((inside & here, _of_voxels(known[inside & ~here], learned.fluid[inside & ~here])))
        penalty, threshold = _choose(
            lambda one: sum(
                curve((with_intercept(known[out]) @ head.weights(one))[:, 0], learned.fluid[out])
                for out, head in left_out
            )
        )
        scores = np.full(asked.fluid.shape, -np.inf)
        scores[place] = (
            with_intercept(other[place]) @ _of_voxels(known[inside], learned.fluid[inside]).weights(penalty)
        )[:, 0]
        return _by_slice(asked, scores >= threshold)

    return score


def _of_voxels(features: np.ndarray, fluid: np.ndarray) -> Ridge:
    head = Ridge(features.shape[1], 1)
    head.add(features, fluid[:, None].astype(float))
    return head


def _voxels(eye: FluidEye, recipe: Recipe) -> tuple[Float[np.ndarray, "D H W features"], Bool[np.ndarray, "D H W"]]:
    image = _lit(eye, recipe)
    shape, size = geometry.center_crop(recipe.preprocessing), recipe.preprocessing.image_size
    retina = geometry.tissue_mask(eye.volume.band, shape, eye.volume.pixels.shape[1], size)
    height = np.maximum(retina.sum(axis=1, keepdims=True), 1)
    depth = np.where(retina, np.cumsum(retina, axis=1) / height, 0)
    wide = [gaussian_filter(image, (0, width, width / 2)) for width in (1.5, 3.0, 6.0)]
    grey = [image, *wide]
    parts = [*grey, depth, depth**2, *(one * depth for one in grey)]
    return np.stack(parts, axis=-1).astype(np.float32), retina


class UNet(nn.Module):
    """Three levels on single slices, skips between them: the usual small segmentation net."""

    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.down = nn.ModuleList([_pair(1, width), _pair(width, 2 * width), _pair(2 * width, 4 * width)])
        self.up = nn.ModuleList([_pair(6 * width, 2 * width), _pair(3 * width, width)])
        self.head = nn.Conv2d(width, 1, 1)

    def forward(self, x: Float[Tensor, "b 1 h w"]) -> Float[Tensor, "b 1 h w"]:
        kept = []
        for level, block in enumerate(self.down):
            x = block(x if level == 0 else nn.functional.max_pool2d(x, 2))
            kept.append(x)
        for block, skip in zip(self.up, kept[-2::-1], strict=True):
            wide = nn.functional.interpolate(x, scale_factor=2, mode="bilinear")
            x = block(torch.cat([wide, skip], dim=1))
        return self.head(x)


def _pair(before: int, after: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(before, after, 3, padding=1), nn.GroupNorm(4, after), nn.ReLU(),
        nn.Conv2d(after, after, 3, padding=1), nn.GroupNorm(4, after), nn.ReLU(),
    )  # fmt: skip


def with_unet(recipe: Recipe, seed: int, seconds: float) -> Callable[[FluidEye, FluidEye], Counts]:
    """A U-Net trained on the slices of one eye for `seconds` of CPU time; half of the loss is soft Dice."""

    def score(learned: FluidEye, asked: FluidEye) -> Counts:
        torch.manual_seed(seed)
        net = UNet()
        optimizer = torch.optim.AdamW(net.parameters(), lr=2e-3)
        inside = np.flatnonzero(learned.seen.any(axis=(1, 2)))
        x, y = (torch.from_numpy(part)[:, None] for part in (_lit(learned, recipe)[inside], learned.fluid[inside]))
        weight = torch.from_numpy(learned.seen[inside].astype(np.float32))[:, None]
        y, started = y.float(), time.process_time()
        while True:
            spent = (time.process_time() - started) / seconds
            if spent >= 1:
                break
            for group in optimizer.param_groups:
                group["lr"] = 2e-3 * (1 + np.cos(np.pi * spent)) / 2
            shown, wanted, counted = _flipped(x, y, weight)
            logits = net(shown * (1 + 0.2 * torch.randn(len(x), 1, 1, 1)) + 0.2 * torch.randn(len(x), 1, 1, 1))
            chance = torch.sigmoid(logits) * counted
            soft = 1 - (2 * (chance * wanted).sum() + 1) / (chance.sum() + wanted.sum() + 1)
            loss = soft + nn.functional.binary_cross_entropy_with_logits(logits, wanted, counted)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        with torch.inference_mode():
            said = net(torch.from_numpy(_lit(asked, recipe))[:, None])[:, 0] > 0
        return _by_slice(asked, said.numpy())

    return score


def _flipped(*parts: Tensor) -> list[Tensor]:
    """All alike: mirrored or not, and moved by a few rows and columns."""
    down, right = (int(torch.randint(-8, 9, ())) for _ in range(2))
    mirrored = bool(torch.rand(()) < 0.5)
    moved = [torch.roll(part, (down, right), (2, 3)) for part in parts]
    return [torch.flip(part, [3]) for part in moved] if mirrored else moved


def _lit(eye: FluidEye, recipe: Recipe) -> Float[np.ndarray, "D H W"]:
    view = geometry.apply_geometry(
        eye.volume.pixels, geometry.center_crop(recipe.preprocessing), recipe.preprocessing.image_size
    )
    return intensity.lookup_table(eye.volume.tissue_mean, eye.volume.tissue_std)[view]


def say_fluid(eyes: list[FluidEye], score: Callable[[FluidEye, FluidEye], Counts], say: Say, bootstrap: int) -> None:
    """fluid_dice_real over the B-scans of both directions, and each direction by itself."""
    first, second = eyes
    ways = {f"{EYES[0]}_to_{EYES[1]}": score(first, second), f"{EYES[1]}_to_{EYES[0]}": score(second, first)}
    for name, counts in {"": np.concatenate(list(ways.values())), **ways}.items():
        scans = [str(number) for number in range(len(counts))]
        draws = Draws(scans, bootstrap, 0)
        found = draws.estimate(lambda weights, of=counts: dice(of[:, None], weights)[0], scans, name)
        interval = found.interval()
        say("fluid_dice_real" + (f"_{name}" if name else ""), found.value, interval.low, interval.high, found.n)
