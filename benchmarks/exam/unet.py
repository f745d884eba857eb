"""A U-Net of its own for the fluid of one real eye: what the same CPU-seconds buy without an encoder."""

from __future__ import annotations

import time

import numpy as np
import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

_LR = 2e-3
_SHIFT = 8  # voxels of depth and columns, at most
_LIGHT = 0.2  # standard deviation of gain and offset, in units of the tissue's


class UNet(nn.Module):
    """Three levels on single B-scans with skip connections (Ronneberger et al. 2015), small."""

    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.down = nn.ModuleList(
            [_convolutions(1, width), _convolutions(width, 2 * width), _convolutions(2 * width, 4 * width)]
        )
        self.up = nn.ModuleList([_convolutions(6 * width, 2 * width), _convolutions(3 * width, width)])
        self.head = nn.Conv2d(width, 1, 1)

    def forward(self, x: Float[Tensor, "b 1 h w"]) -> Float[Tensor, "b 1 h w"]:
        skips = []
        for level, block in enumerate(self.down):
            x = block(x if level == 0 else nn.functional.max_pool2d(x, 2))
            skips.append(x)
        for block, skip in zip(self.up, skips[-2::-1], strict=True):
            larger = nn.functional.interpolate(x, scale_factor=2, mode="bilinear")
            x = block(torch.cat([larger, skip], dim=1))
        logits: Tensor = self.head(x)
        return logits


def _convolutions(before: int, after: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(before, after, 3, padding=1),
        nn.GroupNorm(4, after),
        nn.ReLU(),
        nn.Conv2d(after, after, 3, padding=1),
        nn.GroupNorm(4, after),
        nn.ReLU(),
    )


def train_unet(
    images: Float[np.ndarray, "n h w"],
    fluid: Bool[np.ndarray, "n h w"],
    graded: Bool[np.ndarray, "n h w"],
    cpu_seconds: float,
    seed: int,
) -> UNet:
    """Trained on all B-scans at once for `cpu_seconds` of this process, its rate falling to 0 by half a cosine.

    The loss is cross-entropy and soft Dice (Milletari et al. 2016), of graded voxels alone. B-scans are mirrored,
    shifted, and changed in gain and offset.
    """
    torch.manual_seed(seed)
    net = UNet()
    optimizer = torch.optim.AdamW(net.parameters(), lr=_LR)
    parts = [torch.from_numpy(part.astype(np.float32))[:, None] for part in (images, fluid, graded)]
    started = time.process_time()
    while (spent := (time.process_time() - started) / cpu_seconds) < 1:
        for group in optimizer.param_groups:
            group["lr"] = _LR * (1 + np.cos(np.pi * spent)) / 2
        image, wanted, known = shift_and_mirror(*parts)
        light = _LIGHT * torch.randn(2, len(image), 1, 1, 1)
        logits = net(image * (1 + light[0]) + light[1])
        chance = torch.sigmoid(logits) * known
        soft_dice = 1 - (2 * (chance * wanted).sum() + 1) / (chance.sum() + (wanted * known).sum() + 1)
        (soft_dice + nn.functional.binary_cross_entropy_with_logits(logits, wanted, known)).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    return net.eval()


def shift_and_mirror(*parts: Float[Tensor, "n 1 h w"]) -> list[Float[Tensor, "n 1 h w"]]:
    """All parts alike: mirrored along the columns or not, and shifted by a few voxels."""
    down, right = (int(torch.randint(-_SHIFT, _SHIFT + 1, ())) for _ in range(2))
    mirrored = bool(torch.rand(()) < 0.5)
    moved = [torch.roll(part, (down, right), (2, 3)) for part in parts]
    return [torch.flip(part, [3]) for part in moved] if mirrored else moved
