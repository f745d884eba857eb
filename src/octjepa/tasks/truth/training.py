"""Training of an encoder on the truth of randomised phantoms, as a task of the supervised loop (`octjepa.train`).

A batch depends on the seed and the number of the update only, so a resumed run computes what an uninterrupted run
computes. Each volume is drawn when it is needed and used several times, with different crops, mirrors and tokens.

A combined run adds an objective of pretraining on volumes without labels (`octjepa.tasks.truth.unlabelled`): two
losses and two data sources in this one loop.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from jaxtyping import Float
from sklearn.metrics import average_precision_score
from torch import Tensor, nn
from torch.nn import functional

from octjepa.distributed.runtime import Runtime
from octjepa.errors import UsageError
from octjepa.files import Journal
from octjepa.keys import generator
from octjepa.phantom.random_scene import SHIFTED, SceneRanges
from octjepa.phantom.scene_stream import TRAINING_MIX
from octjepa.recipe import Recipe, TrainRecipe
from octjepa.tasks.encoder_command import check_learning_rate
from octjepa.tasks.recall import standardised, token_optimizer
from octjepa.tasks.truth.network import (
    LESION_GROUPS,
    SHARES,
    TokenTruth,
    TruthNetwork,
    known_truth,
    lesion_targets,
    token_distances,
    token_labels,
    truth_losses,
)
from octjepa.tasks.truth.unlabelled import Unlabelled
from octjepa.tasks.truth.volumes import LabelledVolume, draw_volume
from octjepa.train.learner import Learner
from octjepa.train.optimizer import learning_rate, set_learning_rate
from octjepa.train.supervised import LoopSettings, SupervisedTask, train_supervised
from octjepa.views import geometry, intensity, tokens
from octjepa.views.loader import Batch
from octjepa.views.sample import token_positions

_LAG: Final = 7  # updates after which a volume is used again
_FLUID: Final = len(LESION_GROUPS[:-1]) * len(SHARES) + SHARES.index(0.08)  # output of the head: fluid, 8 %


@dataclass(frozen=True)
class TruthSettings:
    """Settings of a run.

    `uses`: how often a volume is used. `keep`: weight of the loss that predicts the teacher's tokens; 0 has no
    teacher. `token_counts`: tokens of each volume in a batch, one of them drawn for each update.
    """

    updates: int
    batch: int = 16
    uses: int = 4
    keep: float = 0.0
    learning_rate: float = 5e-4
    weight_decay: float = 0.05
    token_counts: tuple[int, ...] = (224, 224, 384)
    seed: int = 1
    validation_volumes: int = 32
    validate_every: int = 200
    save_every: int = 50

    def __post_init__(self) -> None:
        if self.uses < 1:
            raise UsageError(f"{self.uses} uses of a volume: expected at least 1")
        if self.batch < 1 or self.batch % self.uses:
            raise UsageError(
                f"a batch of {self.batch} volumes: expected a multiple of {self.uses}, because each volume is used "
                f"{self.uses} times"
            )
        if not 0 <= self.keep < math.inf:
            raise UsageError(f"a weight of {self.keep} for the teacher's tokens: expected 0 or a positive number")
        if self.updates < 1:
            raise UsageError(f"{self.updates} updates: expected at least 1")
        check_learning_rate(self.learning_rate)


@dataclass(frozen=True, eq=False)
class TruthBatch:
    """Normalised patches and positions of selected tokens, and their truth.

    `unlabelled` is the batch of the second loss of a combined run.
    """

    patches: Float[Tensor, "b k voxels"]
    positions: Float[Tensor, "b k 3"]
    truth: TokenTruth
    unlabelled: Batch | None = None


@dataclass(frozen=True)
class TruthScores:
    """Results on phantoms of other ranges: loss, average precision of fluid by token, mean error of boundaries."""

    loss: float
    fluid_ap: float
    boundary_um: float


@dataclass(frozen=True, eq=False)
class _Sample:
    patches: np.ndarray
    positions: np.ndarray
    labels: np.ndarray
    distances: np.ndarray


class TruthTask(SupervisedTask[TruthBatch]):
    """Learns the truth of training volumes; validates on `SHIFTED`, with other seeds and ranges that overlap.

    With `settings.keep` the teacher is a frozen copy of the encoder as it is when the task is made: make the task
    before a checkpoint is loaded. With `unlabelled` every update also takes a batch of volumes without labels, whose
    loss is added. `trained` holds every network that a checkpoint has to hold.
    """

    def __init__(
        self,
        network: TruthNetwork,
        recipe: Recipe,
        settings: TruthSettings,
        runtime: Runtime,
        log: Path | None = None,
        unlabelled: Unlabelled | None = None,
    ) -> None:
        self.teacher = deepcopy(network.encoder).requires_grad_(False).eval() if settings.keep else None
        self.network, self.recipe, self.settings, self.runtime, self.log = network, recipe, settings, runtime, log
        self.unlabelled = unlabelled
        self.trained: nn.Module = network
        if unlabelled is not None:
            self.trained = nn.ModuleDict({"truth": network, "unlabelled": unlabelled.model}).to(runtime.device)
        self.optimizer = token_optimizer(self.trained, runtime.device, settings.learning_rate, settings.weight_decay)
        self._schedule = TrainRecipe(
            max_updates=settings.updates, base_lr=settings.learning_rate, warmup_share=0.04, min_lr_ratio=0.01
        )
        # All volumes from one use of a volume to its next, or each would be drawn again at every use.
        self._volume = lru_cache(settings.batch // settings.uses * (_LAG * settings.uses + 1))(self._draw)

    def begin_update(self, update: int) -> Any:
        """Sets the learning rate, and returns it for the journal.

        The EMA target of the second loss follows here, one update late: after a resume it does so before the same
        update as in a run without interruption. A skipped update left the weights as they were, so the target moves
        towards them once more.
        """
        if self.unlabelled is not None and update:
            self.unlabelled.follow(update - 1, self.settings.updates)
        rate = learning_rate(update, self.settings.updates, self._schedule)
        set_learning_rate(self.optimizer, rate)
        return {"lr": rate}

    def batches(self, start: int) -> Iterator[TruthBatch]:
        """The batches from update `start` on."""
        updates = range(start, self.settings.updates)
        if self.unlabelled is None:
            yield from map(self.batch, updates)
            return
        for update, unlabelled in zip(updates, self.unlabelled.batches(start, self.settings.updates), strict=True):
            yield replace(self.batch(update), unlabelled=unlabelled)

    def unreadable_count(self, batch: TruthBatch) -> int:
        """Volumes of the store that could not be read and were replaced by others."""
        return 0 if batch.unlabelled is None else len(batch.unlabelled.unreadable)

    def batch(self, update: int) -> TruthBatch:
        """The batch of an update: a share of its volumes is new, the others were new some updates ago."""
        share = self.settings.batch // self.settings.uses
        starts = [max(update - _LAG * use, 0) * share for use in range(self.settings.uses)]
        numbers = [number for start in starts for number in range(start, start + share)]
        rng = generator("truth batch", self.settings.seed, update)
        count = int(rng.choice(self.settings.token_counts))
        return _collate([_sample(self._volume(number), self.recipe, count, rng) for number in numbers])

    def losses(self, learner: Learner, batch: TruthBatch, update: int, micro_batch: int) -> Iterator[Tensor]:
        """The mean loss of the batch, in parts of at most `micro_batch` volumes: the truth, then the second loss."""
        size = len(batch.patches)
        truth = TokenTruth(*(values.to(self.runtime.device) for values in batch.truth))
        known_weights = known_truth(self.network, truth)
        for start in range(0, size, micro_batch):
            part = slice(start, start + micro_batch)
            patches = batch.patches[part].to(self.runtime.device)
            positions = batch.positions[part].to(self.runtime.device)
            with self.runtime.autocast():
                outputs = self.network(patches, positions)
            of_part = TokenTruth(*(values[part] for values in truth))
            loss = truth_losses(self.network, outputs, of_part, known_weights).total
            if self.teacher is not None:
                with torch.no_grad(), self.runtime.autocast():
                    taught = standardised(self.teacher(patches, positions))
                recalled = self.settings.keep * functional.mse_loss(outputs.recall, taught.float())
                loss = loss + recalled * (len(patches) / size)
            yield loss
        if self.unlabelled is not None and batch.unlabelled is not None:
            yield from self.unlabelled.losses(
                batch.unlabelled, update, self.settings.updates, micro_batch, self.runtime
            )

    def validate(self, learners: Sequence[Learner]) -> list[float | None]:
        """The validation loss; all scores go to the log."""
        scores = score(self.network, self.recipe, self._validation(), self.runtime)
        if self.log is not None:
            # The loop counts the update after its validation.
            Journal(self.log).append({"update": learners[0].update + 1, **asdict(scores)})
        return [scores.loss for _ in learners]

    def _draw(self, number: int) -> LabelledVolume:
        seed = self.settings.seed
        ranges: SceneRanges = TRAINING_MIX[int(generator("truth mix", seed, number).integers(len(TRAINING_MIX)))]
        return draw_volume(seed, number, ranges, self.recipe.preprocessing)

    def _validation(self) -> list[LabelledVolume]:
        return validation_volumes(self.recipe, self.settings.validation_volumes)


@lru_cache(2)
def validation_volumes(recipe: Recipe, count: int, ranges: SceneRanges = SHIFTED) -> list[LabelledVolume]:
    """`count` fixed volumes of seeds that training does not use. `SHIFTED` overlaps the ranges of training."""
    return [draw_volume(900_001, number, ranges, recipe.preprocessing) for number in range(count)]


def _sample(drawn: LabelledVolume, recipe: Recipe, count: int, rng: np.random.Generator) -> _Sample:
    """A random crop, mirrored at random, and `count` of its tokens, those with tissue first."""
    volume, size = drawn.volume, recipe.preprocessing.image_size
    spare = [stored - wanted for stored, wanted in zip(volume.pixels.shape, size, strict=True)]
    z, y, x = (int(rng.integers(most + 1)) for most in spare)
    pixels, labels = (
        array[z : z + size[0], y : y + size[1], x : x + size[2]] for array in (volume.pixels, drawn.labels)
    )
    band = volume.band[:, z : z + size[0], x : x + size[2]]
    band = np.where(band >= 0, np.clip(band - y, 0, size[1] - 1), -1).astype(np.int16)
    boundaries = drawn.boundaries[z : z + size[0], :, x : x + size[2]] - y
    for axis_of_volume, axis_of_map in ((0, 0), (2, 1)):
        if rng.random() < 0.5:
            pixels, labels = np.flip(pixels, axis_of_volume), np.flip(labels, axis_of_volume)
            band = np.flip(band, axis_of_map + 1)
            boundaries = np.flip(boundaries, axis_of_volume)
    share = tokens.tissue_share_of_band(band, recipe.tokens.patch_size, size[1])
    index = tokens.select(share, min(count, len(share)), rng)
    return _tokens_of(replace(volume, pixels=pixels, band=band), labels, boundaries, index, recipe)


def _tokens_of(volume: Any, labels: np.ndarray, boundaries: np.ndarray, index: np.ndarray, recipe: Recipe) -> _Sample:
    """Normalised patches and truth of the tokens `index` of a view."""
    patch = recipe.tokens.patch_size
    values = tokens.extract_patches(volume.pixels, patch, index)
    patches = intensity.lookup_table(volume.tissue_mean, volume.tissue_std)[values]
    return _Sample(
        patches,
        token_positions(index, recipe),
        token_labels(labels, index, patch),
        token_distances(boundaries, index, recipe.grid, patch),
    )


def _collate(samples: Sequence[_Sample]) -> TruthBatch:
    patches, positions, labels, distances = (
        torch.from_numpy(np.stack([getattr(sample, name) for sample in samples]))
        for name in ("patches", "positions", "labels", "distances")
    )
    return TruthBatch(patches, positions, TokenTruth(labels, distances))


@torch.no_grad()
def score(network: TruthNetwork, recipe: Recipe, volumes: Sequence[LabelledVolume], runtime: Runtime) -> TruthScores:
    """Scores of the heads on whole volumes, with the tokens that a frozen encoder reads."""
    network.eval()
    losses, fluid, found, errors = [], [], [], []
    crop = geometry.center_crop(recipe.preprocessing)
    z, y, x = (
        slice(m, m + s) for m, s in zip(recipe.preprocessing.margin, recipe.preprocessing.image_size, strict=True)
    )
    for drawn in volumes:
        band = geometry.band_in_view(drawn.volume.band, crop, recipe.preprocessing.image_size)
        share = tokens.tissue_share_of_band(band, recipe.tokens.patch_size, recipe.preprocessing.image_size[1])
        index = tokens.select_tissue(share, recipe.grid)
        view = replace(drawn.volume, pixels=drawn.volume.pixels[z, y, x])
        batch = _collate([_tokens_of(view, drawn.labels[z, y, x], drawn.boundaries[z, :, x] - y.start, index, recipe)])
        with runtime.autocast():
            outputs = network(batch.patches.to(runtime.device), batch.positions.to(runtime.device))
        truth = TokenTruth(*(values.to(runtime.device) for values in batch.truth))
        losses.append(float(truth_losses(network, outputs, truth).total))
        fluid.append(lesion_targets(truth.labels)[0, :, _FLUID].cpu().numpy())
        found.append(outputs.lesions[0, :, _FLUID].cpu().numpy())
        near = truth.distances.abs() < 0.75
        errors.append((outputs.distances - truth.distances)[near].abs().cpu().numpy())
    network.train()
    scale_um = recipe.tokens.patch_size[1] * recipe.preprocessing.target_spacing_mm[1] * 1000
    return TruthScores(
        float(np.mean(losses)),
        float(average_precision_score(np.concatenate(fluid), np.concatenate(found))),
        float(np.concatenate(errors).mean() * scale_um),
    )


def train_on_truth(
    network: TruthNetwork,
    recipe: Recipe,
    settings: TruthSettings,
    runtime: Runtime,
    folder: Path,
    fingerprint: str,
    unlabelled: Unlabelled | None = None,
) -> Learner:
    """Trains `network` and leaves in it the weights of the least validation loss; resumes from `folder`.

    Raises what `train_supervised` raises.
    """
    folder.mkdir(parents=True, exist_ok=True)
    task = TruthTask(network, recipe, settings, runtime, folder / "validation.jsonl", unlabelled)
    learner = Learner("truth", task.trained, task.optimizer, settings.updates, spike_factor=recipe.train.spike_factor)
    every = settings.validate_every
    loop = LoopSettings(
        "truth",
        settings.updates,
        settings.batch,
        {*range(every, settings.updates, every), settings.updates},
        recipe.train.clip_norm,
        settings.save_every,
        "--learning-rate",
        "the same command",
    )
    train_supervised(task, [learner], loop, runtime, folder, fingerprint)
    return learner
