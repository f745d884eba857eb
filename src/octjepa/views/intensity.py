"""Intensity augmentation, sampled separately for each view: gain, gamma, blur, speckle; then one z-score over tissue.

Stored pixels are 8-bit, so gain, gamma and the z-score together are one look-up table of 256 values.
Speckle multiplies the intensity of light and is therefore nearly additive after a scanner's log or root compression,
which is the domain of stored pixels (Schmitt et al. 1999). It is drawn as 8-bit normal quantiles, again one look-up.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import numpy as np
from jaxtyping import Float, UInt8

from octjepa.recipe import ViewRecipe


@dataclass(frozen=True)
class IntensityAugmentation:
    """One draw of the photometric changes of a view; the default changes nothing.

    `speckle` is in units of the tissue's standard deviation.
    """

    gain: float = 1.0
    gamma: float = 1.0
    speckle: float = 0.0
    blur: bool = False


def sample_augmentation(views: ViewRecipe, rng: np.random.Generator) -> IntensityAugmentation:
    """Gain and gamma log-uniform about 1, speckle uniform up to its limit, blur with its probability."""
    gain, gamma = rng.uniform(-1, 1, size=2)
    speckle, blurred = rng.random(2)
    return IntensityAugmentation(
        gain=float(np.exp(gain * views.gain)),
        gamma=float(np.exp(gamma * views.gamma)),
        speckle=float(speckle * views.speckle),
        blur=bool(blurred < views.blur),
    )


def blur(patches: UInt8[np.ndarray, "t voxels"], patch: tuple[int, int, int]) -> UInt8[np.ndarray, "t voxels"]:
    """A [1 2 1]/4 blur along depth and column, in integers, within each patch.

    The voxels at a patch's borders keep their value along the axis that ends there. If the view were blurred before
    it is cut into patches, voxels of a hidden patch would leak into the visible one next to it.
    """
    x = patches.reshape(len(patches), *patch).astype(np.uint16)  # [t, p, q, r]
    for axis in (2, 3):
        along = np.moveaxis(x, axis, -1)
        along[..., 1:-1] = (along[..., :-2] + 2 * along[..., 1:-1] + along[..., 2:] + 2) >> 2
    return x.astype(np.uint8).reshape(patches.shape)


def lookup_table(
    mean: float, std: float, augmentation: IntensityAugmentation | None = None
) -> Float[np.ndarray, "256"]:
    """Stored value -> z-score over the tissue (`mean`, `std`), after gain and gamma about the tissue's mean."""
    augmentation = augmentation or IntensityAugmentation()
    value = np.arange(256, dtype=np.float64)
    curved = 255.0 * (value / 255.0) ** augmentation.gamma
    centre = 255.0 * (mean / 255.0) ** augmentation.gamma
    return (augmentation.gain * (curved - centre) / max(std, 1.0)).astype(np.float32)


@cache
def _normal_quantiles() -> np.ndarray:
    from scipy.special import ndtri

    return ndtri((np.arange(256) + 0.5) / 256).astype(np.float32)


def apply_intensity(
    patches: UInt8[np.ndarray, "t voxels"],
    augmentation: IntensityAugmentation,
    mean: float,
    std: float,
    rng: np.random.Generator,
) -> Float[np.ndarray, "t voxels"]:
    """Stored patches -> z-scored fp32 patches. Without speckle `rng` is not drawn from; the blur is `blur`'s."""
    table = lookup_table(mean, std, augmentation)  # [256]
    if augmentation.speckle == 0:
        return table.take(patches)
    # one table over (noise, value) pairs: a second look-up and an addition would double the time
    pairs = (table + (augmentation.speckle * _normal_quantiles())[:, None]).ravel()  # [256 * 256]
    index = np.frombuffer(rng.bytes(patches.size), dtype=np.uint8).reshape(patches.shape).astype(np.uint16)
    index <<= 8
    index |= patches
    return pairs.take(index)
