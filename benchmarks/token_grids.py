"""Size of a token at equal CPU time: the objective `truth` from random weights, with tokens of 4 x 8 x 8 voxels and
finer ones.

`python -m benchmarks.token_grids --work WORK --out benchmarks/records/token_grids.json` trains a run for each grid of
`GRIDS` with the settings of `benchmarks.objectives` (whose run of 4 x 8 x 8 it reuses) and half as many updates, each
with twice as many tokens: an update sees the same share of a volume. It goes on where it stopped.

Every run is read on the validation eyes of `benchmarks.objectives`: `same_tokens` are the tokens of 4 x 8 x 8 voxels,
each the mean of the finer tokens in it, so the labels and the number of tokens are those of every other row.
`own_tokens` are the finer tokens with labels of their own: smaller tokens, other positives, so the value compares with
no other row.

Two scales: an encoder with tokens of 4 x 8 x 8 voxels and one with tokens of 4 x 16 x 16, each trained for half of the
time. The features of a small token are followed by those of the large token around it.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from benchmarks.exam.tokens import Featurise, of_encoder
from benchmarks.objectives import CHOICES, TRUTH, VALIDATION, Choice, cohorts_of, read, run_choice, train
from benchmarks.phantom_tokens import Value
from jaxtyping import Float, Int, UInt8

from octjepa.encoders import PretrainedEncoder, load_encoder
from octjepa.encoders.pooling import TokenFeatures
from octjepa.encoders.pretrained import SelectedTokens
from octjepa.files import write_json
from octjepa.recipe import Recipe
from octjepa.views import geometry, intensity, tokens
from octjepa.views.sample import select_tissue_tokens, token_positions
from octjepa.volume import CanonicalVolume

_UPDATES = 95  # half of those of 4 x 8 x 8, with twice as many tokens; drawing a volume costs the same
GRIDS = tuple(
    Choice(TRUTH, f"patch {name}", _UPDATES, (f"tokens.patch_size={patch}", "tokens.budget=1024", "train.base_lr=1e-3"))
    for name, patch in (("4x8x4", "[4,8,4]"), ("2x8x8", "[2,8,8]"))
)
_HALF = 85  # updates: half of those of one encoder
TWO_SCALES = (
    Choice(TRUTH, "half of the time", _HALF, ("train.base_lr=1e-3",)),
    Choice(TRUTH, "patch 4x16x16", _HALF, ("tokens.patch_size=[4,16,16]", "tokens.budget=128", "train.base_lr=1e-3")),
)


@dataclass(frozen=True)
class GridRun:
    """A run of one grid, or two runs: patches in voxels, CPU time, and values by kind of tokens, cohort and lesion."""

    patches: tuple[tuple[int, ...], ...]
    seed: int
    updates: int
    cpu_seconds: float
    values: dict[str, dict[str, dict[str, Value]]]


def children_of(
    index: Int[np.ndarray, " k"], coarse: tuple[int, int, int], fine: tuple[int, int, int]
) -> Int[np.ndarray, "k n"]:
    """The tokens of grid `fine` inside each token `index` of grid `coarse`."""
    ratio = [f // c for f, c in zip(fine, coarse, strict=True)]
    first = np.stack(np.unravel_index(index, coarse), axis=-1) * ratio  # [k, 3]
    inside = [first + np.array(step) for step in itertools.product(*(range(r) for r in ratio))]
    return np.stack([np.ravel_multi_index(tuple(position.T), fine) for position in inside], axis=-1)


def of_same_tokens(encoder: PretrainedEncoder, recipe: Recipe) -> Featurise:
    """Tokens of the grid of `recipe`, each the mean of the tokens of `encoder` inside it."""

    def featurise(volumes: Sequence[CanonicalVolume]) -> list[TokenFeatures]:
        return [_averaged(encoder, volume, recipe) for volume in volumes]

    return featurise


def of_two_scales(small: PretrainedEncoder, large: PretrainedEncoder) -> Featurise:
    """Tokens of `small`, each followed by the token of `large` that it lies in."""

    def featurise(volumes: Sequence[CanonicalVolume]) -> list[TokenFeatures]:
        return [_joined(small, large, volume) for volume in volumes]

    return featurise


def _averaged(encoder: PretrainedEncoder, volume: CanonicalVolume, recipe: Recipe) -> TokenFeatures:
    view, index, share = select_tissue_tokens(volume, recipe, geometry.center_crop(recipe.preprocessing))
    children = children_of(index, recipe.grid, encoder.recipe.grid)  # [k, n]
    mean = _encoded(encoder, volume, view, children).mean(axis=1)  # [k, dim]
    return TokenFeatures(mean, index, recipe.grid, share[index])


def _joined(small: PretrainedEncoder, large: PretrainedEncoder, volume: CanonicalVolume) -> TokenFeatures:
    recipe, grid = small.recipe, large.recipe.grid
    view, index, share = select_tissue_tokens(volume, recipe, geometry.center_crop(recipe.preprocessing))
    every = np.arange(np.prod(grid))
    parents = np.empty(np.prod(recipe.grid), int)
    parents[children_of(every, grid, recipe.grid)] = every[:, None]
    features = [_encoded(small, volume, view, index), _encoded(large, volume, view, parents[index])]
    return TokenFeatures(np.concatenate(features, axis=1), index, recipe.grid, share[index])


def _encoded(
    encoder: PretrainedEncoder, volume: CanonicalVolume, view: UInt8[np.ndarray, "d h w"], index: Int[np.ndarray, "*k"]
) -> Float[np.ndarray, "*k dim"]:
    """Features of the tokens `index` of `encoder`, which are encoded together, each once."""
    recipe, order = encoder.recipe, np.unique(index)
    values = tokens.extract_patches(view, recipe.tokens.patch_size, order)
    patches = intensity.lookup_table(volume.tissue_mean, volume.tissue_std)[values]
    whole = np.ones(len(order), np.float32)
    selected = SelectedTokens(patches, token_positions(order, recipe), order, recipe.grid, whole)
    features: Float[np.ndarray, "m dim"] = encoder.encode_tokens([selected])[0].features
    return features[np.searchsorted(order, index)]


def run_grid(choice: Choice, seed: int, work: Path) -> GridRun:
    """A trained and read grid; trained once."""
    encoder, cpu_seconds = train(choice, seed, work)
    packaged = load_encoder("phantom-tiny")
    values = {
        "same_tokens": read(of_same_tokens(encoder, packaged.recipe), cohorts_of(work, VALIDATION)),
        "own_tokens": read(of_encoder(encoder), cohorts_of(work, VALIDATION, encoder)),
    }
    return GridRun((encoder.recipe.tokens.patch_size,), seed, choice.updates, cpu_seconds, values)


def run_two_scales(seed: int, work: Path) -> GridRun:
    """Both encoders of `TWO_SCALES`, trained and read together; and the first one by itself, as `one_of_them`."""
    (small, first), (large, second) = (train(choice, seed, work) for choice in TWO_SCALES)
    cohorts = cohorts_of(work, VALIDATION)
    values = {
        "same_tokens": read(of_two_scales(small, large), cohorts),
        "one_of_them": read(of_encoder(small), cohorts),
    }
    patches = (small.recipe.tokens.patch_size, large.recipe.tokens.patch_size)
    return GridRun(patches, seed, 2 * _HALF, round(first + second, 1), values)


def main(arguments: Sequence[str] | None = None) -> None:
    """Trains and reads what is missing."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, required=True, help="folder of benchmarks.objectives")
    parser.add_argument("--out", type=Path, required=True, help="JSON file of the results")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    present = next(choice for choice in CHOICES if choice.objective == TRUTH)
    before = run_choice(present, 0, options.work, VALIDATION)
    both = {"same_tokens": before.values, "own_tokens": before.values}
    runs = [asdict(GridRun(((4, 8, 8),), 0, before.updates, before.cpu_seconds, both))]
    measures = {choice.name: partial(run_grid, choice) for choice in GRIDS} | {"two_scales": run_two_scales}
    for name, measure in measures.items():
        file = options.work / "read" / f"{name}-0-grid.json"
        if not file.is_file():
            write_json(file, asdict(measure(0, options.work)))
        runs.append(json.loads(file.read_text(encoding="utf-8")))
        write_json(options.out, runs)
    for run in runs:
        means = {f"{kind} {cohort}": _mean(row) for kind, rows in run["values"].items() for cohort, row in rows.items()}
        shown = "  ".join(f"{name} {value:.3f}" for name, value in means.items())
        patches = " and ".join("x".join(map(str, patch)) for patch in run["patches"])
        print(f"{patches}  {run['cpu_seconds']:.0f} s  {shown}")


def _mean(row: dict[str, dict[str, float]]) -> float:
    return row["with_drusen"]["value"]


if __name__ == "__main__":
    main()
