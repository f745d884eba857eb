"""Inline SVG for the page: scans with overlays, and matplotlib charts in the page's own colours.

A scan's pixels are an embedded PNG and its overlays are vector shapes in voxel units. The shown aspect is set by the
caller, which is how a scan 1 mm deep and 6 mm wide becomes readable; the caption states the stretch.
"""

from __future__ import annotations

import base64
import io
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Bool, Float, UInt8
from markupsafe import Markup, escape

from octjepa.tasks.labels.label_files import UNLABELLED

if TYPE_CHECKING:
    from matplotlib.figure import Figure

SHOWN_ASPECT = 0.62  # height over width of a B-scan on the page
_UPSCALE = 2  # browsers enlarge bilinearly; a first doubling by Lanczos keeps layers from looking like steps

# Colours of classes by Okabe & Ito (2008), which colour-blind readers tell apart; more classes take them again.
_CLASS_COLOURS = ("#e69f00", "#56b4e9", "#009e73", "#f0e442", "#0072b2", "#d55e00", "#cc79a7", "#999999")
_CLASS_OPACITY, _UNLABELLED_OPACITY = 140, 150

# Stand-ins that matplotlib writes into the SVG, and the page's own variables that replace them.
PAGE_COLOURS = {"ink": "#010203", "rule": "#010204", "line": "#010205", "other": "#010206"}
_PAGE_VARIABLES = {"ink": "currentColor", "rule": "var(--rule)", "line": "var(--ours)", "other": "var(--other)"}


def png(pixels: UInt8[np.ndarray, "h w"], upscale: tuple[int, int] = (_UPSCALE, _UPSCALE)) -> str:
    """A greyscale image as a data URI, enlarged by whole (height, width) factors."""
    from PIL import Image

    image = Image.fromarray(np.ascontiguousarray(pixels))
    image = image.resize((image.width * upscale[1], image.height * upscale[0]), Image.Resampling.LANCZOS)
    stream = io.BytesIO()
    # 64 intensities are more than an 8-bit OCT of this size shows, and halve the page
    image.quantize(64, method=Image.Quantize.MAXCOVERAGE).save(stream, "PNG", optimize=True)
    return data_uri(stream.getvalue(), "image/png")


def data_uri(content: bytes, media_type: str) -> str:
    """`content` as a data URI."""
    return f"data:{media_type};base64," + base64.b64encode(content).decode("ascii")


def scan(
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


def depth_stretch(shape: tuple[int, int], spacing_mm: tuple[float, float]) -> float:
    """By how much `scan` stretches the depth of a B-scan of (depth, column) voxels over its true proportions."""
    return SHOWN_ASPECT * shape[1] * spacing_mm[1] / (shape[0] * spacing_mm[0])


def line(points: Sequence[tuple[float, float]], css: str) -> Markup:
    """A polyline through (x, y) voxel positions."""
    path = "M" + "L".join(f"{x:g} {y:g}" for x, y in points)
    return Markup('<path class="{}" d="{}"/>').format(css, path)


def boundary(depths: Float[np.ndarray, " w"], css: str) -> list[Markup]:
    """The line through `depths` (a depth index per column), broken if one is not finite."""
    columns = np.flatnonzero(np.isfinite(depths))
    runs = np.split(columns, np.flatnonzero(np.diff(columns) > 1) + 1)
    return [line([(float(x) + 0.5, float(depths[x])) for x in run], css) for run in runs if len(run) > 1]


def cells(chosen: Bool[np.ndarray, "r c"], size: tuple[int, int], css: str, inset: float = 0.0) -> Markup:
    """Every chosen cell of a token grid as one path; `size` is the (height, width) of a cell in voxels."""
    high, wide = size
    parts = [
        f"M{c * wide + inset:g} {r * high + inset:g}h{wide - 2 * inset:g}v{high - 2 * inset:g}h{-(wide - 2 * inset):g}z"
        for r, c in np.argwhere(chosen)
    ]
    return Markup('<path class="{}" d="{}"/>').format(css, "".join(parts)) if parts else Markup("")


def coloured_cells(
    colours: UInt8[np.ndarray, "r c 3"], chosen: Bool[np.ndarray, "r c"], size: tuple[int, int]
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
    """An L of two bars in the lower left corner, `length_mm` down and across, at `spacing_mm` (depth, column)."""
    height, width = shape
    x, y = 0.04 * width, 0.94 * height
    down, across = (mm / spacing for mm, spacing in zip(length_mm, spacing_mm, strict=True))
    return line([(x, y - down), (x, y), (x + across, y)], "bar")


def class_colour(code: int) -> str:
    """The colour of class 1, 2, ..."""
    return _CLASS_COLOURS[(code - 1) % len(_CLASS_COLOURS)]


def class_overlay(codes: UInt8[np.ndarray, "h w"]) -> Markup:
    """Class codes of voxels in colour over a scan: 0 is clear, 255 (not labelled) dark."""
    from PIL import Image

    image = Image.fromarray(np.ascontiguousarray(codes)).convert("P")
    image.putdata(codes.ravel().tolist())
    shades = [(0, 0, 0), *(tuple(bytes.fromhex(class_colour(code)[1:])) for code in range(1, UNLABELLED)), (0, 0, 0)]
    image.putpalette([part for shade in shades for part in shade])
    opacity = bytes([0, *[_CLASS_OPACITY] * (UNLABELLED - 1), _UNLABELLED_OPACITY])
    stream = io.BytesIO()
    image.save(stream, "PNG", optimize=True, transparency=opacity)
    return Markup(
        '<image href="{}" width="{}" height="{}" preserveAspectRatio="none" style="image-rendering:pixelated"/>'
    ).format(data_uri(stream.getvalue(), "image/png"), codes.shape[1], codes.shape[0])


@contextmanager
def page_style(name: str, font_size: float) -> Iterator[None]:
    """matplotlib's settings for a chart of the page; drawing it and `figure_svg` both happen inside."""
    import matplotlib as mpl

    with mpl.rc_context(
        {"svg.fonttype": "none", "svg.hashsalt": name, "text.parse_math": False, "font.size": font_size}
    ):
        yield


def figure_svg(figure: Figure, alt: str, name: str) -> Markup:
    """A figure in `PAGE_COLOURS` as an element of the page: its own ids, the page's colours and font.

    Light and dark pages share the element, because its colours are the page's variables.
    """
    from matplotlib.backends.backend_svg import FigureCanvasSVG

    FigureCanvasSVG(figure)
    stream = io.StringIO()
    metadata = dict.fromkeys(("Creator", "Date", "Format", "Type"))
    figure.savefig(stream, format="svg", transparent=True, metadata=metadata)
    text = stream.getvalue()
    body = text[text.index("<svg") :]
    head = re.match(r"<svg[^>]*viewBox=\"([^\"]+)\"[^>]*>", body)
    assert head is not None  # matplotlib writes one
    prefix = re.sub(r"\W", "-", name)
    body = re.sub(r"<metadata>.*?</metadata>", "", body[head.end() :], flags=re.DOTALL)
    body = re.sub(r'\bid="', f'id="{prefix}-', body)
    body = re.sub(r'(href="#|url\(#)', rf"\g<1>{prefix}-", body)
    body = body.replace("xlink:href", "href")
    body = re.sub(r"font-family:[^;\"]*;?", "", body)
    body = re.sub(r"font: ([\d.]+px)[^;\"]*", r"font-size: \1", body)
    for colour, stand_in in PAGE_COLOURS.items():
        body = body.replace(stand_in, _PAGE_VARIABLES[colour])
    title = escape(alt)
    return Markup(
        f'<svg class="chart" role="img" aria-label="{title}" viewBox="{head[1]}"><title>{title}</title>{body}'
    )
