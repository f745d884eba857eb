"""A B-scan with what each voxel is called laid over it in colour, as one inline SVG."""

from __future__ import annotations

import base64
import io

import numpy as np
from jaxtyping import UInt8
from markupsafe import Markup

from octjepa.report.figures import scan
from octjepa.tasks.segment.label_files import UNSEEN

# Okabe & Ito (2008), which the colour-blind tell apart; more classes take them again.
COLOURS = ("#e69f00", "#56b4e9", "#009e73", "#f0e442", "#0072b2", "#d55e00", "#cc79a7", "#999999")
_OPACITY, _VEIL = 140, 150  # of a class, and of what nobody labelled (dark)


def colour(code: int) -> str:
    """Of class 1, 2, ..."""
    return COLOURS[(code - 1) % len(COLOURS)]


def labelled(pixels: UInt8[np.ndarray, "h w"], codes: UInt8[np.ndarray, "h w"], alt: str) -> Markup:
    """`pixels` with the classes of `codes` in colour: 0 is clear, 255 (not labelled) dark."""
    return scan.picture(pixels, alt, [_overlay(codes)])


def _overlay(codes: UInt8[np.ndarray, "h w"]) -> Markup:
    from PIL import Image

    image = Image.fromarray(np.ascontiguousarray(codes)).convert("P")
    image.putdata(codes.ravel().tolist())
    shades = [(0, 0, 0), *(_rgb(colour(code)) for code in range(1, UNSEEN)), (0, 0, 0)]
    image.putpalette([part for shade in shades for part in shade])
    seen = bytes([0, *[_OPACITY] * (UNSEEN - 1), _VEIL])
    stream = io.BytesIO()
    image.save(stream, "PNG", optimize=True, transparency=seen)
    data = base64.b64encode(stream.getvalue()).decode("ascii")
    return Markup(
        '<image href="data:image/png;base64,{}" width="{}" height="{}" preserveAspectRatio="none" '
        'style="image-rendering:pixelated"/>'
    ).format(data, codes.shape[1], codes.shape[0])


def _rgb(text: str) -> tuple[int, int, int]:
    return int(text[1:3], 16), int(text[3:5], 16), int(text[5:7], 16)
