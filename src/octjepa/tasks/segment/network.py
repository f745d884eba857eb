"""The decoder's network: a small U-Net of the voxels, into whose lowest level the tokens come.

After UNETR (Hatamizadeh et al. 2022) and the U-Net (Ronneberger et al. 2015). B-scans lie farther apart than voxels
within one, so resolution falls only within B-scans. Only the lowest level, at a quarter of the resolution, looks across
B-scans.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn


class Decoder(nn.Module):
    """Tokens of b windows, and these z-scored [b, 1, d, h, w], to scores of the classes, background first.

    The number of tokens differs by window; `index` is the position of each in the raster order of `grid`. Grid
    positions without a token hold a learned vector. Scores are zero before the first update.
    """

    def __init__(self, dim: int, grid: tuple[int, int, int], channels: int, classes: int) -> None:
        super().__init__()
        self.grid = grid
        self.missing = nn.Parameter(torch.zeros(dim))
        self.squeeze = nn.Conv3d(dim, 4 * channels, 1)
        self.down1 = nn.Sequential(_within_bscans(1, channels), _within_bscans(channels, channels))
        self.down2 = nn.Sequential(_within_bscans(channels, 2 * channels), _within_bscans(2 * channels, 2 * channels))
        self.down3 = _across_bscans(2 * channels, 4 * channels)
        self.up3 = _across_bscans(8 * channels, 2 * channels)
        self.up2 = _within_bscans(4 * channels, channels)
        self.up1 = _within_bscans(2 * channels, channels)
        self.output = nn.Conv2d(channels, classes, 1)
        nn.init.zeros_(self.output.weight)
        nn.init.zeros_(self.output.bias)  # type: ignore[arg-type]

    def forward(
        self,
        features: Sequence[Float[Tensor, "_ dim"]],
        index: Sequence[Int[Tensor, " _"]],
        image: Float[Tensor, "b 1 d h w"],
    ) -> Float[Tensor, "b classes d h w"]:
        windows = len(image)
        # Channels last: on a CPU an update of these convolutions takes two thirds of the time.
        x1 = self.down1(_to_bscans(image).contiguous(memory_format=torch.channels_last))
        x2 = self.down2(F.max_pool2d(x1, 2))
        x3 = self.down3(_to_volumes(F.max_pool2d(x2, 2), windows))
        tokens = F.interpolate(self.squeeze(self._on_grid(features, index)), x3.shape[2:], mode="trilinear")
        up = _to_bscans(self.up3(torch.cat([tokens, x3], dim=1)))
        up = self.up2(torch.cat([_resized(up, x2), x2], dim=1))
        up = self.up1(torch.cat([_resized(up, x1), x1], dim=1))
        return _to_volumes(self.output(up), windows)

    def _on_grid(
        self, features: Sequence[Float[Tensor, "_ dim"]], index: Sequence[Int[Tensor, " _"]]
    ) -> Float[Tensor, "b dim gd gh gw"]:
        empty = self.missing.expand(math.prod(self.grid), -1)
        tokens = torch.stack(
            [
                empty.scatter(0, at[:, None].expand(-1, feature.shape[-1]), feature)
                for feature, at in zip(features, index, strict=True)
            ]
        )
        return tokens.transpose(1, 2).unflatten(2, self.grid)


def _within_bscans(inputs: int, outputs: int) -> nn.Sequential:
    block = nn.Sequential(nn.Conv2d(inputs, outputs, 3, padding=1), *_norm(outputs))
    return block.to(memory_format=torch.channels_last)  # type: ignore[call-overload]


def _across_bscans(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(nn.Conv3d(inputs, outputs, 3, padding=1), *_norm(outputs))


def _norm(channels: int) -> tuple[nn.Module, nn.Module]:
    return nn.GroupNorm(math.gcd(4, channels), channels), nn.ReLU()


def _to_bscans(x: Float[Tensor, "b c d h w"]) -> Float[Tensor, "b*d c h w"]:
    return x.transpose(1, 2).flatten(0, 1)


def _to_volumes(x: Float[Tensor, "bd c h w"], windows: int) -> Float[Tensor, "{windows} c d h w"]:
    return x.unflatten(0, (windows, -1)).transpose(1, 2).contiguous()


def _resized(x: Float[Tensor, "bd c _h _w"], like: Float[Tensor, "bd _c h w"]) -> Float[Tensor, "bd c h w"]:
    return F.interpolate(x, like.shape[2:], mode="bilinear")
