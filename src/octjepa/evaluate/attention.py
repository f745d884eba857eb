"""How a probe that reads tokens divides its attention over them, in held-out volumes; `octjepa.explain` maps it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Int

from octjepa.embed.token_folder import TokenFolder
from octjepa.evaluate.calibration import ProbeFit


@dataclass(frozen=True, eq=False)
class VolumeAttention:
    """The attention of each token of one volume, which sums to 1; `grid_index` is its index in the raster of `grid`.

    name: of the result. twin: whether the tokens are those of the randomly initialised encoder of the encoder.
    """

    name: str
    twin: bool
    target: str
    volume_id: str
    grid: tuple[int, ...]
    grid_index: Int[np.ndarray, " k"]
    attention: Float[np.ndarray, " k"]


def list_attention(
    about: tuple[str, bool, str],
    fit: ProbeFit,
    tokens: TokenFolder,
    volume_ids: Sequence[str],
    held_out: Int[np.ndarray, " n"],
) -> Iterator[VolumeAttention]:
    """The attention of each of the volumes `held_out`, positions in `volume_ids`; none where the probe has none.

    about: (name, twin, target) of every one.
    """
    if fit.attention is None:
        return
    for position, attention in zip(held_out, fit.attention(held_out), strict=True):
        volume_id = volume_ids[int(position)]
        yield VolumeAttention(*about, volume_id, tokens.grid, tokens.grid_index(volume_id), attention)
