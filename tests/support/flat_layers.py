"""A network of the tests that finds eight even layers at once, so that pages are tested without waiting for layers."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from octjepa.tasks.segmenter.retained_layers import LayerCache, RetainedLayers
from octjepa.volume import OCTVolume


class FlatLayers(LayerCache):
    """A retina of 300 um from row 20 on, with a strip of fluid.

    `segmented` lists the scans that were segmented. It retains only the scans whose content hash is in `held`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.segmented: list[str] = []
        self.held: set[str] = set()

    def layers(self, volume: OCTVolume, advance: Callable[[int], None] | None = None) -> RetainedLayers:
        """Even layers of any scan."""
        self.segmented.append(volume.content_hash)
        return self._flat(volume)

    def retained(self, volume: OCTVolume) -> RetainedLayers | None:
        """Even layers of a scan in `held`."""
        return self._flat(volume) if volume.content_hash in self.held else None

    def _flat(self, volume: OCTVolume) -> RetainedLayers:
        shape = (8, volume.shape[0], volume.shape[2])
        rows = 20 + 0.3 / volume.spacing_mm[1] * np.linspace(0, 1, 8, dtype=np.float32)[:, None, None]
        classes = np.zeros(volume.shape, np.uint8)
        classes[:, 40:44] = 1
        layers = np.broadcast_to(rows, shape).astype(np.float32)
        return RetainedLayers(layers, np.ones(shape, np.float32), classes, volume.spacing_mm)
