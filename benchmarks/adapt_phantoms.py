"""Compares ways to adapt the segmentation network on phantom eyes of scanners that training did not contain.

`python -m benchmarks.adapt_phantoms --out FILE` draws phantom scanners: one optics, one display and one set of constant
offsets of the boundaries (a grader's definition) for all eyes of a scanner. The network learns the eleven labelled
B-scans of one eye and is scored on three other eyes of the same scanner. Each line of FILE is one scanner and one way.
No real eye is read, so a way can be chosen here.
"""

from __future__ import annotations

import argparse
import copy
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, cast

import numpy as np
import torch
from torch import Tensor, nn

from octjepa.model.boundary_unet import BoundaryUNet, decode_boundaries, segmentation_loss
from octjepa.model.bscan_inference import bscan_logits, with_statistics
from octjepa.phantom.random_scene import AS_IS, MODERATE, SHIFTED, STRONG, draw_scene
from octjepa.tasks.segmenter.adapt import AdaptSettings, AdaptTask, Sample, Trained, split_samples, train
from octjepa.tasks.segmenter.calibrate import PhantomEye, phantom_eye
from octjepa.tasks.segmenter.image_formation import ROW_UM, Draws, form_batch
from octjepa.tasks.segmenter.inference import Segmenter, load_segmenter
from octjepa.tasks.segmenter.scene_pool import ScenePool
from octjepa.tasks.segmenter.validation import average_precision
from octjepa.train.learner import Learner

SEED = 51_001
SCANNERS = ("smoothed", "coarse", "striped", "equalised")
EYES, BSCANS, TEST_BSCANS = 4, 11, 5
OFFSET_ROWS = 0.8  # standard deviation of the constant offsets: 6 um, as two graders differ


def scanner_eyes(number: int) -> list[PhantomEye]:
    """The eyes of a scanner. All have the same optics and display, and the same constant offsets of boundaries."""
    rng = np.random.default_rng([SEED, number])
    offsets = torch.from_numpy(rng.normal(0, OFFSET_ROWS, (1, 8, 1)).astype(np.float32))
    eyes = []
    for index in range(EYES):
        scene = draw_scene(SEED, 100 * number + index, SHIFTED, BSCANS if index == 0 else TEST_BSCANS)
        draws = Draws(SEED + number, torch.device("cpu"))  # anew for each eye: the same optics
        eye = phantom_eye(scene, draws, SCANNERS[number])
        eyes.append(PhantomEye(eye.images, eye.boundaries + offsets, eye.classes, eye.display))
    return eyes


def samples_of(eye: PhantomEye) -> list[Sample]:
    """The B-scans of an eye as labelled samples, each without its neighbours, as in a sparse raster."""
    intensities = (eye.images * 45 + 100).clamp(0, 255)
    samples = []
    for image, boundaries, classes in zip(intensities, eye.boundaries, eye.classes, strict=True):
        images = torch.zeros(3, *image.shape)
        images[1] = image
        samples.append(Sample(images, (False, True, False), boundaries, 1 << classes, "eye", "eye"))
    return samples


class Averaged(AdaptTask):
    """Validates and takes an exponential average of the weights."""

    decay = 0.95

    def begin_update(self, update: int) -> dict[str, Any]:
        network = self.learner.network
        if update == 0:
            self.average = copy.deepcopy(network)
        else:
            self._follow()
        return super().begin_update(update)

    def _follow(self) -> None:
        with torch.no_grad():
            pairs = zip(self.average.state_dict().values(), self.learner.network.state_dict().values(), strict=True)
            for mean, value in pairs:
                if mean.is_floating_point():
                    mean.lerp_(value, 1 - self.decay)

    def validate(self, learners: Sequence[Learner]) -> list[float | None]:
        if not hasattr(self, "average"):
            return super().validate(learners)
        (learner,) = learners
        trained = copy.deepcopy(learner.network.state_dict())
        learner.network.load_state_dict(self.average.state_dict())
        (loss,) = super().validate(learners)
        if loss is not None:
            learner.follow_validation(learner.update, loss)  # keeps the averaged weights if they are the best so far
        learner.network.load_state_dict(trained)
        return [None]


class Mixed(AdaptTask):
    """Adds two crops of training phantoms to the four labelled crops of each step."""

    pool: ScenePool

    def losses(self, learner: Learner, batch: Any, update: int, micro_batch: int) -> Iterator[Tensor]:
        yield from super().losses(learner, batch, update, micro_batch)
        rng, draws = np.random.default_rng([7, update]), Draws(7_000 + update, torch.device("cpu"))
        with torch.no_grad():
            phantoms = form_batch(self.pool.sample(rng, 2), draws)
        with self.runtime.autocast():
            logits = learner.network(phantoms.images.contiguous(memory_format=torch.channels_last))
        layers, fluid = segmentation_loss(logits, phantoms.boundaries, phantoms.classes, phantoms.graded)
        yield (layers + 2 * fluid) * 0.5


class AveragedMixed(Mixed, Averaged):
    """Both."""


class LastLayers(AdaptTask):
    """Changes the weights of the last decoder level and of the head alone."""

    def begin_update(self, update: int) -> dict[str, Any]:
        network = cast(BoundaryUNet, self.learner.network)
        changed = {id(p) for part in (network.up[-1], network.head) for p in part.parameters()}
        for parameter in network.parameters():
            parameter.requires_grad_(id(parameter) in changed)
        return super().begin_update(update)


@dataclass(frozen=True)
class Way:
    """A way to adapt: what a step learns, the learning rate, and the share of the adapted weights in the result."""

    task_class: type[AdaptTask] = AdaptTask
    rate: float = 1.0  # times the usual one
    share: float = 1.0  # below 1: a mean of adapted and packaged weights (Wortsman et al. 2022, WiSE-FT)

    def train(
        self, network: nn.Module, training: Sequence[Sample], held_out: Sequence[Sample], settings: AdaptSettings
    ) -> Trained:
        """Adapts a copy of `network` this way."""
        if issubclass(self.task_class, Mixed) and not hasattr(Mixed, "pool"):
            Mixed.pool = scene_pool()
        settings = replace(settings, learning_rate=settings.learning_rate * self.rate, adapted_share=self.share)
        return train(network, training, held_out, settings, task_class=self.task_class)


WAYS: Final = {
    "all weights": Way(),
    "averaged weights": Way(Averaged),
    "a fifth of the rate": Way(rate=0.2),
    "with phantoms": Way(Mixed),
    "half of the weights": Way(share=0.5),
    "half of the weights, with phantoms": Way(Mixed, share=0.5),
    "averaged weights, with phantoms": Way(AveragedMixed),
    "last layers": Way(LastLayers),
}


def scene_pool(count: int = 48) -> ScenePool:
    """Training phantoms, 1 : 1 : 2 as they are, moderately and strongly randomised."""
    ranges = (AS_IS, MODERATE, STRONG, STRONG)
    pool = ScenePool(count, 3, torch.device("cpu"))
    pool.add([draw_scene(SEED + 7, k, ranges[k % 4], 3) for k in range(count)])
    return pool


def score(segmenter: Segmenter, eyes: Sequence[PhantomEye]) -> dict[str, float]:
    """Mean boundary error in um and average precision of fluid on the eyes, read as `Segmenter.segment` reads them."""
    errors, scores, truths = [], [], []
    for eye in eyes:
        stacked = torch.zeros(len(eye.images), 3, *eye.images.shape[1:])
        stacked[:, 1] = eye.images
        share = segmenter.calibration.adapt
        with torch.inference_mode(), with_statistics(segmenter.network, [stacked], share) as network:
            logits = bscan_logits(network, stacked, flip=False)
        errors.append(((decode_boundaries(logits[:, :8]).rows - eye.boundaries).abs() * ROW_UM).nanmean((0, 2)))
        p = torch.softmax(logits[:, 8:], 1)
        scores.append((p[:, 1] + p[:, 2]).flatten().numpy())
        truths.append(((eye.classes == 1) | (eye.classes == 2)).flatten().numpy())
    um = torch.stack(errors).nanmean(0)
    precision = average_precision(np.concatenate(scores), np.concatenate(truths))
    return {"um": round(float(um.mean()), 3), "ap": round(float(precision), 4)}


def main() -> None:
    """Computes what is missing in the file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--scanners", type=int, default=2)
    parser.add_argument("--steps", type=int, default=50)
    arguments = parser.parse_args()
    lines = [json.loads(line) for line in arguments.out.read_text().splitlines()] if arguments.out.is_file() else []
    done = {(line["scanner"], line["way"]) for line in lines}
    settings = AdaptSettings(most_steps=arguments.steps)
    packaged = load_segmenter()
    for number in range(arguments.scanners):
        labelled, *others = scanner_eyes(number)
        training, held_out = split_samples(samples_of(labelled))
        for name, way in {"packaged": None, **WAYS}.items():
            if (number, name) in done:
                continue
            line: dict[str, object] = {"scanner": number, "display": SCANNERS[number], "way": name}
            if way is None:
                line |= score(packaged, others)
            else:
                trained = way.train(packaged.network, training, held_out, settings)
                line |= score(Segmenter(trained.network, packaged.calibration), others)
                line |= {"step": trained.step, "cpu_seconds": round(trained.cpu_seconds, 1), "losses": trained.losses}
            with arguments.out.open("a") as file:
                file.write(json.dumps(line) + "\n")


if __name__ == "__main__":
    main()
