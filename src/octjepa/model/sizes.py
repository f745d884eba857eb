"""The named sizes: width, depth, heads of the encoder, and of the predictor that goes with it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Size:
    width: int
    depth: int
    heads: int
    predictor_width: int
    predictor_depth: int
    predictor_heads: int


SIZES: dict[str, Size] = {
    "test": Size(192, 6, 6, 96, 3, 3),
    "reference": Size(384, 6, 6, 192, 4, 6),
    "small": Size(384, 12, 6, 192, 6, 6),
    "base": Size(768, 12, 12, 384, 12, 12),
    "large": Size(1024, 24, 16, 384, 12, 12),
}
