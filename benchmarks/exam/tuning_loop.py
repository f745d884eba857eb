"""What both readings of task 7 share: who is labelled, the training views, how a network is tuned, and its figures.

Networks are trained alike: the same people, augmented views, updates and two learning rates of the encoder, of which
validation people choose one. For the first third of the updates the heads alone learn (LP-FT, Kumar et al. 2022). A
training view holds 3/8 of the recipe's token budget, drawn anew (PatchDropout, Liu et al. 2022).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Any, TypeVar

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import nn

from octjepa import keys
from octjepa.distributed.adamw import adamw
from octjepa.distributed.runtime import Runtime
from octjepa.encoders import PretrainedEncoder
from octjepa.metrics.bootstrap import Estimate
from octjepa.phantom import LESIONS
from octjepa.recipe import Recipe, TrainRecipe, ViewRecipe
from octjepa.train.learner import Learner
from octjepa.train.optimizer import learning_rate
from octjepa.train.supervised import LoopSettings, SupervisedTask, train_supervised
from octjepa.views.loader import TrainingDataset

from .cohorts import Cohort
from .lesion_tasks import lesions_mean
from .questions import OpenedEyes, open_eyes
from .results import Finding, LeftOut
from .settings import MIN_POSITIVES

RATES = (1e-4, 5e-4)  # of the encoder
HEAD_RATE = 2e-3
BATCH = 8
MIN_LABELLED = 2  # labelled people with a lesion: with fewer its figure is left out
_HEAD_SHARE = 1 / 3  # of the updates, in which the heads alone learn
_TOKEN_SHARE = 3 / 8  # of the recipe's token budget that a training view has
_WARM_UP, _WEIGHT_DECAY, _CLIP_NORM = 0.1, 0.05, 1.0
B = TypeVar("B")


class TuningTask(SupervisedTask[B]):
    """Training of several networks, of one learning rate each, on the same views of the labelled volumes."""

    def __init__(self, cohort: Cohort, labelled: Int[np.ndarray, " n"], recipe: Recipe) -> None:
        self.cohort, self.updates = cohort, recipe.train.max_updates
        self.stream = TrainingDataset(cohort.store, recipe, [cohort.ids[one] for one in labelled])
        self.learners: list[Learner] = []

    def add_learner(self, network: nn.Module, rate: float) -> None:
        """One network with its optimizer; all but its `encoder` are heads."""
        inside = {id(parameter) for parameter in _encoder(network).parameters()}
        heads = [parameter for parameter in network.parameters() if id(parameter) not in inside]
        groups = [{"params": heads, "peak": HEAD_RATE}, {"params": list(_encoder(network).parameters()), "peak": rate}]
        optimizer = adamw(groups, torch.device("cpu"), lr=rate, weight_decay=_WEIGHT_DECAY)
        self.learners.append(Learner(f"tuning at {rate:g}", network, optimizer, self.updates))

    def begin_update(self, update: int) -> dict[str, Any]:
        heads_alone = update < _HEAD_SHARE * self.updates
        for learner in self.learners:
            _encoder(learner.network).requires_grad_(not heads_alone)
            for group in learner.optimizer.param_groups:
                group["lr"] = group["peak"] * learning_rate(update, self.updates, self.stream.recipe.train)
        return {}


def _encoder(network: nn.Module) -> nn.Module:
    found = network.encoder
    assert isinstance(found, nn.Module)
    return found


def tune_each_rate(
    task: TuningTask[Any],
    encoder: PretrainedEncoder,
    make: Callable[[PretrainedEncoder], nn.Module],
    seed: int,
) -> Learner:
    """That of the learning rate which `task` validates best; `make` builds a network above a copy of the encoder."""
    for rate in RATES:
        torch.manual_seed(seed)
        task.add_learner(make(PretrainedEncoder(copy.deepcopy(encoder.encoder), encoder.recipe, encoder.name)), rate)
    settings = LoopSettings("tune", task.updates, BATCH, {task.updates}, _CLIP_NORM, rates="RATES")
    train_supervised(task, task.learners, settings, Runtime("fp32"))
    return min(task.learners, key=lambda one: np.inf if one.best_loss is None else one.best_loss)


def training_recipe(recipe: Recipe, seed: int, updates: int) -> Recipe:
    """What makes and orders the training views: crops and flips of the encoder's volumes, few of their tokens."""
    train = TrainRecipe(
        max_updates=updates,
        global_batch=BATCH,
        base_lr=1.0,
        min_lr_ratio=0.01,
        warmup_share=_WARM_UP,
        precision="fp32",
        seed=seed,
    )
    tokens = recipe.tokens.model_copy(
        update={"select": "tissue", "budget": max(2, int(recipe.token_count * _TOKEN_SHARE))}
    )
    data = recipe.data.model_copy(update={"balance": "none", "balance_power": 0.0})
    return recipe.model_copy(update={"train": train, "tokens": tokens, "views": ViewRecipe(), "data": data})


def draw_people(
    candidates: Int[np.ndarray, " n"], has: Bool[np.ndarray, "n lesions"], count: int, seed: int
) -> Int[np.ndarray, " count"]:
    """`count` of the candidates, in turn one with each lesion and one without any; nested for growing counts."""
    order = keys.generator("exam tuning", seed).permutation(len(candidates))
    kinds = cycle([*has.T, ~has.any(axis=1)])
    chosen: list[int] = []
    free = np.ones(len(candidates), bool)
    while len(chosen) < min(count, len(candidates)):
        some = order[(next(kinds) & free)[order]]
        if len(some):
            chosen.append(some[0])
            free[some[0]] = False
    return candidates[chosen]


def tested_people(cohort: Cohort, count: int) -> Int[np.ndarray, " m"]:
    """The first `count` of the test people: their volumes."""
    return cohort.indices("test")[:count]


@dataclass(frozen=True)
class TunedQuestion:
    """A task and its metric, what identifies the network that is tuned, and the seed of the labelled people."""

    task: str
    metric: str
    measured: str
    seed: int


def read_lesions(
    question: TunedQuestion,
    cohort: Cohort,
    test: Int[np.ndarray, " m"],
    counts: Sequence[int],
    estimates: Callable[[Int[np.ndarray, " n"], Sequence[int], OpenedEyes], Iterable[Estimate]],
) -> Iterator[Finding | LeftOut]:
    """A metric of each lesion on the volumes `test`, and their mean, learned from each number of labelled people.

    `estimates(labelled people, numbers of the lesions, the tested people's open questions)` gives them in that order.
    """
    train, task, metric, seed = cohort.indices("train"), question.task, question.metric, question.seed
    not_tested = np.setdiff1d(cohort.indices("test"), test)
    for count in counts:
        labelled = draw_people(train, cohort.lesions[train], count, seed)
        if len(labelled) < count:
            yield LeftOut(task, metric, count, f"there are {len(labelled)} training people, {count} are needed")
            continue
        measured: list[int] = []
        for number, name in enumerate(LESIONS):
            reason = _too_few(cohort, labelled, test, number)
            if reason is not None:
                yield LeftOut(task, f"{metric}_{name}", count, reason)
            else:
                measured.append(number)
        names = [LESIONS[number] for number in measured]
        found: Iterable[Estimate] = ()
        if measured:
            truth = cohort.lesions.astype(float)
            truth[not_tested] = np.nan
            by_name = {LESIONS[number]: truth[:, number] for number in measured}
            tuned = [f"{question.measured} {seed} {count}"]
            found = estimates(labelled, measured, open_eyes(cohort, task, by_name, "binary", tuned))
        parts = dict(zip(names, found, strict=True))
        yield from (Finding(task, f"{metric}_{name}", count, one) for name, one in parts.items())
        yield lesions_mean(task, metric, count, parts, len(test))


def _too_few(cohort: Cohort, labelled: Int[np.ndarray, " n"], test: Int[np.ndarray, " m"], lesion: int) -> str | None:
    """Why a lesion is left out, where too few of the labelled or the tested have it."""
    known, positives = (int(cohort.lesions[some, lesion].sum()) for some in (labelled, test))
    if known >= MIN_LABELLED and positives >= MIN_POSITIVES:
        return None
    reason = f"{known} of {len(labelled)} labelled and {positives} of {len(test)} test people have it"
    return f"{reason}; {MIN_LABELLED} and {MIN_POSITIVES} are needed"
