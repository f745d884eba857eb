"""TensorBoard: event files in the run folder."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from jaxtyping import UInt8

from octjepa.recipe import TRACKERS
from octjepa.train.tracking.base import PICTURE, TrackedRun


@TRACKERS.register("tensorboard")
class TensorBoard:
    """Event files in the run folder's tracking/tensorboard."""

    def __init__(self, run: TrackedRun) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # Events of updates that a resumed run will repeat are purged.
        self._writer: Any = SummaryWriter(run.folder / "tensorboard", purge_step=run.first + 1 if run.first else None)
        self._writer.add_text("config", "\n".join(f"    {key}: {value}" for key, value in run.config.items()))

    def metrics(self, update: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, update)

    def picture(self, update: int, image: UInt8[np.ndarray, "H W 3"]) -> None:
        self._writer.add_image(PICTURE, image, update, dataformats="HWC")

    def checkpoint(self, update: int, address: str) -> None:
        """TensorBoard has no artefacts."""

    def close(self, finished: bool) -> None:
        self._writer.close()
