"""Answers from the arrangement of what a network found: its lesion maps seen from above, read by a small 2D network.

Decoys are matched in number and height of what a map shows, so its highest cells are the same in both members: drusen
lie here and there, the ridges of a wave in rows a millimetre apart. Only their arrangement differs, and 400 eyes of a
kind are too few for a network of volumes to learn it by the way: with the answers of `LesionMapNet` alone, cyst or
thinning read 0.64 and drusen or wave 0.51. A map from above is 16 x 32 cells, and costs a thousandth of the volume.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn

from octjepa import keys

from .supervised_loop import train_on_batches

_BATCH, _EPOCHS, _RATE, _WARM_UP_PART = 40, 60, 3e-3, 5
_SHIFT = (1, 3)  # cells of slices and columns, at most


class MapHead(nn.Module):
    """Four convolutions over the maps from above, then mean and maximum, then one logit."""

    def __init__(self, channels: int, width: int = 24) -> None:
        super().__init__()
        wide = 4 * width // 3
        self.body = nn.Sequential(
            _convolution(channels, width),
            _convolution(width, width),
            nn.MaxPool2d((1, 2)),
            _convolution(width, wide),
            _convolution(wide, wide),
        )
        self.drop = nn.Dropout(0.3)
        self.answer = nn.Linear(2 * wide, 1)

    def forward(self, above: Float[Tensor, "b channels d q"]) -> Float[Tensor, " b"]:
        found = self.body(above)
        pooled = torch.cat([found.mean(dim=(2, 3)), found.amax(dim=(2, 3))], dim=1)
        logits: Tensor = self.answer(self.drop(pooled))[:, 0]
        return logits


def from_above(maps: Float[Tensor, "b maps d p q"]) -> Float[Tensor, "b channels d q"]:
    """The highest logit of each A-scan, and how many cells of it are lesion, for every map."""
    return torch.cat([maps.amax(dim=3).clamp(-8, 6) / 4, maps.sigmoid().sum(dim=3)], dim=1)


def train_head(above: Float[Tensor, "n channels d q"], answers: Float[Tensor, " n"], seed: int, what: str) -> MapHead:
    """A head trained on the maps of eyes whose answers are known, mirrored and shifted by a few cells."""
    torch.manual_seed(seed)
    head = MapHead(above.shape[1])
    rng = keys.generator("exam ceiling head", seed, what)

    def loss(which: list[int]) -> Tensor:
        mirrored = [axis for axis in (2, 3) if rng.random() < 0.5]
        shift = [int(rng.integers(-most, most + 1)) for most in _SHIFT]
        logits = head(torch.roll(above[which].flip(mirrored), shift, (2, 3)))
        return nn.functional.binary_cross_entropy_with_logits(logits, answers[which])

    updates = _EPOCHS * (len(above) // _BATCH)
    train_on_batches(head, loss, len(above), _BATCH, updates, _RATE, rng, what, _WARM_UP_PART)
    return head


def _convolution(before: int, after: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(before, after, 3, padding=1, bias=False), nn.BatchNorm2d(after), nn.ReLU())
