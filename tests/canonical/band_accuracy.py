"""How far the found membranes lie from the phantom's true ones, per device or per shape of eye.

Command: python tests/canonical/band_accuracy.py [--people N] [--size small|full] [--seed N] [--shapes SEEDS]
    [--difficulty plain|realistic|exam] [--noise LEVELS --light SHARE]
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections import defaultdict
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from band_error import Errors, errors_um
from octjepa.phantom import DEVICES, SURFACES, CohortDesign, read_truth, write_cohort
from octjepa.phantom.person import Difficulty
from octjepa.read.reader import read_volume
from octjepa.recipe import Preprocessing
from octjepa.volume import OCTVolume
from shaped_eye import SHAPES, shaped_eye


def noisier(volume: OCTVolume, noise: float, light: float, seed: int) -> OCTVolume:
    """A scan with a share of its light over the vitreous, and Gaussian noise of so many intensity levels."""
    if not noise:
        return volume
    floor = np.median(volume.pixels[:, :10])
    drawn = np.random.default_rng(seed).normal(0, noise, volume.shape)
    pixels = np.clip(floor + (volume.pixels - floor) * light + drawn, 0, 255).astype(np.uint8)
    return replace(volume, pixels=pixels, content_hash="")


def of_file(path: Path, truth: Path, preprocessing: Preprocessing, noise: float, light: float) -> Errors:
    """Of a phantom file. A membrane on the retina belongs to its tissue: the band is to begin there."""
    volume = noisier(read_volume(path), noise, light, int(path.stem[-6:].replace(".", "")))
    known = read_truth(truth)
    ilm, bm = (known.surfaces_px[SURFACES.index(name)] for name in ("ilm", "bm"))
    if "epiretinal_membrane" in known.masks:
        ilm = ilm - known.masks["epiretinal_membrane"].sum(axis=1)
    if "frames_reversed" in volume.notes:  # the truth lies in the file's frame order
        ilm, bm = ilm[::-1], bm[::-1]
    return errors_um(volume, ilm, bm, preprocessing)


def table(
    people: int, size: str, seed: int, difficulty: Difficulty, noise: float, light: float
) -> dict[str, dict[str, float]]:
    """device -> {ilm, bm: mean absolute error in um, ilm_bias, bm_bias, ilm_wrong, bm_wrong: share beyond 50 um}."""
    collected: dict[str, dict[str, list[np.ndarray]]] = defaultdict(lambda: defaultdict(list))
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "cohort"
        write_cohort(out, people=people, seed=seed, size=size, design=CohortDesign(difficulty=difficulty))
        for path in sorted(out.rglob("*.dcm")):
            truth = out / "truth" / f"{path.stem.rsplit('_', 1)[1]}.npz"
            for name, error in of_file(path, truth, Preprocessing(), noise, light).items():
                collected[path.parent.parent.name][name].append(error.ravel())
    return {device: summary(collected[device]) for device in DEVICES if device in collected}


def summary(collected: dict[str, list[np.ndarray]]) -> dict[str, float]:
    row: dict[str, float] = {}
    for name, parts in collected.items():
        error = np.concatenate(parts)
        row[name] = float(np.abs(error).mean())
        row[f"{name}_bias"] = float(np.median(error))
        row[f"{name}_wrong"] = float((np.abs(error - np.median(error)) > 50).mean())
    return row


def shapes(seeds: int) -> dict[str, dict[str, float]]:
    """shape of eye -> as `table`, over all devices."""
    rows = {}
    for shape in SHAPES:
        collected: dict[str, list[np.ndarray]] = defaultdict(list)
        for device, seed in product(DEVICES, range(1, seeds + 1)):
            eye = shaped_eye(device, shape, seed)
            for name, error in errors_um(eye.volume, eye.ilm, eye.bm, Preprocessing()).items():
                collected[name].append(error.ravel())
        rows[shape] = summary(collected)
    return rows


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--people", type=int, default=8)
    parser.add_argument("--size", default="small")
    parser.add_argument("--seed", type=int, default=5)
    parser.add_argument("--shapes", type=int, default=0, metavar="SEEDS", help="chosen shapes instead of a cohort")
    parser.add_argument("--difficulty", default="plain")
    parser.add_argument("--noise", type=float, default=0.0)
    parser.add_argument("--light", type=float, default=1.0)
    arguments = parser.parse_args()
    done = (
        shapes(arguments.shapes)
        if arguments.shapes
        else table(
            arguments.people, arguments.size, arguments.seed, arguments.difficulty, arguments.noise, arguments.light
        )
    )
    for device, row in done.items():
        print(device, {name: round(value, 3) for name, value in row.items()})
