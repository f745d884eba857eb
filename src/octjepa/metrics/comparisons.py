"""Many comparisons at once: p-values that stay honest when a family of them is read together.

Holm's step-down rule bounds the chance of even one false claim in the family, whatever the dependence between its
members (Holm 1979). Benjamini and Hochberg's bounds the expected share of false claims among those made; it holds for
independent and positively dependent ones, such as rows measured on the same people (Benjamini & Hochberg 1995,
Benjamini & Yekutieli 2001). The family is everything that was compared, not what looked worth showing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from jaxtyping import Float

from octjepa.errors import UsageError


def holm(p: Sequence[float | None]) -> list[float | None]:
    """Adjusted p-values in the order given; None (no p-value exists) stays None and is not counted in the family."""

    def adjusted(ordered: Float[np.ndarray, " family"]) -> Float[np.ndarray, " family"]:
        steps: np.ndarray = np.maximum.accumulate(ordered * np.arange(len(ordered), 0, -1))
        return steps

    return _over_family(p, adjusted)


def benjamini_hochberg(p: Sequence[float | None]) -> list[float | None]:
    """As `holm`, for the false discovery rate."""

    def adjusted(ordered: Float[np.ndarray, " family"]) -> Float[np.ndarray, " family"]:
        steps = ordered * len(ordered) / np.arange(1, len(ordered) + 1)
        from_above: np.ndarray = np.minimum.accumulate(steps[::-1])[::-1]
        return from_above

    return _over_family(p, adjusted)


def _over_family(p: Sequence[float | None], adjusted: Callable[[np.ndarray], np.ndarray]) -> list[float | None]:
    known = [index for index, one in enumerate(p) if one is not None]
    values = np.array([p[index] for index in known], dtype=np.float64)
    if ((values < 0) | (values > 1) | np.isnan(values)).any():
        raise UsageError("a family of comparisons holds a p-value outside 0..1")
    order = np.argsort(values, kind="stable")
    found: list[float | None] = [None] * len(p)
    if len(known):
        for place, value in zip(order, np.minimum(adjusted(values[order]), 1.0), strict=True):
            found[known[place]] = float(value)
    return found
