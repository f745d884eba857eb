"""Runs the segmentation network on B-scans with their neighbours, and adapts its batch normalisation to a scan.

Batch normalisation may use statistics of the scan itself, which moves a network that was trained on phantoms towards
the contrast of this scan without any label (Schneider et al. 2020, "Improving robustness against common corruptions by
covariate shift adaptation").
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch
from jaxtyping import Float, UInt8
from torch import Tensor, nn
from torch.nn import functional

from octjepa.distributed.precision import inference_autocast
from octjepa.model.boundary_unet import STRIDE, NetworkSize

NEIGHBOUR_MM: Final = 0.3  # farther B-scans are not shown to the network; training had pitches of 0.03 to 0.4 mm
BATCH: Final = 8  # B-scans


@dataclass(frozen=True)
class Calibration:
    """Settings that were chosen on validation phantoms: see `octjepa.tasks.segmenter.calibrate`.

    `boundary_temperature` divides the logits of each boundary and `class_temperature` those of the classes;
    `fluid_threshold` is for the sum of the probabilities of intraretinal and subretinal fluid.
    `spread_factor` turns the standard deviation of a boundary's distribution into an expected absolute error.
    Raises ValueError for wrong values: a folder from a stranger may hold any, and NaN would hide all fluid.
    """

    boundary_temperature: tuple[float, ...] = (1.0,) * 8
    spread_factor: tuple[float, ...] = (1.0,) * 8
    class_temperature: float = 1.0
    fluid_threshold: float = 0.5
    sub_rpe_threshold: float = 0.5
    adapt: float = 0.0  # share of the scan's own statistics in batch normalisation
    flip: bool = True

    def __post_init__(self) -> None:
        temperatures = (*self.boundary_temperature, self.class_temperature)
        others = (*self.spread_factor, self.fluid_threshold, self.sub_rpe_threshold, self.adapt)
        is_valid = (
            len(self.boundary_temperature) == len(self.spread_factor) == NetworkSize().boundaries
            and all(math.isfinite(value) and value > 0 for value in temperatures)
            and all(math.isfinite(value) and value >= 0 for value in others)
            and self.adapt <= 1
            and isinstance(self.flip, bool)
        )
        if not is_valid:
            raise ValueError(f"not a calibration of a network with {NetworkSize().boundaries} boundaries: {self}")


def near_bscans(count: int, pitch_mm: float, positions_mm: np.ndarray | None, sparse: bool) -> np.ndarray:
    """`[D, 3]`: index of the previous B-scan, of the B-scan itself and of the next one; -1 for none that is near."""
    index = np.arange(count)
    near = np.stack([index - 1, index, index + 1], 1)
    near[near >= count] = -1
    steps = np.full(max(count - 1, 0), pitch_mm) if positions_mm is None else np.abs(np.diff(positions_mm))
    far = (steps > NEIGHBOUR_MM) | sparse
    near[1:, 0][far] = -1
    near[:-1, 2][far] = -1
    return near


def resampled(image: Float[Tensor, "1 1 H W"], shape: tuple[int, int]) -> Float[Tensor, "1 1 h w"]:
    """Area average when it shrinks, which also averages speckle, and linear interpolation when it grows."""
    return functional.interpolate(image, shape, mode="bilinear", antialias=True, align_corners=False)


def prepared_bscans(
    pixels: UInt8[np.ndarray, "D H W"],
    shape: tuple[int, int],
    clean: Callable[[Float[np.ndarray, "H W"]], Float[np.ndarray, "H W"]] | None = None,
) -> Float[Tensor, "D h w"]:
    """B-scans, each through `clean`, resampled to `shape`, standardised, padded to a multiple of the network's stride.

    One B-scan after the other: memory is that of the result.
    """
    out = torch.empty(len(pixels), *(-(-n // STRIDE) * STRIDE for n in shape))
    pad = (0, out.shape[2] - shape[1], 0, out.shape[1] - shape[0])
    for k, frame in enumerate(pixels):
        bscan = frame.astype(np.float32)
        bscan = bscan if clean is None else clean(bscan)
        image = resampled(torch.from_numpy(bscan)[None, None], shape)
        deviation, mean = torch.std_mean(image)
        image = (image - mean) / (deviation + 0.25)  # 1e-3 of the range, as in training
        out[k] = functional.pad(image, pad, mode="replicate")[0, 0]
    return out


def stack_neighbours(images: Float[Tensor, "D H W"], near: np.ndarray, index: np.ndarray) -> Float[Tensor, "N 3 H W"]:
    """The B-scans `index` with their neighbours by `near_bscans`; a missing neighbour is all zero."""
    chosen = near[index]
    out = images[torch.from_numpy(np.maximum(chosen, 0))]
    out[torch.from_numpy(chosen < 0)] = 0
    return out


def bscan_logits(network: nn.Module, stacked: Tensor, flip: bool) -> Float[Tensor, "N O H W"]:
    """Logits of prepared B-scans, optionally averaged with those of the mirrored B-scans."""
    with inference_autocast(stacked.device):
        logits = network(stacked.contiguous(memory_format=torch.channels_last)).float()
        if flip:
            mirrored = stacked.flip(3).contiguous(memory_format=torch.channels_last)
            logits = 0.5 * (logits + network(mirrored).float().flip(3))
    return logits


@contextmanager
def with_statistics(network: nn.Module, bscans: Iterable[Tensor], share: float) -> Iterator[nn.Module]:
    """The network with a `share` of the statistics of `bscans` `[N, 3, H, W]` in its batch normalisation."""
    if share <= 0:
        yield network
        return
    adapted = copy.deepcopy(network)
    norms = [module for module in adapted.modules() if isinstance(module, nn.BatchNorm2d)]
    before = [(norm.running_mean.clone(), norm.running_var.clone()) for norm in norms]  # type: ignore[union-attr]
    for norm in norms:
        norm.reset_running_stats()
        norm.train()
    seen = 0
    for batch in bscans:
        seen += len(batch)
        for norm in norms:
            norm.momentum = len(batch) / seen  # the mean over B-scans, also if the last batch is smaller
        bscan_logits(adapted, batch, flip=False)
    for norm, (mean, variance) in zip(norms, before, strict=True):
        norm.running_mean = (1 - share) * mean + share * norm.running_mean  # type: ignore[operator]
        norm.running_var = (1 - share) * variance + share * norm.running_var  # type: ignore[operator]
    yield adapted.eval()


def spread_bscans(images: Tensor, near: np.ndarray) -> Iterator[Tensor]:
    """At most 16 B-scans with their neighbours, evenly spread over the scan, in batches; none that is empty.

    Empty B-scans fill a volume up that is narrower than the grid. Statistics of them would depend on the field of view.
    """
    filled = np.flatnonzero((images.amax((1, 2)) > images.amin((1, 2))).cpu().numpy())
    filled = filled if len(filled) else np.arange(len(images))
    spread = filled[np.unique(np.linspace(0, len(filled) - 1, 16).astype(int))]
    for start in range(0, len(spread), BATCH):
        yield stack_neighbours(images, near, spread[start : start + BATCH])
