"""Token features as colours: three principal components of the tokens of several volumes together.

Tokens of like colour have like features. The report and the viewer draw these colours.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Float, Int, UInt8

if TYPE_CHECKING:
    from octjepa.encoders.base import FrozenEncoder
    from octjepa.volume import CanonicalVolume

COMPONENTS = 3


@dataclass(frozen=True, eq=False)
class Components:
    """Three principal components as red, green and blue, each from its 2nd to 98th percentile over what was fitted.

    `explained` is their share of the variance; `by_depth` the share of that which a token's depth in the grid by itself
    explains, and which is therefore not the eye's own.
    """

    mean: Float[np.ndarray, " dim"]
    axes: Float[np.ndarray, "3 dim"]
    low: Float[np.ndarray, " 3"]
    high: Float[np.ndarray, " 3"]
    explained: float
    by_depth: float

    def colours(self, features: Float[np.ndarray, "t dim"]) -> UInt8[np.ndarray, "t 3"]:
        """RGB of every token."""
        scores = (features.astype(np.float64) - self.mean) @ self.axes.T
        shares = np.clip((scores - self.low) / np.maximum(self.high - self.low, 1e-12), 0, 1)
        return (shares * 255).round().astype(np.uint8)


def tissue_tokens(
    encoder: FrozenEncoder, volume: CanonicalVolume
) -> tuple[Float[np.ndarray, "t dim"], Int[np.ndarray, "t 3"]]:
    """Features of the tokens that hold enough tissue, and their grid positions (slab, depth, column)."""
    from octjepa.views.tokens import holds_tissue

    tokens = encoder.tokens(volume)
    tissue = holds_tissue(tokens.tissue)
    return tokens.features[tissue], np.stack(np.unravel_index(tokens.grid_index[tissue], tokens.grid), axis=-1)


def principal_components(features: Sequence[Float[np.ndarray, "t dim"]], depths: Sequence[np.ndarray]) -> Components:
    """The components of the tokens of several volumes together.

    `depths` holds the depth index of every token in the grid. Signs are fixed so that the same features give the same
    colours. Raises ValueError: too few tokens.
    """
    stacked = np.concatenate(features).astype(np.float64)  # [tokens, dim]
    if len(stacked) <= COMPONENTS:
        raise ValueError(f"{len(stacked)} tokens are too few for {COMPONENTS} components")
    mean = stacked.mean(axis=0)
    _, singular, axes = np.linalg.svd(stacked - mean, full_matrices=False)
    axes = axes[:COMPONENTS]
    axes *= np.sign(axes[np.arange(len(axes)), np.abs(axes).argmax(axis=1)])[:, None]
    scores = (stacked - mean) @ axes.T  # [tokens, 3]
    total = float((singular**2).sum())
    levels, level = np.unique(np.concatenate(depths), return_inverse=True)
    depth_means = np.stack([scores[level == number].mean(axis=0) for number in range(len(levels))])[level]
    spread = float((scores**2).sum())
    low, high = np.percentile(scores, [2, 98], axis=0)
    explained = float((singular[:COMPONENTS] ** 2).sum()) / total if total else 0.0
    return Components(mean, axes, low, high, explained, float((depth_means**2).sum()) / spread if spread else 0.0)
