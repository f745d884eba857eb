"""Calibrate a trained segmentation network on phantoms: `python -m octjepa.tasks.segmenter.calibrate`.

In: `segmenter.safetensors` and `segmenter.json` of a training run. Out: a folder with the same weights and a
`segmenter.json` that also holds the `Calibration`: temperatures of the probabilities, the factor from the spread of a
boundary to its expected error, the fluid threshold, and how much batch normalisation adapts to a scan.

All of it is chosen on phantom eyes with seeds and randomisation ranges that training did not use. Each eye is shown as
it is and in displays that training does not contain (equalised, smoothed, eight grey levels, striped), because a real
instrument is also one that training did not contain. No real eye is read.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional

from octjepa.files import write_atomic
from octjepa.model.boundary_unet import decode_boundaries
from octjepa.model.bscan_inference import Calibration
from octjepa.phantom.random_scene import SHIFTED, Scene, draw_scene
from octjepa.tasks.segmenter.image_formation import ROW_UM, SIZE, Draws, Scenes, form_batch
from octjepa.tasks.segmenter.inference import Segmenter, adapted_logits, load_segmenter
from octjepa.tasks.segmenter.validation import average_precision, dice_at

SEED: Final = 70_001
_SLICES: Final = 5
_SHARES: Final = (0.0, 0.5, 1.0)
_TEMPERATURES: Final = np.exp(np.linspace(np.log(0.4), np.log(4.0), 24))
_THRESHOLDS: Final = np.linspace(0.05, 0.95, 37)


@dataclass(frozen=True, eq=False)
class PhantomEye:
    """Neighbouring B-scans of one phantom through one instrument, and the truth; `display` names the display."""

    images: Float[Tensor, "D H W"]
    boundaries: Float[Tensor, "D 8 W"]
    classes: Int[Tensor, "D H W"]
    display: str


def phantom_eye(scene: Scene, draws: Draws, display: str) -> PhantomEye:
    """All B-scans of `scene` with the same optics, in the fixed geometry of validation."""
    power = torch.from_numpy(scene.power)[None]
    slices, middle = power.shape[1], power.shape[1] // 2
    everything = torch.ones(1, slices, dtype=torch.bool)
    truth, classes = torch.from_numpy(scene.boundaries_px), torch.from_numpy(scene.classes)
    scenes = Scenes(
        power,
        truth[middle : middle + 1],
        classes[middle : middle + 1],
        torch.tensor([scene.optics]),
        everything,
        everything,
    )
    batch = form_batch(scenes, draws, augment=False)
    first = (power.shape[3] - SIZE) // 2
    window = slice(first, first + SIZE)
    offset = float((truth[middle, :, window] - batch.boundaries[0]).nanmean())
    rows = (torch.arange(SIZE) + offset).round().long()
    inside = (rows >= 0) & (rows < power.shape[2])
    moved = classes[:, rows.clamp(0, power.shape[2] - 1)][:, :, window] * inside.view(1, -1, 1)
    images = DISPLAYS[display](batch.images[0])
    images = (images - images.mean((1, 2), keepdim=True)) / (images.std((1, 2), keepdim=True) + 1e-3)
    return PhantomEye(images, truth[:, :, window] - offset, moved.long(), display)


def _equalised(images: Tensor) -> Tensor:
    return images.flatten(1).argsort(1).argsort(1).view_as(images).float()


def _smoothed(images: Tensor) -> Tensor:
    for _ in range(2):
        images = functional.avg_pool2d(functional.pad(images[None], (1, 1, 1, 1), mode="replicate"), 3, 1)[0]
    return images


def _coarse(images: Tensor) -> Tensor:
    low, high = images.amin((1, 2), keepdim=True), images.amax((1, 2), keepdim=True)
    return ((images - low) / (high - low + 1e-6) * 8).floor()


def _striped(images: Tensor) -> Tensor:
    rows = torch.sin(torch.arange(images.shape[1]) * 0.9)[None, :, None]
    return images + 0.25 * rows + 0.15 * torch.sin(torch.arange(images.shape[2]) * 1.3)


DISPLAYS: Final[dict[str, Callable[[Tensor], Tensor]]] = {
    "as_formed": lambda images: images,
    "equalised": _equalised,
    "smoothed": _smoothed,
    "coarse": _coarse,
    "striped": _striped,
}


def calibration_eyes(count: int, seed: int = SEED) -> list[PhantomEye]:
    """`count` phantom eyes; every second one is as formed, the others take turns in the other displays."""
    draws = Draws(seed, torch.device("cpu"))
    names = list(DISPLAYS)
    kinds = [names[0] if k % 2 else names[1 + k // 2 % (len(names) - 1)] for k in range(count)]
    return [phantom_eye(draw_scene(seed, k, SHIFTED, _SLICES), draws, kind) for k, kind in enumerate(kinds)]


@dataclass(frozen=True, eq=False)
class EyeOutputs:
    """Logits of all eyes `[N, 12, H, W]` in half precision, and the truth."""

    logits: Tensor
    boundaries: Tensor
    classes: Tensor

    def graded(self) -> Tensor:
        """`[N, H, W]` bool: columns outside the optic disc."""
        return torch.isfinite(self.boundaries[:, 7])[:, None].expand_as(self.classes)


def _outputs(segmenter: Segmenter, eyes: list[PhantomEye], share: float) -> EyeOutputs:
    logits = [adapted_logits(segmenter, eye.images, share).half() for eye in eyes]
    return EyeOutputs(
        torch.cat(logits), torch.cat([eye.boundaries for eye in eyes]), torch.cat([eye.classes for eye in eyes])
    )


@dataclass(frozen=True)
class CalibrationMetrics:
    """Metrics on the calibration phantoms, and what each share of adaptation gives."""

    mean_um: float
    median_um: float
    dice: float
    average_precision: float


def _metrics(outputs: EyeOutputs, threshold: float | None = None) -> tuple[CalibrationMetrics, float]:
    """Metrics at `threshold`, or at the threshold with the largest Dice; and that threshold."""
    error = _errors_um(outputs, 1.0)
    p = torch.softmax(outputs.logits[:, 8:].float(), 1)
    graded = outputs.graded()
    score = (p[:, 1] + p[:, 2])[graded].numpy()
    truth = ((outputs.classes == 1) | (outputs.classes == 2))[graded].numpy()
    if threshold is None:
        threshold = float(_THRESHOLDS[int(np.argmax([dice_at(score, truth, t) for t in _THRESHOLDS]))])
    metrics = CalibrationMetrics(
        mean_um=round(float(error.nanmean()), 3),
        median_um=round(float(error.nanmedian()), 3),
        dice=round(dice_at(score, truth, threshold), 4),
        average_precision=round(average_precision(score, truth), 4),
    )
    return metrics, threshold


def _errors_um(outputs: EyeOutputs, temperature: float | Tensor) -> Tensor:
    """Absolute errors `[N, 8, W]` in um, NaN if nothing is graded."""
    rows = torch.cat([decode_boundaries(part[:, :8], temperature).rows for part in outputs.logits.split(32)])
    truth = outputs.boundaries
    known = torch.isfinite(truth) & (truth >= 0) & (truth <= SIZE - 1)
    return torch.where(known, (rows - truth).abs() * ROW_UM, torch.nan)


def boundary_temperatures(outputs: EyeOutputs) -> tuple[float, ...]:
    """The temperature of each boundary that makes the true rows most probable."""
    truth = outputs.boundaries.clamp(0, SIZE - 1)
    known = torch.isfinite(outputs.boundaries) & (outputs.boundaries == truth)
    row = torch.nan_to_num(truth).round().long()
    best = []
    for k in range(8):
        logits = outputs.logits[:, k].float()
        index = row[:, k, None]
        losses = [
            -functional.log_softmax(logits / t, 1).gather(1, index)[:, 0][known[:, k]].clamp(min=-12).mean()
            for t in _TEMPERATURES
        ]
        best.append(round(float(_TEMPERATURES[int(torch.stack(losses).argmin())]), 3))
    return tuple(best)


def fitted_class_temperature(outputs: EyeOutputs) -> float:
    """The temperature of the class logits that makes the true classes most probable."""
    graded = outputs.graded()
    losses = []
    for t in _TEMPERATURES:
        log_p = functional.log_softmax(outputs.logits[:, 8:].float() / t, 1)
        losses.append(functional.nll_loss(log_p, outputs.classes, reduction="none")[graded].mean())
    return round(float(_TEMPERATURES[int(torch.stack(losses).argmin())]), 3)


def calibrate(segmenter: Segmenter, eyes: list[PhantomEye]) -> tuple[Calibration, dict[str, object]]:
    """The calibration of a network, and metrics on the phantoms for its record."""
    by_share = {share: _outputs(segmenter, eyes, share) for share in _SHARES}
    metrics = {share: _metrics(outputs)[0] for share, outputs in by_share.items()}
    # Fluid decides, as long as the boundaries are at most 5 % worse than with the best share.
    least = min(m.median_um for m in metrics.values())
    allowed = [share for share, m in metrics.items() if m.median_um <= 1.05 * least]
    share = max(allowed, key=lambda s: metrics[s].average_precision)
    outputs = by_share[share]
    temperatures = boundary_temperatures(outputs)
    scale = torch.tensor(temperatures)
    spread = torch.cat([decode_boundaries(part[:, :8], scale).spread_rows for part in outputs.logits.split(32)])
    error = _errors_um(outputs, scale) / ROW_UM
    known = torch.isfinite(error)
    factor = [
        round(float(error[:, k][known[:, k]].clamp(max=20).mean() / spread[:, k][known[:, k]].mean()), 3)
        for k in range(8)
    ]
    class_temperature = fitted_class_temperature(outputs)
    voxels = EyeOutputs(
        torch.cat([outputs.logits[:, :8], outputs.logits[:, 8:] / class_temperature], 1),
        outputs.boundaries,
        outputs.classes,
    )
    final, threshold = _metrics(voxels)
    calibration = Calibration(
        boundary_temperature=temperatures,
        spread_factor=tuple(factor),
        class_temperature=class_temperature,
        fluid_threshold=round(threshold, 3),
        adapt=share,
    )
    record = {"final": asdict(final), "by_share": {str(s): asdict(m) for s, m in metrics.items()}, "eyes": len(eyes)}
    return calibration, record


def main() -> None:
    """Reads the command line, calibrates and writes the folder."""
    parser = argparse.ArgumentParser(prog="python -m octjepa.tasks.segmenter.calibrate", description=__doc__)
    parser.add_argument("run", type=Path, help="folder of a training run")
    parser.add_argument("--out", type=Path, required=True, help="folder of the calibrated network")
    parser.add_argument("--eyes", type=int, default=48)
    arguments = parser.parse_args()
    segmenter = load_segmenter(arguments.run)
    calibration, phantoms = calibrate(segmenter, calibration_eyes(arguments.eyes))
    record = json.loads((arguments.run / "segmenter.json").read_text())
    record |= {"calibration": asdict(calibration), "calibration_phantoms": phantoms}
    arguments.out.mkdir(parents=True, exist_ok=True)
    if arguments.out.resolve() != arguments.run.resolve():
        shutil.copyfile(arguments.run / "segmenter.safetensors", arguments.out / "segmenter.safetensors")
    text = json.dumps(record, indent=1).encode()
    write_atomic(arguments.out / "segmenter.json", lambda file: file.write(text))
    print(json.dumps({"calibration": asdict(calibration), **phantoms}, indent=1))


if __name__ == "__main__":
    main()
