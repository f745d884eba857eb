"""Stored volumes in memory with their labels, and the crops of them that the networks of the ceiling see."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from .cohorts import Cohort
from .truth import CELL, lesion_cells

_GAIN = 0.1  # standard deviation of gain and offset, in units of the tissue's


@dataclass(frozen=True, eq=False)
class LabelledScans:
    """Volumes with their answers (NaN where a question is not asked), and the share of each lesion in every cell."""

    pixels: list[np.ndarray]
    scale: list[tuple[float, float]]  # mean and standard deviation of tissue
    answers: Float[np.ndarray, "n questions"]
    size: tuple[int, int, int]
    cells: list[np.ndarray]  # [lesions, D, h, w] of the stored volume, 8 bit, 255 a whole cell; none: not read

    @classmethod
    def read(
        cls, cohort: Cohort, volumes: Int[np.ndarray, " n"], answers: np.ndarray, cells: bool = False
    ) -> LabelledScans:
        """The volumes of a cohort; `answers` is [n, questions]. `cells`: with the lesions' places."""
        scans = [cohort.store.read(cohort.ids[volume]) for volume in volumes]
        return cls(
            [scan.pixels for scan in scans],
            [(scan.tissue_mean, scan.tissue_std) for scan in scans],
            answers.astype(np.float32),
            cohort.store.preprocessing.image_size,
            [np.rint(255 * lesion_cells(cohort, volume)).astype(np.uint8) for volume in volumes] if cells else [],
        )

    @classmethod
    def joined(cls, parts: Sequence[LabelledScans]) -> LabelledScans:
        """All of `parts`, one after the other."""
        return cls(
            [pixels for part in parts for pixels in part.pixels],
            [scale for part in parts for scale in part.scale],
            np.concatenate([part.answers for part in parts]),
            parts[0].size,
            [cells for part in parts for cells in part.cells],
        )

    def views(self, which: Sequence[int], rng: np.random.Generator | None) -> Float[Tensor, "b d h w"]:
        """Centred, or cropped at random and mirrored along the slices with probability one half."""
        found = []
        for index in which:
            pixels, (mean, std) = self.pixels[index], self.scale[index]
            room = np.array(pixels.shape) - np.array(self.size)
            start = room // 2 if rng is None else rng.integers(0, (room + 1).astype(np.int64))
            view = pixels[tuple(slice(a, a + n) for a, n in zip(start, self.size, strict=True))]
            view = view[::-1] if rng is not None and rng.random() < 0.5 else view
            found.append((view.astype(np.float32) - mean) / max(std, 1.0))
        return torch.from_numpy(np.stack(found))

    def views_with_cells(
        self, which: Sequence[int], rng: np.random.Generator
    ) -> tuple[Float[Tensor, "b d h w"], Float[Tensor, "b lesions d p q"]]:
        """Crops at random by whole cells, mirrored along slices and columns, of other gain and offset; their cells."""
        views, shares = [], []
        for index in which:
            (mean, std), cell = self.scale[index], np.array(CELL)
            room = (np.array(self.pixels[index].shape) - np.array(self.size)) // cell
            start = rng.integers(0, room + 1)
            over, _, back = np.where(rng.random(3) < 0.5, -1, 1).tolist()  # depth is never mirrored
            parts = []
            for volume, unit in ((self.pixels[index], cell), (self.cells[index], np.ones(3, np.int64))):
                (a, b, c), (d, h, w) = (start * unit).tolist(), (np.array(self.size) // cell * unit).tolist()
                parts.append(volume[..., a : a + d, b : b + h, c : c + w][..., ::over, :, ::back])
            gain, offset = 1 + _GAIN * rng.standard_normal(), _GAIN * rng.standard_normal()
            views.append(((parts[0].astype(np.float32) - mean) / max(std, 1.0) * gain + offset).astype(np.float32))
            shares.append(parts[1].astype(np.float32) / 255)
        return torch.from_numpy(np.stack(views)), torch.from_numpy(np.stack(shares))
