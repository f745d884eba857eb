"""Photometric changes, drawn apart for each view: gain, gamma, blur, speckle; then the one z-score over tissue.

Stored pixels are 8-bit, so gain, gamma and the z-score together are one table of 256 values: one look-up per voxel.
Speckle is multiplicative in intensity and so nearly additive after a scanner's log or root compression, which is
the domain of stored pixels (Schmitt et al. 1999); it is drawn as 8-bit normal quantiles, again one look-up.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np
from jaxtyping import Float, UInt8
from scipy.special import ndtri

from octjepa.recipe import ViewRecipe


@dataclass(frozen=True)
class Light:
    """`speckle` in units of the tissue's standard deviation; the neutral Light changes nothing."""

    gain: float = 1.0
    gamma: float = 1.0
    speckle: float = 0.0
    blur: bool = False


def draw(views: ViewRecipe, rng: np.random.Generator) -> Light:
    gain, gamma = rng.uniform(-1, 1, size=2)
    speckle, blur = rng.random(2)
    return Light(
        gain=float(np.exp(gain * views.gain)),
        gamma=float(np.exp(gamma * views.gamma)),
        speckle=float(speckle * views.speckle),
        blur=bool(blur < views.blur),
    )


def soften(patches: UInt8[np.ndarray, "t voxels"], patch: tuple[int, int, int]) -> UInt8[np.ndarray, "t voxels"]:
    """A [1 2 1]/4 blur along depth and width, in whole numbers, within each patch: none sees into its neighbour.

    Borders keep their value along the axis they end. Were the view blurred before it is cut, voxels of a hidden patch
    would stand in the visible one beside it.
    """
    x = patches.reshape(len(patches), *patch).astype(np.uint16)
    for axis in (2, 3):
        a, b, c = (_within(x, axis, cut) for cut in (slice(None, -2), slice(1, -1), slice(2, None)))
        blurred = (a + 2 * b + c + 2) >> 2
        _within(x, axis, slice(1, -1))[...] = blurred
    return x.astype(np.uint8).reshape(patches.shape)


def _within(x: np.ndarray, axis: int, cut: slice) -> np.ndarray:
    return x[(slice(None),) * axis + (cut,)]


def table(light: Light, mean: float, std: float) -> Float[np.ndarray, "256"]:
    """Stored value -> z-score over the tissue, after gain and gamma about the tissue's mean."""
    value = np.arange(256, dtype=np.float64)
    bent = 255.0 * (value / 255.0) ** light.gamma
    middle = 255.0 * (mean / 255.0) ** light.gamma
    return (light.gain * (bent - middle) / max(std, 1.0)).astype(np.float32)


@cache
def _normal_quantiles() -> np.ndarray:
    return ndtri((np.arange(256) + 0.5) / 256).astype(np.float32)


def expose(
    patches: UInt8[np.ndarray, "t voxels"], light: Light, mean: float, std: float, rng: np.random.Generator
) -> Float[np.ndarray, "t voxels"]:
    """Stored patches -> z-scored fp32 under `light`. Without speckle `rng` is not drawn from."""
    exposed = table(light, mean, std)
    if light.speckle == 0:
        return exposed.take(patches)
    # one table over (noise, value) pairs: a second look-up and an addition would double the time
    pairs = (exposed + (light.speckle * _normal_quantiles())[:, None]).ravel()
    index = np.frombuffer(rng.bytes(patches.size), dtype=np.uint8).reshape(patches.shape).astype(np.uint16)
    index <<= 8
    index |= patches
    return pairs.take(index)
