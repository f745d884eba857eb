"""A plain layered retina in numbers, quick to make, for what needs no phantom."""

from __future__ import annotations

import numpy as np

from octjepa.recipe import Preprocessing
from octjepa.volume import OCTVolume

PREPROCESSING = Preprocessing(
    image_size=(8, 96, 64), margin=(0, 8, 8), target_spacing_mm=(0.3, 0.0078, 0.06), axial_anchor=0.65
)
BRUCH_ROW, ROWS, COLUMNS, FRAMES = 90, 180, 120, 16


def eye(
    laterality: str = "OD", tilt: float = 0.0, motion: float = 0.0, curve: float = 0.0, **changes: object
) -> OCTVolume:
    """A layered retina, 0.25 mm thick over Bruch's membrane at `BRUCH_ROW`, tilted and bent by rows over the width."""
    rng = np.random.default_rng(1)
    x = np.linspace(-1, 1, COLUMNS)[None, None, :]
    z = np.arange(FRAMES)[:, None, None]
    jump = motion * rng.normal(0, 1, FRAMES)[:, None, None]
    bruch = BRUCH_ROW + tilt * x + curve * x**2 + np.rint(jump) + 0.3 * z
    y = np.arange(ROWS)[None, :, None] - bruch
    image = 10 + 90 * ((y > -32) & (y <= -6)) + 45 * ((y > -14) & (y <= -6)) * -1
    image = image + 200 * ((y > -6) & (y <= 0)) + 70 * np.exp(-np.clip(y, 0, None) / 25) * (y > 0)
    # The nasal side is brighter, so that left and right can be told apart; not up to one column in all B-scans.
    image += 25 * ((y > -32) & (np.arange(COLUMNS) < 8 + 2 * z))
    pixels = np.clip(image + rng.normal(0, 4, image.shape), 0, 255).astype(np.uint8)
    values: dict[str, object] = {
        "pixels": pixels,
        "spacing_mm": (0.15, 0.0078, 0.035),
        "provenance": {"slice": "positions", "depth": "shared", "column": "shared"},
        "person_id": "1",
        "device": "topcon_triton",
        "laterality": laterality,
    }
    return OCTVolume(**{**values, **changes})  # type: ignore[arg-type]
