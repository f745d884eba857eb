"""Task 7 by Dice: lesions segmented by the whole network, tuned on few labelled people.

Trained as `tuning_loop` says, on the people of `tuning`. The head is linear: from a token, and its depth in the grid,
to each lesion at the voxels of its own patch, one for `COLUMNS` columns, so that what is found is the encoder's. The
loss is binary cross-entropy plus MONAI's Dice. The threshold of each lesion is the one of the highest Dice on the
validation people, and so is the learning rate; what no token covers counts as without a lesion.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, Int, UInt8
from torch import Tensor, nn

from octjepa.checkpoint import PretrainedEncoder
from octjepa.metrics.bootstrap import Draws, Estimate
from octjepa.phantom import LESIONS
from octjepa.recipe import Recipe
from octjepa.store import CanonicalVolume
from octjepa.tasks.segment.decoder import monai
from octjepa.tasks.segment.dice import dice
from octjepa.tasks.segment.linear import patch_cells
from octjepa.tasks.segment.windows import coarsen_columns
from octjepa.train.learner import Learner
from octjepa.views import geometry
from octjepa.views.loader import Batch, LoadedSample, collate, training_batches
from octjepa.views.sample import draw_sample, make_sample

from .cohorts import Cohort
from .lesion_tasks import lesions_mean
from .results import Finding, LeftOut
from .settings import RESAMPLES
from .truth import COLUMNS, lesion_labels
from .tuning_loop import TuningTask, draw_people, tested_people, too_few, training_recipe, tune_each_rate

TASK = "tuning_segmentation"
COUNTS = (30, 100)  # labelled people
UPDATES, TEST_PEOPLE = 100, 200  # fewer than those of `tuning`, for the ten minutes that an exam may take
THRESHOLDS = np.geomspace(1e-3, 0.9, 30)  # of the probability, one of which is chosen for each lesion
_MIN_SHARE = 1e-4  # of a lesion's voxels, from which the head starts
_BITS = np.arange(len(LESIONS))


class SegmentedBatch(NamedTuple):
    """Views with the lesions of each token's cells."""

    views: Batch
    lesions: Float[Tensor, "b k lesions cells"]


class Segmenter(nn.Module):
    """An encoder, and a linear head that starts from `shares`, how much of the labelled voxels each lesion is."""

    def __init__(self, pretrained: PretrainedEncoder, shares: Float[np.ndarray, " lesions"]) -> None:
        super().__init__()
        self.pretrained, self.encoder = pretrained, pretrained.encoder
        recipe = pretrained.recipe
        p, q, r = recipe.tokens.patch_size
        self.grid, self.cells = recipe.grid, p * q * (r // COLUMNS)
        self.linear = nn.Linear(pretrained.dim, len(LESIONS) * self.cells)
        self.depth = nn.Embedding(recipe.grid[1], len(LESIONS) * self.cells)
        start = torch.from_numpy(np.maximum(shares, _MIN_SHARE)).float().logit().repeat_interleave(self.cells)
        for parameter, value in ((self.linear.weight, 0.0), (self.depth.weight, 0.0), (self.linear.bias, start)):
            parameter.data[:] = value

    def forward(
        self,
        patches: Float[Tensor, "b k voxels"],
        positions: Float[Tensor, "b k 3"],
        index: Int[Tensor, "b k"],
    ) -> Float[Tensor, "b k lesions cells"]:
        """Logits, from tokens at `index` in the raster order of the grid."""
        return self.logits(self.encoder(patches, positions).float(), index)

    def logits(self, features: Float[Tensor, "*b dim"], index: Int[Tensor, "*b"]) -> Float[Tensor, "*b lesions cells"]:
        """From the features of tokens."""
        _, height, width = self.grid
        found = self.linear(features) + self.depth(index // width % height)
        return found.unflatten(-1, (len(LESIONS), self.cells))


class SegmentationTask(TuningTask[SegmentedBatch]):
    """Networks that segment lesions in training views of the labelled people."""

    def __init__(
        self,
        cohort: Cohort,
        labelled: Int[np.ndarray, " n"],
        val: Int[np.ndarray, " m"],
        encoder: PretrainedEncoder,
        seed: int,
        updates: int,
    ) -> None:
        super().__init__(cohort, labelled, training_recipe(encoder.recipe, seed, updates), updates)
        preprocessing = cohort.store.preprocessing
        whole = {cohort.ids[one]: lesion_labels(cohort, one, (0, 0, 0), preprocessing.stored_size) for one in labelled}
        self.shares = np.mean([bits(labels).mean(axis=(0, 1, 2)) for labels in whole.values()], axis=0)
        self.stream.make = partial(_sample_with_lesions, labels=whole)
        self.val, self.truth = val, labels_of(cohort, val)
        self.dice_loss = monai("losses").DiceLoss(sigmoid=True, batch=True)

    def batches(self, start: int) -> Iterator[SegmentedBatch]:
        return training_batches(self.stream, start, self.updates, 0, collate_samples=_collate)

    def losses(self, learner: Learner, batch: SegmentedBatch, update: int, micro_batch: int) -> Iterator[Tensor]:
        views = batch.views
        logits = _network(learner.network)(views.context_view, views.positions, views.grid_index).flatten(0, 1)
        true = batch.lesions.flatten(0, 1)  # [b*k, lesions, cells]
        yield F.binary_cross_entropy_with_logits(logits, true) + self.dice_loss(logits, true)

    def validate(self, learners: Sequence[Learner]) -> list[float | None]:
        """1 - mean Dice over lesions of the validation people, each at its best threshold."""
        counts = [counts_of(_network(one.network), self.cohort, self.val, self.truth) for one in learners]
        return [1 - float(np.nanmean(dice_by_threshold(one).max(axis=0))) for one in counts]


def _network(network: nn.Module) -> Segmenter:
    assert isinstance(network, Segmenter)
    return network


def bits(labels: UInt8[np.ndarray, "..."]) -> np.ndarray:
    """Lesions as a last axis, from their bits."""
    found: np.ndarray = (labels[..., None] >> _BITS.astype(np.uint8)) & 1
    return found


def _sample_with_lesions(
    volume: CanonicalVolume, recipe: Recipe, visit: int, labels: dict[str, np.ndarray]
) -> tuple[Any, np.ndarray]:
    sample = make_sample(volume, recipe, visit)
    transform = draw_sample(volume, recipe, visit).transform
    view = geometry.moved_view(labels[volume.volume_id], transform, recipe.preprocessing.image_size)
    return sample, patch_cells(coarsen_columns(view, COLUMNS), recipe.grid, sample.grid_index)


def _collate(items: Sequence[LoadedSample]) -> SegmentedBatch:
    cells = np.stack([one.sample[1] for one in items])  # [b, k, cells]
    views = collate([one._replace(sample=one.sample[0]) for one in items])
    return SegmentedBatch(views, torch.from_numpy(np.moveaxis(bits(cells), -1, -2).astype(np.float32)))


def labels_of(cohort: Cohort, volumes: Int[np.ndarray, " n"]) -> list[UInt8[np.ndarray, "d h c"]]:
    """Of the centred views."""
    preprocessing = cohort.store.preprocessing
    return [lesion_labels(cohort, one, preprocessing.margin, preprocessing.image_size, COLUMNS) for one in volumes]


@torch.no_grad()
def counts_of(
    network: Segmenter, cohort: Cohort, volumes: Int[np.ndarray, " n"], truth: Sequence[UInt8[np.ndarray, "d h c"]]
) -> Float[np.ndarray, "n thresholds lesions 3"]:
    """(both, found, true) voxels of each volume and lesion at each of `THRESHOLDS`."""
    network.eval()
    cuts = torch.from_numpy(np.log(THRESHOLDS / (1 - THRESHOLDS)).astype(np.float32))
    found = np.zeros((len(volumes), len(cuts), len(LESIONS), 3))
    for number, (volume, labels) in enumerate(zip(volumes, truth, strict=True)):
        (tokens,) = network.pretrained.encode_volumes([cohort.store.read(cohort.ids[volume])])
        index = torch.from_numpy(tokens.grid_index)
        logits = network.logits(torch.from_numpy(tokens.features), index)  # [k, lesions, cells]
        above = torch.bucketize(logits, cuts, right=True).numpy()  # how many thresholds a voxel reaches
        true = bits(patch_cells(labels, tokens.grid, tokens.grid_index)).transpose(0, 2, 1).astype(bool)
        found[number, :, :, 2] = bits(labels).sum(axis=(0, 1, 2))
        for lesion in _BITS:
            reached, hit = above[:, lesion], true[:, lesion]
            for part, some in enumerate((reached[hit], reached.reshape(-1))):
                each = np.bincount(some, minlength=len(cuts) + 1)
                found[number, :, lesion, part] = each[::-1].cumsum()[::-1][1:]
    network.train()
    return found


def dice_by_threshold(counts: Float[np.ndarray, "n thresholds lesions 3"]) -> Float[np.ndarray, "thresholds lesions"]:
    """Over all volumes together."""
    return np.stack([dice(counts[:, number])[:, 0] for number in range(counts.shape[1])])


def tuning_segmentation(
    cohort: Cohort,
    encoder: PretrainedEncoder,
    seed: int,
    counts: Sequence[int] = COUNTS,
    updates: int = UPDATES,
) -> Iterator[Finding | LeftOut]:
    """Dice of each lesion, and their mean, on test people, of the network tuned on each number of labelled people."""
    train, val, test = cohort.indices("train"), cohort.indices("val"), tested_people(cohort)[:TEST_PEOPLE]
    draws = Draws(cohort.people[test].tolist(), RESAMPLES, 0)
    tested = labels_of(cohort, test)
    for count in counts:
        labelled = draw_people(train, cohort.lesions[train], count, seed)
        if len(labelled) < count:
            yield LeftOut(TASK, "dice", count, f"there are {len(labelled)} training people, {count} are needed")
            continue
        task = SegmentationTask(cohort, labelled, val, encoder, seed, updates)
        network = _network(tune_each_rate(task, encoder, partial(Segmenter, shares=task.shares), seed))
        best = np.nan_to_num(dice_by_threshold(counts_of(network, cohort, val, task.truth))).argmax(axis=0)
        found = counts_of(network, cohort, test, tested)
        parts: dict[str, Estimate] = {}
        for lesion, name in enumerate(LESIONS):
            reason = too_few(cohort, labelled, test, lesion)
            if reason is not None:
                yield LeftOut(TASK, f"dice_{name}", count, reason)
                continue
            of_lesion = found[:, best[lesion], lesion]
            parts[name] = draws.estimate(partial(_dice_of, of_lesion), cohort.people[test].tolist(), name)
            yield Finding(TASK, f"dice_{name}", count, parts[name])
        yield lesions_mean(TASK, "dice", count, parts, len(test))


def _dice_of(counts: Float[np.ndarray, "n 3"], weights: Float[np.ndarray, "n r"]) -> Float[np.ndarray, " r"]:
    return dice(counts[:, None], weights)[0]
