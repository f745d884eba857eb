"""How far the found membranes lie from the phantom's true ones, per device.

Command: python tests/store/band_accuracy.py [--people N] [--size small|full] [--seed N]
"""

from __future__ import annotations

import argparse
import tempfile
from collections import defaultdict
from pathlib import Path

import numpy as np

from octjepa.ingest import read_volume
from octjepa.phantom import DEVICES, SURFACES, read_truth, write_cohort
from octjepa.recipe import Preprocessing
from octjepa.store.canonical import in_plane
from octjepa.store.resample import centred
from octjepa.store.surfaces import find_surfaces


def errors_um(path: Path, truth: Path, preprocessing: Preprocessing) -> dict[str, np.ndarray]:
    """Signed error in um of "ilm" and "bm" at every A-scan of one file, `[D, W]`; positive is too deep."""
    volume = read_volume(path)
    depth, height, width = volume.shape
    _, dy, dx = volume.spacing_mm
    _, ty, tx = preprocessing.target_spacing_mm
    columns_mm = centred(int(width * dx / tx), tx)
    image = in_plane(volume.pixels, volume, preprocessing, columns_mm)
    found = find_surfaces(image, ty, tx)
    true = read_truth(truth).surfaces_row
    if "frames_reversed" in volume.notes:
        true = true[:, ::-1]  # the truth lies in the file's frame order
    result = {}
    for name, rows, index in (("ilm", found.ilm, SURFACES.index("ilm")), ("bm", found.bm, SURFACES.index("bm"))):
        found_mm = (rows - (image.shape[1] - 1) / 2) * ty
        native_mm = (true[index] - (height - 1) / 2) * dy
        true_mm = np.stack([np.interp(columns_mm, centred(width, dx), native_mm[z]) for z in range(depth)])
        result[name] = (found_mm - true_mm) * 1000
    return result


def table(people: int, size: str, seed: int = 5) -> dict[str, dict[str, float]]:
    """device -> {ilm, bm: mean absolute error in um, ilm_bias, bm_bias, ilm_wrong, bm_wrong: share beyond 50 um}."""
    collected: dict[str, dict[str, list[np.ndarray]]] = defaultdict(lambda: defaultdict(list))
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "cohort"
        write_cohort(out, people=people, seed=seed, size=size)
        for path in sorted(out.rglob("*.dcm")):
            truth = out / "truth" / f"{path.stem.rsplit('_', 1)[1]}.npz"
            for name, error in errors_um(path, truth, Preprocessing()).items():
                collected[path.parent.parent.name][name].append(error.ravel())
    rows: dict[str, dict[str, float]] = {}
    for device in DEVICES:
        rows[device] = {}
        for name, parts in collected[device].items():
            error = np.concatenate(parts)
            rows[device][name] = float(np.abs(error).mean())
            rows[device][f"{name}_bias"] = float(np.median(error))
            rows[device][f"{name}_wrong"] = float((np.abs(error - np.median(error)) > 50).mean())
    return rows


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--people", type=int, default=8)
    parser.add_argument("--size", default="small")
    parser.add_argument("--seed", type=int, default=5)
    arguments = parser.parse_args()
    for device, row in table(arguments.people, arguments.size, arguments.seed).items():
        print(device, {name: round(value, 3) for name, value in row.items()})
