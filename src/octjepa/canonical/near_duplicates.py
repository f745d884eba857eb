"""Near-duplicates: scans whose en face images are alike, found by a hash without comparing all pairs.

A scan that was exported again (lossy, brightened, shifted by pixels, cropped) has other bytes and often another UID,
and may end up in training and in test. Its en face image, the mean of the tissue band, is unique: the signs of its
lowest cosine terms give 256 bits, of which such a copy changes few and another eye about half (a perceptual hash,
pHash: Zauner, Implementation and Benchmarking of Perceptual Image Hash Functions, 2010).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Bool, Float, UInt8, UInt32, UInt64

from octjepa.canonical.resample import centred_positions, resampling_matrix

if TYPE_CHECKING:
    import pandas as pd

NEAR_BITS = 40  # of 256; the distances of copies, repeats and other eyes are in docs/quality.md
_GRID = ((16, 0.36), (48, 0.12))  # samples and pitch in mm of the small image, slices and columns: 5.8 x 5.8 mm
_TERMS = 16  # cosine terms unique along each axis
_KEY_BITS, _KEYS = 24, 270  # candidates agree in one of so many keys of so many bits each
_AT_ONCE = 1 << 20  # candidate pairs compared at once


def mean_en_face(pixels: UInt8[np.ndarray, "D H W"], tissue: Bool[np.ndarray, "D H W"]) -> Float[np.ndarray, "D W"]:
    """Mean intensity of the tissue in every A-scan, NaN if there is none."""
    count = tissue.sum(axis=1, dtype=np.float32)
    total = np.where(tissue, pixels, np.uint8(0)).sum(axis=1, dtype=np.float32)
    return np.where(count > 0, total / np.maximum(count, 1), np.nan)


def enface_hash(image: Float[np.ndarray, "D W"], slice_mm: float, column_mm: float) -> str:
    """Perceptual hash (256 bits as 64 hex digits) of an en face image with the given spacing.

    The caller mirrors left eyes.
    """
    from scipy.fft import dctn

    is_finite = np.isfinite(image)
    value = np.where(is_finite, image - image[is_finite].mean(), 0.0).astype(np.float32)  # outside the scan: the mean
    for axis, (step, (count, pitch)) in enumerate(zip((slice_mm, column_mm), _GRID, strict=True)):
        source, target = centred_positions(image.shape[axis], step), centred_positions(count, pitch)
        matrix = resampling_matrix(source, target, pitch, reach_mm=step / 2)
        value = matrix @ value if axis == 0 else value @ matrix.T
    terms = dctn(value, norm="ortho")[:_TERMS, :_TERMS]
    terms[0, 0] = 0.0  # the mean intensity carries no structure
    return np.packbits(terms > 0).tobytes().hex()


def near_duplicates(table: pd.DataFrame, bits: int = NEAR_BITS) -> list[tuple[str, str, int]]:
    """(volume_id, volume_id, distance in bits) of all pairs of a store's table whose en face images are alike.

    Of volumes with one and the same hash only the pairs with the first are listed. Two hashes are compared if they
    agree in one of 270 keys, each made of 24 bits that are drawn once (bit sampling: Indyk and Motwani, Approximate
    Nearest Neighbors, 1998). A pair d bits apart is missed with probability (1 - (1 - d / 256) ** 24) ** 270: 1 % of
    those 40 apart, one in 250,000 of those 31 apart. One pair in 62,000 of random hashes is compared, so that the
    time grows with the number of volumes.
    """
    hashed = table[table["enface_hash"].astype(str) != ""].sort_values("volume_id")
    names = hashed["volume_id"].tolist()
    first: dict[str, int] = {}
    pairs: list[tuple[str, str, int]] = []
    for index, digits in enumerate(hashed["enface_hash"]):
        group = first.setdefault(digits, index)
        if group != index:
            pairs.append((names[group], names[index], 0))
    if len(first) > 1:
        unique = np.fromiter(first.values(), np.int64)
        codes = np.array([np.frombuffer(bytes.fromhex(digits), np.uint8) for digits in first])
        left, right, distance = _close_pairs(codes, bits)
        distances = zip(unique[left].tolist(), unique[right].tolist(), distance.tolist(), strict=True)
        pairs += [(names[a], names[b], d) for a, b, d in distances]
    return sorted(pairs)


def near_duplicates_across_people(table: pd.DataFrame) -> list[tuple[str, str, int]]:
    """The near-duplicates whose person ids differ: one eye under two ids, or a copy of a file that lost its id."""
    if len(table) < 2:
        return []
    person = dict(zip(table["volume_id"], table["person_id"], strict=True))
    return [pair for pair in near_duplicates(table) if person[pair[0]] != person[pair[1]]]


def _keys(codes: UInt8[np.ndarray, "N 32"]) -> Iterator[UInt32[np.ndarray, " N"]]:
    """The keys of the codes, one after another: each 24 bits of a code, in the lower part of a word."""
    planes = np.ascontiguousarray(np.unpackbits(codes, axis=1).T)
    draw = np.random.default_rng(0)  # the same bits everywhere: a pair is found on every machine or on none
    for _ in range(_KEYS):
        key = np.zeros(len(codes), np.uint32)
        for bit in draw.choice(len(planes), _KEY_BITS, replace=False):
            key = (key << np.uint32(1)) | planes[bit]
        yield key


def _candidates(key: UInt32[np.ndarray, " N"]) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """(i, j), i != j, in batches: all pairs with equal keys, each once."""
    order = np.argsort(key, kind="stable")
    ordered = key[order]
    later = np.searchsorted(ordered, ordered, "right") - np.arange(len(key)) - 1  # equal keys that follow each
    ends = np.cumsum(later)
    start = 0
    while start < len(key):
        before = int(ends[start - 1]) if start else 0
        stop = max(start + 1, int(np.searchsorted(ends, before + _AT_ONCE, "right")))
        count = later[start:stop]
        left = np.repeat(np.arange(start, stop), count)
        within = np.arange(len(left)) - np.repeat(np.cumsum(count) - count, count)
        yield order[left], order[left + 1 + within]
        start = stop


def _popcount(words: UInt64[np.ndarray, "N 4"]) -> np.ndarray:
    """Set bits of each code (Warren, Hacker's Delight, 2nd ed., 5-1; NumPy has its own from 2.0 on)."""
    words = words - ((words >> np.uint64(1)) & np.uint64(0x5555555555555555))
    words = (words & np.uint64(0x3333333333333333)) + ((words >> np.uint64(2)) & np.uint64(0x3333333333333333))
    words = (words + (words >> np.uint64(4))) & np.uint64(0x0F0F0F0F0F0F0F0F)
    return ((words * np.uint64(0x0101010101010101)) >> np.uint64(56)).sum(axis=1).astype(np.int64)


def _close_pairs(codes: UInt8[np.ndarray, "N 32"], bits: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(i, j, distance), i < j, of the pairs at most `bits` apart, each once."""
    words: UInt64[np.ndarray, "N 4"] = np.ascontiguousarray(codes).view(np.uint64)
    close: list[np.ndarray] = []
    for key in _keys(codes):
        for lefts, others in _candidates(key):
            distance = _popcount(words[lefts] ^ words[others])
            near = distance <= bits
            if near.any():
                pair = lefts[near], others[near]
                close.append(np.stack([np.minimum(*pair), np.maximum(*pair), distance[near]]))
    if not close:
        return (np.empty(0, np.int64),) * 3
    left, right, distance = np.unique(np.concatenate(close, axis=1), axis=1)
    return left, right, distance
