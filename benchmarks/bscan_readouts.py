"""Other ways to read lesions and diagnoses from the frozen tokens of real B-scans, beside that of the page.

`python -m benchmarks.bscan_readouts --keep FOLDER --out FILE` measures the tasks of `benchmarks.real_bscans` in each
of these ways, for the encoders and their baselines alike, and prints how many comparisons exclude zero. FOLDER is
that of `benchmarks.real_bscans --keep`. These are development eyes: the results say what limits the goals, and nothing
is chosen with them. The record `real/bscan_readouts.json` has `three_stages`, the encoder that was packaged as
`phantom-truth` until 2026-11-30.

Lesions:
- `plain`: the way of the page.
- `limited`: features keep the range that they have in the learned folds.
- `by_eye`: features have mean 0 and spread 1 over the tokens of each eye-visit. This needs no label.
- `neighbours`: each token with the mean of itself and the tokens around it in its B-scan.

Diagnoses:
- `plain`: mean and maximum over the tokens of an eye, the way of the page.
- `limited`: as for lesions.
- `by_bscan`: learned from B-scans; an eye has the mean of the log-odds of its B-scans.

The row of two encoders has the features of both side by side.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from benchmarks.exam.measured import MEAN
from benchmarks.exam.readings import interleave
from benchmarks.real_bscans import (
    DIAGNOSES,
    OWN_RANDOM,
    Frame,
    Resampled,
    Tokens,
    compare,
    counted_groups,
    diagnoses,
    eyes_of,
    held_out_scores,
    lesions,
    mean_entry,
    measure_rows,
    pooled,
    read_frames,
    resample,
    resampled_groups,
)
from benchmarks.real_eyes import SHARED
from jaxtyping import Float
from scipy.ndimage import uniform_filter

from octjepa.encoders import load_encoder
from octjepa.files import write_json

BOTH = "phantom-unet and phantom-truth", "random_unet and random_init"
NATIVE = "segmenter and phantom-truth"
ROWS = ("phantom-unet", "phantom-truth", "segmenter", "random_unet", "random_init", "intensity", "context")
READ = ("phantom-unet", "phantom-truth", BOTH[0], "segmenter", NATIVE)  # rows whose goals are counted


def by_eye(tokens: Tokens, frames: Sequence[Frame]) -> Tokens:
    """Features with mean 0 and spread 1 over the tokens of each eye-visit."""
    names = np.array([frame.eye.name for frame in frames])[tokens.frame]
    features = tokens.features.copy()
    for name in np.unique(names):
        mine = features[names == name]
        features[names == name] = (mine - mine.mean(axis=0)) / np.maximum(mine.std(axis=0), 1e-6)
    return replace(tokens, features=features)


def with_neighbours(tokens: Tokens, grid: tuple[int, int]) -> Tokens:
    """Each token with the mean over the 3 x 3 positions around it; positions without a token are left out."""
    means = np.empty_like(tokens.features)
    for number in np.unique(tokens.frame):
        mine = tokens.frame == number
        at = np.divmod(tokens.index[mine], grid[1])
        full = np.zeros((*grid, tokens.features.shape[1] + 1), np.float32)
        full[at] = np.column_stack([tokens.features[mine], np.ones(mine.sum(), np.float32)])
        summed = uniform_filter(full, (3, 3, 0), mode="constant")[at]
        means[mine] = summed[:, :-1] / summed[:, -1:]
    return replace(tokens, features=interleave([tokens.features, means]))


def diagnoses_by_bscan(rows: Mapping[str, Tokens], frames: Sequence[Frame]) -> dict[str, Any]:
    """Diagnoses learned from B-scans: an eye has the mean of the log-odds of its B-scans."""
    usable = [number for number, frame in enumerate(frames) if frame.eye.diagnoses & set(DIAGNOSES)]
    names = [frames[number].eye.name for number in usable]
    eyes = {frame.eye.name: frame.eye for frame in frames}
    order = sorted(set(names))
    groups = np.array([eyes[name].group for name in order])
    keys = [f"{number:06d}" for number in range(len(frames))]
    bscans = {name: pooled(tokens.features, [keys[k] for k in tokens.frame])[usable] for name, tokens in rows.items()}
    draws = resampled_groups(groups)
    out: dict[str, Any] = {}
    in_same_draws: list[dict[str, Resampled]] = []
    for diagnosis in DIAGNOSES:
        truth = np.array([diagnosis in eyes[name].diagnoses for name in order])
        sample_truth = np.array([diagnosis in eyes[name].diagnoses for name in names])
        sample_groups = np.array([eyes[name].group for name in names])
        outcomes = {}
        for row, values in bscans.items():
            scores, _ = held_out_scores(values, sample_truth, sample_groups, 32)
            eye_scores = _mean_by_eye(scores, names, order)
            outcomes[row] = eye_scores, eye_scores >= 0
        in_same_draws.append(resample(outcomes, truth, draws, "auroc"))
        count = counted_groups(truth, groups)
        out[diagnosis] = {"counted_groups": count, "rows": compare(in_same_draws[-1], count, "auroc")}
    return out | {MEAN: mean_entry(out, in_same_draws, "auroc")}


def _mean_by_eye(scores: np.ndarray, names: Sequence[str], order: Sequence[str]) -> Float[np.ndarray, " eyes"]:
    of_sample = np.array(names)
    return np.array([scores[of_sample == name].mean() for name in order])


def main() -> int:
    """Measures every way of reading."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shared", type=Path, default=SHARED)
    parser.add_argument("--keep", type=Path, help="folder that keeps the tokens of every row, for the next time")
    parser.add_argument("--out", type=Path, required=True, help="JSON file of the results")
    options = parser.parse_args()
    folder = options.shared / "real" / "macular_edema_bscans"
    if not folder.is_dir():
        print(f"{folder} is absent: nothing is measured")
        return 0
    packaged = load_encoder("phantom-tiny")
    frames, _ = read_frames(folder, packaged)
    torch.set_num_threads(1)
    rows = measure_rows(ROWS, {}, frames, packaged, options.keep)
    for name in (*BOTH, NATIVE):
        parts = [rows[part] for part in name.split(" and ")]
        rows[name] = replace(parts[0], features=interleave([part.features for part in parts]))
    eyes = eyes_of(rows, frames)
    grid = packaged.recipe.grid[1:]
    neighbours = {name: with_neighbours(tokens, grid) for name, tokens in rows.items()}
    normalised = {name: by_eye(tokens, frames) for name, tokens in rows.items()}
    results = {
        "lesions": {
            "plain": lesions(rows, frames, packaged),
            "limited": lesions(rows, frames, packaged, limited=True),
            "by_eye": lesions(normalised, frames, packaged),
            "neighbours": lesions(neighbours, frames, packaged),
        },
        "diagnoses": {
            "plain": diagnoses(eyes, frames),
            "limited": diagnoses(eyes, frames, limited=True),
            "by_bscan": diagnoses_by_bscan(rows, frames),
        },
    }
    write_json(options.out, results)
    for part, metric in (("lesions", "ap"), ("diagnoses", "auroc")):
        _print(results[part], metric)
    return 0


def _print(by_readout: Mapping[str, Mapping[str, Any]], metric: str) -> None:
    for readout, found in by_readout.items():
        for row in READ:
            cells = [f"{name} {entry['rows'][row][metric]['value']:.3f}" for name, entry in found.items()]
            ahead = []
            for baseline in ("random_init", "context", OWN_RANDOM.get(row)):
                if baseline is not None:
                    less = {name: entry["rows"][row][f"less_{baseline}"] for name, entry in found.items()}
                    each = [less[name]["low"] for name in less if name != MEAN]
                    mean = "{value} ({low} to {high})".format(**less[MEAN])
                    ahead.append(f"{baseline} {sum(low is not None and low > 0 for low in each)} of 4, mean {mean}")
            print(f"{readout:10} {row:32} {'  '.join(cells)}  ahead of {', '.join(ahead)}")


if __name__ == "__main__":
    sys.exit(main())
