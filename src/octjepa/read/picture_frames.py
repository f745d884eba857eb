"""Frames that are not B-scan by their content: a fundus picture before or after the scan, and damaged frames.

A B-scan resembles those next to it, at some height of the image, and its intensity varies with depth. Both have to
fail, so that a B-scan over a blink, a jump of the eye or the optic disc is not taken for another image.

Whether such a frame is a picture needs evidence of its own, for a frame garbled in a file or on its way is not a B-scan
either: a picture is smooth along both axes, its light is within the range of the camera, and no dark vitreous is in it.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Bool, Float, UInt8

_FEWEST = 6  # B-scans
_SAMPLES = (48, 24)  # blocks along depth and columns
_NEAREST, _AROUND = 3, 7  # frames compared with one, and those that have to be B-scans
_UNLIKE, _ALIKE = 0.5, 0.7  # correlation of another image with the nearest B-scans; of neighbouring B-scans
_FLAT = 0.6  # share of another image's variance that lies between its rows, over that of the B-scans next to it
_STRIPS = 4  # of columns, in each of which that share is taken: a tilted retina is layered in a narrow strip
_STRUCTURE = 0.15  # of the contrast of a B-scan; an empty frame has less
_SMOOTH = 0.45  # least correlation of a picture's neighbouring blocks, along depth and along columns
_WHITE, _SATURATED = 250, 0.1  # intensity, and its greatest share in a picture
_BLACK, _UNMASKED = 2, 0.3  # intensity up to which a picture is masked, and the least share of it that is not
_BOTH_ENDS = 0.03  # greatest share that is white where as much is black
_DARK, _VITREOUS = 0.15, 0.25  # of the way from vitreous to retina; greatest share of a picture that is darker


def block_means(frames: UInt8[np.ndarray, "n H W"]) -> Float[np.ndarray, "n h w"]:
    """Means of blocks, at most `_SAMPLES` of them."""
    _, height, width = frames.shape
    down, across = max(1, height // _SAMPLES[0]), max(1, width // _SAMPLES[1])
    return block_sums(frames, down, across) / np.float32(across) / np.float32(down)


def block_sums(frames: UInt8[np.ndarray, "n H W"], down: int, across: int) -> Float[np.ndarray, "n h w"]:
    """Sums of blocks of `down` x `across` pixels; what is left over at the ends of the axes does not count."""
    count, height, width = frames.shape
    high, wide = height // down, width // across
    sums = np.empty((count, high, wide), np.float32)  # whole numbers: exact in any order
    kind = np.uint16 if down < 257 else np.uint32  # the narrowest that holds them is the fastest
    starts = np.arange(0, wide * across, across)
    for out, frame in zip(sums, frames, strict=True):
        rows = frame[: high * down].reshape(high, down, width).sum(axis=1, dtype=kind)  # [h, W]
        out[...] = np.add.reduceat(rows[:, : wide * across], starts, axis=1, dtype=np.uint32)
    return sums


def _correlations(blocks: Float[np.ndarray, "n h w"], step: int) -> Float[np.ndarray, " n-step"]:
    """Of each frame with the one `step` further on, the best over all shifts along depth."""
    centred = blocks - blocks.mean(axis=(1, 2), keepdims=True)
    norm = np.linalg.norm(centred, axis=(1, 2))
    spectrum = np.fft.rfft(centred, axis=1)
    products = (spectrum[:-step] * spectrum[step:].conj()).sum(axis=2)  # [n - step, frequencies]
    best = np.fft.irfft(products, n=blocks.shape[1], axis=1).max(axis=1)
    return np.asarray(best / np.maximum(norm[:-step] * norm[step:], 1e-6))


def _share_between_rows(frames: Float[np.ndarray, "n h w"]) -> Float[np.ndarray, " n"]:
    """Share of each frame's variance that lies between its rows, as a mean over strips of columns."""
    shares = [
        strip.mean(axis=2).var(axis=1) / np.maximum(strip.var(axis=(1, 2)), 1e-6)
        for strip in np.array_split(frames, min(_STRIPS, frames.shape[2]), axis=2)
    ]
    return np.asarray(np.mean(shares, axis=0))


def _unlike_b_scans(blocks: Float[np.ndarray, "n h w"]) -> Bool[np.ndarray, " n"]:
    """True for frames that are not B-scan, among frames of which most are B-scans and similar to each other."""
    count = len(blocks)
    similarity = np.eye(count)
    for step in range(1, _NEAREST + 1):
        correlations = _correlations(blocks, step)
        similarity += np.diag(correlations, step) + np.diag(correlations, -step)
    between_rows, contrast = _share_between_rows(blocks), blocks.std(axis=(1, 2))
    unlike = np.zeros(count, bool)
    for index in range(count):
        others = np.delete(np.arange(count), index)
        near = np.sort(others[np.abs(others - index).argsort(kind="stable")][:_AROUND])
        nearest = near[np.abs(near - index).argsort(kind="stable")][:_NEAREST]
        unlike[index] = (
            similarity[index, nearest].max() < _UNLIKE
            and float(np.median(similarity[near[:-1], near[1:]])) > _ALIKE
            and contrast[index] >= _STRUCTURE * float(np.median(contrast[near]))
            and between_rows[index] <= _FLAT * float(np.median(between_rows[near]))
        )
    return unlike


def _is_picture(frame: UInt8[np.ndarray, "H W"], scans: Float[np.ndarray, "n h w"]) -> bool:
    """Whether a frame that is not a B-scan is what a camera sees; `scans` are blocks of the B-scans next to it."""
    blocks = block_means(frame[None])[0]
    white, black = float((frame >= _WHITE).mean()), float((frame <= _BLACK).mean())
    if white > _SATURATED or min(white, black) > _BOTH_ENDS:
        return False
    for first, next_one in ((blocks[:-1], blocks[1:]), (blocks[:, :-1], blocks[:, 1:])):
        if min(first.std(), next_one.std()) < 1e-3 or np.corrcoef(first.ravel(), next_one.ravel())[0, 1] < _SMOOTH:
            return False
    unmasked = block_means((frame > _BLACK)[None].view(np.uint8))[0] > 0.1
    vitreous, retina = np.percentile(scans, (10, 98))
    dark = blocks[unmasked] < vitreous + _DARK * (retina - vitreous)
    return bool(unmasked.mean() > _UNMASKED and dark.mean() < _VITREOUS)


def picture_frames(pixels: UInt8[np.ndarray, "F H W"]) -> Bool[np.ndarray, " F"]:
    """True for the first and the last frame if they are a picture, such as the fundus image of a scan."""
    is_picture = np.zeros(len(pixels), bool)
    if len(pixels) < _FEWEST:
        return is_picture
    for end, others in ((0, pixels[:_FEWEST]), (-1, pixels[: -_FEWEST - 1 : -1])):
        blocks = block_means(others)
        is_picture[end] = bool(_unlike_b_scans(blocks)[0]) and _is_picture(pixels[end], blocks[1:])
    return is_picture


def damaged_frames(pixels: UInt8[np.ndarray, "F H W"]) -> Bool[np.ndarray, " F"]:
    """True for frames with structure that is not a B-scan's; call it without blank frames and pictures."""
    return np.zeros(len(pixels), bool) if len(pixels) < _FEWEST else _unlike_b_scans(block_means(pixels))
