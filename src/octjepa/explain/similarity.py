"""How alike the tokens of a volume are to one of them, by the cosine of their features."""

from __future__ import annotations

import numpy as np
from jaxtyping import Float

from octjepa.encoders.base import FrozenEncoder
from octjepa.errors import UsageError
from octjepa.views.tokens import holds_tissue
from octjepa.volume import CanonicalVolume


def cosine_with(features: Float[np.ndarray, "k dim"], number: int) -> Float[np.ndarray, " k"]:
    """The cosine of every token with token `number`, from -1 to 1; with itself exactly 1, however sums are rounded."""
    unit = features / np.maximum(np.linalg.norm(features, axis=1, keepdims=True), 1e-9)
    cosine: np.ndarray = np.clip(unit @ unit[number], -1.0, 1.0)
    cosine[number] = 1.0
    return cosine


def similarity_grid(
    encoder: FrozenEncoder, volume: CanonicalVolume, token: tuple[int, int, int]
) -> Float[np.ndarray, "d h w"]:
    """The cosine of every token of tissue with the token at `token` (slice, depth, column of the token grid); else NaN.

    Raises UsageError: no token of tissue is there.
    """
    tokens = encoder.tokens(volume)
    tissue = holds_tissue(tokens.tissue)
    here = np.flatnonzero((tokens.grid_index == np.ravel_multi_index(token, tokens.grid)) & tissue)
    if not len(here):
        raise UsageError(f"no token of tissue at {token} of a grid of {tokens.grid}")
    grid = np.full(tokens.grid, np.nan, np.float32)
    grid.reshape(-1)[tokens.grid_index[tissue]] = cosine_with(tokens.features, int(here[0]))[tissue]
    return grid
