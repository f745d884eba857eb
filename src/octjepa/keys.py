"""Stateless randomness: every random choice is a function of (seed, purpose, epoch, sample id), never of a state.

Nothing needs saving for a resume, and no choice depends on the worker, the rank or the order of work.
"""

from __future__ import annotations

import hashlib
import operator

import numpy as np


def key(*parts: int | str) -> int:
    """A 63-bit integer from `parts`; equal parts give equal keys on every machine."""
    # NumPy's integers count as the numbers they are; file names may hold halves of characters
    text = "\x1f".join(f"str:{part}" if isinstance(part, str) else f"int:{operator.index(part)}" for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).digest(), "big") >> 1


def generator(*parts: int | str) -> np.random.Generator:
    """A NumPy generator (Philox, counter based) for `parts`."""
    return np.random.Generator(np.random.Philox(key=key(*parts)))
