"""B-scans as the images that a network for pictures takes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor
from torch.utils.checkpoint import checkpoint

IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
_B_SCANS_AT_ONCE = 16


@dataclass(frozen=True)
class ImageFormat:
    """size: (height, width) in pixels; mean and std: of intensities 0..1, one for each channel or one for all."""

    size: tuple[int, int]
    channels: int
    mean: Sequence[float]
    std: Sequence[float]

    def prepare(self, b_scans: Float[Tensor, "n h w"]) -> Float[Tensor, "n c h2 w2"]:
        """B-scans of intensities 0..1, resized, with one intensity in every channel, normalised."""
        images = F.interpolate(b_scans[:, None], self.size, mode="bilinear", align_corners=False, antialias=True)
        images = images.expand(-1, self.channels, -1, -1)
        mean, std = (
            torch.as_tensor(value, dtype=images.dtype, device=images.device) for value in (self.mean, self.std)
        )
        if mean.numel() not in (1, self.channels):
            mean, std = mean.mean(), std.mean()  # one channel of weights that were averaged over colours
        normalised: Tensor = (images - mean.reshape(-1, 1, 1)) / std.reshape(-1, 1, 1)
        return normalised

    def encode(self, view: Float[Tensor, "d h w"], network: Callable[[Tensor], Tensor]) -> Float[Tensor, "k dim"]:
        """Tokens of all B-scans, slice after slice, by a `network` that maps images to tokens `[n, t, dim]`."""
        batches = [self.prepare(b_scans) for b_scans in view.split(_B_SCANS_AT_ONCE)]
        if torch.is_grad_enabled():  # activations of 16 B-scans are stored at a time, those of the others recomputed
            tokens = [checkpoint(network, images, use_reentrant=False) for images in batches]
        else:
            tokens = [network(images) for images in batches]
        return torch.cat([of_batch.flatten(0, 1) for of_batch in tokens])
