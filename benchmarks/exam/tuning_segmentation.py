"""Fine-tuning by Dice: lesions segmented by the whole network, tuned on few labelled people.

Trained as `tuning_loop` says, on the people of `tuning`. The head is linear: from a token, and its depth in the grid,
to each lesion at the voxels of its own patch, one for `COLUMNS` columns, so that what is found is the encoder's. Tokens
are standardised by those of the labelled people before the training. The loss is binary cross-entropy plus MONAI's
Dice. The threshold of each lesion is the one of the highest Dice on the validation people, and so is the learning rate;
what no token covers counts as without a lesion.
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

from octjepa.encoders import PretrainedEncoder
from octjepa.metrics.bootstrap import Estimate
from octjepa.phantom import LESIONS
from octjepa.recipe import Recipe
from octjepa.tasks.segment.dice import dice
from octjepa.tasks.segment.linear import patch_cells
from octjepa.tasks.segment.windows import coarsen_columns
from octjepa.train.learner import Learner
from octjepa.views.geometry import moved_view
from octjepa.views.loader import Batch, LoadedSample, collate, training_batches
from octjepa.views.sample import make_sample, view_transform
from octjepa.volume import CanonicalVolume

from .cohorts import Cohort
from .questions import OpenedEyes
from .real_tasks import dice_of
from .results import Finding, LeftOut
from .truth import COLUMNS, lesion_labels
from .tuning_loop import TunedQuestion, TuningTask, read_lesions, tested_people, training_recipe, tune_each_rate

COUNTS = (30, 100)  # labelled people
UPDATES, TEST_PEOPLE = 100, 200  # fewer than in `tuning`, for the ten minutes that an exam may take
THRESHOLDS = np.geomspace(1e-3, 0.9, 30)  # of the probability, one of which is chosen for each lesion
_MIN_SHARE = 1e-4  # of a lesion's voxels, from which the head starts
_BITS = np.arange(len(LESIONS), dtype=np.uint8)


class SegmentedBatch(NamedTuple):
    """Views with the lesions of each token's cells."""

    views: Batch
    lesions: Float[Tensor, "b k lesions cells"]


class LabelledEyes(NamedTuple):
    """Volumes of a cohort, and the lesions in their centred views as bits."""

    volumes: Int[np.ndarray, " n"]
    labels: list[UInt8[np.ndarray, "d h c"]]

    @classmethod
    def read(cls, cohort: Cohort, volumes: Int[np.ndarray, " n"]) -> LabelledEyes:
        """One column of `COLUMNS`."""
        at = cohort.store.preprocessing
        return cls(volumes, [lesion_labels(cohort, one, at.margin, at.image_size, COLUMNS) for one in volumes])


class Start(NamedTuple):
    """What a head starts from: mean and spread of the labelled people's tokens, the share of their cells by lesion."""

    mean: Float[Tensor, " dim"]
    std: Float[Tensor, " dim"]
    shares: Float[Tensor, " lesions"]


class Segmenter(nn.Module):
    """An encoder, and a linear head on its tokens."""

    mean: Tensor
    std: Tensor

    def __init__(self, pretrained: PretrainedEncoder, start: Start) -> None:
        super().__init__()
        self.pretrained, self.encoder = pretrained, pretrained.encoder
        recipe = pretrained.recipe
        p, q, r = recipe.tokens.patch_size
        self.grid, self.cells = recipe.grid, p * q * (r // COLUMNS)
        self.linear = nn.Linear(pretrained.dim, len(LESIONS) * self.cells)
        self.depth = nn.Embedding(recipe.grid[1], len(LESIONS) * self.cells)
        self.register_buffer("mean", start.mean)
        self.register_buffer("std", start.std)
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.depth.weight)
        self.linear.bias.data = start.shares.clamp(_MIN_SHARE, 0.5).logit().repeat_interleave(self.cells)

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
        found = self.linear((features - self.mean) / self.std) + self.depth(index // width % height)
        return found.unflatten(-1, (len(LESIONS), self.cells))


class SegmentationTask(TuningTask[SegmentedBatch]):
    """Networks that segment lesions in training views of the labelled people."""

    def __init__(self, cohort: Cohort, labelled: Int[np.ndarray, " n"], val: LabelledEyes, recipe: Recipe) -> None:
        from monai.losses import DiceLoss

        super().__init__(cohort, labelled, recipe)
        size = cohort.store.preprocessing.stored_size
        whole = {cohort.ids[one]: lesion_labels(cohort, one, (0, 0, 0), size) for one in labelled}
        self.stream.make = partial(_sample_with_lesions, labels=whole)
        self.val = val
        self.counts: dict[str, np.ndarray] = {}  # `counts_of` the validation people, by the learner's name
        self.dice_loss = DiceLoss(sigmoid=True, batch=True)

    def batches(self, start: int) -> Iterator[SegmentedBatch]:
        return training_batches(self.stream, start, self.updates, 0, collate_samples=_collate)

    def losses(self, learner: Learner, batch: SegmentedBatch, update: int, micro_batch: int) -> Iterator[Tensor]:
        views = batch.views
        logits = _network(learner)(views.context_view, views.positions, views.grid_index).flatten(0, 1)
        true = batch.lesions.flatten(0, 1)  # [b*k, lesions, cells]
        yield F.binary_cross_entropy_with_logits(logits, true) + self.dice_loss(logits, true)

    def validate(self, learners: Sequence[Learner]) -> list[float | None]:
        """1 - mean Dice of the validation people over the lesions that they have, each at its best threshold."""
        losses: list[float | None] = []
        for learner in learners:
            counts = self.counts[learner.name] = counts_of(_network(learner), self.cohort, self.val)
            there = counts[:, 0, :, 2].any(axis=0)
            best = np.nan_to_num(dice_by_threshold(counts)).max(axis=0)
            losses.append(1 - float(best[there].mean()) if there.any() else None)
        return losses


def _network(learner: Learner) -> Segmenter:
    assert isinstance(learner.network, Segmenter)
    return learner.network


def bits(labels: UInt8[np.ndarray, "..."]) -> np.ndarray:
    """Lesions as a last axis, from their bits."""
    found: np.ndarray = (labels[..., None] >> _BITS) & 1
    return found


def _sample_with_lesions(
    volume: CanonicalVolume, recipe: Recipe, visit: int, labels: dict[str, np.ndarray]
) -> tuple[Any, np.ndarray]:
    sample, transform = make_sample(volume, recipe, visit), view_transform(volume, recipe, visit)
    if not transform.moves_whole_voxels:
        raise ValueError("labels move by whole voxels alone: the views may not be rotated or zoomed")
    view = moved_view(labels[volume.volume_id], transform, recipe.preprocessing.image_size)
    return sample, patch_cells(coarsen_columns(view, COLUMNS), recipe.grid, sample.grid_index)


def _collate(items: Sequence[LoadedSample]) -> SegmentedBatch:
    cells = np.stack([one.sample[1] for one in items])  # [b, k, cells]
    views = collate([one._replace(sample=one.sample[0]) for one in items])
    return SegmentedBatch(views, torch.from_numpy(np.moveaxis(bits(cells), -1, -2).astype(np.float32)))


def start_of(encoder: PretrainedEncoder, cohort: Cohort, eyes: LabelledEyes) -> Start:
    """From all tokens of the labelled eyes."""
    features, shares = [], []
    for volume, labels in zip(*eyes, strict=True):
        (tokens,) = encoder.encode_volumes([cohort.store.read(cohort.ids[volume])])
        features.append(tokens.features)
        shares.append(bits(patch_cells(labels, tokens.grid, tokens.grid_index)).mean(axis=1))
    x, share = (torch.from_numpy(np.concatenate(part)).float() for part in (features, shares))
    return Start(x.mean(dim=0), x.std(dim=0).clamp_min(1e-6), share.mean(dim=0))


@torch.no_grad()
def counts_of(network: Segmenter, cohort: Cohort, eyes: LabelledEyes) -> Float[np.ndarray, "n thresholds lesions 3"]:
    """(both, found, true) voxels of each volume and lesion at each of `THRESHOLDS`."""
    network.eval()
    cuts = torch.from_numpy(np.log(THRESHOLDS / (1 - THRESHOLDS)).astype(np.float32))
    found = np.zeros((len(eyes.volumes), len(cuts), len(LESIONS), 3))
    for number, (volume, labels) in enumerate(zip(*eyes, strict=True)):
        (tokens,) = network.pretrained.encode_volumes([cohort.store.read(cohort.ids[volume])])
        logits = network.logits(torch.from_numpy(tokens.features), torch.from_numpy(tokens.grid_index))
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
    """Over all volumes together; NaN where a lesion is neither there nor found."""
    return np.stack([dice(counts[:, number])[:, 0] for number in range(counts.shape[1])])


def tuning_segmentation(
    cohort: Cohort,
    encoder: PretrainedEncoder,
    seed: int,
    counts: Sequence[int] = COUNTS,
    updates: int = UPDATES,
) -> Iterator[Finding | LeftOut]:
    """Dice of each lesion, and their mean, on test people, of the network tuned on each number of labelled people."""
    val = LabelledEyes.read(cohort, cohort.indices("val"))
    test = LabelledEyes.read(cohort, tested_people(cohort, TEST_PEOPLE))
    people = cohort.people[test.volumes].tolist()

    def estimates(labelled: Int[np.ndarray, " n"], lesions: Sequence[int], opened: OpenedEyes) -> Iterator[Estimate]:
        task = SegmentationTask(cohort, labelled, val, training_recipe(encoder.recipe, seed, updates))
        start = start_of(encoder, cohort, LabelledEyes.read(cohort, labelled))
        learner = tune_each_rate(task, encoder, partial(Segmenter, start=start), seed)
        best = np.nan_to_num(dice_by_threshold(task.counts[learner.name])).argmax(axis=0)
        found = counts_of(_network(learner), cohort, test)
        for lesion in lesions:
            statistic = partial(dice_of, found[:, best[lesion], lesion])
            yield opened.test_set.draws.estimate(statistic, people, LESIONS[lesion])

    question = TunedQuestion("tuning_segmentation", "dice", encoder.weights_hash(), seed)
    return read_lesions(question, cohort, test.volumes, counts, estimates)
