"""Fine-tuning: the whole network, tuned on few labelled people, from pretrained weights or from its first ones: AUROC.

Trained as `tuning_loop` says. The network is that of `octjepa finetune`: a linear head for each lesion reads the mean,
spread and maximum of the tokens, and what a query of its own attends to. The loss is binary cross-entropy over all
lesions at once. The people are drawn anew for each seed of the network, so that the interval over seeds holds that
chance too.

Testing reads all tissue of `TEST_PEOPLE` of the test people: 2 rates x 150 updates x 8 samples, 2 x 100 people of
validation, 400 of test. That is a short training: it tells what either network gets out of few steps, not what it would
reach after many. Until 2026-11-24 a head of attention alone learned at the encoder's rate for 100 updates, which ended
at chance from either weights (lab/2026-11.md).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from sklearn.metrics import roc_auc_score
from torch import Tensor

from octjepa.encoders import PretrainedEncoder
from octjepa.metrics.bootstrap import Estimate
from octjepa.metrics.test_set_ledger import fingerprint
from octjepa.phantom import LESIONS
from octjepa.recipe import Recipe
from octjepa.tasks.finetune.network import TunedNetwork
from octjepa.train.learner import Learner
from octjepa.views.loader import Batch, training_batches

from .cohorts import Cohort
from .questions import OpenedEyes
from .readings import choose_strength, logistic_scores
from .results import Finding, LeftOut
from .settings import LABELLED_PEOPLE
from .tuning_loop import TunedQuestion, TuningTask, read_lesions, tested_people, training_recipe, tune_each_rate

UPDATES, TEST_PEOPLE = 150, 400


def logits(network: TunedNetwork, cohort: Cohort, volumes: Int[np.ndarray, " n"]) -> Float[np.ndarray, "n lesions"]:
    """Of each lesion, from all tissue of the volumes."""
    network.eval()
    found = []
    for one in volumes:
        outputs = network.predict([cohort.store.read(cohort.ids[one])])
        found.append([float(log[0, 1] - log[0, 0]) for log in outputs])
    network.train()
    return np.array(found)


class LesionTask(TuningTask[Batch]):
    """Networks that tell from the tokens of an eye whether it has each lesion."""

    def __init__(
        self,
        cohort: Cohort,
        labelled: Int[np.ndarray, " n"],
        val: Int[np.ndarray, " m"],
        recipe: Recipe,
    ) -> None:
        super().__init__(cohort, labelled, recipe)
        self.val, self.row_of = val, {name: number for number, name in enumerate(cohort.ids)}

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
    val, test = cohort.indices("val"), tested_people(cohort, TEST_PEOPLE)

    def scores(labelled: Int[np.ndarray, " n"], _: Sequence[int]) -> Float[np.ndarray, "m lesions"]:
        return logits(tune(cohort, encoder, labelled, val, seed, updates), cohort, test)

    return _read("tuning", encoder.weights_hash(), cohort, seed, counts, scores)


def frozen(
    cohort: Cohort, x: Float[np.ndarray, "V f"], seed: int, counts: Sequence[int] = LABELLED_PEOPLE
) -> Iterator[Finding | LeftOut]:
    """What the vectors `x` of eyes tell from the people that `tuning` learns from, of those that it is tested on.

    `eye_lesion` draws people for each lesion, half of them with it, which are more people and easier ones.
    """
    tested = x[tested_people(cohort, TEST_PEOPLE)]

    def scores(labelled: Int[np.ndarray, " n"], lesions: Sequence[int]) -> Float[np.ndarray, "m lesions"]:
        found = np.full((len(tested), len(LESIONS)), np.nan)
        for number in lesions:
            has = cohort.lesions[labelled, number]
            found[:, number] = logistic_scores(x[labelled], has, tested, choose_strength(x[labelled], has))
        return found

    return _read("frozen", fingerprint(x, "logistic"), cohort, seed, counts, scores)


def _read(
    task: str,
    measured: str,
    cohort: Cohort,
    seed: int,
    counts: Sequence[int],
    scores: Callable[[np.ndarray, Sequence[int]], Float[np.ndarray, "m lesions"]],
) -> Iterator[Finding | LeftOut]:
    """AUROC of each lesion, and their mean, by `scores(labelled people, lesions)` of those that are tested."""
    test = tested_people(cohort, TEST_PEOPLE)

    def estimates(labelled: Int[np.ndarray, " n"], lesions: Sequence[int], opened: OpenedEyes) -> Iterator[Estimate]:
        found = scores(labelled, lesions)
        for number in lesions:
            yield opened.auroc(LESIONS[number], [found[:, number]])

    return read_lesions(TunedQuestion(task, "auroc", measured, seed), cohort, test, counts, estimates)


def tune(
    cohort: Cohort,
    encoder: PretrainedEncoder,
    labelled: Int[np.ndarray, " n"],
    val: Int[np.ndarray, " m"],
    seed: int,
    updates: int = UPDATES,
) -> TunedNetwork:
    """The network of the learning rate with the highest mean AUROC on the validation people `val`."""

    def network(own: PretrainedEncoder) -> TunedNetwork:
        return TunedNetwork(own, [("binary", 2)] * len(LESIONS))

    scale = network(encoder).pool([cohort.store.read(cohort.ids[one]) for one in labelled])

    def scaled(own: PretrainedEncoder) -> TunedNetwork:
        found = network(own)
        found.set_scale(scale)
        return found

    task = LesionTask(cohort, labelled, val, training_recipe(encoder.recipe, seed, updates))
    return _network(tune_each_rate(task, encoder, scaled, seed))
