"""A first or last frame that is no B-scan by its content: the fundus picture that some files hold before their scan.

A B-scan resembles the one beside it, at some height of the image, and its intensity varies with depth. A picture
resembles no B-scan, and its rows are alike. Both have to hold, so that a B-scan over a blink, a jump of the eye or the
optic disc is not taken for a picture.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np
from jaxtyping import Bool, Float, UInt8

_FEWEST = 6  # B-scans
_SAMPLES = (48, 24)  # blocks along depth and columns
_UNLIKE, _ALIKE = 0.5, 0.7  # correlation of a picture with the three B-scans beside it; of neighbouring B-scans
_FLAT = 0.6  # share of a picture's variance that lies between its rows, over that of the B-scans beside it
_STRIPS = 4  # of columns, in each of which that share is taken: a tilted retina is layered in a narrow strip
_STRUCTURE = 0.15  # of the contrast of a B-scan; an empty frame has less


def _blocks(frames: UInt8[np.ndarray, "n H W"]) -> Float[np.ndarray, "n h w"]:
    """Means of blocks, at most `_SAMPLES` of them."""
    count, height, width = frames.shape
    down, across = max(1, height // _SAMPLES[0]), max(1, width // _SAMPLES[1])
    frames = frames[:, : height // down * down, : width // across * across]
    return frames.reshape(count, height // down, down, width // across, across).mean(axis=(2, 4), dtype=np.float32)


def _correlation(one: Float[np.ndarray, "h w"], other: Float[np.ndarray, "h w"]) -> float:
    """The best over all shifts along depth."""
    one, other = (part - part.mean() for part in (one, other))
    norm = float(np.linalg.norm(one) * np.linalg.norm(other))
    products = np.fft.irfft(np.fft.rfft(one, axis=0) * np.fft.rfft(other, axis=0).conj(), n=len(one), axis=0)
    return float(products.sum(axis=1).max()) / max(norm, 1e-6)


def _share_between_rows(frames: Float[np.ndarray, "n h w"]) -> Float[np.ndarray, " n"]:
    """Share of each frame's variance that lies between its rows, as a mean over strips of columns."""
    shares = [
        strip.mean(axis=2).var(axis=1) / np.maximum(strip.var(axis=(1, 2)), 1e-6)
        for strip in np.array_split(frames, min(_STRIPS, frames.shape[2]), axis=2)
    ]
    return np.asarray(np.mean(shares, axis=0))


def _is_picture(frames: Float[np.ndarray, "n h w"]) -> bool:
    """Whether the first of some blocks of frames is a picture and the others are B-scans."""
    picture, scans = frames[0], frames[1:]
    contrast = scans.std(axis=(1, 2))
    if picture.std() < _STRUCTURE * float(np.median(contrast)):
        return False
    between_rows = _share_between_rows(frames)
    if between_rows[0] > _FLAT * float(np.median(between_rows[1:])):
        return False
    alike = [_correlation(one, other) for one, other in pairwise(scans)]
    return float(np.median(alike)) > _ALIKE and max(_correlation(picture, scan) for scan in scans[:3]) < _UNLIKE


def picture_frames(pixels: UInt8[np.ndarray, "F H W"]) -> Bool[np.ndarray, " F"]:
    """True for the first and the last frame where they are no B-scans."""
    found = np.zeros(len(pixels), bool)
    if len(pixels) < _FEWEST:
        return found
    found[0] = _is_picture(_blocks(pixels[:_FEWEST]))
    found[-1] = _is_picture(_blocks(pixels[: -_FEWEST - 1 : -1]))
    return found
