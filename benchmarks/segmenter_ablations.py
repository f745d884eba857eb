"""What matters in the training of the segmentation network: short runs that differ in one setting.

`python -m benchmarks.segmenter_ablations --out FILE` trains every variant from random weights with the same number of
updates, scores it on validation phantoms and on the real development eyes, and appends a line of JSON to FILE. What
FILE holds already is not computed again; `--table` prints it. A run has far fewer updates than the packaged network
had, so it ranks settings and says nothing about the packaged network. A setting is chosen on phantoms; the real eyes
are reported.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from benchmarks.real_eyes import SHARED, development_eyes

import octjepa
from octjepa.files import write_json
from octjepa.keys import generator, key
from octjepa.model.boundary_unet import BoundaryUNet, NetworkSize
from octjepa.model.bscan_inference import Calibration
from octjepa.phantom.random_scene import AS_IS, MODERATE, STRONG, SceneRanges, draw_scene
from octjepa.phantom.scene_stream import TRAINING_MIX
from octjepa.tasks.segmenter.evaluation import pooled_score, score_eye
from octjepa.tasks.segmenter.image_formation import Batch, Draws, Scenes
from octjepa.tasks.segmenter.inference import Segmenter
from octjepa.tasks.segmenter.scene_pool import ScenePool
from octjepa.tasks.segmenter.train import Trainer, TrainingSettings
from octjepa.tasks.segmenter.validation import validate, validation_batches

SLICES: Final = 6
VALIDATION: Final = 48  # phantoms
SHARES: Final = (0.0, 0.5, 1.0)  # of the scan's own statistics in batch normalisation
NARROW: Final = (20, 40, 80, 100, 120)
WIDE: Final = (48, 96, 160, 192, 224)


@dataclass(frozen=True)
class Variant:
    """One setting that differs from the packaged training."""

    about: str
    mix: tuple[SceneRanges, ...] = TRAINING_MIX
    neighbours: bool = True
    widths: tuple[int, ...] = NetworkSize.widths


def _changed(**changes: Any) -> tuple[SceneRanges, ...]:
    """The training mix with these values in its randomised ranges."""
    return tuple(ranges if ranges is AS_IS else replace(ranges, **changes) for ranges in TRAINING_MIX)


VARIANTS: Final = {
    "base": Variant("the settings of the packaged network: as is, moderate and strong 1:2:3"),
    "as_is": Variant("phantoms as they are", mix=(AS_IS,)),
    "moderate": Variant("moderately randomised phantoms", mix=(MODERATE,)),
    "strong": Variant("strongly randomised phantoms", mix=(STRONG,)),
    "small_fluid": Variant(
        "no oedema of free shape: cysts that respect layers",
        mix=_changed(oedema_probability=0.0, free_fluid_probability=0.0),
    ),
    "one_grey": Variant("fluid of one reflectivity, -8 dB", mix=_changed(fluid_db=(-8, -8))),
    "fixed_contrast": Variant(
        "contrast of the layers as in healthy eyes", mix=_changed(contrast_stretch=(1, 1), contrast_jitter_db=0.0)
    ),
    "single_bscans": Variant("no neighbours (2D)", neighbours=False),
    "narrow": Variant("1.1 million weights", widths=NARROW),
    "wide": Variant("4.4 million weights", widths=WIDE),
}


class _SingleBscans(ScenePool):
    """A pool that never shows a neighbour."""

    def gather(
        self, scene: np.ndarray, middle: np.ndarray, alone: np.ndarray | None = None, dropped: np.ndarray | None = None
    ) -> Scenes:
        return super().gather(scene, middle, np.ones(len(scene), bool), dropped)


class _Trainer(Trainer):
    """A run of a fixed number of updates that draws its phantoms itself, so that its cost does not depend on others."""

    def __init__(self, settings: TrainingSettings, out: Path, widths: tuple[int, ...]) -> None:
        super().__init__(settings, out, out, torch.device("cpu"), size=NetworkSize(widths=widths))

    def run_updates(self, variant: Variant, updates: int) -> None:
        """Trains. Scene i of the run is drawn from the variant's mix."""
        settings, progress = self.settings, self.progress
        kind = ScenePool if variant.neighbours else _SingleBscans
        pool = kind(settings.pool_scenes, SLICES, self.device)
        draws = Draws(key("segmenter", settings.seed, 0) % 2**31, self.device)
        rng = np.random.default_rng([settings.seed, 0])
        self.network.train()
        for update in range(updates):
            while pool.received < settings.first_scenes + update * settings.scenes_per_step:
                pool.add([_scene(settings.seed, pool.received, variant.mix)])
            progress.seconds = settings.seconds * update / updates  # the learning rate follows it
            self.step(pool, rng, draws)
        self.losses.flush()


def _scene(seed: int, index: int, mix: Sequence[SceneRanges]) -> Any:
    return draw_scene(seed, index, mix[int(generator("scene mix", seed, index).integers(len(mix)))], SLICES)


def train_and_score(name: str, seed: int, updates: int, eyes: Sequence[Any]) -> dict[str, Any]:
    """One line of the file: settings, cost and scores of one run."""
    variant = VARIANTS[name]
    settings = TrainingSettings(seed=seed, pool_scenes=300, first_scenes=60, scenes_per_step=2)
    start = time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        trainer = _Trainer(settings, Path(folder), variant.widths)
        trainer.run_updates(variant, updates)
    seconds = time.process_time() - start
    network = trainer.network
    batches = validation_batches(VALIDATION, torch.device("cpu"))
    real = {str(share): _real(network, share, eyes) for share in SHARES} if eyes else {}
    return {
        "variant": name,
        "about": variant.about,
        "seed": seed,
        "updates": updates,
        "weights": sum(p.numel() for p in network.parameters()),
        "cpu_seconds": round(seconds, 1),
        "phantoms": validate(network, batches).as_dict(),
        "phantoms_alone": validate(network, [_alone(batch) for batch in batches]).as_dict(),
        "real": real,
    }


def _alone(batch: Batch) -> Batch:
    images = batch.images.clone()
    images[:, 0] = images[:, 2] = 0
    return replace(batch, images=images)


def _real(network: BoundaryUNet, share: float, eyes: Sequence[Any]) -> dict[str, float]:
    """Mean of eight boundaries in um, Dice at 0.5 and average precision of fluid: the five eyes together."""
    segmenter = Segmenter(network, Calibration(adapt=share))
    scores = [
        score_eye(segmenter.predict(volume.pixels, volume.spacing_mm, None, sparse=True), layers, fluid)
        for volume, layers, fluid in eyes
    ]
    pooled = pooled_score(scores)
    return {"mean_um": pooled.mean_um, "dice": pooled.dice, "average_precision": pooled.average_precision}


def main() -> None:
    """Computes what is missing in the file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--shared", type=Path, default=SHARED)
    parser.add_argument("--variants", nargs="+", default=list(VARIANTS), choices=list(VARIANTS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[1])
    parser.add_argument("--updates", type=int, default=240)
    parser.add_argument("--table", action="store_true", help="print the file, compute nothing")
    parser.add_argument("--record", type=Path, help="write the file as one JSON object, compute nothing")
    given = parser.parse_args()
    lines = [json.loads(line) for line in given.out.read_text().splitlines()] if given.out.is_file() else []
    if given.table:
        _print_table(lines)
        return
    if given.record is not None:
        write_json(given.record, {"command": "python -m benchmarks.segmenter_ablations --out FILE", "runs": lines})
        return
    torch.set_num_threads(1)
    eyes = [(octjepa.read_volume(scan), layers, fluid) for _, scan, layers, _, fluid in development_eyes(given.shared)]
    done = {(line["variant"], line["seed"], line["updates"]) for line in lines}
    for seed in given.seeds:
        for name in given.variants:
            if (name, seed, given.updates) in done:
                continue
            line = train_and_score(name, seed, given.updates, eyes)
            with given.out.open("a") as file:
                file.write(json.dumps(line) + "\n")


def _print_table(lines: list[dict[str, Any]]) -> None:
    """Markdown, a row for each variant: values of its seeds."""
    for name, variant in VARIANTS.items():
        runs = [line for line in lines if line["variant"] == name]
        if runs:
            print(f"| {variant.about} |", " | ".join(_cells(runs)), "|")


def _cells(runs: list[dict[str, Any]]) -> list[str]:
    def shown(digits: int, *path: str) -> str:
        values = []
        for run in runs:
            value: Any = run
            for key_ in path:
                value = value[key_]
            values.append(f"{value:.{digits}f}")
        return ", ".join(values)

    return [
        shown(1, "phantoms", "mean_um"),
        shown(2, "phantoms", "average_precision"),
        shown(1, "phantoms_alone", "mean_um"),
        shown(2, "phantoms_alone", "average_precision"),
        shown(1, "real", "0.5", "mean_um"),
        shown(2, "real", "0.5", "dice"),
        shown(2, "real", "0.5", "average_precision"),
    ]


if __name__ == "__main__":
    main()
