"""The folder of pictures in the run folder: the tracker that every run has."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
from jaxtyping import UInt8

from octjepa.files import write_atomic
from octjepa.train.tracking.base import png


class PictureFolder:
    """`update-00000001.png` and so on, in the run folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(exist_ok=True)

    def metrics(self, update: int, values: Mapping[str, float]) -> None:
        """Metrics are in metrics.jsonl already."""

    def picture(self, update: int, image: UInt8[np.ndarray, "H W 3"]) -> None:
        write_atomic(self._folder / f"update-{update:08d}.png", lambda file: file.write(png(image)))

    def close(self, finished: bool) -> None:
        """Every picture is written already."""

    def checkpoint(self, update: int, address: str) -> None:
        """Checkpoints are in their folder already."""
