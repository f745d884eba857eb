"""Linear intensities of a Spectralis to the grey that a person sees."""

from __future__ import annotations

import numpy as np
from jaxtyping import Float, UInt8

FILL = 255  # HEYEX paints white where the registration left no measurement; `octjepa.store.fill` masks it


def heyex_grey(raw: Float[np.ndarray, "*shape"]) -> UInt8[np.ndarray, "*shape"]:
    """255 times the fourth root of a Spectralis intensity in [0, 1]; what is above 1 or no number is fill.

    Heidelberg's raw export marks invalid pixels with the largest float32, .e2e with its own largest values, near 2.
    Source: Heidelberg Engineering, Spectralis "Special Function: Exporting Raw Data": the display takes the fourth
    root of the linear intensity. (eyepy fits a logarithm to HEYEX' contrast setting instead and turns fill black.)
    """
    valid = (raw >= 0) & (raw <= 1)
    shown = np.sqrt(np.sqrt(np.where(valid, raw, 0).astype(np.float32)))
    return np.where(valid, np.round(255 * shown), FILL).astype(np.uint8)
