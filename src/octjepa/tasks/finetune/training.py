"""Fine-tuning as a task of the supervised loop: the computation of an update and the evaluation of weights.

Batches, augmented views and drop-path depend only on the position in the stream of samples, so that a training that
resumes, or runs on several processes, computes what one process without a break computes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from octjepa.checkpoint.folder import list_checkpoints
from octjepa.distributed.adamw import adamw
from octjepa.distributed.runtime import Runtime
from octjepa.recipe import TrainRecipe
from octjepa.store import Store
from octjepa.tasks.finetune.external import ViewBatch
from octjepa.tasks.finetune.network import TunedNetwork, draw_paths, each_loss
from octjepa.tasks.finetune.predict import predict_split, standardise, validation_loss
from octjepa.tasks.finetune.recipe import FinetuneRecipe
from octjepa.tasks.finetune.tuning_data import TuningData
from octjepa.train.learner import STATES, Learner
from octjepa.train.optimizer import learning_rate
from octjepa.train.supervised import LoopSettings, SupervisedTask, train_supervised
from octjepa.views.loader import Batch, TrainingDataset, training_batches


class TuningTask(SupervisedTask[Batch | ViewBatch]):
    """Fine-tuning of `network` on the training volumes of `data`, in the stages of the recipe."""

    def __init__(
        self, network: TunedNetwork, recipe: FinetuneRecipe, data: TuningData, store: Store, runtime: Runtime
    ) -> None:
        self.network, self.recipe, self.data, self.store, self.runtime = network, recipe, data, store, runtime
        self.stream = TrainingDataset(store, recipe.sampling(network.pretrained.recipe), data.volume_ids("train"))
        self.stream.make = network.make_sample
        self.index = {name: number for number, name in enumerate(data.frame["volume_id"])}
        self.depth = network.depth
        self.optimizer = adamw(network.groups(recipe), network.mean.device, betas=(0.9, 0.999))

    def begin_update(self, update: int) -> dict[str, Any]:
        """Unfreezes what learns in this stage, and sets the learning rate of each parameter group."""
        blocks = self.recipe.learning_blocks(update, self.depth)
        self.network.unfreeze(blocks)
        set_rates(self.optimizer, self.recipe, self.stream.recipe.train, update)
        return {"blocks": blocks, "lr": self.optimizer.param_groups[0]["lr"]}

    def batches(self, start: int) -> Iterator[Batch | ViewBatch]:
        runtime, recipe = self.runtime, self.recipe
        return training_batches(
            self.stream,
            start,
            recipe.stages.updates,
            recipe.loader_workers,
            runtime.rank,
            runtime.world_size,
            collate_samples=self.network.collate,
        )

    def unreadable_count(self, batch: Batch | ViewBatch) -> int:
        return len(batch.unreadable)

    def losses(self, learner: Learner, batch: Batch | ViewBatch, update: int, micro_batch: int) -> Iterator[Tensor]:
        """The mean loss over targets and the global batch, in micro-batches of this rank's volumes."""
        device, size = self.network.mean.device, len(batch.volume_ids)
        blocks = self.recipe.learning_blocks(update, self.depth)
        first = update * self.recipe.batch + self.runtime.rank * size  # position in the stream
        for start in range(0, size, micro_batch):
            part = batch.micro_batch(start, start + micro_batch)
            positions = range(first + start, first + start + len(part.volume_ids))
            paths = draw_paths(self.recipe, self.depth, blocks, positions)
            with self.runtime.autocast():
                tokens = self.network.encode_batch(part, paths)
            volumes = [self.index[name] for name in part.volume_ids]
            total = torch.zeros((), device=device)
            for outputs, labels in zip(self.network.head_outputs(tokens), self.data.labels, strict=True):
                truth = torch.from_numpy(labels.truth[volumes]).float().to(device)
                weight = None if labels.weight is None else labels.weight.to(device)
                total = total + each_loss(outputs, truth, weight, self.recipe.label_smoothing).sum()
            yield total / (self.recipe.batch * len(self.data.labels))

    def validate(self, learners: Sequence[Learner]) -> list[float | None]:
        """The mean of the targets' validation losses."""
        scores = predict_split(self.network, self.data, self.store, "val", self.runtime)
        target_losses = [
            validation_loss(*three)[0] for three in zip(self.data.targets, self.data.labels, scores, strict=True)
        ]
        losses = [loss for loss in target_losses if loss is not None]
        return [sum(losses) / len(losses) if losses else None]


def tune(
    network: TunedNetwork, recipe: FinetuneRecipe, data: TuningData, store: Store, runtime: Runtime, folder: Path
) -> Learner:
    """Tunes `network`, from the newest state in `folder` if there is one, and leaves its best weights in it.

    Best by validation loss; without anybody in val, the last. Raises what `train_supervised` raises.
    """
    task, total = TuningTask(network, recipe, data, store, runtime), recipe.stages.updates
    if runtime.broadcast_object(not list_checkpoints(folder / STATES)):
        standardise(network, data, store, runtime)
    learner = Learner(
        "fine-tuning",
        network,
        task.optimizer,
        total,
        patience=recipe.patience,
        patience_from=recipe.last_stage,
        spike_factor=task.stream.recipe.train.spike_factor,
        guard_starts=recipe.starts,
    )
    every = recipe.validate_every
    settings = LoopSettings(
        "tune",
        total,
        recipe.micro_batch or recipe.batch // runtime.world_size,
        {*range(every, total, every), total},
        recipe.clip_norm,
        recipe.save_every,
        "head_lr and encoder_lr",
    )
    train_supervised(task, [learner], settings, runtime, folder)
    return learner


def set_rates(optimizer: torch.optim.Optimizer, recipe: FinetuneRecipe, train: TrainRecipe, update: int) -> None:
    """One cosine over all updates, which never rises. Each group warms up from its first update on."""
    cosine = learning_rate(update, recipe.stages.updates, train)
    for group in optimizer.param_groups:
        since = update - group["start"] + 1
        warm = min(1.0, since / recipe.warmup) if recipe.warmup else 1.0
        group["lr"] = 0.0 if since <= 0 else group["peak"] * warm * cosine
