"""A B-scan or an en face view as one inline SVG: the pixels as an embedded PNG, overlays as crisp vector shapes.

The SVG's units are voxels, so an overlay is drawn at the voxel it speaks of; the shown aspect is set by the caller,
which is how a scan 1 mm deep and 6 mm wide becomes readable (the stretch is told in the caption).
"""

from __future__ import annotations

import base64
import io
from collections.abc import Iterable, Sequence

import numpy as np
from jaxtyping import Bool, Float, UInt8
from markupsafe import Markup

SHOWN_ASPECT = 0.62  # height over width of a B-scan on the page
_UPSCALE = 2  # browsers enlarge bilinearly; a first doubling by Lanczos keeps layers from looking like steps


def png(pixels: UInt8[np.ndarray, "h w"], upscale: tuple[int, int] = (_UPSCALE, _UPSCALE)) -> str:
    """A greyscale image as a data URI, enlarged by whole (height, width) factors."""
    from PIL import Image

    image = Image.fromarray(np.ascontiguousarray(pixels))
    image = image.resize((image.width * upscale[1], image.height * upscale[0]), Image.Resampling.LANCZOS)
    stream = io.BytesIO()
    # 64 grey levels are more than an 8-bit OCT of this size shows, and halve the page
    image.quantize(64, method=Image.Quantize.MAXCOVERAGE).save(stream, "PNG", optimize=True)
    return "data:image/png;base64," + base64.b64encode(stream.getvalue()).decode("ascii")


def picture(
    pixels: UInt8[np.ndarray, "h w"],
    alt: str,
    overlays: Iterable[Markup] = (),
    aspect: float = SHOWN_ASPECT,
    upscale: tuple[int, int] = (_UPSCALE, _UPSCALE),
) -> Markup:
    """Inline SVG of `pixels` shown `aspect` times as high as wide, with `overlays` in voxel units on top."""
    height, width = pixels.shape
    head = Markup(
        '<svg class="scan" role="img" aria-label="{}" viewBox="0 0 {} {}" preserveAspectRatio="none" '
        'style="aspect-ratio:{}"><title>{}</title>'
    ).format(alt, width, height, f"{1 / aspect:.4f}", alt)
    image = Markup('<image href="{}" width="{}" height="{}" preserveAspectRatio="none"/>').format(
        png(pixels, upscale), width, height
    )
    return head + image + Markup("").join(overlays) + Markup("</svg>")


def line(points: Sequence[tuple[float, float]], css: str) -> Markup:
    """A polyline through (x, y) voxel positions."""
    path = "M" + "L".join(f"{x:g} {y:g}" for x, y in points)
    return Markup('<path class="{}" d="{}"/>').format(css, path)


def boundary(rows: Float[np.ndarray, " w"], css: str) -> list[Markup]:
    """The line along `rows` (voxel row per column), broken where a row is not finite."""
    columns = np.flatnonzero(np.isfinite(rows))
    runs = np.split(columns, np.flatnonzero(np.diff(columns) > 1) + 1)
    return [line([(float(x) + 0.5, float(rows[x])) for x in run], css) for run in runs if len(run) > 1]


def cells(chosen: Bool[np.ndarray, "rows columns"], size: tuple[int, int], css: str, inset: float = 0.0) -> Markup:
    """Every chosen cell of a token grid as one path; `size` is (height, width) of a cell in voxels."""
    high, wide = size
    parts = [
        f"M{c * wide + inset:g} {r * high + inset:g}h{wide - 2 * inset:g}v{high - 2 * inset:g}h{-(wide - 2 * inset):g}z"
        for r, c in np.argwhere(chosen)
    ]
    return Markup('<path class="{}" d="{}"/>').format(css, "".join(parts)) if parts else Markup("")


def coloured_cells(
    colours: UInt8[np.ndarray, "rows columns 3"], chosen: Bool[np.ndarray, "rows columns"], size: tuple[int, int]
) -> Markup:
    """Chosen cells of a token grid, each in its own colour."""
    high, wide = size
    parts = [
        '<path class="tok-colour" fill="#{:02x}{:02x}{:02x}" d="M{:g} {:g}h{:g}v{:g}h{:g}z"/>'.format(
            *colours[r, c], c * wide, r * high, wide, high, -wide
        )
        for r, c in np.argwhere(chosen)
    ]
    return Markup("".join(parts))  # only numbers enter


def scale_bars(shape: tuple[int, int], spacing_mm: tuple[float, float], length_mm: tuple[float, float]) -> Markup:
    """An L of two bars in the lower left corner: `length_mm` down and across at `spacing_mm` (rows, columns)."""
    height, width = shape
    x, y = 0.04 * width, 0.94 * height
    down, across = (mm / one for mm, one in zip(length_mm, spacing_mm, strict=True))
    return line([(x, y - down), (x, y), (x + across, y)], "bar")
