"""Size of a token at equal CPU time: the objective `truth` from random weights, with tokens of 4 x 8 x 8 voxels and
finer ones.

`python -m benchmarks.token_grids --work WORK --out benchmarks/records/token_grids.json` trains a run for each grid of
`GRIDS` with the settings of `benchmarks.objectives` (whose run of 4 x 8 x 8 it reuses) and half as many updates, each
with twice as many tokens: an update sees the same share of a volume. It goes on where it stopped.

Every run is read on the validation eyes of `benchmarks.objectives`: `same_tokens` are the tokens of 4 x 8 x 8 voxels,
each the mean of the finer tokens in it, so the labels and the number of tokens are those of every other row.
`own_tokens` are the finer tokens with labels of their own: smaller tokens, other positives, so the value compares with
no other row.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from benchmarks.exam.tokens import Featurise, of_encoder
from benchmarks.objectives import CHOICES, TRUTH, VALIDATION, Choice, cohorts_of, read, run_choice, train
from benchmarks.phantom_tokens import Value
from jaxtyping import Float, Int

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


@dataclass(frozen=True)
class GridRun:
    """A run of one grid: patch in voxels, CPU time, and values by kind of tokens, cohort and lesion."""

    patch: tuple[int, ...]
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


def _averaged(encoder: PretrainedEncoder, volume: CanonicalVolume, recipe: Recipe) -> TokenFeatures:
    view, index, share = select_tissue_tokens(volume, recipe, geometry.center_crop(recipe.preprocessing))
    fine = encoder.recipe
    children = children_of(index, recipe.grid, fine.grid)  # [k, n]
    order = np.sort(children, axis=None)
    values = tokens.extract_patches(view, fine.tokens.patch_size, order)
    patches = intensity.lookup_table(volume.tissue_mean, volume.tissue_std)[values]
    selected = SelectedTokens(patches, token_positions(order, fine), order, fine.grid, np.ones(len(order), np.float32))
    features: Float[np.ndarray, "m dim"] = encoder.encode_tokens([selected])[0].features
    mean = features[np.searchsorted(order, children)].mean(axis=1)  # [k, dim]
    return TokenFeatures(mean, index, recipe.grid, share[index])


def run_grid(choice: Choice, seed: int, work: Path) -> GridRun:
    """A trained and read grid; trained once."""
    encoder, cpu_seconds = train(choice, seed, work)
    packaged = load_encoder("phantom-tiny")
    values = {
        "same_tokens": read(of_same_tokens(encoder, packaged.recipe), cohorts_of(work, VALIDATION)),
        "own_tokens": read(of_encoder(encoder), cohorts_of(work, VALIDATION, encoder)),
    }
    return GridRun(encoder.recipe.tokens.patch_size, seed, choice.updates, cpu_seconds, values)


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
    runs = [asdict(GridRun((4, 8, 8), 0, before.updates, before.cpu_seconds, both))]
    for choice in GRIDS:
        file = options.work / "read" / f"{choice.name}-0-grid.json"
        if not file.is_file():
            write_json(file, asdict(run_grid(choice, 0, options.work)))
        runs.append(json.loads(file.read_text(encoding="utf-8")))
        write_json(options.out, runs)
    for run in runs:
        means = {f"{kind} {cohort}": _mean(row) for kind, rows in run["values"].items() for cohort, row in rows.items()}
        shown = "  ".join(f"{name} {value:.3f}" for name, value in means.items())
        print(f"{'x'.join(map(str, run['patch']))}  {run['cpu_seconds']:.0f} s  {shown}")


def _mean(row: dict[str, dict[str, float]]) -> float:
    return row["with_drusen"]["value"]


if __name__ == "__main__":
    main()
