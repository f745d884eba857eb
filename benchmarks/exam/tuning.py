"""Task 7: the whole network tuned on few labelled people, from pretrained weights or from its first ones.

Both are trained alike: the same people, augmented views, updates and two learning rates, of which validation people
choose one. The head is attentive pooling that knows positions, with a query for each lesion, then a logit for each; the
loss is binary cross-entropy over all lesions at once. The people are drawn anew for each seed of the network, so that
the interval over seeds holds that chance too.

Cost, measured on one core of about 40 GFLOP/s (fp32), 192 wide, 6 blocks, patches of 4 x 8 x 8: a training sample of
512 tokens takes 0.29 CPU-seconds, of 192 tokens 0.06; a volume's whole tissue 0.09. So a training view holds 3/8 of the
recipe's token budget, drawn anew (PatchDropout, Liu et al. 2022), and testing reads all tissue of `TEST_PEOPLE` of the
test people: 2 rates x 100 updates x 8 samples, 2 x 100 people of validation and 400 of test are about 155 CPU-seconds
for one network and number of people. That is a short training: it tells what either network gets out of few steps, not
what it would reach after many.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from itertools import cycle
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from sklearn.metrics import roc_auc_score
from torch import Tensor, nn

from octjepa import keys
from octjepa.checkpoint import PretrainedEncoder
from octjepa.distributed.runtime import Runtime
from octjepa.embed.token_folder import grid_coordinates
from octjepa.metrics.bootstrap import Draws, mean_estimate
from octjepa.phantom import LESIONS
from octjepa.probe.networks import WIDTH, AttentivePooling, TokenBatch
from octjepa.recipe import Recipe, TrainRecipe, ViewRecipe
from octjepa.train.learner import Learner, adamw
from octjepa.train.optimizer import learning_rate
from octjepa.train.supervised import LoopSettings, SupervisedTask, train_supervised
from octjepa.views.loader import Batch, TrainingDataset, training_batches

from .cohorts import Cohort
from .lesion_tasks import auroc
from .results import Finding, LeftOut
from .settings import LABELLED_PEOPLE, MIN_POSITIVES, RESAMPLES

TEST_PEOPLE = 400  # the first of the test people
RATES = (2e-4, 1e-3)  # of the encoder and the head alike
UPDATES, BATCH = 100, 8
MIN_LABELLED = 2  # labelled people with a lesion: with fewer its figure is left out
_TOKEN_SHARE = 3 / 8  # of the recipe's token budget that a training view has
_WARM_UP, _WEIGHT_DECAY, _CLIP_NORM = 0.1, 0.05, 1.0
_EVAL_BATCH = 8  # volumes


class TunedLesions(nn.Module):
    """An encoder whose weights learn, attentive pooling with a query for each lesion, and its logit."""

    def __init__(self, encoder: PretrainedEncoder, tokens: Float[Tensor, "k dim"]) -> None:
        super().__init__()
        self.pretrained = PretrainedEncoder(copy.deepcopy(encoder.encoder), encoder.recipe, encoder.name)
        self.encoder = self.pretrained.encoder.requires_grad_(True)
        self.pooling = AttentivePooling(tokens.mean(dim=0), tokens.std(dim=0).clamp_min(1e-6), len(LESIONS))
        self.weight, self.bias = nn.Parameter(torch.zeros(len(LESIONS), WIDTH)), nn.Parameter(torch.zeros(len(LESIONS)))

    def forward(self, batch: Batch) -> Float[Tensor, "b lesions"]:
        features = self.encoder(batch.context_view, batch.positions).float()
        return self.logits(features, batch.grid_index.numpy())

    def logits(self, features: Float[Tensor, "b k dim"], index: Int[np.ndarray, "b k"]) -> Float[Tensor, "b lesions"]:
        """Of token features and their indices in the raster order of the grid."""
        coordinates = torch.from_numpy(grid_coordinates(index, self.pretrained.recipe.grid))
        vectors = self.pooling(TokenBatch(features, coordinates, torch.ones(features.shape[:2], dtype=torch.bool)))
        return (vectors * self.weight).sum(dim=-1) + self.bias

    @torch.no_grad()
    def predict(self, cohort: Cohort, volumes: Int[np.ndarray, " n"]) -> Float[np.ndarray, "n lesions"]:
        """Logits of volumes, from all of their tissue."""
        self.eval()
        found = []
        for start in range(0, len(volumes), _EVAL_BATCH):
            scans = [cohort.store.read(cohort.ids[one]) for one in volumes[start : start + _EVAL_BATCH]]
            for one in self.pretrained.encode_volumes(scans):
                found.append(self.logits(torch.from_numpy(one.features)[None], one.grid_index[None])[0].numpy())
        self.train()
        return np.stack(found)


class TuningTask(SupervisedTask[Batch]):
    """Training of several networks, of one learning rate each, on the same views of the labelled volumes."""

    def __init__(
        self, cohort: Cohort, labelled: Int[np.ndarray, " n"], val: Int[np.ndarray, " m"], recipe: Recipe, updates: int
    ) -> None:
        self.cohort, self.val, self.updates = cohort, val, updates
        self.stream = TrainingDataset(cohort.store, recipe, [cohort.ids[one] for one in labelled])
        self.row_of = {name: number for number, name in enumerate(cohort.ids)}
        self.learners: list[tuple[float, Learner]] = []

    def learner(self, network: TunedLesions, rate: float) -> Learner:
        """One network with its optimizer."""
        optimizer = adamw(network.parameters(), torch.device("cpu"), lr=rate, weight_decay=_WEIGHT_DECAY)
        self.learners.append((rate, Learner(f"tuning at {rate:g}", network, optimizer, self.updates)))
        return self.learners[-1][1]

    def begin_update(self, update: int) -> dict[str, Any]:
        for rate, learner in self.learners:
            for group in learner.optimizer.param_groups:
                group["lr"] = rate * learning_rate(update, self.updates, self.stream.recipe.train)
        return {}

    def batches(self, start: int) -> Iterator[Batch]:
        return training_batches(self.stream, start, self.updates, 0)

    def losses(self, learner: Learner, batch: Batch, update: int, micro_batch: int) -> Iterator[Tensor]:
        has = self.cohort.lesions[[self.row_of[name] for name in batch.volume_ids]]
        logits = learner.network(batch)
        yield nn.functional.binary_cross_entropy_with_logits(logits, torch.from_numpy(has).float())

    def validate(self, learners: Sequence[Learner]) -> list[float | None]:
        """1 - mean AUROC over lesions of the validation people."""
        return [_missed(learner.network.predict(self.cohort, self.val), self.cohort.lesions[self.val])  # type: ignore[operator]
                for learner in learners]  # fmt: skip


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
    train, val, test = cohort.indices("train"), cohort.indices("val"), cohort.indices("test")[:TEST_PEOPLE]
    people = cohort.people[test]
    draws = Draws(people.tolist(), RESAMPLES, 0)
    for count in counts:
        labelled = draw_people(train, cohort.lesions[train], count, seed)
        if len(labelled) < count:
            yield LeftOut("tuning", "auroc", count, f"there are {len(labelled)} training people, {count} are needed")
            continue
        measured = []
        for number, name in enumerate(LESIONS):
            known, positives = (int(cohort.lesions[some, number].sum()) for some in (labelled, test))
            if known < MIN_LABELLED or positives < MIN_POSITIVES:
                reason = f"{known} of {count} labelled and {positives} of {len(test)} test people have it"
                needed = f"{MIN_LABELLED} and {MIN_POSITIVES} are needed"
                yield LeftOut("tuning", f"auroc_{name}", count, f"{reason}; {needed}")
            else:
                measured.append(number)
        if not measured:
            continue
        scores = tune(cohort, encoder, labelled, val, seed, updates).predict(cohort, test)
        parts = [
            auroc(cohort.lesions[test, number], [scores[:, number]], draws, people, LESIONS[number])
            for number in measured
        ]
        for number, part in zip(measured, parts, strict=True):
            yield Finding("tuning", f"auroc_{LESIONS[number]}", count, part)
        yield Finding("tuning", "auroc", count, mean_estimate(parts, len(test)))


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
) -> TunedLesions:
    """The network of the learning rate with the highest mean AUROC on the validation people `val`."""
    known = encoder.encode_volumes([cohort.store.read(cohort.ids[one]) for one in labelled[:_EVAL_BATCH]])
    tokens = torch.from_numpy(np.concatenate([one.features for one in known]))
    task = TuningTask(cohort, labelled, val, training_recipe(encoder.recipe, seed, updates), updates)
    learners = []
    for rate in RATES:
        torch.manual_seed(seed)
        learners.append(task.learner(TunedLesions(encoder, tokens), rate))
    settings = LoopSettings("tune", updates, BATCH, {updates}, _CLIP_NORM, rates="RATES")
    train_supervised(task, learners, settings, Runtime("fp32"))
    best = min(learners, key=lambda one: np.inf if one.best_loss is None else one.best_loss).network
    assert isinstance(best, TunedLesions)
    return best


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
