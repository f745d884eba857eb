"""Drawn pictures of what is not a retina, or not only one: bent surfaces, a fundus picture, an instrument."""

from __future__ import annotations

import numpy as np

from octjepa.volume import OCTVolume
from shaped_eye import as_volume

CORNEA, RODENT = (7.8, 6.5, 0.53, 1), (3.2, 3.4, 0.25, -1)


def bent(front_mm: float, back_mm: float, thick_mm: float, towards: int) -> OCTVolume:
    """Two bright spherical surfaces with tissue between them; `towards` 1: the middle is highest."""
    rng = np.random.default_rng(0)
    depth, height, width = 24, 300, 200
    (dz, dy, dx) = 0.2, 0.0078, 0.02
    z, x = (np.arange(depth) - 11.5) * dz, (np.arange(width) - 99.5) * dx
    square = z[:, None] ** 2 + x**2
    apex = 0.3 if towards > 0 else 1.3
    top = apex + towards * (front_mm - np.sqrt(front_mm**2 - square))
    bottom = apex + thick_mm + towards * (back_mm - np.sqrt(back_mm**2 - square))
    row = np.arange(height)[None, :, None] * dy
    inside = (row >= top[:, None]) & (row < bottom[:, None])
    pixels = np.where(inside, 70.0, 8.0)
    for surface, level in ((top + 0.02, 130), (bottom, 90)):
        pixels += level * np.exp(-(((row - surface[:, None]) / 0.012) ** 2))
    pixels *= rng.gamma(4, 0.25, pixels.shape)
    return as_volume(np.clip(pixels + rng.normal(6, 4, pixels.shape), 0, 255).astype(np.uint8), (dz, dy, dx))


def fundus_picture(height: int, width: int, seed: int = 0) -> np.ndarray:
    """uint8 [height, width]: a bright disc, dark vessels that leave it, brightness that falls off to the corners."""
    rng = np.random.default_rng(seed)
    y, x = np.mgrid[-1 : 1 : height * 1j, -1 : 1 : width * 1j]
    image = 110 - 25 * (x**2 + y**2) + 90 * (np.hypot(x - 0.55, y) < 0.16)
    for start in np.linspace(-0.9, 0.9, 6):
        vessel = start * (0.55 - x) + 0.08 * np.sin(5 * x + 7 * start)
        image -= 55 * np.exp(-(((y - vessel) / 0.035) ** 2))
    return np.clip(image + rng.normal(0, 8, image.shape), 0, 255).astype(np.uint8)


def with_instrument(pixels: np.ndarray, first: int, last: int) -> np.ndarray:
    """B-scans first..last - 1 with a bright bar in the vitreous and no light below it."""
    drawn = pixels.copy()
    width = pixels.shape[2]
    columns = slice(width // 3, width // 3 + max(12, width // 10))
    dark = np.resize(pixels[:, :6, columns], pixels[:, :, columns].shape)
    drawn[first:last, :, columns] = dark[first:last]
    drawn[first:last, 8:20, columns] = 240
    return drawn
