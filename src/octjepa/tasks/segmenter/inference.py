"""Layers and fluid of any scan with the packaged network, in the scan's own geometry.

In: pixels `[D, H, W]` with their spacing. Out: a `Segmentation`: boundaries in rows and um, probabilities of classes,
and a confidence for each. The scan is resampled to the network's in-plane spacing, cleaned of registration fill,
segmented B-scan by B-scan with the neighbours that are near enough, and mapped back.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

import numpy as np
import torch
from jaxtyping import Float, UInt8
from torch import Tensor, nn
from torch.nn import functional

from octjepa.checkpoint.boundary_unet import read_boundary_unet
from octjepa.errors import OctjepaError
from octjepa.layers import BOUNDARIES, CLASSES
from octjepa.model.boundary_unet import decode_boundaries
from octjepa.model.bscan_inference import (
    BATCH,
    Calibration,
    bscan_logits,
    near_bscans,
    prepared_bscans,
    spread_bscans,
    stack_neighbours,
    with_statistics,
)
from octjepa.phantom.random_scene import COLUMN_MM, ROW_MM
from octjepa.read.reader import read_volume
from octjepa.tasks.segmenter.outer_boundaries import with_outer_boundaries
from octjepa.volume import OCTVolume

_LARGEST_COLUMNS: Final = 2048  # of the resampled B-scan
_LARGEST_ROWS: Final = 1024


@dataclass(frozen=True, eq=False)
class Segmentation:
    """Layers and fluid of one scan, in its own geometry.

    `boundaries_px` `[8, D, W]`: fractional row of each of `BOUNDARIES`, from above. `boundaries_um` is the same in um
    below the first row. `expected_error_um` is the calibrated absolute error that the network expects of itself.
    `classes` `[D, H, W]` indexes `CLASSES`; `fluid` is the probability of fluid of any kind.
    `confidence` `[D, H, W]` is the probability of the class that was chosen.
    """

    boundaries_px: Float[np.ndarray, "8 D W"]
    expected_error_um: Float[np.ndarray, "8 D W"]
    classes: UInt8[np.ndarray, "D H W"]
    fluid: Float[np.ndarray, "D H W"]
    confidence: Float[np.ndarray, "D H W"]
    spacing_mm: tuple[float, float, float]
    boundary_names: tuple[str, ...] = BOUNDARIES
    class_names: tuple[str, ...] = CLASSES

    @property
    def boundaries_um(self) -> Float[np.ndarray, "8 D W"]:
        """Depth of each boundary in um below the first row."""
        return self.boundaries_px * np.float32(1000 * self.spacing_mm[1])

    @property
    def thickness(self) -> Float[np.ndarray, "D W"]:
        """Thickness of the retina in um, from the ILM to Bruch's membrane."""
        return self.boundaries_um[-1] - self.boundaries_um[0]

    def fluid_mm3(self) -> dict[str, float]:
        """Volume of each class but the background. It assumes that B-scans are evenly spaced."""
        voxel = float(np.prod(self.spacing_mm))
        return {name: float(np.count_nonzero(self.classes == k)) * voxel for k, name in enumerate(CLASSES) if k}


class Segmenter:
    """The network with its calibration. `predict` segments pixels."""

    def __init__(self, network: nn.Module, calibration: Calibration | None = None) -> None:
        self.network = network.eval().to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.calibration = calibration or Calibration()

    def segment(self, volume: OCTVolume | str | Path, advance: Callable[[int], None] | None = None) -> Segmentation:
        """Segments a volume or the scan in a file. `advance` is called with the number of B-scans that are done.

        The ILM and Bruch's membrane are those that `octjepa.tasks.segmenter.outer_boundaries` chooses. B-scans are
        taken alone in radial and circle scans, and where the positions of B-scans are uncertain.
        Raises OctjepaError as `predict` does, and VolumeRejected for a file that is not an OCT scan.
        """
        if not isinstance(volume, OCTVolume):
            volume = read_volume(volume)
        alone = bscans_alone(volume)
        found = self.predict(volume.pixels, volume.spacing_mm, volume.slice_positions_mm, alone, advance)
        rows, error_um = with_outer_boundaries(
            found.boundaries_px, found.expected_error_um, volume, near_bscans_of(volume)
        )
        return replace(found, boundaries_px=rows, expected_error_um=error_um)

    def predict(
        self,
        pixels: UInt8[np.ndarray, "D H W"],
        spacing_mm: tuple[float, float, float],
        slice_positions_mm: Float[np.ndarray, " D"] | None = None,
        sparse: bool = False,
        advance: Callable[[int], None] | None = None,
    ) -> Segmentation:
        """Segments a scan with spacing (slice, depth, column) in mm.

        `sparse` treats every B-scan alone, for scans whose B-scans are far apart or whose positions are uncertain.
        Raises OctjepaError for pixels of another shape, a spacing that is not positive, or a scan that would need
        images beyond 1024 x 2048.
        """
        _check(pixels, spacing_mm)
        near = near_bscans(len(pixels), spacing_mm[0], slice_positions_mm, sparse)
        shape = network_shape(pixels.shape[1:], spacing_mm)
        images = prepared_bscans(pixels, shape, without_fill)
        out = _Result.empty(pixels.shape)
        with (
            torch.inference_mode(),
            with_statistics(self.network, spread_bscans(images, near), self.calibration.adapt) as network,
        ):
            for start in range(0, len(pixels), BATCH):
                index = np.arange(start, min(start + BATCH, len(pixels)))
                logits = bscan_logits(network, stack_neighbours(images, near, index), self.calibration.flip)
                out.fill(index, logits, shape, spacing_mm[1], self.calibration)
                if advance is not None:
                    advance(int(index[-1]) + 1)
        return Segmentation(out.boundaries, out.error_um, out.classes, out.fluid, out.confidence, spacing_mm)


def load_segmenter(folder: str | Path | None = None) -> Segmenter:
    """The packaged network, or the network in `folder`. Raises what `read_boundary_unet` raises."""
    return Segmenter(*read_boundary_unet(folder))


def _check(pixels: np.ndarray, spacing_mm: tuple[float, float, float]) -> None:
    if pixels.ndim != 3 or 0 in pixels.shape:
        raise OctjepaError(f"pixels of shape {pixels.shape}: expected [slice, depth, column]")
    if len(spacing_mm) != 3 or not all(np.isfinite(s) and s > 0 for s in spacing_mm):
        raise OctjepaError(f"spacing {spacing_mm}: expected three positive lengths in mm (slice, depth, column)")


def network_shape(shape: tuple[int, ...], spacing_mm: tuple[float, float, float]) -> tuple[int, int]:
    """Rows and columns of a B-scan at the network's spacing, before padding."""
    rows = max(8, round(shape[0] * spacing_mm[1] / ROW_MM))
    columns = max(8, round(shape[1] * spacing_mm[2] / COLUMN_MM))
    if rows > _LARGEST_ROWS or columns > _LARGEST_COLUMNS:
        extent = (shape[0] * spacing_mm[1], shape[1] * spacing_mm[2])
        raise OctjepaError(
            f"a B-scan of {extent[0]:.1f} x {extent[1]:.1f} mm is larger than the network reads "
            f"({_LARGEST_ROWS * ROW_MM:.0f} x {_LARGEST_COLUMNS * COLUMN_MM:.0f} mm): check the spacing of the scan"
        )
    return rows, columns


def bscans_alone(volume: OCTVolume) -> bool:
    """Whether each B-scan is taken alone, because it is not known which B-scans are next to it."""
    return volume.pattern in ("radial", "circle") or "slice" in volume.uncertain


def near_bscans_of(volume: OCTVolume) -> np.ndarray:
    """`near_bscans` of a volume."""
    alone = bscans_alone(volume)
    return near_bscans(len(volume.pixels), volume.spacing_mm[0], volume.slice_positions_mm, alone)


def without_fill(bscan: Float[np.ndarray, "H W"]) -> Float[np.ndarray, "H W"]:
    """Replaces white or black registration fill at the upper and lower edge by the median of the rest."""
    out = bscan
    for value in (bscan >= 254, bscan <= 0):
        above = np.logical_and.accumulate(value, axis=0)
        below = np.logical_and.accumulate(value[::-1], axis=0)[::-1]
        fill = above | below
        if fill.all() or not fill.any():
            continue
        # Interpolation softens the edge of the fill by two rows.
        grown = above.copy()
        grown[2:] |= above[:-2]
        grown[:-2] |= below[2:]
        fill |= grown & (above.any(0) | below.any(0))
        out = out.copy() if out is bscan else out
        out[fill] = np.median(bscan[~fill])
    return out


def adapted_logits(segmenter: Segmenter, images: Float[Tensor, "D H W"], share: float) -> Float[Tensor, "D O H W"]:
    """Logits of standardised neighbouring B-scans at the network's spacing, with a `share` of the statistics of these
    B-scans.
    """
    near = near_bscans(len(images), 0.0, None, sparse=False)
    with torch.inference_mode(), with_statistics(segmenter.network, spread_bscans(images, near), share) as network:
        return bscan_logits(network, stack_neighbours(images, near, np.arange(len(images))), segmenter.calibration.flip)


@dataclass(eq=False)
class _Result:
    """The arrays of a `Segmentation` while they are filled."""

    boundaries: np.ndarray
    error_um: np.ndarray
    classes: np.ndarray
    fluid: np.ndarray
    confidence: np.ndarray
    shape: tuple[int, int, int] = field(default=(0, 0, 0))

    @classmethod
    def empty(cls, shape: tuple[int, ...]) -> _Result:
        """Arrays for a scan of `shape`, not yet filled."""
        d, h, w = shape
        layers = (np.empty((8, d, w), np.float32) for _ in range(2))
        boundaries, error = layers
        return cls(
            boundaries,
            error,
            np.empty((d, h, w), np.uint8),
            np.empty((d, h, w), np.float16),
            np.empty((d, h, w), np.float16),
            (d, h, w),
        )

    def fill(
        self, index: np.ndarray, logits: Tensor, shape: tuple[int, int], row_mm: float, calibration: Calibration
    ) -> None:
        """Maps predictions for the B-scans `index` back to native rows and columns."""
        _, height, width = self.shape
        rows, columns = shape
        logits = logits[:, :, :, :columns]
        decoded = decode_boundaries(logits[:, :8], torch.tensor(calibration.boundary_temperature))
        scale = height / rows
        native = (_columns(decoded.rows, width) + 0.5) * scale - 0.5
        self.boundaries[:, index] = native.transpose(0, 1).numpy()
        factor = torch.tensor(calibration.spread_factor).view(1, -1, 1)
        error = _columns(decoded.spread_rows * factor, width) * scale * row_mm * 1000
        self.error_um[:, index] = error.transpose(0, 1).numpy()
        voxel = logits[:, 8:, :rows] / calibration.class_temperature
        p = torch.softmax(functional.interpolate(voxel, (height, width), mode="bilinear", align_corners=False), 1)
        fluid, sub_rpe = p[:, 1] + p[:, 2], p[:, 3]
        kind = torch.where(p[:, 2] > p[:, 1], 2, 1)
        classes = torch.where(fluid >= calibration.fluid_threshold, kind, torch.zeros_like(kind))
        classes = torch.where((sub_rpe >= calibration.sub_rpe_threshold) & (sub_rpe > fluid), 3, classes)
        self.classes[index] = classes.numpy().astype(np.uint8)
        self.fluid[index] = fluid.numpy()
        self.confidence[index] = p.gather(1, classes[:, None].long())[:, 0].numpy()


def _columns(values: Float[Tensor, "N K w"], width: int) -> Float[Tensor, "N K W"]:
    return functional.interpolate(values, width, mode="linear", align_corners=False)


def with_calibration(segmenter: Segmenter, **changes: object) -> Segmenter:
    """The same network with other calibration values."""
    return Segmenter(segmenter.network, replace(segmenter.calibration, **changes))  # type: ignore[arg-type]
