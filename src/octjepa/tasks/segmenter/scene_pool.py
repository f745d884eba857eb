"""A growing pool of phantom scenes on the training device, from which batches are drawn again and again.

In: scenes from `octjepa.phantom.scene_stream`. Out: `Scenes` for `image_formation.form_batch`. When the pool is full, a
new scene replaces the oldest one. Half of each batch comes from B-scans with fluid, which is rare otherwise.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import torch

from octjepa.phantom.random_scene import COLUMNS, ROWS, SUB_RPE, Scene
from octjepa.tasks.segmenter.image_formation import Scenes

_RICH: Final = 0.002  # share of fluid voxels from which a B-scan counts as one with fluid
_WITH_FLUID: Final = 0.5  # share of a batch


class ScenePool:
    """Holds up to `capacity` scenes of `slices` B-scans on `device`."""

    def __init__(self, capacity: int, slices: int, device: torch.device) -> None:
        shape = (capacity, slices, ROWS, COLUMNS)
        self.device = device
        self._power = torch.empty(shape, dtype=torch.uint8, device=device)
        self._classes = torch.empty(shape, dtype=torch.uint8, device=device)
        self._boundaries = torch.empty((capacity, slices, 8, COLUMNS), device=device)
        self._optics = np.zeros(capacity, np.int64)
        self._rich = np.zeros((capacity, slices), bool)
        self.received = 0

    def __len__(self) -> int:
        return min(self.received, len(self._optics))

    def add(self, scenes: list[Scene]) -> None:
        """Copies `scenes` to the device."""
        pinned = self.device.type == "cuda"
        for scene in scenes:
            row = self.received % len(self._optics)
            pairs = (
                (self._power, scene.power),
                (self._classes, scene.classes),
                (self._boundaries, scene.boundaries_px),
            )
            for target, array in pairs:
                source = torch.from_numpy(array)
                target[row].copy_(source.pin_memory() if pinned else source, non_blocking=pinned)
            self._optics[row] = scene.optics
            fluid = (scene.classes > 0) & (scene.classes < SUB_RPE)
            self._rich[row] = fluid.mean((1, 2)) > _RICH
            self.received += 1

    def sample(self, rng: np.random.Generator, count: int) -> Scenes:
        """`count` random B-scans with their two neighbours in the scene."""
        size, slices = len(self), self._rich.shape[1]
        rich = np.argwhere(self._rich[:size])
        share = round(_WITH_FLUID * count) if len(rich) else 0
        scene, middle = rng.integers(size, size=count), rng.integers(slices, size=count)
        if share:
            scene[:share], middle[:share] = rich[rng.integers(len(rich), size=share)].T
        # Half of the samples come without neighbours, so that the network also reads single B-scans.
        alone = np.arange(count) % 2 == 1
        dropped = rng.random((count, 3)) < 0.15
        return self.gather(scene, middle, alone, dropped)

    def gather(
        self, scene: np.ndarray, middle: np.ndarray, alone: np.ndarray | None = None, dropped: np.ndarray | None = None
    ) -> Scenes:
        """The B-scans `middle` of the scenes `scene`, with their neighbours unless `alone` or `dropped`."""
        around = middle[:, None] + np.array([-1, 0, 1])
        formed = np.ones_like(around, dtype=bool)
        if alone is not None:
            formed &= ~alone[:, None]
        present = formed & (around >= 0) & (around < self._rich.shape[1])
        if dropped is not None:
            present &= ~dropped
        formed[:, 1] = present[:, 1] = True
        rows = torch.from_numpy(scene).to(self.device)
        columns = torch.from_numpy(np.clip(around, 0, self._rich.shape[1] - 1)).to(self.device)
        return Scenes(
            power=self._power[rows[:, None], columns],
            boundaries=self._boundaries[rows, columns[:, 1]],
            classes=self._classes[rows, columns[:, 1]],
            optics=torch.from_numpy(self._optics[scene]).to(self.device),
            present=torch.from_numpy(present),
            formed=torch.from_numpy(formed),
        )
