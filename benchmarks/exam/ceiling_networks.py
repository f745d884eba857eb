"""The networks of the ceiling: one that learns where lesions are, and a small one for few labels of whole eyes."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from octjepa import keys
from octjepa.phantom import LESIONS

from .labelled_scans import LabelledScans
from .supervised_loop import train_on_batches
from .truth import CELL

_ROWS = (16, 112)  # depth indices that LesionMapNet sees: from 0.54 mm above Bruch's membrane to 0.2 mm below
_TOP = (1, 8, 64)  # highest cells of a map whose mean says whether the eye has the lesion
_BATCH = 16
_RATE, _SMALL_RATE = 3e-3, 1e-3
_FULL = 0.25  # share of a cell that is lesion at which the cell counts as wholly so


def _convolution(before: int, after: int, kernel: tuple[int, int, int] = (1, 3, 3), stride: int = 1) -> nn.Sequential:
    """With batch norm and ReLU; the stride is along depth and columns."""
    padding = (kernel[0] // 2, kernel[1] // 2, kernel[2] // 2)
    return nn.Sequential(
        nn.Conv3d(before, after, kernel, stride=(1, stride, stride), padding=padding, bias=False),
        nn.BatchNorm3d(after),
        nn.ReLU(),
    )


class _Residual(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Float[Tensor, "b c d h w"]) -> Float[Tensor, "b c d h w"]:
        return x + self.inner(x)


class LesionMapNet(nn.Module):
    """Maps of every lesion by cell, and answers about the eye from the highest cells of each map and two levels.

    Three levels, of 4 x 2, 8 x 4 and 16 x 8 voxels of a B-scan; the coarsest joins neighbouring slices. Depth has a
    learned embedding. A fourth level has no depth: the maxima over depth in cells of 0.36 x 0.38 mm, seen from above,
    where one row of bumps is told from bumps here and there. The last two are added back to the second, which gives
    the maps (a feature pyramid).
    """

    def __init__(self, questions: int, width: int = 16, maps: int = len(LESIONS)) -> None:
        super().__init__()
        self.fine = nn.Sequential(_convolution(8, width), _Residual(_convolution(width, width)))
        self.middle = _convolution(width, 2 * width, stride=2)
        self.depth = nn.Parameter(torch.zeros(2 * width, 1, (_ROWS[1] - _ROWS[0]) // CELL[1], 1))
        self.deeper = _Residual(_convolution(2 * width, 2 * width))
        self.coarse = nn.Sequential(
            _convolution(2 * width, 4 * width, stride=2),
            _Residual(_convolution(4 * width, 4 * width, (3, 1, 1))),
            _Residual(_convolution(4 * width, 4 * width)),
        )
        self.above = nn.Sequential(
            _convolution(6 * width, 4 * width, (1, 1, 1)),
            *(_Residual(_convolution(4 * width, 4 * width, (3, 1, 3))) for _ in range(3)),
        )
        self.back = nn.ModuleList([nn.Conv3d(4 * width, 2 * width, 1) for _ in range(2)])
        self.joined = _Residual(_convolution(2 * width, 2 * width))
        self.maps = nn.Conv3d(2 * width, maps, 1)
        pooled = maps * (len(_TOP) + 1) + 16 * width
        self.answer = nn.Sequential(nn.BatchNorm1d(pooled), nn.Linear(pooled, questions))

    def forward(
        self, views: Float[Tensor, "b d h w"]
    ) -> tuple[Float[Tensor, "b maps d p q"], Float[Tensor, "b questions"]]:
        tall = views[:, :, _ROWS[0] : _ROWS[1]]
        batch, depth, height, width = tall.shape
        x = tall.reshape(batch, depth, height // 4, 4, width // 2, 2).permute(0, 3, 5, 1, 2, 4)
        x = x.reshape(batch, 8, depth, height // 4, width // 2).contiguous(memory_format=torch.channels_last_3d)
        x = self.deeper(self.middle(self.fine(x)) + self.depth)  # [b, 2 width, d, h / 8, w / 4]
        y = self.coarse(x)  # [b, 4 width, d, h / 16, w / 8]
        pairs = x.amax(dim=3, keepdim=True).unflatten(4, (-1, 2)).amax(dim=5)
        z = self.above(torch.cat([pairs, y.amax(dim=3, keepdim=True)], dim=1))  # [b, 4 width, d, 1, w / 8]
        context = self.back[0](y).repeat_interleave(2, dim=3) + self.back[1](z)
        maps = self.maps(self.joined(x + context.repeat_interleave(2, dim=4)))
        cells = maps.flatten(2)
        highest = cells.topk(max(_TOP), dim=2).values
        pooled = [highest[:, :, :count].mean(dim=2) for count in _TOP]
        pooled.append(cells.sigmoid().mean(dim=2).clamp(min=1e-6).log())
        pooled += [pool(level, dim=(2, 3, 4)) for level in (y, z) for pool in (torch.mean, torch.amax)]
        return maps, self.answer(torch.cat(pooled, dim=1))

    def answers(self, views: Float[Tensor, "b d h w"]) -> Float[Tensor, "b questions"]:
        """The mean over the views and their mirror images along slices and columns."""
        mirrored = (views, views.flip(1), views.flip(3), views.flip(1, 3))
        logits: Tensor = torch.stack([self(one)[1] for one in mirrored]).mean(dim=0)
        return logits


def train_maps(scans: LabelledScans, updates: int, seed: int, what: str, rate: float = _RATE) -> LesionMapNet:
    """A network trained for `updates` on the cells of each lesion and on the answers that are known.

    Each loss is a binary cross-entropy in units of what a constant answer has, so that a rare lesion counts as much as
    a frequent one; maps and answers count alike, and so does every question. The rate follows half a cosine after a
    warm-up of a twentieth.
    """
    targets = np.mean([np.minimum(cells / (255 * _FULL), 1).mean(axis=(1, 2, 3)) for cells in scans.cells], axis=0)
    entropy = _entropy(targets)
    torch.manual_seed(seed)
    net = LesionMapNet(scans.answers.shape[1])
    assert net.maps.bias is not None
    net.maps.bias.data = torch.from_numpy(targets).logit(1e-4).float()
    rows = slice(_ROWS[0] // CELL[1], _ROWS[1] // CELL[1])
    rng = keys.generator("exam ceiling maps", seed, updates)

    def loss(which: list[int]) -> Tensor:
        views, shares = scans.views_with_cells(which, rng)
        maps, logits = net(views)
        wanted = (shares[:, :, :, rows] / _FULL).clamp(max=1)
        by_lesion = nn.functional.binary_cross_entropy_with_logits(maps, wanted, reduction="none")
        of_maps = (by_lesion.mean(dim=(0, 2, 3, 4)) / entropy).mean()
        by_eye, known = _loss_of_answers(logits, scans.answers[which])
        by_question = by_eye.sum(dim=0) / known.sum(dim=0).clamp(min=1)
        return of_maps + by_question.mean() / math.log(2)

    train_on_batches(net, loss, len(scans.answers), _BATCH, updates, rate, rng, what)
    return net


def _loss_of_answers(
    logits: Float[Tensor, "b questions"],
    answers: Float[np.ndarray, "b questions"],
    weight: Float[Tensor, " questions"] | None = None,
) -> tuple[Float[Tensor, "b questions"], Bool[Tensor, "b questions"]]:
    """(binary cross-entropy, 0 where an answer is not known; whether it is known). `weight`: of a yes."""
    truth = torch.from_numpy(answers)
    known = ~truth.isnan()
    loss = nn.functional.binary_cross_entropy_with_logits(
        logits, truth.nan_to_num(0.0), reduction="none", pos_weight=weight
    )
    return loss * known, known


def _entropy(share: Float[np.ndarray, " n"]) -> Float[Tensor, " n"]:
    inside = np.clip(share, 1e-4, 1 - 1e-4)
    return torch.from_numpy(-(inside * np.log(inside) + (1 - inside) * np.log(1 - inside)).astype(np.float32))


class SmallNet(nn.Module):
    """Four strided convolutions, then mean and maximum over the volume, then one logit for each question."""

    def __init__(self, questions: int, width: int = 16) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        before = 1
        for after, stride in ((width, (1, 2, 2)), (2 * width, 2), (4 * width, 2), (8 * width, 2)):
            layers += [
                nn.Conv3d(before, after, 3, stride=stride, padding=1, bias=False),
                nn.BatchNorm3d(after),
                nn.ReLU(),
            ]
            before = after
        self.body = nn.Sequential(*layers)
        self.head = nn.Linear(2 * before, questions)

    def forward(self, views: Float[Tensor, "b d h w"]) -> Float[Tensor, "b questions"]:
        maps = self.body(views[:, None])
        logits: Tensor = self.head(torch.cat([maps.mean(dim=(2, 3, 4)), maps.amax(dim=(2, 3, 4))], dim=1))
        return logits


def train_small(scans: LabelledScans, updates: int, seed: int, what: str) -> SmallNet:
    """A network trained for `updates` on answers that are known, each question's classes weighted to be equal."""
    torch.manual_seed(seed)
    net = SmallNet(scans.answers.shape[1])
    net = net.to(memory_format=torch.channels_last_3d)  # type: ignore[call-overload]  # its stubs know 2D alone
    share = np.nanmean(scans.answers, axis=0)
    weight = torch.from_numpy(np.clip((1 - share) / np.maximum(share, 1e-6), 0.05, 20).astype(np.float32))
    rng = keys.generator("exam ceiling", seed, updates)

    def loss(which: list[int]) -> Tensor:
        by_eye, known = _loss_of_answers(net(scans.views(which, rng)), scans.answers[which], weight)
        return by_eye.sum().div(known.sum())

    train_on_batches(net, loss, len(scans.answers), _BATCH, updates, _SMALL_RATE, rng, what)
    return net


@torch.inference_mode()
def scores(answer: Callable[[Tensor], Tensor], scans: LabelledScans) -> Float[np.ndarray, "n ..."]:
    """Logits, or whatever `answer` gives, of the centred views."""
    count = len(scans.pixels)
    parts = [answer(scans.views(range(i, min(i + _BATCH, count)), None)) for i in range(0, count, _BATCH)]
    return torch.cat(parts).numpy()
