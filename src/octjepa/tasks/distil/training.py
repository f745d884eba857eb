"""Training of an encoder on the tokens of a frozen teacher, as a task of the supervised loop (`octjepa.train`).

A batch depends on the seed and the number of the update only. The teacher reads the centred view of a volume, the
student random crops, mirrored at random; `positions` finds the teacher's features at the student's tokens. Every
loss is the mean squared distance between the predicted and the standardised teacher tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from octjepa.distributed.runtime import Runtime
from octjepa.embed.token_folder import half_precision
from octjepa.encoders.base import FrozenEncoder
from octjepa.encoders.pooling import TokenFeatures
from octjepa.errors import UsageError
from octjepa.files import Journal
from octjepa.keys import generator
from octjepa.model import Encoder
from octjepa.recipe import Recipe, TrainRecipe
from octjepa.store import Store
from octjepa.tasks.distil.positions import View, check_teacher, teach
from octjepa.tasks.encoder_command import check_learning_rate
from octjepa.tasks.recall import Recall, standardised, token_optimizer
from octjepa.train.learner import Learner
from octjepa.train.optimizer import learning_rate, set_learning_rate
from octjepa.train.run_folder import chunks_hash, data_hash
from octjepa.train.supervised import LoopSettings, SupervisedTask, train_supervised
from octjepa.views import intensity, tokens
from octjepa.views.loader import select_volumes
from octjepa.views.sample import token_positions
from octjepa.volume import CanonicalVolume

_CACHED: Final = 256  # volumes whose teacher tokens stay in memory, fp16


@dataclass(frozen=True)
class DistilSettings:
    """Settings of a run. `tokens`: of each volume in a batch. `validation_volumes`: at most so many."""

    updates: int
    batch: int = 8
    tokens: int = 256
    learning_rate: float = 5e-4
    weight_decay: float = 0.05
    seed: int = 1
    validation_volumes: int = 16
    validate_every: int = 200
    save_every: int = 50

    def __post_init__(self) -> None:
        if min(self.updates, self.batch, self.tokens) < 1:
            raise UsageError(
                f"{self.updates} updates of {self.batch} volumes with {self.tokens} tokens: expected at least 1 of each"
            )
        check_learning_rate(self.learning_rate)


class DistilNetwork(nn.Module):
    """`encoder`, and the linear head that predicts the teacher's tokens of `taught` features."""

    def __init__(self, encoder: Encoder, taught: int) -> None:
        super().__init__()
        self.encoder, self.recall = encoder, Recall(encoder.width, taught)

    def forward(
        self, patches: Float[Tensor, "b k voxels"], positions: Float[Tensor, "b k 3"]
    ) -> Float[Tensor, "b k taught"]:
        predicted: Tensor = self.recall(self.encoder(patches, positions))
        return predicted


@dataclass(frozen=True, eq=False)
class DistilBatch:
    """Patches and positions of selected tokens, the standardised teacher tokens, and whether they exist."""

    patches: Float[Tensor, "b k voxels"]
    positions: Float[Tensor, "b k 3"]
    taught: Float[Tensor, "b k f"]
    known: Bool[Tensor, "b k"]


@dataclass(frozen=True)
class DistilScores:
    """On validation volumes: the loss, and the share of the teacher's variance between tokens that is predicted."""

    loss: float
    explained: float


class Pairs:
    """Volumes of `split` for the student, and the teacher's tokens of the same scans.

    `teacher_store`: if the teacher's preprocessing differs, a store of the same scans that was made with it. Raises
    UsageError: the teacher has no positions, or the stores share no scan; ContractError: a store of another recipe.
    """

    def __init__(
        self, store: Store, recipe: Recipe, teacher: FrozenEncoder, teacher_store: Store | None = None
    ) -> None:
        check_teacher(teacher, recipe.preprocessing)
        self.store, self.recipe, self.teacher = store, recipe.with_whole_views, teacher
        self.teacher_store = store if teacher_store is None else teacher_store
        if self.teacher_store.preprocessing != teacher.preprocessing:
            raise UsageError(
                f"store {self.teacher_store.location} was made with another preprocessing than the teacher reads: give "
                "a store of the same scans that was made with it"
            )
        self._teach = lru_cache(_CACHED)(self._encode)

    def ids(self, split: str) -> list[str]:
        """Volume ids of a split that both stores have. Raises UsageError: none."""
        there = set(self.teacher_store.table["volume_id"])
        chosen = select_volumes(self.store, self.recipe, split).volume_ids
        shared = [volume_id for volume_id in chosen if volume_id in there]
        if not shared:
            raise UsageError(
                f"stores {self.store.location} and {self.teacher_store.location} share no scan of split {split}: "
                "ingest the same files into both"
            )
        return shared

    @property
    def fingerprint(self) -> str:
        """Names the contents of both stores: volumes of training and of validation. Raises as `ids`."""
        hashes = []
        for volume_ids in (self.ids("train"), self.ids("val")):
            for store in (self.store, self.teacher_store):
                hashes += [data_hash(store, volume_ids), chunks_hash(store, volume_ids, self.recipe)]
        return " ".join(hashes)

    def read(self, volume_id: str) -> tuple[CanonicalVolume, TokenFeatures]:
        """The student's volume, and the teacher's tokens of the scan."""
        return self.store.read(volume_id), self._teach(volume_id)

    def _encode(self, volume_id: str) -> TokenFeatures:
        # The id of a volume is that of its native content, so it is the same in every store.
        taught = self.teacher.encode_volumes([self.teacher_store.read(volume_id)])[0]
        return taught._replace(features=half_precision(taught.features, volume_id))


class DistilTask(SupervisedTask[DistilBatch]):
    """Learns the teacher's tokens of training volumes; validates on centred views of validation volumes."""

    def __init__(
        self, network: DistilNetwork, pairs: Pairs, settings: DistilSettings, runtime: Runtime, log: Path | None = None
    ) -> None:
        self.network, self.pairs, self.settings, self.runtime, self.log = network, pairs, settings, runtime, log
        self.optimizer = token_optimizer(network, runtime.device, settings.learning_rate, settings.weight_decay)
        self.training_ids = pairs.ids("train")
        self.validation_ids = pairs.ids("val")[: settings.validation_volumes]
        self._schedule = TrainRecipe(
            max_updates=settings.updates, base_lr=settings.learning_rate, warmup_share=0.04, min_lr_ratio=0.01
        )

    def begin_update(self, update: int) -> Any:
        """Sets the learning rate, and returns it for the journal."""
        rate = learning_rate(update, self.settings.updates, self._schedule)
        set_learning_rate(self.optimizer, rate)
        return {"lr": rate}

    def batches(self, start: int) -> Iterator[DistilBatch]:
        """The batches from update `start` on."""
        for update in range(start, self.settings.updates):
            rng = generator("distil batch", self.settings.seed, update)
            chosen = rng.choice(
                len(self.training_ids), self.settings.batch, len(self.training_ids) < self.settings.batch
            )
            yield self.batch([self.training_ids[number] for number in chosen], rng)

    def batch(self, volume_ids: Sequence[str], rng: np.random.Generator | None) -> DistilBatch:
        """Tokens of these volumes: of random views, or without `rng` of centred views, whose tokens are always the
        same."""
        samples = [self._sample(volume_id, rng) for volume_id in volume_ids]
        return DistilBatch(*(torch.from_numpy(np.stack(part)) for part in zip(*samples, strict=True)))

    def losses(self, learner: Learner, batch: DistilBatch, update: int, micro_batch: int) -> Iterator[Tensor]:
        """The mean loss of the batch over tokens that the teacher knows, in parts of at most `micro_batch` volumes."""
        count = int(batch.known.sum())
        for start in range(0, len(batch.patches), micro_batch):
            part = slice(start, start + micro_batch)
            yield self._errors(batch, part).sum() / max(count, 1)

    @torch.no_grad()
    def validate(self, learners: Sequence[Learner]) -> list[float | None]:
        """The validation loss; all scores go to the log."""
        self.network.eval()
        errors, taught = [], []
        for volume_id in self.validation_ids:
            batch = self.batch([volume_id], None)
            is_known = batch.known.to(self.runtime.device)
            errors.append(self._errors(batch, slice(None))[is_known].cpu())
            taught.append(batch.taught[batch.known])
        self.network.train()
        targets = torch.cat(taught)
        loss = float(torch.cat(errors).mean())
        variance = float((targets - targets.mean(dim=0)).square().mean())
        scores = DistilScores(loss, 1 - loss / max(variance, 1e-9))
        if self.log is not None:
            # The loop counts the update after its validation.
            Journal(self.log).append({"update": learners[0].update + 1, **asdict(scores)})
        return [loss for _ in learners]

    def _errors(self, batch: DistilBatch, part: slice) -> Float[Tensor, "b k"]:
        """The squared distance of each token, mean over features; 0 if the teacher has none."""
        device = self.runtime.device
        with self.runtime.autocast():
            predicted = self.network(batch.patches[part].to(device), batch.positions[part].to(device))
        apart = (predicted.float() - batch.taught[part].to(device)).square().mean(dim=-1)
        return apart * batch.known[part].to(device)

    def _sample(self, volume_id: str, rng: np.random.Generator | None) -> tuple[np.ndarray, ...]:
        volume, taught = self.pairs.read(volume_id)
        recipe = self.pairs.recipe
        size, patch = recipe.preprocessing.image_size, recipe.tokens.patch_size
        view = View.centred(recipe.preprocessing)
        if rng is not None:
            spare = [stored - wanted for stored, wanted in zip(volume.pixels.shape, size, strict=True)]
            z, y, x = (int(rng.integers(most + 1)) for most in spare)
            view = View(recipe.preprocessing, (z, y, x), (bool(rng.integers(2)), False, bool(rng.integers(2))))
        (z, y, x), (d, h, w) = view.offset, size
        pixels = volume.pixels[z : z + d, y : y + h, x : x + w]
        band = volume.band[:, z : z + d, x : x + w]
        band = np.where(band >= 0, np.clip(band - y, 0, h - 1), -1).astype(np.int16)
        for axis, (of_volume, of_map) in enumerate(((0, 1), (1, None), (2, 2))):
            if view.mirrored[axis] and of_map is not None:
                pixels, band = np.flip(pixels, of_volume), np.flip(band, of_map)
        share = tokens.tissue_share_of_band(band, patch, h)
        fixed = generator("distil validation", volume_id) if rng is None else rng
        index = tokens.select(share, min(self.settings.tokens, len(share)), fixed)
        values = tokens.extract_patches(pixels, patch, index)
        patches = intensity.lookup_table(volume.tissue_mean, volume.tissue_std)[values]
        features, is_known = teach(taught, self.pairs.teacher.preprocessing, view, patch, index)
        target = standardised(torch.from_numpy(features)).numpy()
        return patches, token_positions(index, recipe), target, is_known


def distil(
    network: DistilNetwork, pairs: Pairs, settings: DistilSettings, runtime: Runtime, folder: Path, fingerprint: str
) -> tuple[Learner, list[str]]:
    """Trains `network` and leaves in it the weights of the least validation loss; resumes from `folder`.

    Returns the learner and the ids of the training volumes. Raises what `train_supervised` and `Pairs` raise.
    """
    folder.mkdir(parents=True, exist_ok=True)
    task = DistilTask(network, pairs, settings, runtime, folder / "validation.jsonl")
    spike_factor = pairs.recipe.train.spike_factor
    learner = Learner("distil", network, task.optimizer, settings.updates, spike_factor=spike_factor)
    every = settings.validate_every
    loop = LoopSettings(
        "distil",
        settings.updates,
        settings.batch,
        {*range(every, settings.updates, every), settings.updates},
        pairs.recipe.train.clip_norm,
        settings.save_every,
        "--learning-rate",
        "the same command",
    )
    train_supervised(task, [learner], loop, runtime, folder, fingerprint)
    return learner, task.training_ids
