"""Writes a plot as SVG."""

from __future__ import annotations

import io
import re
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def save_svg(figure: Figure, path: Path) -> None:
    """Writes the same file for the same results on every machine.

    The names of clip paths and markers are hashes of coordinates, whose last bit depends on the processor: they are
    numbered instead.
    """
    buffer = io.StringIO()
    figure.savefig(buffer, format="svg", metadata={"Date": None})
    text = buffer.getvalue()
    names = list(dict.fromkeys(re.findall(r'id="([pm][0-9a-f]{10})"', text)))
    numbers = {name: f"{name[0]}{number}" for number, name in enumerate(names)}
    path.write_text(re.sub(r"\b[pm][0-9a-f]{10}\b", lambda found: numbers.get(found[0], found[0]), text), "utf-8")
