"""The ceiling: a 3D convolutional network trained on labels alone, with ample labels and with few.

With ample labels it tells whether a question can be answered at all. One network learns from all eyes of the
pretraining cohort and of the decoys' cohorts made for it, where each lesion is (the share of every cell, which only a
phantom knows) and which eyes have it. Lesions it answers itself; of each kind of decoy a head answers that reads its
maps from above (`map_heads.py`). Until 2026-11-24 it was `SmallNet` on answers about whole eyes, which stayed at chance
for three of four decoys: it had not learned, and said nothing about the questions.

With 30 people it tells whether so few are enough without an encoder. That network is still `SmallNet`, on answers about
eyes alone, as 30 labelled people give them: the two differ in network, in labels and in how long they train.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch
from jaxtyping import Bool, Int
from torch import Tensor

from octjepa import keys
from octjepa.metrics.bootstrap import Estimate
from octjepa.phantom import LESIONS

from .ceiling_networks import scores, train_maps, train_small
from .cohorts import Cohort
from .labelled_scans import LabelledScans
from .lesion_tasks import lesions_mean, too_few_to_test
from .map_heads import from_above, train_head
from .measurement_tasks import macro
from .questions import open_eyes
from .results import SUPERVISED, Finding, LeftOut

FEW_UPDATES, FEW_PEOPLE = 200, 30
AMPLE_UPDATES = 400
Answer = Callable[[Tensor], Tensor]  # views [b, d, h, w] -> logits [b, questions]


def ample_network(
    pretraining: Cohort, decoys: Sequence[Cohort], seed: int = 0, updates: int = AMPLE_UPDATES
) -> tuple[Answer, Answer]:
    """Learns from all eyes of these cohorts; returns what answers about lesions, and about kinds of decoys.

    Eyes of decoys are fewer and the harder question, and come twice as often: about half of what the network sees.
    """
    first, questions = len(LESIONS), len(LESIONS) + len(decoys)
    parts = [_read(pretraining, np.arange(len(pretraining.ids)), pretraining.lesions, 0, questions, cells=True)]
    for number, cohort in enumerate(decoys, start=first):
        volumes = np.arange(len(cohort.ids))
        parts += 2 * [_read(cohort, volumes, _member(cohort)[:, None], number, questions, cells=True)]
    net = train_maps(LabelledScans.joined(parts), updates, seed, "CNN with ample labels")
    heads = []
    for number, cohort in enumerate(decoys, start=first):
        scans = parts[1 + 2 * (number - first)]
        above = scores(lambda views: from_above(net(views)[0]), scans)
        heads.append(train_head(torch.from_numpy(above), torch.from_numpy(scans.answers[:, number]), seed, cohort.name))

    def of_decoys(views: Tensor) -> Tensor:
        above = from_above(net(views)[0])
        return torch.stack([head(above) for head in heads], dim=1)

    return lambda views: net.answers(views)[:, :first], of_decoys


def few_lesions_network(main: Cohort, seed: int = 0) -> Answer:
    """Learns every lesion from 30 people of the main cohort."""
    train = main.indices("train")
    chosen = _some_people(train, main.lesions[train], FEW_PEOPLE)
    scans = LabelledScans.read(main, chosen, main.lesions[chosen])
    return train_small(scans, FEW_UPDATES, seed, "CNN on lesions")


def few_decoys_network(cohorts: Sequence[Cohort], seed: int = 0) -> Answer:
    """Learns every kind of decoy, each from 30 people of its own."""
    parts = []
    for number, cohort in enumerate(cohorts):
        train, member = cohort.indices("train"), _member(cohort)[:, None]
        chosen = _some_people(train, member[train], FEW_PEOPLE)
        parts.append(_read(cohort, chosen, member, number, len(cohorts), cells=False))
    return train_small(LabelledScans.joined(parts), FEW_UPDATES, seed, "CNN on decoys")


def lesions_ceiling(main: Cohort, answer: Answer, labels: int | None) -> Iterator[Finding | LeftOut]:
    """Whole eyes by a network that learned from `labels` people (None: ample): AUROC of each lesion, and their mean."""
    test = main.indices("test")
    truth = {
        name: main.lesions[:, number]
        for number, name in enumerate(LESIONS)
        if too_few_to_test(main.lesions[test, number]) is None
    }
    if truth:
        opened = open_eyes(main, "eye_lesion", truth, "binary", [f"{SUPERVISED} {labels}"])
        logits = scores(answer, LabelledScans.read(main, test, main.lesions[test]))
    parts: dict[str, Estimate] = {}
    for number, name in enumerate(LESIONS):
        reason = too_few_to_test(main.lesions[test, number]) or opened.left_out.get(name)
        if reason is not None:
            yield LeftOut("eye_lesion", f"auroc_{name}", labels, reason)
            continue
        parts[name] = opened.auroc(name, [logits[:, number]])
        yield Finding("eye_lesion", f"auroc_{name}", labels, parts[name])
    yield lesions_mean("eye_lesion", "auroc", labels, parts, len(test))


def decoys_ceiling(cohorts: Sequence[Cohort], answer: Answer, labels: int | None) -> Iterator[Finding | LeftOut]:
    """Pairs by one network for all kinds of lesions; each kind is tested on its pairs only."""
    found: list[Finding] = []
    for number, cohort in enumerate(cohorts):
        test, member = cohort.indices("test"), _member(cohort)
        reason = too_few_to_test(member[test])
        if reason is not None:
            yield LeftOut("decoys", f"auroc_{cohort.name}", labels, reason)
            continue
        opened = open_eyes(cohort, "decoys", {cohort.name: member}, "binary", [f"{SUPERVISED} {labels}"])
        logits = scores(answer, LabelledScans.read(cohort, test, member[test, None]))[:, number]
        value = opened.auroc(cohort.name, [logits])
        found.append(Finding("decoys", f"auroc_{cohort.name}", labels, value))
    yield from found
    yield macro(found, "decoys", "auroc", labels, [f"auroc_{cohort.name}" for cohort in cohorts])


def _member(cohort: Cohort) -> Bool[np.ndarray, " V"]:
    """Whether an eye of a cohort of decoys has the lesion."""
    return cohort.column("decoy_member") == 1


def _read(
    cohort: Cohort,
    volumes: Int[np.ndarray, " n"],
    truth: Bool[np.ndarray, "V q"],
    first: int,
    questions: int,
    cells: bool,
) -> LabelledScans:
    """Volumes with the answers `truth` to the questions from number `first` on; the others are not asked."""
    answers = np.full((len(volumes), questions), np.nan, np.float32)
    answers[:, first : first + truth.shape[1]] = truth[volumes]
    return LabelledScans.read(cohort, volumes, answers, cells)


def _some_people(
    candidates: Int[np.ndarray, " n"], has: Bool[np.ndarray, "n questions"], count: int
) -> Int[np.ndarray, " count"]:
    """`count` volumes, an equal share of them with each answer as far as there are so many."""
    rng = keys.generator("exam ceiling people", count)
    wanted: list[int] = []
    each = count // (2 if has.shape[1] == 1 else has.shape[1] + 1)
    for question in range(has.shape[1]):
        wanted += rng.permutation(candidates[has[:, question]])[:each].tolist()
    wanted += rng.permutation(candidates[~has.any(axis=1)]).tolist()
    return np.array(list(dict.fromkeys(wanted))[:count])
