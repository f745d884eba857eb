"""The probes with gradient steps: AdamW, early stopping on held-out people, and many targets in one pass.

Every target (and every fold, where validation holds too few people) has a separate network; each batch of features is
read once and given to all of them. Batches are drawn from all training volumes, labelled or not, and the random numbers
of a step depend on its target, so a target's result does not depend on the other targets. The
held-out loss stops each network at its best epoch and then sets the decision between the classes, as for the other
probes. Volumes are named by their index in the table of embeddings.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from octjepa import keys
from octjepa.distributed.adamw import adamw
from octjepa.distributed.runtime import Runtime
from octjepa.embed.token_folder import TokenFolder
from octjepa.evaluate.calibration import ProbeFit, calibrated_predictions, class_weights, select_setting
from octjepa.evaluate.features import PROBES, TOKEN_PROBES, FeatureSpace, Selection
from octjepa.evaluate.networks import MLP, AttentiveProbe, TokenBatch, loss
from octjepa.evaluate.targets import Target
from octjepa.metrics.scores import Task
from octjepa.train.learner import Learner
from octjepa.train.supervised import LoopSettings, SupervisedTask, train_supervised

EPOCHS = 60
PATIENCE = 8  # epochs without a better held-out loss
UNWATCHED_EPOCHS = 15  # if there are no people to hold out
_BATCH = 32
_LR, _WEIGHT_DECAY = 3e-3, 0.05
_VOLUMES_FOR_SCALE = 256

Volumes = Int[np.ndarray, " _"]
Features = Tensor | TokenBatch
Read = Callable[[Volumes], Features]  # features of volumes
Build = Callable[[Task, int], nn.Module]  # a network for a task and its number of classes (0: a quantity)


@dataclass(frozen=True, eq=False)
class NetworkFit:
    """One network of one target: trained on the volumes `in_train`, stopped early by the volumes `held_out`.

    truth: the label of every volume of train and val, by volume. scale: mean and standard deviation of a quantity.
    weight: of each class in the loss, None for a quantity.
    """

    target: Target
    learner: Learner
    in_train: Bool[np.ndarray, " volumes"]
    held_out: Volumes
    truth: Float[np.ndarray, " volumes"]
    weight: Tensor | None
    scale: tuple[float, float]

    def labels(self, volumes: Volumes) -> Tensor:
        """The targets of the network: class codes, or the standardised quantity."""
        values = self.truth[volumes]
        if self.target.classes:
            return torch.from_numpy(values.astype(np.int64))
        return torch.from_numpy(((values - self.scale[0]) / self.scale[1]).astype(np.float32))

    def predict(self, features: Features) -> Float[np.ndarray, "n classes"]:
        """Probabilities, or quantities in their own unit."""
        network = self.learner.network.eval()
        with torch.no_grad():
            outputs = network(features).double().numpy()
        network.train()
        return np.exp(outputs) if self.target.classes else outputs * self.scale[1] + self.scale[0]

    @torch.no_grad()
    def attention(self, tokens: TokenBatch) -> Float[np.ndarray, "n k"]:
        """The share of each token, the mean over the heads of an attentive network; 0 of what fills a volume up."""
        assert isinstance(self.learner.network, AttentiveProbe)
        shares: np.ndarray = self.learner.network.pooling.attention(tokens)[:, 0].mean(dim=1).numpy()
        return shares

    def held_out_loss(self, volumes: Volumes, scores: Float[np.ndarray, "n classes"]) -> float:
        """Log loss in which every class weighs the same, or mean squared error."""
        truth = self.truth[volumes]
        if self.weight is None:
            return float(np.mean((truth - scores[:, 0]) ** 2))
        codes = truth.astype(np.int64)
        weight = class_weights(codes, len(self.weight))[codes]
        return float(-weight @ np.log(np.clip(scores[np.arange(len(codes)), codes], 1e-12, 1)) / weight.sum())


class ProbeBatch(NamedTuple):
    """Volumes of a step, the features of those that any learner trains on, and which of these each one trains on."""

    epoch: int
    step: int
    volumes: Volumes
    features: Features | None
    members: dict[Learner, Bool[np.ndarray, " n"]]


class ProbeTask(SupervisedTask[ProbeBatch]):
    """All fits of a pass over the features that `read` gives."""

    def __init__(self, read: Read, fits: Sequence[NetworkFit], train: Volumes, smoothing: float, seed: int) -> None:
        self.read, self.train, self.smoothing, self.seed = read, train, smoothing, seed
        self.fits = {fit.learner: fit for fit in fits}

    def batches(self, start: int) -> Iterator[ProbeBatch]:
        if start:
            raise ValueError("a pass of probes is not resumed")
        for epoch in count(1):
            shuffled = keys.generator(self.seed, "probe order", epoch).permutation(self.train)
            for step in range(0, len(shuffled), _BATCH):
                volumes = shuffled[step : step + _BATCH]
                members = {learner: fit.in_train[volumes] for learner, fit in self.fits.items() if not learner.done}
                used = np.any(list(members.values()), axis=0)
                features = self.read(volumes[used]) if used.any() else None
                yield ProbeBatch(
                    epoch, step, volumes[used], features, {learner: mask[used] for learner, mask in members.items()}
                )

    def losses(self, learner: Learner, batch: ProbeBatch, update: int, micro_batch: int) -> Iterator[Tensor]:
        fit, mask = self.fits[learner], batch.members[learner]
        if batch.features is None or mask.sum() < 2:
            return  # the mean of one volume's loss says little, and comes once in many epochs
        # The networks are on the CPU. torch.manual_seed would also note the stack for each other kind of device, which
        # takes as long as half of a small network's step.
        torch.default_generator.manual_seed(keys.key(self.seed, "probe step", learner.name, batch.epoch, batch.step))
        features, truth = batch.features[torch.from_numpy(mask)], fit.labels(batch.volumes[mask])
        weights = torch.ones(len(truth)) if fit.weight is None else fit.weight[truth]
        for start in range(0, len(truth), micro_batch):
            part = slice(start, start + micro_batch)
            share = weights[part].sum() / weights.sum()
            yield loss(learner.network(features[part]), truth[part], fit.weight, self.smoothing) * share

    def validate(self, learners: Sequence[Learner]) -> list[float | None]:
        fits = [self.fits[learner] for learner in learners]
        volumes = [np.sort(fit.held_out) for fit in fits]
        return [
            fit.held_out_loss(positions, scores) if len(positions) else None
            for fit, positions, scores in zip(fits, volumes, predictions(self.read, fits, volumes), strict=True)
        ]


@PROBES.register("mlp")
def mlp(space: FeatureSpace, target: Target, selection: Selection, smoothing: float = 0.0, seed: int = 0) -> ProbeFit:
    """MLP on pooled features, one hidden layer of 64."""
    volumes = np.concatenate([target.indices[split] for split in ("train", "val", "test")])
    features = space.train.shape[1]
    # A training volume has length one on average: back to features of about unit size, as layers expect them.
    table = np.concatenate([space.train, space.val, space.test]).astype(np.float32) * np.sqrt(np.float32(features))
    position = np.zeros(volumes.max() + 1, np.int64)
    position[volumes] = np.arange(len(volumes))

    def read(volumes: Volumes) -> Tensor:
        return torch.from_numpy(table[position[volumes]])

    train = np.sort(target.indices["train"])

    def build(task: Task, classes: int) -> nn.Module:
        return MLP(features, task, classes)

    return _fit(read, [target], [selection], train, build, "mlp", smoothing, seed)[0]


@TOKEN_PROBES.register("attentive")
def attentive(
    tokens: TokenFolder,
    view: str,
    volume_ids: Sequence[str],
    train: Volumes,
    targets: Sequence[Target],
    selections: Sequence[Selection],
    smoothing: float = 0.0,
    seed: int = 0,
) -> list[ProbeFit]:
    """The attentive probe for every target, in one pass over the tokens.

    `volume_ids` names each volume of the table, `train` are all volumes of the training split.
    """

    def read(volumes: Volumes) -> TokenBatch:
        features, coordinates, valid = tokens.read(view, [volume_ids[volume] for volume in volumes])
        return TokenBatch(
            torch.from_numpy(features.astype(np.float32)), torch.from_numpy(coordinates), torch.from_numpy(valid)
        )

    sample = train[np.unique(np.linspace(0, len(train) - 1, _VOLUMES_FOR_SCALE).astype(int))]
    mean, std = _token_scale(tokens.features(view, volume_ids[volume]) for volume in sample)

    def build(task: Task, classes: int) -> nn.Module:
        return AttentiveProbe(mean, std, task, classes)

    return _fit(read, targets, selections, train, build, "attentive", smoothing, seed)


def _token_scale(volumes: Iterable[np.ndarray]) -> tuple[Float[Tensor, " dim"], Float[Tensor, " dim"]]:
    """Mean and standard deviation of each feature over the tokens of `volumes`, one volume in memory at a time."""
    sums = [
        (len(tokens), tokens.sum(axis=0), (tokens**2).sum(axis=0)) for tokens in (v.astype(np.float64) for v in volumes)
    ]
    count, total, squares = (sum(part) for part in zip(*sums, strict=True))
    mean = total / count
    std = np.sqrt(np.maximum(squares / count - mean**2, 1e-12))
    return torch.from_numpy(mean.astype(np.float32)), torch.from_numpy(std.astype(np.float32))


def _attention(read: Read, fits: Sequence[NetworkFit], volumes: Volumes) -> Iterator[Float[np.ndarray, " k"]]:
    """The share of each token of every volume, the mean over the networks of `fits`."""
    for start in range(0, len(volumes), _BATCH):
        tokens = read(volumes[start : start + _BATCH])
        assert isinstance(tokens, TokenBatch)
        shares = np.mean([fit.attention(tokens) for fit in fits], axis=0)
        for share, valid in zip(shares, tokens.valid.numpy(), strict=True):
            yield share[valid]


def predictions(read: Read, fits: Sequence[NetworkFit], volumes: Sequence[Volumes]) -> list[Float[np.ndarray, "_ _"]]:
    """The predictions of each fit for its own volumes, in their order.

    Every block of the table is read once for all fits. Blocks are fixed, so who else is read for changes no rounding.
    """
    everyone = np.unique(np.concatenate(volumes))
    parts: list[list[np.ndarray]] = [[np.zeros((0, max(1, len(fit.target.classes))))] for fit in fits]
    for block in np.unique(everyone // _BATCH):
        block_volumes = everyone[everyone // _BATCH == block]
        features = read(block_volumes)
        for fit, positions, outputs in zip(fits, volumes, parts, strict=True):
            mask = np.isin(block_volumes, positions)
            if mask.any():
                outputs.append(fit.predict(features[torch.from_numpy(mask)]))
    # Blocks come in ascending order: back to that of `volumes`.
    return [
        np.concatenate(outputs)[np.argsort(np.argsort(positions))]
        for outputs, positions in zip(parts, volumes, strict=True)
    ]


def _fit(
    read: Read,
    targets: Sequence[Target],
    selections: Sequence[Selection],
    train: Volumes,
    build: Build,
    kind: str,
    smoothing: float,
    seed: int,
) -> list[ProbeFit]:
    """Trains every network of every target in one pass, and predicts the test volumes with the best weights of each."""
    epoch_updates = -(-len(train) // _BATCH)
    label = None if kind == "mlp" else f"{kind} probe"  # the MLP takes seconds
    settings = LoopSettings(
        label, EPOCHS * epoch_updates, _BATCH, range(epoch_updates, EPOCHS * epoch_updates + 1, epoch_updates)
    )
    with torch.random.fork_rng(devices=[]):
        table = 1 + max(int(rows.max(initial=0)) for rows in (train, *(v for t in targets for v in t.indices.values())))
        fits = [
            fit
            for target, selection in zip(targets, selections, strict=True)
            for fit in _fits(target, selection, build, kind, epoch_updates, seed, table)
        ]
        task = ProbeTask(read, fits, train, smoothing, seed)
        train_supervised(task, [fit.learner for fit in fits], settings, Runtime("fp32"))
    held_out = dict(zip(fits, predictions(read, fits, [fit.held_out for fit in fits]), strict=True))
    test = dict(zip(fits, predictions(read, fits, [fit.target.indices["test"] for fit in fits]), strict=True))
    probe_fits = []
    for target, selection in zip(targets, selections, strict=True):
        target_fits = [fit for fit in fits if fit.target is target]
        shift = np.zeros(max(1, len(target.classes)))
        if selection.by == "val":
            _, shift = select_setting(target, target.values["val"], [held_out[target_fits[0]]])
        elif selection.by == "cv":
            order = np.argsort(np.concatenate([fit.held_out for fit in target_fits]))
            of_train = np.concatenate([held_out[fit] for fit in target_fits])[
                order
            ]  # of the training volumes, ascending
            back = np.argsort(np.argsort(target.indices["train"]))
            _, shift = select_setting(target, target.values["train"], [of_train[back]])
        mean = np.mean([test[fit] for fit in target_fits], axis=0)
        epochs = [
            (fit.learner.best_update if len(fit.held_out) else fit.learner.updates) // epoch_updates
            for fit in target_fits
        ]
        predicted = calibrated_predictions(target, mean, shift)
        attends = isinstance(target_fits[0].learner.network, AttentiveProbe)
        probe_fits.append(
            ProbeFit(
                predicted,
                float(np.mean(epochs)),
                epochs.count(EPOCHS),
                partial(_attention, read, target_fits) if attends else None,
            )
        )
    return probe_fits


def _fits(
    target: Target, selection: Selection, build: Build, kind: str, epoch_updates: int, seed: int, table: int
) -> Iterator[NetworkFit]:
    """A network for the whole training split, or one for each fold, which it never sees; `table` counts all volumes."""
    train, values = target.indices["train"], target.values["train"]
    truth = np.zeros(table)
    for split in ("train", "val"):
        truth[target.indices[split]] = target.values[split]
    parts: list[tuple[np.ndarray, np.ndarray]] = [(np.ones(len(train), bool), target.indices["val"])]
    if selection.by == "cv":
        parts = [(selection.folds != number, train[selection.folds == number]) for number in np.unique(selection.folds)]
    for number, (inside, outside) in enumerate(parts):
        name = f"{kind} {target.name} {number}"
        torch.manual_seed(keys.key(seed, "probe", name))
        network = build(target.task, len(target.classes)).train()
        optimizer = adamw(network.parameters(), torch.device("cpu"), lr=_LR, weight_decay=_WEIGHT_DECAY)
        weight, scale = None, (0.0, 1.0)
        if target.classes:
            weight = torch.from_numpy(class_weights(values[inside], len(target.classes)).astype(np.float32))
        else:
            scale = float(values[inside].mean()), float(values[inside].std()) or 1.0
        held_out = outside if selection.by != "fixed" else outside[:0]
        epochs = EPOCHS if len(held_out) else UNWATCHED_EPOCHS
        learner = Learner(name, network, optimizer, epochs * epoch_updates, patience=PATIENCE)
        yield NetworkFit(target, learner, np.isin(np.arange(table), train[inside]), held_out, truth, weight, scale)
