"""Whether the content of B-scans contradicts their order: in a raster, neighbours look more alike than others do.

It serves where an order is only assumed, because names or numbers were lost. Each B-scan is reduced to block means, the
mean B-scan is subtracted, and the correlation of every pair is computed. In the right order, the B-scan most like
another one is next to it. If no pair correlates (noise, B-scans far apart), the content says nothing.

Measured on two genuine HEYEX exports of 49 B-scans: in the right order 94 and 100 % of the B-scans have their best
match at most two places away, in the order of their names 55 and 47 %.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Float, UInt8

_BLOCK = 16  # pixels along either axis of a B-scan
_INFORMATIVE = 0.3  # median correlation of B-scans with their best match, at least
_NEXT = 0.75  # share of B-scans whose best match is at most two places away
_FEWEST = 16  # B-scans; among fewer, far ones may look alike by chance


def _correlations(pixels: UInt8[np.ndarray, "D H W"]) -> Float[np.ndarray, "D D"]:
    """Of every pair of B-scans, after the mean B-scan was subtracted; -2 on the diagonal."""
    _, depth, columns = pixels.shape
    block = max(1, min(_BLOCK, depth // 16, columns // 16))
    rows, across = depth // block, columns // block
    small = np.stack(
        [
            frame[: rows * block, : across * block].reshape(rows, block, across, block).mean((1, 3)).ravel()
            for frame in pixels
        ]
    ).astype(np.float32)  # [D, N]
    small -= small.mean(axis=0)
    small -= small.mean(axis=1, keepdims=True)
    small /= np.linalg.norm(small, axis=1, keepdims=True) + 1e-6
    pairs = small @ small.T
    np.fill_diagonal(pairs, -2)
    return pairs


def contradicts_order(pixels: UInt8[np.ndarray, "D H W"]) -> str:
    """The evidence against the order of B-scans, in words; "" if nothing does, or where the content says nothing."""
    if len(pixels) < _FEWEST:
        return ""
    pairs = _correlations(pixels)
    best = pairs.argmax(axis=1)
    if np.median(pairs.max(axis=1)) < _INFORMATIVE:
        return ""
    away = np.abs(best - np.arange(len(best)))
    far = int((away > 2).sum())
    if far > (1 - _NEXT) * len(best):
        return f"{far} of {len(best)} B-scans look most like one that is further away than two places"
    return ""
