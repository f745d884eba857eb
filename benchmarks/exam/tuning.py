"""Task 7: the whole network tuned on few labelled people, from pretrained weights or from its first ones.

Both are trained alike: the same people, augmented views, updates and two learning rates of the encoder, of which
validation people choose one. The network is that of `octjepa finetune`: a linear head for each lesion reads the mean,
spread and maximum of the tokens, and what a query of its own attends to. For the first third of the updates the heads
alone learn (LP-FT, Kumar et al. 2022). The loss is binary cross-entropy over all lesions at once. The people are drawn
anew for each seed of the network, so that the interval over seeds holds that chance too.

A training view holds 3/8 of the recipe's token budget, drawn anew (PatchDropout, Liu et al. 2022), and testing reads
all tissue of `TEST_PEOPLE` of the test people: 2 rates x 150 updates x 8 samples, 2 x 100 people of validation, 400 of
test. That is a short training: it tells what either network gets out of few steps, not what it would reach after many.
Until 2026-11-24 a head of attention alone learned at the encoder's rate for 100 updates, which ended at chance from
either weights (lab/LOG.md).
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from itertools import cycle
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from sklearn.metrics import roc_auc_score
from torch import Tensor

from octjepa import keys
from octjepa.checkpoint import PretrainedEncoder
from octjepa.distributed.runtime import Runtime
from octjepa.metrics.bootstrap import Draws, Estimate
from octjepa.phantom import LESIONS
from octjepa.recipe import Recipe, TrainRecipe, ViewRecipe
from octjepa.tasks.finetune.network import TunedNetwork
from octjepa.train.learner import Learner, adamw
from octjepa.train.optimizer import learning_rate
from octjepa.train.supervised import LoopSettings, SupervisedTask, train_supervised
from octjepa.views.loader import Batch, TrainingDataset, training_batches

from .cohorts import Cohort
from .lesion_tasks import auroc, lesions_mean
from .readings import choose_strength, logistic_scores
from .results import Finding, LeftOut
from .settings import LABELLED_PEOPLE, MIN_POSITIVES, RESAMPLES

TEST_PEOPLE = 400  # the first of the test people
RATES = (1e-4, 5e-4)  # of the encoder
HEAD_RATE = 2e-3
UPDATES, BATCH = 150, 8
MIN_LABELLED = 2  # labelled people with a lesion: with fewer its figure is left out
_HEAD_SHARE = 1 / 3  # of the updates, in which the heads alone learn
_TOKEN_SHARE = 3 / 8  # of the recipe's token budget that a training view has
_WARM_UP, _WEIGHT_DECAY, _CLIP_NORM = 0.1, 0.05, 1.0


def logits(network: TunedNetwork, cohort: Cohort, volumes: Int[np.ndarray, " n"]) -> Float[np.ndarray, "n lesions"]:
    """Of each lesion, from all tissue of the volumes."""
    network.eval()
    found = []
    for one in volumes:
        outputs = network.predict([cohort.store.read(cohort.ids[one])])
        found.append([float(log[0, 1] - log[0, 0]) for log in outputs])
    network.train()
    return np.array(found)


class TuningTask(SupervisedTask[Batch]):
    """Training of several networks, of one learning rate each, on the same views of the labelled volumes."""

    def __init__(
        self, cohort: Cohort, labelled: Int[np.ndarray, " n"], val: Int[np.ndarray, " m"], recipe: Recipe, updates: int
    ) -> None:
        self.cohort, self.val, self.updates = cohort, val, updates
        self.stream = TrainingDataset(cohort.store, recipe, [cohort.ids[one] for one in labelled])
        self.row_of = {name: number for number, name in enumerate(cohort.ids)}
        self.learners: list[Learner] = []

    def add_learner(self, network: TunedNetwork, rate: float) -> None:
        """One network with its optimizer."""
        heads = [*network.heads.parameters(), *network.pooling.parameters()]
        groups = [{"params": heads, "peak": HEAD_RATE}, {"params": list(network.encoder.parameters()), "peak": rate}]
        optimizer = adamw(groups, torch.device("cpu"), lr=rate, weight_decay=_WEIGHT_DECAY)
        self.learners.append(Learner(f"tuning at {rate:g}", network, optimizer, self.updates))

    def begin_update(self, update: int) -> dict[str, Any]:
        heads_alone = update < _HEAD_SHARE * self.updates
        for learner in self.learners:
            _network(learner).encoder.requires_grad_(not heads_alone)
            for group in learner.optimizer.param_groups:
                group["lr"] = group["peak"] * learning_rate(update, self.updates, self.stream.recipe.train)
        return {}

    def batches(self, start: int) -> Iterator[Batch]:
        return training_batches(self.stream, start, self.updates, 0)

    def losses(self, learner: Learner, batch: Batch, update: int, micro_batch: int) -> Iterator[Tensor]:
        has = self.cohort.lesions[[self.row_of[name] for name in batch.volume_ids]]
        network = _network(learner)
        outputs = torch.stack(network.head_outputs(network.encode_batch(batch)), dim=1)  # [b, lesions, 2]
        yield -outputs.gather(2, torch.from_numpy(has).long()[:, :, None]).mean()

    def validate(self, learners: Sequence[Learner]) -> list[float | None]:
        """1 - mean AUROC over lesions of the validation people."""
        has = self.cohort.lesions[self.val]
        return [_missed(logits(_network(learner), self.cohort, self.val), has) for learner in learners]


def _network(learner: Learner) -> TunedNetwork:
    assert isinstance(learner.network, TunedNetwork)
    return learner.network


def _missed(scores: Float[np.ndarray, "n lesions"], has: Bool[np.ndarray, "n lesions"]) -> float | None:
    known = [n for n in range(has.shape[1]) if 0 < has[:, n].sum() < len(has)]
    return 1 - float(np.mean([roc_auc_score(has[:, n], scores[:, n]) for n in known])) if known else None


def tuning(
    cohort: Cohort,
    encoder: PretrainedEncoder,
    seed: int,
    counts: Sequence[int] = LABELLED_PEOPLE,
    updates: int = UPDATES,
) -> Iterator[Finding | LeftOut]:
    """AUROC of each lesion, and their mean, on test people, of the network tuned on each number of labelled people."""
    val, test = cohort.indices("val"), _tested(cohort)

    def scores(labelled: Int[np.ndarray, " n"], _: Sequence[int]) -> Float[np.ndarray, "m lesions"]:
        return logits(tune(cohort, encoder, labelled, val, seed, updates), cohort, test)

    yield from _read("tuning", cohort, seed, counts, scores)


def frozen(
    cohort: Cohort, x: Float[np.ndarray, "V f"], seed: int, counts: Sequence[int] = LABELLED_PEOPLE
) -> Iterator[Finding | LeftOut]:
    """What the vectors `x` of eyes tell from the people that `tuning` learns from, of those that it is tested on.

    `eye_lesion` draws people for each lesion, half of them with it, which are more people and easier ones.
    """
    tested = x[_tested(cohort)]

    def scores(labelled: Int[np.ndarray, " n"], lesions: Sequence[int]) -> Float[np.ndarray, "m lesions"]:
        found = np.full((len(tested), len(LESIONS)), np.nan)
        for number in lesions:
            has = cohort.lesions[labelled, number]
            found[:, number] = logistic_scores(x[labelled], has, tested, choose_strength(x[labelled], has))
        return found

    yield from _read("frozen", cohort, seed, counts, scores)


def _tested(cohort: Cohort) -> Int[np.ndarray, " m"]:
    return cohort.indices("test")[:TEST_PEOPLE]


def _read(
    task: str,
    cohort: Cohort,
    seed: int,
    counts: Sequence[int],
    scores: Callable[[np.ndarray, Sequence[int]], Float[np.ndarray, "m lesions"]],
) -> Iterator[Finding | LeftOut]:
    """AUROC of each lesion, and their mean, by `scores(labelled people, lesions)` of those that are tested."""
    train, test = cohort.indices("train"), _tested(cohort)
    people = cohort.people[test]
    draws = Draws(people.tolist(), RESAMPLES, 0)
    for count in counts:
        labelled = draw_people(train, cohort.lesions[train], count, seed)
        if len(labelled) < count:
            yield LeftOut(task, "auroc", count, f"there are {len(labelled)} training people, {count} are needed")
            continue
        measured: list[int] = []
        for number, name in enumerate(LESIONS):
            known, positives = (int(cohort.lesions[some, number].sum()) for some in (labelled, test))
            if known < MIN_LABELLED or positives < MIN_POSITIVES:
                reason = f"{known} of {count} labelled and {positives} of {len(test)} test people have it"
                needed = f"{MIN_LABELLED} and {MIN_POSITIVES} are needed"
                yield LeftOut(task, f"auroc_{name}", count, f"{reason}; {needed}")
            else:
                measured.append(number)
        parts: dict[str, Estimate] = {}
        if measured:
            found = scores(labelled, measured)
        for number in measured:
            name = LESIONS[number]
            parts[name] = auroc(cohort.lesions[test, number], [found[:, number]], draws, people, name)
            yield Finding(task, f"auroc_{name}", count, parts[name])
        yield lesions_mean(task, "auroc", count, parts, len(test))


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


def tune(
    cohort: Cohort,
    encoder: PretrainedEncoder,
    labelled: Int[np.ndarray, " n"],
    val: Int[np.ndarray, " m"],
    seed: int,
    updates: int = UPDATES,
) -> TunedNetwork:
    """The network of the learning rate with the highest mean AUROC on the validation people `val`."""
    task = TuningTask(cohort, labelled, val, training_recipe(encoder.recipe, seed, updates), updates)
    for rate in RATES:
        torch.manual_seed(seed)
        own = PretrainedEncoder(copy.deepcopy(encoder.encoder), encoder.recipe, encoder.name)
        network = TunedNetwork(own, [("binary", 2)] * len(LESIONS))
        if not task.learners:
            scale = network.pool([cohort.store.read(cohort.ids[one]) for one in labelled])
        network.set_scale(scale)
        task.add_learner(network, rate)
    settings = LoopSettings("tune", updates, BATCH, {updates}, _CLIP_NORM, rates="RATES")
    train_supervised(task, task.learners, settings, Runtime("fp32"))
    return _network(min(task.learners, key=lambda one: np.inf if one.best_loss is None else one.best_loss))


def training_recipe(recipe: Recipe, seed: int, updates: int) -> Recipe:
    """What makes and orders the training views: crops and flips of the encoder's volumes, few of their tokens."""
    train = TrainRecipe(
        max_updates=updates, global_batch=BATCH, base_lr=1.0, min_lr_ratio=0.01, warmup_share=_WARM_UP,
        precision="fp32", seed=seed,
    )  # fmt: skip
    tokens = recipe.tokens.model_copy(
        update={"select": "tissue", "budget": max(2, int(recipe.token_count * _TOKEN_SHARE))}
    )
    data = recipe.data.model_copy(update={"balance": "none", "balance_power": 0.0})
    return recipe.model_copy(update={"train": train, "tokens": tokens, "views": ViewRecipe(), "data": data})
