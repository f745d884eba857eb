"""The range of a scan's values without the marks of what was not measured: -32768, 65535, the largest float32.

Such a mark lies further from the other values than they lie from each other. Scaled together with it, 12 bits of scan
would be sixteen intensities; it becomes the nearest end of the scan's own range instead, white or black, and
`octjepa.store.fill` masks it where it reaches the border. A single bright pixel far above all others counts as one too.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import UInt8


def range_without_marks(values: np.ndarray) -> tuple[float, float]:
    """(least, largest) value of an array of finite numbers without marks; of both ends the further mark goes first."""
    low, high = float(values.min()), float(values.max())
    for _ in range(2):
        below = float(values.max(where=values < high, initial=low, axis=None)) if high > low else low
        above = float(values.min(where=values > low, initial=high, axis=None)) if high > low else high
        if high - below > below - low and high - below >= above - low:
            high = below
        elif above - low > high - above:
            low = above
        else:
            break
    return low, high


def scale_to_bytes(values: np.ndarray, low: float, high: float, span: float) -> UInt8[np.ndarray, "..."]:
    """`values` with `low` at 0 and `low + span` at 255; what is above `high` is white, what is below `low` black.

    One frame at a time: the copy in floats stays small.
    """
    intensities = np.empty(values.shape, np.uint8)
    for out, frame in zip(intensities, values, strict=True):
        out[...] = np.round((np.clip(frame.astype(np.float64), low, high) - low) * (255.0 / span))
        out[frame > high] = 255
    return intensities
