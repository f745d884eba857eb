"""How the retina lies in the pixels: frames that are no B-scans, A-scans stored as rows, B-scans upside down.

The picture decides, for headers of such files say nothing of it. Retinal layers make the mean over the axial axis' own
planes vary far more than that of any other axis. Towards the vitreous the tissue ends at once, towards the sclera it
fades: the level just outside the first bright edge from either end tells top from bottom.

On 24 phantom eyes of four devices and three real scans the axial axis varied at least 2.8 times as much as any other,
and the level outside the edge (0 to 1, of an A-scan's contrast) was 0.00 to 0.06 at the top and 0.12 to 0.30 at the
bottom; `tests/ingest/test_orientation.py` holds every turn of such eyes to the rule.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import UInt8

from octjepa.ingest.reasons import rejection

_STRONGER = 2.0  # times the variation along the other axes that makes an axis the axial one
_LEAST = 4.0  # grey values of variation below which a picture tells nothing
_TURNED = 0.08  # by which the level above the tissue exceeds that below, where the B-scans are upside down
_EDGE = 0.45  # of an A-scan's contrast: the first tissue from an end
_ROWS = 64  # about as many rows an A-scan is looked at with


def _variation(pixels: UInt8[np.ndarray, "F H W"]) -> tuple[float, float, float]:
    """Standard deviation of the mean profile along (frames, rows, columns); frames with nothing in them left out."""
    steps = [max(1, count // 64) for count in pixels.shape]
    small = pixels[:: steps[0], :: steps[1], :: steps[2]].astype(np.float32)
    small = small[small.std(axis=(1, 2)) > 1]
    if not len(small):
        return 0.0, 0.0, 0.0
    along = [float(small.mean(axis=axes).std()) for axes in ((1, 2), (0, 2), (0, 1))]
    return along[0], along[1], along[2]


def is_transposed(pixels: UInt8[np.ndarray, "F H W"]) -> bool:
    """Whether the axial axis runs along the columns.

    Raises VolumeRejected not_b_scans where it runs through the frames.
    """
    frames, rows, columns = _variation(pixels)
    if frames > max(_LEAST, _STRONGER * max(rows, columns)):
        raise rejection("not_b_scans", "the layers of the retina run through the frames, not within them")
    return columns > max(_LEAST, _STRONGER * max(rows, frames))


def _outside(ascans: np.ndarray) -> float:
    """Median level [0, 1] just before the first tissue from the start of `ascans` [N, H]; NaN where none has room."""
    first = (ascans > _EDGE).argmax(axis=1)[:, None]
    row = np.arange(ascans.shape[1])
    before = (row < first - 1) & (row >= first - 9)
    count = before.sum(axis=1)
    levels = (ascans * before).sum(axis=1)[count > 2] / count[count > 2]
    return float(np.median(levels)) if len(levels) > len(ascans) // 8 else float("nan")


def is_upside_down(pixels: UInt8[np.ndarray, "F H W"]) -> bool:
    """Whether the sclera is on top."""
    frames, height, width = pixels.shape
    across, down = max(1, min(8, width // 8)), max(1, height // _ROWS)
    some = pixels[frames // 8 :: max(1, frames // 6)]
    some = some[:, : height // down * down, : width // across * across].astype(np.float32)
    blocks = some.reshape(len(some), height // down, down, width // across, across).mean(axis=(2, 4))
    ascans = blocks.transpose(0, 2, 1).reshape(-1, height // down)
    low = np.percentile(ascans, 10, axis=1, keepdims=True)
    contrast = ascans.max(axis=1, keepdims=True) - low
    ascans = ((ascans - low) / np.maximum(contrast, 1e-6))[contrast[:, 0] > 2 * _LEAST]
    if not len(ascans):
        return False
    return _outside(ascans) > _outside(ascans[:, ::-1]) + _TURNED
