"""The protocol of a tracker, and the data that it receives from a run.

Only the recipe's science fields (no paths), the run's hash, metrics and, if the recipe allows it, pictures leave the
machine. Everything else that the libraries of trackers would send (host, user, command line, code, console, usage
statistics) is switched off.
"""

from __future__ import annotations

import io
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np
from jaxtyping import UInt8

from octjepa.files import write_atomic

SECONDS = 10  # a library may wait for its server that long, at the start and at the end
PICTURE = "pictures/views_and_masks"


class Tracker(Protocol):
    """The methods of a tracker. Any of it may raise or block: `TrackerThread` handles that."""

    def metrics(self, update: int, values: Mapping[str, float]) -> None: ...

    def picture(self, update: int, image: UInt8[np.ndarray, "H W 3"]) -> None: ...

    def checkpoint(self, update: int, address: str) -> None: ...

    def close(self, finished: bool) -> None: ...


@dataclass(frozen=True)
class TrackedRun:
    """The data that a tracker receives from a run. It may store files in `folder`.

    `first` counts the updates done before; `pictures`: whether pictures may be sent to servers.
    """

    folder: Path
    project: str
    name: str
    config: Mapping[str, str | int | float | bool]
    first: int
    pictures: bool

    def stored_id(self, backend: str) -> str | None:
        """The id under which `backend` knows this run from before it was resumed."""
        path = self.folder / f"{backend}.id"
        return path.read_text(encoding="utf-8").strip() if self.first and path.is_file() else None

    def store_id(self, backend: str, run_id: str) -> None:
        """Writes the id under which `backend` knows the run, for a resume."""
        write_atomic(self.folder / f"{backend}.id", lambda file: file.write(run_id.encode()))


def in_one_line(error: BaseException) -> str:
    """A library's error message, cut short, without the credentials that an address may hold."""
    message = re.sub(r"//[^/@\s]+@", "//", " ".join(str(error).split()))
    return f"{type(error).__name__}: {message[:200]}" if message else type(error).__name__


def png(image: UInt8[np.ndarray, "H W 3"]) -> bytes:
    """The image as the content of a PNG file."""
    from PIL import Image

    buffer = io.BytesIO()
    Image.fromarray(image).save(buffer, format="png")
    return buffer.getvalue()


# The libraries that the trackers of this package import, and the extra that brings it.
NEEDS = {
    "wandb": ("wandb", "wandb"),
    "wandb_offline": ("wandb", "wandb"),
    "tensorboard": ("tensorboard", "tensorboard"),
    "mlflow": ("mlflow", "mlflow"),
}
