"""Validation of the segmentation network on phantoms that were not trained on, and calibration of its outputs.

The validation phantoms have other seeds and other randomisation ranges than the training phantoms. Nothing here reads a
real eye: the threshold and the temperatures that ship are chosen on phantoms only.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Final

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from octjepa.distributed.precision import inference_autocast
from octjepa.model.boundary_unet import decode_boundaries
from octjepa.phantom.random_scene import AS_IS, SHIFTED, draw_scene
from octjepa.tasks.segmenter.image_formation import ROW_UM, Batch, Draws, form_batch
from octjepa.tasks.segmenter.scene_pool import ScenePool

VALIDATION_SEED: Final = 90_001
_RANGES: Final = (SHIFTED, SHIFTED, SHIFTED, AS_IS)
_SLICES: Final = 3
_BATCH: Final = 16
_GRID: Final = np.linspace(0.02, 0.98, 49)


@dataclass(frozen=True)
class ValidationResult:
    """Errors in um per boundary, and Dice of fluid at 0.5 and at the best threshold; `sub_rpe_dice` at 0.5."""

    boundary_um: tuple[float, ...]
    mean_um: float
    dice: float
    best_dice: float
    best_threshold: float
    average_precision: float
    sub_rpe_dice: float

    def as_dict(self) -> dict[str, object]:
        """For a line of JSON."""
        return asdict(self)


def validation_batches(count: int, device: torch.device, seed: int = VALIDATION_SEED) -> list[Batch]:
    """Fixed images of the middle B-scans of `count` validation phantoms."""
    pool = ScenePool(count, _SLICES, torch.device("cpu"))
    pool.add([draw_scene(seed, k, _RANGES[k % len(_RANGES)], _SLICES) for k in range(count)])
    draws = Draws(seed, torch.device("cpu"))
    batches = []
    for start in range(0, count, _BATCH):
        scene = np.arange(start, min(start + _BATCH, count))
        batch = form_batch(pool.gather(scene, np.full(len(scene), 1)), draws, augment=False)
        batches.append(Batch(*(getattr(batch, name).to(device) for name in Batch.__dataclass_fields__)))
    return batches


def validate(network: nn.Module, batches: list[Batch]) -> ValidationResult:
    """Metrics of `network` on `batches`. The network is in evaluation mode during the call."""
    errors: list[Tensor] = []
    scores, truths, sub_rpe = [], [], np.zeros(3)
    for logits, batch in predictions(network, batches):
        decoded = decode_boundaries(logits[:, :8])
        error = (decoded.rows - batch.boundaries).abs()
        inside = torch.isfinite(error) & (batch.boundaries >= 0) & (batch.boundaries < logits.shape[2])
        errors.append(torch.where(inside, error, torch.nan).cpu())
        p = torch.softmax(logits[:, 8:], 1)
        graded = (batch.graded > 0)[:, None].expand_as(batch.classes)
        scores.append((p[:, 1] + p[:, 2])[graded].cpu().numpy())
        truths.append(((batch.classes == 1) | (batch.classes == 2))[graded].cpu().numpy())
        marked, druse = (p[:, 3] >= 0.5) & graded, (batch.classes == 3) & graded
        sub_rpe += [(marked & druse).sum().item(), marked.sum().item(), druse.sum().item()]
    um = torch.cat([e.transpose(1, 2).reshape(-1, 8) for e in errors]).nanmean(0).numpy() * ROW_UM
    score, truth = np.concatenate(scores), np.concatenate(truths)
    dice = [dice_at(score, truth, threshold) for threshold in _GRID]
    best = int(np.argmax(dice))
    return ValidationResult(
        boundary_um=tuple(float(value) for value in um.round(2)),
        mean_um=round(float(um.mean()), 3),
        dice=round(dice_at(score, truth, 0.5), 4),
        best_dice=round(dice[best], 4),
        best_threshold=round(float(_GRID[best]), 3),
        average_precision=round(average_precision(score, truth), 4),
        sub_rpe_dice=round(float(2 * sub_rpe[0] / max(sub_rpe[1] + sub_rpe[2], 1)), 4),
    )


def predictions(network: nn.Module, batches: list[Batch]) -> list[tuple[Float[Tensor, "N O H W"], Batch]]:
    """Logits of every batch, float32."""
    mode = network.training
    network.eval()
    out = []
    with torch.inference_mode():
        for batch in batches:
            images = batch.images.contiguous(memory_format=torch.channels_last)
            with inference_autocast(images.device):
                logits = network(images)
            out.append((logits.float(), batch))
    network.train(mode)
    return out


def dice_at(score: np.ndarray, truth: np.ndarray, threshold: float) -> float:
    """Dice of `score >= threshold` and `truth`; 1.0 if both are empty."""
    marked = score >= threshold
    total = np.count_nonzero(marked) + np.count_nonzero(truth)
    return float(2 * np.count_nonzero(marked & truth) / total) if total else 1.0


def average_precision(score: np.ndarray, truth: np.ndarray, steps: int = 4096) -> float:
    """Area under the precision-recall curve of probabilities, counted in `steps` bins; nan without a positive."""
    index = np.clip((score * steps).astype(np.int64), 0, steps - 1)
    positive = np.bincount(index, truth, steps)[::-1].cumsum()
    every = np.bincount(index, minlength=steps)[::-1].cumsum()
    if positive[-1] == 0:
        return float("nan")
    recall = np.diff(positive / positive[-1], prepend=0)
    return float((recall * positive / np.maximum(every, 1)).sum())
