"""A fully convolutional U-Net that finds layer boundaries and classes of voxels in B-scans.

In: normalised B-scans `[N, S, H, W]`, the B-scan itself in the middle of `S` (odd) neighbours; a missing neighbour is
all zero. Out: `[N, K + C, H, W]`: for each of K boundaries one logit per row, whose softmax over depth is the
distribution of the boundary in that column, and C class logits per voxel. H and W are multiples of 32.

Boundaries as distributions over depth come from He et al. (2019), "Fully convolutional boundary regression for retina
OCT segmentation". The stem halves the resolution by pixel-unshuffle and the head restores it by pixel-shuffle, so
that boundaries keep the full grid and the convolutions cost a quarter.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional

STRIDE: Final = 32  # height and width of the input are multiples of it
_DECODE_ROWS: Final = 4  # reach of the local soft-argmax


@dataclass(frozen=True)
class NetworkSize:
    """Slices of the input, boundaries and classes of the output, and channels of the five levels."""

    slices: int = 3
    boundaries: int = 8
    classes: int = 4
    widths: tuple[int, ...] = (32, 64, 128, 160, 192)


class BoundaryUNet(nn.Module):
    """The network of `octjepa segment`; about 2.7 million parameters in its default size."""

    def __init__(self, size: NetworkSize | None = None) -> None:
        super().__init__()
        self.size = size or NetworkSize()
        widths = self.size.widths
        self.stem = nn.Conv2d(4 * self.size.slices, widths[0], 3, padding=1)
        self.down = nn.ModuleList(
            _two_convolutions(a, b) for a, b in zip((widths[0], *widths[:-1]), widths, strict=True)
        )
        self.up = nn.ModuleList(
            _two_convolutions(widths[k] + widths[k - 1], widths[k - 1]) for k in range(len(widths) - 1, 0, -1)
        )
        self.head = nn.Conv2d(widths[0], 4 * (self.size.boundaries + self.size.classes), 1)

    def forward(self, bscans: Float[Tensor, "N S H W"]) -> Float[Tensor, "N O H W"]:
        """Logits of boundaries, then of classes."""
        x = self.stem(functional.pixel_unshuffle(bscans, 2))
        levels = []
        for k, block in enumerate(self.down):
            x = block(functional.max_pool2d(x, 2) if k else x)
            levels.append(x)
        for block, skip in zip(self.up, reversed(levels[:-1]), strict=True):
            x = block(torch.cat([functional.interpolate(x, scale_factor=2.0, mode="nearest"), skip], 1))
        return functional.pixel_shuffle(self.head(x), 2)


def _two_convolutions(inputs: int, outputs: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for channels in (inputs, outputs):
        layers += [
            nn.Conv2d(channels, outputs, 3, padding=1, bias=False),
            nn.BatchNorm2d(outputs),
            nn.ReLU(inplace=True),
        ]
    return nn.Sequential(*layers)


def boundary_loss(logits: Float[Tensor, "N K H W"], boundaries: Float[Tensor, "N K W"]) -> Float[Tensor, ""]:
    """Cross-entropy against a Gaussian of 0.8 rows plus a small absolute error of the mean row.

    `boundaries` holds fractional rows, NaN where unknown; rows outside the image count as unknown.
    """
    rows = logits.shape[2]
    is_labelled = torch.isfinite(boundaries) & (boundaries >= 0) & (boundaries <= rows - 1)
    target = torch.where(is_labelled, boundaries, torch.zeros_like(boundaries))
    row = torch.arange(rows, device=logits.device, dtype=torch.float32).view(1, 1, rows, 1)
    log_p = functional.log_softmax(logits.float(), dim=2)
    gauss = torch.exp(-0.5 * ((row - target[:, :, None]) / 0.8) ** 2)
    gauss = gauss / gauss.sum(2, keepdim=True)
    weight = is_labelled.float() / is_labelled.sum().clamp(min=1)
    cross_entropy = -((gauss * log_p).sum(2) * weight).sum()
    mean_row = (log_p.exp() * row).sum(2)
    absolute = ((mean_row - target).abs().clamp(max=20) * weight).sum()
    return cross_entropy + 0.05 * absolute


def segmentation_loss(
    logits: Float[Tensor, "N O H W"],
    boundaries: Float[Tensor, "N K W"],
    classes: Int[Tensor, "N H W"],
    graded: Float[Tensor, "N W"],
) -> tuple[Float[Tensor, ""], Float[Tensor, ""]]:
    """Losses of boundaries and classes.

    `boundaries` is as in `boundary_loss`. `graded` is 1 for columns whose classes are known. The class loss is
    cross-entropy plus soft Dice of fluid and of sub-RPE material.
    """
    count, rows = boundaries.shape[1], logits.shape[2]
    log_c = functional.log_softmax(logits[:, count:].float(), dim=1)
    voxel = functional.nll_loss(log_c, classes, reduction="none") * graded[:, None]
    loss = voxel.sum() / (graded.sum() * rows).clamp(min=1)
    p = log_c.exp() * graded[:, None, None]
    for members in ((1, 2), (3,)):
        truth = torch.stack([classes == member for member in members]).any(0) * graded[:, None]
        predicted = torch.stack([p[:, member] for member in members]).sum(0)
        overlap, total = (predicted * truth).sum(), predicted.sum() + truth.sum()
        loss = loss + 0.25 * (1 - (2 * overlap + 1) / (total + 1))
    return boundary_loss(logits[:, :count], boundaries), loss


@dataclass(frozen=True, eq=False)
class Decoded:
    """Decoded boundaries: fractional rows, ordered from above, and the standard deviation of each distribution."""

    rows: Float[Tensor, "N K W"]
    spread_rows: Float[Tensor, "N K W"]


def decode_boundaries(logits: Float[Tensor, "N K H W"], temperature: float | Float[Tensor, " K"] = 1.0) -> Decoded:
    """The row of each boundary: the mean of the distribution within four rows of its mode, made ordered from above.

    The mode ignores mass elsewhere, for instance at a neighbouring layer; the mean gives the fraction of a row. The
    spread is that of the whole distribution after division of the logits by `temperature`.
    """
    scale = torch.as_tensor(temperature, device=logits.device, dtype=torch.float32).view(1, -1, 1, 1)
    p = torch.softmax(logits.float() / scale, dim=2)
    rows = torch.arange(p.shape[2], device=p.device, dtype=torch.float32).view(1, 1, -1, 1)
    mode = p.argmax(2, keepdim=True)
    near = p * ((rows - mode).abs() <= _DECODE_ROWS)
    positions = (near * rows).sum(2) / near.sum(2)
    mean = (p * rows).sum(2)
    # The difference of the mean of squares and the squared mean would lose a sharp distribution deep in the image.
    spread = (p * (rows - mean[:, :, None]) ** 2).sum(2).sqrt()
    return Decoded(torch.cummax(positions, 1).values, spread)
