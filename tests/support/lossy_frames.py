"""B-scans after lossy JPEG."""

from __future__ import annotations

import io

import numpy as np
from PIL import Image


def encoded(pixels: np.ndarray, quality: int | None) -> np.ndarray:
    """[D, H, W] each B-scan encoded as JPEG and decoded; None: as it is."""
    if quality is None:
        return pixels
    frames = []
    for frame in pixels:
        with io.BytesIO() as buffer:
            Image.fromarray(frame).save(buffer, "JPEG", quality=quality)
            frames.append(np.asarray(Image.open(buffer)))
    return np.stack(frames)
