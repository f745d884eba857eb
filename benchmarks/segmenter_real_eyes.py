"""Scores the segmentation network on the real development eyes, beside the difference of the two graders.

`python -m benchmarks.segmenter_real_eyes [FOLDER]` reads the eyes of ../shared, segments each with the packaged network
or the one in FOLDER, and prints a JSON object. The B-scans of these eyes are a sparse sample, so each is taken alone.
Nothing is chosen with these numbers. Graders place the edges of EZ (ISM/ISE) and RPE (OS/RPE) according to a definition
of their own; `mean_um_shifted` subtracts from both a constant that is measured on the other eyes.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import numpy as np

import octjepa
from octjepa.tasks.segmenter.evaluation import pooled_score, score_eye
from octjepa.tasks.segmenter.inference import load_segmenter, with_calibration

SHARED = Path(__file__).resolve().parents[2] / "shared"


def development_eyes(shared: Path) -> Iterator[tuple[str, Path, np.ndarray, np.ndarray, np.ndarray]]:
    """Name, scan, layers of grader 1 and grader 2 `[D, 8, W]`, and fluid `[D, H, W]` of each eye."""
    for name in ("01", "04", "02", "05", "07"):
        first = name in ("01", "04")
        folder = shared / "data" if first else shared / "real" / "duke_dme_more"
        labels = shared / "labels" if first else folder
        layers = np.load(labels / f"duke_dme_eye{name}_layers.npz")
        fluid = np.load(folder / f"duke_dme_eye{name}_fluid.npz")["fluid"] > 0
        yield name, folder / f"duke_dme_eye{name}_11x496x768.dcm", layers["layers"], layers["layers2"], fluid


def main() -> None:
    """Prints the scores."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path, nargs="?", help="of segmenter.safetensors and segmenter.json")
    parser.add_argument("--shared", type=Path, default=SHARED)
    parser.add_argument("--adapt", type=float, help="share of the scan's own statistics; default: as calibrated")
    arguments = parser.parse_args()
    segmenter = load_segmenter(arguments.folder)
    if arguments.adapt is not None:
        segmenter = with_calibration(segmenter, adapt=arguments.adapt)
    eyes, graders, errors, lines = [], [], [], {}
    for name, scan, layers, second, fluid in development_eyes(arguments.shared):
        found = segmenter.segment(octjepa.read_volume(scan))
        score = score_eye(found, layers, fluid)
        errors.append((found.boundaries_px.transpose(1, 0, 2) - layers) * 1000 * found.spacing_mm[1])
        eyes.append(score)
        graders.append(np.nanmean(np.abs(layers - second), axis=(0, 2)) * 3.872)
        lines[name] = {
            "absolute_um": score.absolute_um.round(1).tolist(), "mean_um": round(float(score.absolute_um.mean()), 2),
            "dice": round(score.dice, 3),
        }  # fmt: skip
    signed = np.stack([eye.signed_um for eye in eyes])
    shifted_um = np.stack([eye.absolute_um for eye in eyes])
    for k, error_um in enumerate(errors):
        others = np.delete(signed, k, axis=0).mean(0)
        for boundary in (5, 6):
            shifted_um[k, boundary] = np.nanmean(np.abs(error_um[:, boundary] - others[boundary]))
    out = {
        "eyes": lines,
        "pooled": asdict(pooled_score(eyes)),
        "shifted_um": shifted_um.mean(0).round(2).tolist(),
        "mean_um_shifted": round(float(shifted_um.mean()), 2),
        "graders_um": np.mean(graders, axis=0).round(2).tolist(),
    }
    print(json.dumps(out, indent=1))


if __name__ == "__main__":
    main()
