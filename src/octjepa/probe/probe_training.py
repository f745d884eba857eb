"""How the probes with gradient steps are fitted: AdamW, early stopping on held-out people, many targets in one pass.

Every target (and every fold, where validation holds too few people) has a network of its own; each batch of features is
read once and given to all of them. The order of volumes is that of all training volumes, labelled or not, and every
step is seeded by its target, so what one target gets does not depend on which others are asked for. Held-out loss stops
each network at its best epoch and then places the decision between the classes, as for the other probes.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from octjepa import keys
from octjepa.embed.token_folder import TokenFolder
from octjepa.metrics.scores import Task
from octjepa.probe.calibration import ProbeFit, calibrated_predictions, class_weights, select_setting
from octjepa.probe.features import FeatureSpace, Selection
from octjepa.probe.networks import MLP, AttentiveProbe, loss
from octjepa.probe.targets import Target

EPOCHS = 60
PATIENCE = 8  # epochs without a better held-out loss
UNWATCHED_EPOCHS = 15  # where there is nobody to hold out
_BATCH = 32
_LR, _WEIGHT_DECAY = 3e-3, 0.05
_VOLUMES_FOR_SCALE = 256

Read = Callable[[Int[np.ndarray, " n"]], Tensor]
Build = Callable[[Task, int], nn.Module]


@dataclass
class _Fit:
    """One network of one target on its way; `rows` are positions in the table."""

    target: Target
    name: str
    rows: Int[np.ndarray, " n"]
    held: Int[np.ndarray, " m"]
    truth: dict[int, float]
    network: nn.Module
    optimizer: torch.optim.AdamW
    weight: Tensor | None
    scale: tuple[float, float]
    best: float = np.inf
    epoch: int = 0
    done: bool = False
    scores: np.ndarray = field(default_factory=lambda: np.zeros((0, 1)))
    state: dict[str, Tensor] = field(default_factory=dict)

    def wanted(self, rows: Int[np.ndarray, " n"]) -> Tensor:
        values = np.array([self.truth[int(row)] for row in rows])
        if self.target.classes:
            return torch.from_numpy(values.astype(np.int64))
        return torch.from_numpy(((values - self.scale[0]) / self.scale[1]).astype(np.float32))

    def said(self, features: Tensor) -> Float[np.ndarray, "n classes"]:
        """Probabilities, or quantities in their own unit."""
        self.network.eval()
        with torch.no_grad():
            found = self.network(features).double().numpy()
        self.network.train()
        return np.exp(found) if self.target.classes else found * self.scale[1] + self.scale[0]


def mlp(space: FeatureSpace, target: Target, how: Selection, smoothing: float = 0.0, seed: int = 0) -> ProbeFit:
    """MLP on pooled features, one hidden layer of 64."""
    rows = np.concatenate([target.indices[split] for split in ("train", "val", "test")])
    axes = space.train.shape[1]
    # A training volume has length one on average: back to features of about unit size, as layers expect them.
    table = np.concatenate([space.train, space.val, space.test]).astype(np.float32) * np.sqrt(np.float32(axes))
    place = {int(row): number for number, row in enumerate(rows)}

    def read(wanted: Int[np.ndarray, " n"]) -> Tensor:
        return torch.from_numpy(table[[place[int(row)] for row in wanted]])

    order = np.sort(target.indices["train"])
    (probed,) = _learn(read, [target], [how], order, lambda task, n: MLP(axes, task, n), "mlp", smoothing, seed)
    return probed


def attentive(
    tokens: TokenFolder,
    view: str,
    volume_ids: Sequence[str],
    train: Int[np.ndarray, " n"],
    targets: Sequence[Target],
    hows: Sequence[Selection],
    smoothing: float = 0.0,
    seed: int = 0,
) -> list[ProbeFit]:
    """The attentive probe for every target, in one pass over the tokens.

    `volume_ids` names the volume of each row of the table, `train` are all rows of the training split.
    """

    def read(rows: Int[np.ndarray, " n"]) -> Tensor:
        return torch.from_numpy(tokens.read(view, [volume_ids[row] for row in rows]).astype(np.float32))

    some = train[np.unique(np.linspace(0, len(train) - 1, _VOLUMES_FOR_SCALE).astype(int))]
    sample = read(some).flatten(0, 1)
    mean, std = sample.mean(dim=0), sample.std(dim=0).clamp_min(1e-6)

    def build(task: Task, classes: int) -> nn.Module:
        return AttentiveProbe(mean, std, task, classes)

    return _learn(read, targets, hows, train, build, "attentive", smoothing, seed)


def _learn(
    read: Read,
    targets: Sequence[Target],
    hows: Sequence[Selection],
    order: Int[np.ndarray, " n"],
    build: Build,
    kind: str,
    smoothing: float,
    seed: int,
) -> list[ProbeFit]:
    with torch.random.fork_rng(devices=[]):
        fits = [list(_fits(target, how, build, kind, seed)) for target, how in zip(targets, hows, strict=True)]
        flat = [fit for of_target in fits for fit in of_target]
        for epoch in range(1, EPOCHS + 1):
            _one_epoch(read, flat, order, epoch, smoothing, seed)
            _look(read, flat, epoch)
            if all(fit.done for fit in flat):
                break
    found = []
    for target, how, of_target in zip(targets, hows, fits, strict=True):
        shift = np.zeros(max(1, len(target.classes)))
        if how.by == "val":
            _, shift = select_setting(target, target.values["val"], [of_target[0].scores])
        elif how.by == "cv":
            place = {int(row): number for number, row in enumerate(target.indices["train"])}
            held_out = np.zeros((len(place), len(shift)))
            for fit in of_target:
                held_out[[place[int(row)] for row in fit.held]] = fit.scores
            _, shift = select_setting(target, target.values["train"], [held_out])
        for fit in of_target:
            fit.network.load_state_dict(fit.state)
        test = [
            np.mean([fit.said(features) for fit in of_target], axis=0)
            for _, features in _batches(read, target.indices["test"])
        ]
        never = sum(fit.epoch == EPOCHS for fit in of_target)
        setting = float(np.mean([fit.epoch for fit in of_target]))
        found.append(ProbeFit(calibrated_predictions(target, np.concatenate(test), shift), setting, never))
    return found


def _fits(target: Target, how: Selection, build: Build, kind: str, seed: int) -> Iterator[_Fit]:
    """A network for the whole training split, or one for each fold, which it never sees."""
    train, truth = target.indices["train"], target.values["train"]
    known = {
        int(row): float(value)
        for split in ("train", "val")
        for row, value in zip(target.indices[split], target.values[split], strict=True)
    }
    held: list[tuple[np.ndarray, np.ndarray]] = [(np.ones(len(train), bool), target.indices["val"])]
    if how.by == "cv":
        held = [(how.folds != number, train[how.folds == number]) for number in np.unique(how.folds)]
    for number, (inside, out) in enumerate(held):
        name = f"{kind} {target.name} {number}"
        torch.manual_seed(keys.key(seed, "probe", name))
        network = build(target.task, len(target.classes)).train()
        optimizer = torch.optim.AdamW(network.parameters(), lr=_LR, weight_decay=_WEIGHT_DECAY)
        weight, scale = None, (0.0, 1.0)
        if target.classes:
            weight = torch.from_numpy(class_weights(truth[inside], len(target.classes)).astype(np.float32))
        else:
            scale = float(truth[inside].mean()), float(truth[inside].std()) or 1.0
        watched = out if how.by != "fixed" else out[:0]
        yield _Fit(target, name, train[inside], watched, known, network, optimizer, weight, scale)


def _one_epoch(
    read: Read, fits: Sequence[_Fit], order: Int[np.ndarray, " n"], epoch: int, smoothing: float, seed: int
) -> None:
    inside = {id(fit): set(fit.rows.tolist()) for fit in fits if not fit.done}
    shuffled = keys.generator(seed, "probe order", epoch).permutation(order)
    for step in range(0, len(shuffled), _BATCH):
        rows = shuffled[step : step + _BATCH]
        wanted = [(fit, np.array([int(row) in inside[id(fit)] for row in rows])) for fit in fits if not fit.done]
        used = np.any([mask for _, mask in wanted], axis=0)
        if not used.any():
            continue
        features = read(rows[used])
        for fit, mask in wanted:
            if mask.sum() < 2:
                continue  # the mean of one volume's loss says little, and comes once in many epochs
            torch.manual_seed(keys.key(seed, "probe step", fit.name, epoch, step))
            said = fit.network(features[torch.from_numpy(mask[used])])
            value = loss(said, fit.wanted(rows[mask]), fit.weight, smoothing)
            fit.optimizer.zero_grad()
            value.backward()
            fit.optimizer.step()


def _look(read: Read, fits: Sequence[_Fit], epoch: int) -> None:
    """Held-out loss of every network that is still learning; keeps the best epoch's weights."""
    looking = [fit for fit in fits if not fit.done]
    scores: dict[int, list[np.ndarray]] = {id(fit): [] for fit in looking}
    everyone = np.unique(np.concatenate([fit.held for fit in looking]))
    for rows, features in _batches(read, everyone):
        for fit in looking:
            mine = np.isin(rows, fit.held)
            if mine.any():
                scores[id(fit)].append(fit.said(features[torch.from_numpy(mine)]))
    for fit in looking:
        if not len(fit.held):
            fit.epoch, fit.done = epoch, epoch == UNWATCHED_EPOCHS
            if fit.done:
                fit.state = copy.deepcopy(fit.network.state_dict())
            continue
        fit_rows = np.sort(fit.held)
        said = np.concatenate(scores[id(fit)])
        value = _held_out_loss(fit, fit_rows, said)
        if value < fit.best:
            back = np.argsort(np.argsort(fit.held))  # from rows in order to those of `held`
            fit.best, fit.epoch, fit.scores = value, epoch, said[back]
            fit.state = copy.deepcopy(fit.network.state_dict())
        fit.done = epoch - fit.epoch >= PATIENCE


def _held_out_loss(fit: _Fit, rows: Int[np.ndarray, " m"], said: Float[np.ndarray, "m classes"]) -> float:
    truth = np.array([fit.truth[int(row)] for row in rows])
    if fit.weight is None:
        return float(np.mean((truth - said[:, 0]) ** 2))
    codes = truth.astype(np.int64)
    weight = class_weights(codes, len(fit.weight))[codes]
    return float(-weight @ np.log(np.clip(said[np.arange(len(codes)), codes], 1e-12, 1)) / weight.sum())


def _batches(read: Read, rows: Int[np.ndarray, " n"]) -> Iterator[tuple[np.ndarray, Tensor]]:
    """Rows with their features, by fixed blocks of the table: who else is asked for changes no sum's order."""
    blocks = rows // _BATCH
    for block in np.unique(blocks):
        some = rows[blocks == block]
        yield some, read(some)
