"""Thickness maps of one scan, a panel a class, with the ETDRS grid and its nine means; an SVG."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from jaxtyping import Float
from matplotlib.figure import Figure

from octjepa.tasks.segment.thickness import RADII_MM, SECTORS, Lie

_AT = {"superior": (0, 1), "nasal": (1, 0), "inferior": (0, -1), "temporal": (-1, 0)}  # (nasal, up)


def draw_thickness(
    path: Path,
    thickness_um: Float[np.ndarray, "K N C"],
    etdrs_um: Float[np.ndarray, "K 9"],
    classes: Sequence[str],
    spacing_mm: tuple[float, float],
    lie: Lie,
    title: str,
) -> Path:
    """Columns run to the right as in the scan, superior is up. `spacing_mm` (slice, column). Returns `path`."""
    columns = min(3, len(classes))
    lines = -(-len(classes) // columns)
    figure = Figure(figsize=(3.6 * columns, 3.4 * lines), layout="constrained")
    up = 1 if lie.first_bscan == "inferior" else -1
    nasal = -1 if lie.eye == "OS" else 1
    frames, width = thickness_um.shape[1:]
    slice_mm = up * (np.array([-0.5, frames - 0.5]) * spacing_mm[0] - lie.centre_mm[0])
    column_mm = np.array([-0.5, width - 0.5]) * spacing_mm[1] - lie.centre_mm[1]
    for number, name in enumerate(classes):
        panel = figure.add_subplot(lines, columns, number + 1)
        shown = panel.imshow(
            thickness_um[number], origin="lower", extent=(*column_mm, *slice_mm), aspect="equal", cmap="viridis"
        )
        figure.colorbar(shown, ax=panel, shrink=0.8, label="um")
        angle = np.linspace(0, 2 * np.pi, 200)
        for radius in RADII_MM:
            panel.plot(radius * np.cos(angle), radius * np.sin(angle), color="white", linewidth=0.8)
        for turn in (1, -1):
            for side in (1, -1):
                ends = side * np.array([RADII_MM[0], RADII_MM[2]]) / np.sqrt(2)
                panel.plot(ends, turn * ends, color="white", linewidth=0.8)
        for place, sector in enumerate(SECTORS):
            if np.isfinite(etdrs_um[number, place]):
                ring, _, quarter = sector.partition("_")
                radius = {"central": 0.0, "inner": 1.0, "outer": 2.25}[ring]
                across, high = _AT.get(quarter, (0, 0))
                panel.text(
                    nasal * across * radius, high * radius, f"{etdrs_um[number, place]:.0f}", color="white", fontsize=7,
                    ha="center", va="center",
                )  # fmt: skip
        panel.set_xlim(*map(float, column_mm))
        panel.set_ylim(*sorted(map(float, slice_mm)))
        panel.set_title(name, fontsize=9)
        panel.set_xlabel("mm, as in the B-scan", fontsize=7)
        panel.set_ylabel("mm, superior up", fontsize=7)
        panel.tick_params(labelsize=7)
    figure.suptitle(f"Thickness, {title}", fontsize=10)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    return path
