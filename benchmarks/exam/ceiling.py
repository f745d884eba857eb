"""The ceiling: a small 3D convolutional network trained on labels alone, with ample labels and with few.

It tells whether a task can be learned at all, and whether 30 labelled people are enough for it without an encoder.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from octjepa import keys
from octjepa.metrics.bootstrap import Draws, mean_estimate
from octjepa.phantom import DECOYS, LESIONS
from octjepa.progress import bar

from .cohorts import Cohort
from .lesion_tasks import auroc, measurable
from .measurement_tasks import macro
from .results import Finding
from .settings import RESAMPLES

_BATCH, _LR, _WEIGHT_DECAY = 16, 1e-3, 0.05
AMPLE_UPDATES, FEW_UPDATES, FEW_PEOPLE = 800, 200, 30


class SmallNet(nn.Module):
    """Four strided convolutions, then mean and maximum over the volume, then one logit for each question."""

    def __init__(self, questions: int, width: int = 16) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        before = 1
        for after, stride in ((width, (1, 2, 2)), (2 * width, 2), (4 * width, 2), (8 * width, 2)):
            layers += [
                nn.Conv3d(before, after, 3, stride=stride, padding=1, bias=False), nn.BatchNorm3d(after), nn.ReLU(),
            ]  # fmt: skip
            before = after
        self.body = nn.Sequential(*layers)
        self.head = nn.Linear(2 * before, questions)

    def forward(self, views: Float[Tensor, "b d h w"]) -> Float[Tensor, "b questions"]:
        maps = self.body(views[:, None])
        logits: Tensor = self.head(torch.cat([maps.mean(dim=(2, 3, 4)), maps.amax(dim=(2, 3, 4))], dim=1))
        return logits


@dataclass(frozen=True, eq=False)
class LabelledScans:
    """Stored volumes in memory with their answers; NaN where a question is not asked of a volume."""

    pixels: list[np.ndarray]
    scale: list[tuple[float, float]]  # mean and standard deviation of tissue
    answers: Float[np.ndarray, "n questions"]
    size: tuple[int, int, int]

    @classmethod
    def read(cls, cohort: Cohort, volumes: Int[np.ndarray, " n"], answers: np.ndarray) -> LabelledScans:
        """The volumes of a cohort; `answers` is [n, questions]."""
        scans = [cohort.store.read(cohort.ids[volume]) for volume in volumes]
        return cls(
            [scan.pixels for scan in scans], [(scan.tissue_mean, scan.tissue_std) for scan in scans],
            answers.astype(np.float32), cohort.store.preprocessing.image_size,
        )  # fmt: skip

    def __add__(self, other: LabelledScans) -> LabelledScans:
        answers = np.concatenate([self.answers, other.answers])
        return LabelledScans(self.pixels + other.pixels, self.scale + other.scale, answers, self.size)

    def views(self, which: Sequence[int], rng: np.random.Generator | None) -> Float[Tensor, "b d h w"]:
        """Centred, or cropped at random and mirrored along the slices with probability one half."""
        found = []
        for index in which:
            pixels, (mean, std) = self.pixels[index], self.scale[index]
            room = np.array(pixels.shape) - np.array(self.size)
            start = room // 2 if rng is None else rng.integers(0, (room + 1).astype(np.int64))
            view = pixels[tuple(slice(a, a + n) for a, n in zip(start, self.size, strict=True))]
            view = view[::-1] if rng is not None and rng.random() < 0.5 else view
            found.append((view.astype(np.float32) - mean) / max(std, 1.0))
        return torch.from_numpy(np.stack(found))


def train(scans: LabelledScans, updates: int, seed: int, what: str) -> SmallNet:
    """A network trained for `updates` on answers that are known, each question's classes weighted to be equal."""
    torch.manual_seed(seed)
    net = SmallNet(scans.answers.shape[1])
    net = net.to(memory_format=torch.channels_last_3d)  # type: ignore[call-overload]  # its stubs know 2D alone
    optimizer = torch.optim.AdamW(net.parameters(), lr=_LR, weight_decay=_WEIGHT_DECAY)
    share = np.nanmean(scans.answers, axis=0)
    weight = torch.from_numpy(np.clip((1 - share) / np.maximum(share, 1e-6), 0.05, 20).astype(np.float32))
    rng = keys.generator("exam ceiling", seed, updates)
    order: list[int] = []
    net.train()
    with bar(what, updates, "updates") as progress:
        for update in range(updates):
            if len(order) < _BATCH:
                order += rng.permutation(len(scans.answers)).tolist()
            which, order = order[:_BATCH], order[_BATCH:]
            answers = torch.from_numpy(scans.answers[which])
            known = ~answers.isnan()
            for group in optimizer.param_groups:
                group["lr"] = (
                    _LR * min(1.0, 20 * (update + 1) / updates) * (1 + math.cos(math.pi * update / updates)) / 2
                )
            logits = net(scans.views(which, rng))
            loss = nn.functional.binary_cross_entropy_with_logits(
                logits, answers.nan_to_num(0.0), reduction="none", pos_weight=weight
            )
            (loss * known).sum().div(known.sum()).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            progress.advance()
    return net.eval()


@torch.inference_mode()
def scores(net: SmallNet, scans: LabelledScans) -> Float[np.ndarray, "n questions"]:
    """Logits of the centred views."""
    count = len(scans.pixels)
    parts = [net(scans.views(range(i, min(i + _BATCH, count)), None)) for i in range(0, count, _BATCH)]
    return torch.cat(parts).numpy()


def lesions_ceiling(main: Cohort, pretraining: Cohort, ample: bool) -> Iterator[Finding]:
    """Task 2 by the network: from every labelled eye of the pretraining cohort, or from 30 people of the main one."""
    if ample:
        scans = LabelledScans.read(pretraining, np.arange(len(pretraining.ids)), pretraining.lesions)
    else:
        chosen = _some_people(main.indices("train"), main.lesions[main.indices("train")], FEW_PEOPLE)
        scans = LabelledScans.read(main, chosen, main.lesions[chosen])
    net = train(scans, AMPLE_UPDATES if ample else FEW_UPDATES, 0, "CNN on lesions")
    test = main.indices("test")
    logits = scores(net, LabelledScans.read(main, test, main.lesions[test]))
    draws, people = Draws(main.people[test].tolist(), RESAMPLES, 0), main.people[test]
    labels = None if ample else FEW_PEOPLE
    parts = []
    for number in measurable(main):
        parts.append(auroc(main.lesions[test, number], [logits[:, number]], draws, people, LESIONS[number]))
        yield Finding("eye_lesion", f"auroc_{LESIONS[number]}", labels, parts[-1])
    yield Finding("eye_lesion", "auroc", labels, mean_estimate(parts, len(test)))


def decoys_ceiling(cohorts: Sequence[Cohort], training: Sequence[Cohort], ample: bool) -> Iterator[Finding]:
    """Task 3 by one network for all kinds, each question asked of its own pairs alone."""
    together: LabelledScans | None = None
    for number, cohort in enumerate(training):
        member = cohort.column("decoy_member") == 1
        volumes = np.arange(len(cohort.ids)) if ample else _some_people(
            cohort.indices("train"), member[cohort.indices("train"), None], FEW_PEOPLE
        )  # fmt: skip
        answers = np.full((len(volumes), len(DECOYS)), np.nan)
        answers[:, number] = member[volumes]
        part = LabelledScans.read(cohort, volumes, answers)
        together = part if together is None else together + part
    assert together is not None
    net = train(together, AMPLE_UPDATES if ample else FEW_UPDATES, 0, "CNN on decoys")
    labels, found = None if ample else FEW_PEOPLE, []
    for number, cohort in enumerate(cohorts):
        test = cohort.indices("test")
        truth = cohort.column("decoy_member")[test] == 1
        logits = scores(net, LabelledScans.read(cohort, test, truth[:, None]))[:, number]
        people = cohort.people[test]
        draws = Draws(people.tolist(), RESAMPLES, 0)
        found.append(Finding("decoys", f"auroc_{cohort.name}", labels, auroc(truth, [logits], draws, people, "decoys")))
    yield from found
    mean = macro(found, "decoys", "auroc", labels)
    if mean is not None:
        yield mean


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
