"""Adapts the segmentation network to one real development eye and scores it on the others.

`python -m benchmarks.adapt_real_eyes --out FILE` learns each eye of ../shared from 1, 3, 5 and 11 labelled B-scans,
from the packaged weights and from random ones, and appends a line of JSON for each to FILE. What FILE holds already is
not computed again. `--table` prints the means. `--record benchmarks/records/real/adaptation.json` writes the means
over all five eyes, and `make real` shows them on its page. Nothing is chosen with these numbers.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from benchmarks.real_eyes import SHARED, USUAL_WAY, development_eyes

import octjepa
from octjepa.files import write_json
from octjepa.model.boundary_unet import BoundaryUNet, NetworkSize
from octjepa.tasks.labels.layer_names import ANY_CLASS, FLUID
from octjepa.tasks.segmenter.adapt import (
    AdaptSettings,
    LabelledScan,
    adapted_calibration,
    labelled_samples,
    split_samples,
    train,
)
from octjepa.tasks.segmenter.evaluation import pooled_score, score_eye
from octjepa.tasks.segmenter.inference import Segmenter, load_segmenter
from octjepa.volume import OCTVolume

_EYES = 5
WAYS = {"all weights": 1.0, USUAL_WAY: AdaptSettings.adapted_share}  # share of the learned weights in the result
CHOSEN = {1: (5,), 3: (2, 5, 8), 5: (1, 3, 5, 7, 9), 11: tuple(range(11))}
_BACKGROUND_OR_SUB_RPE = 0b1001  # the graders marked fluid, not sub-RPE material


@dataclass(frozen=True)
class _Eye:
    name: str
    volume: OCTVolume
    layers: np.ndarray
    fluid: np.ndarray

    def labelled(self, bscans: tuple[int, ...]) -> LabelledScan:
        """The labels of grader 1 in `bscans` alone."""
        graded = np.isfinite(self.layers[:, 0])
        graded[[k for k in range(len(graded)) if k not in bscans]] = False
        allowed = np.where(self.fluid, FLUID, _BACKGROUND_OR_SUB_RPE)
        allowed = np.where(graded[:, None], allowed, ANY_CLASS).astype(np.uint8)
        rows = np.where(graded[None], self.layers.transpose(1, 0, 2), np.nan).astype(np.float32)
        return LabelledScan(self.name, self.volume, rows, allowed)


def _line(
    eyes: list[_Eye], learned: _Eye, count: int, start: str, settings: AdaptSettings, way: str
) -> dict[str, object]:
    packaged = load_segmenter()
    training, held_out = split_samples(labelled_samples(learned.labelled(CHOSEN[count])))
    torch.manual_seed(settings.seed)
    network = packaged.network if start == "packaged" else BoundaryUNet(NetworkSize())
    trained = train(network, training, held_out, replace(settings, adapted_share=WAYS[way]))
    segmenter = Segmenter(trained.network, adapted_calibration(packaged.calibration, trained.step > 0))
    others = [eye for eye in eyes if eye is not learned]
    scores = [score_eye(segmenter.segment(eye.volume), eye.layers, eye.fluid) for eye in others]
    pooled = pooled_score(scores)
    rounded = [[round(float(score.absolute_um.mean()), 2), round(score.dice, 3)] for score in scores]
    by_eye = dict(zip([eye.name for eye in others], rounded, strict=True))
    return {
        "eye": learned.name,
        "bscans": count,
        "start": start,
        "way": way,
        "seed": settings.seed,
        "um": pooled.mean_um,
        "dice": pooled.dice,
        "ap": pooled.average_precision,
        "boundary_um": pooled.absolute_um,
        "signed_um": pooled.signed_um,
        "step": trained.step,
        "steps": trained.steps,
        "cpu_seconds": round(trained.cpu_seconds, 1),
        "losses": [round(v, 3) for v in trained.losses],
        "others": by_eye,
    }


def main() -> None:
    """Computes what is missing in the file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--shared", type=Path, default=SHARED)
    parser.add_argument("--bscans", type=int, nargs="+", default=[11, 3, 1, 5])
    parser.add_argument("--starts", nargs="+", default=["packaged", "random"])
    parser.add_argument("--eyes", nargs="+")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--learning-rate", type=float, default=AdaptSettings.learning_rate)
    parser.add_argument("--way", choices=sorted(WAYS), default=USUAL_WAY, help="from random weights: all weights")
    parser.add_argument("--record", type=Path, help="write means of the file as JSON, compute nothing")
    parser.add_argument("--table", action="store_true", help="print means of the file, compute nothing")
    arguments = parser.parse_args()
    lines = [json.loads(line) for line in arguments.out.read_text().splitlines()] if arguments.out.is_file() else []
    if arguments.table:
        _print_table(lines)
        return
    if arguments.record is not None:
        write_json(arguments.record, {"rows": _means(lines, least=_EYES)})
        return
    settings = AdaptSettings(seed=arguments.seed, learning_rate=arguments.learning_rate)
    eyes = [
        _Eye(name, octjepa.read_volume(scan), layers, fluid)
        for name, scan, layers, _, fluid in development_eyes(arguments.shared)
    ]
    done = {
        (line["eye"], line["bscans"], line["start"], line["seed"], line.get("way", "all weights")) for line in lines
    }
    for count in arguments.bscans:
        for start in arguments.starts:
            way = arguments.way if start == "packaged" else "all weights"
            for eye in eyes:
                is_done = (eye.name, count, start, settings.seed, way) in done
                if is_done or (arguments.eyes and eye.name not in arguments.eyes):
                    continue
                with arguments.out.open("a") as file:
                    file.write(json.dumps(_line(eyes, eye, count, start, settings, way)) + "\n")


def _means(lines: list[dict[str, Any]], least: int = 1) -> list[dict[str, Any]]:
    """Means over the eyes that were learned from, of each kind of adaptation that has at least `least` of them."""

    def kind(line: dict[str, Any]) -> tuple[int, str, str]:
        return line["bscans"], line["start"], line.get("way", "all weights")

    rows = []
    for count, start, way in sorted({kind(line) for line in lines}):
        group = [line for line in lines if kind(line) == (count, start, way)]
        means = {
            name: round(float(np.mean([line[name] for line in group])), 3)
            for name in ("um", "dice", "ap", "cpu_seconds")
        }
        if len(group) >= least:
            rows.append({"bscans": count, "start": start, "way": way, "eyes": len(group), **means})
    return rows


def _print_table(lines: list[dict[str, Any]]) -> None:
    for row in _means(lines):
        print(*row.values())


if __name__ == "__main__":
    main()
