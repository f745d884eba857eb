"""The picture of a segmented scan: one B-scan with its boundaries and fluid, and the thickness map.

The B-scan is the one through the centre of the ETDRS grid. Its depth axis is drawn stretched, as devices do. Superior
is up in the map, unless the B-scans are vertical; columns run to the right as in the scan.
"""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any, Final

import numpy as np

from octjepa.files import write_atomic
from octjepa.layers import BOUNDARIES, BOUNDARY_NAMES, CLASSES
from octjepa.tasks.labels.class_files import file_order
from octjepa.tasks.segmenter.inference import Segmentation
from octjepa.tasks.segmenter.measurement import Measurement
from octjepa.tasks.segmenter.retained_layers import RetainedLayers
from octjepa.tasks.thickness import RADII_MM, SECTORS, slice_widths_mm
from octjepa.volume import OCTVolume

LINE_COLOURS: Final = ("#ff5c5c", "#ffa14a", "#ffe14a", "#9be564", "#3fd1a6", "#45c5ff", "#8f8bff", "#ff7de0")
CLASS_COLOURS: Final = {"intraretinal_fluid": "#00c8ff", "subretinal_fluid": "#ff4fd8", "sub_rpe": "#ffb000"}
_DIRECTION: Final = {"superior": (0, 1), "nasal": (1, 0), "inferior": (0, -1), "temporal": (-1, 0)}  # (nasal, up)
_RADIUS: Final = {"central": 0.0, "inner": 1.0, "outer": 2.25}


def draw_scan(
    path: Path, title: str, volume: OCTVolume, found: Segmentation | RetainedLayers, made: Measurement
) -> Path:
    """Writes the picture as PNG; returns `path`."""
    figure = scan_figure(title, volume, found, made)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, lambda file: figure.savefig(file, format="png", dpi=90, metadata={"Software": None}))
    return path


def scan_jpeg(title: str, volume: OCTVolume, found: Segmentation | RetainedLayers, made: Measurement) -> bytes:
    """The picture as JPEG, about 100 kB, for pages that hold many."""
    stream = io.BytesIO()
    figure = scan_figure(title, volume, found, made)
    figure.savefig(stream, format="jpg", dpi=80, pil_kwargs={"quality": 80, "optimize": True})
    return stream.getvalue()


def scan_figure(title: str, volume: OCTVolume, found: Segmentation | RetainedLayers, made: Measurement) -> Any:
    """The B-scan as a matplotlib drawing, with the map if the scan covers an area."""
    from matplotlib.figure import Figure

    # A field that is much wider than high goes below the B-scan, a square one next to it.
    flat = float(made.column_mm[-1]) > 2.2 * float(made.slice_mm[-1] - made.slice_mm[0])
    size = (8.2, 5.2) if not made.has_area else (9.4, 7.4) if flat else (13.0, 5.2)
    figure = Figure(figsize=size, layout="constrained", facecolor="white")
    if not made.has_area:
        left = figure.subplots(1, 1)
    elif flat:
        left, below = figure.subplots(2, 1, height_ratios=(1.9, 1))
        _draw_map(figure, below, made)
    else:
        left, right = figure.subplots(1, 2, width_ratios=(1.55, 1))
        _draw_map(figure, right, made)
    middle = volume.shape[0] // 2
    index = int(np.abs(made.slice_mm - made.centre.slice_mm).argmin()) if made.has_area else middle
    _draw_bscan(left, index, volume, found, made)
    figure.suptitle(title, fontsize=11)
    return figure


def _draw_bscan(
    panel: Any, index: int, volume: OCTVolume, found: Segmentation | RetainedLayers, made: Measurement
) -> None:
    """Draws B-scan `index`, cropped in depth to the retina."""
    from matplotlib.colors import to_rgba
    from matplotlib.patches import Patch

    _, rows, columns = volume.shape
    dy, dx = volume.spacing_mm[1:]
    lines = found.boundaries_px[:, index]
    top = max(0, int(lines[0].min() - 0.25 / dy))
    bottom = min(rows, int(lines[7].max() + 0.3 / dy) + 1)
    extent = (0.0, columns * dx, bottom * dy, top * dy)
    panel.imshow(volume.pixels[index, top:bottom], cmap="gray", extent=extent, aspect="auto", vmin=0, vmax=255)
    classes = found.classes[index, top:bottom]
    overlay = np.zeros((*classes.shape, 4), np.float32)
    handles: list[Any] = []
    for code, name in enumerate(CLASSES[1:], start=1):
        if (classes == code).any():
            overlay[classes == code] = to_rgba(CLASS_COLOURS[name], 0.5)
            handles.append(
                Patch(color=CLASS_COLOURS[name], alpha=0.6, label=name.replace("_", " ").replace("rpe", "RPE"))
            )
    panel.imshow(overlay, extent=extent, aspect="auto", interpolation="nearest")
    across = (np.arange(columns) + 0.5) * dx
    known = np.isfinite(made.layers_um[0, index])
    for name, line, colour in zip(BOUNDARY_NAMES, lines, LINE_COLOURS, strict=True):
        (drawn,) = panel.plot(
            across, np.where(known, (line + 0.5) * dy, np.nan), color=colour, linewidth=1.0, label=name
        )
        handles.append(drawn)
    if made.has_area:
        panel.axvline(made.centre.column_mm + dx / 2, color="white", linewidth=0.7, linestyle=":")
    panel.set_xlim(0, columns * dx)
    panel.set_ylim(bottom * dy, top * dy)
    centre = "through the fovea" if made.centre.kind == "fovea" else "in the middle of the scan"
    panel.set_title(f"B-scan {index + 1} of {volume.shape[0]}{_frame(index, volume)}, {centre}", fontsize=9)
    panel.set_xlabel("mm", fontsize=8)
    panel.set_ylabel("depth, mm (stretched)", fontsize=8)
    panel.tick_params(labelsize=7)
    panel.legend(handles=handles, loc="upper center", bbox_to_anchor=(0.5, -0.1), ncols=6, fontsize=7, frameon=False)


def _frame(index: int, volume: OCTVolume) -> str:
    """The number of a B-scan in its file, if the reader reversed the B-scans; files of results are in that order."""
    if file_order(volume)[0].slice_step > 0:
        return ""
    return f" (number {volume.shape[0] - index} in the file)"


def _draw_map(figure: Any, panel: Any, made: Measurement) -> None:
    """Draws the total thickness with the ETDRS grid and its means."""
    up, nasal = made.orientation.signs
    v = up * (made.slice_mm - made.centre.slice_mm)
    u = made.column_mm - made.centre.column_mm
    widths = slice_widths_mm(made.slice_mm, 0.1)
    order = np.argsort(v)
    edges = np.concatenate([[v[order[0]] - widths[order[0]] / 2], (v[order][1:] + v[order][:-1]) / 2])
    edges = np.concatenate([edges, [v[order[-1]] + widths[order[-1]] / 2]])
    step = (u[1] - u[0]) / 2 if len(u) > 1 else 0.01
    sides = np.concatenate([u - step, [u[-1] + step]])
    values = np.ma.masked_invalid(made.layers_um[0][order])
    image = panel.pcolormesh(sides, edges, values, cmap="viridis", vmin=150, vmax=550, rasterized=True)
    figure.colorbar(image, ax=panel, shrink=0.85, extend="both").set_label("retina, ILM to BM, um", fontsize=8)
    is_vertical = made.orientation.lines == "vertical"  # then only the central sector has a value
    angle = np.linspace(0, 2 * np.pi, 200)
    for radius in RADII_MM[:1] if is_vertical else RADII_MM:
        panel.plot(radius * np.cos(angle), radius * np.sin(angle), color="white", linewidth=0.9)
    for turn in () if is_vertical else (1, -1):
        for side in (1, -1):
            ends = side * np.array([RADII_MM[0], RADII_MM[2]]) / np.sqrt(2)
            panel.plot(ends, turn * ends, color="white", linewidth=0.9)
    for value, sector in zip(made.etdrs_um[0], SECTORS, strict=True):
        if np.isfinite(value):
            ring, _, quarter = sector.partition("_")
            (a, b), radius = _DIRECTION.get(quarter, (0, 0)), _RADIUS[ring]
            box = {"facecolor": "black", "alpha": 0.45, "pad": 1.5, "edgecolor": "none"}
            panel.text(
                float(np.clip(nasal * a * radius, sides[0] + 0.2, sides[-1] - 0.2)),
                float(np.clip(b * radius, edges[0] + 0.15, edges[-1] - 0.15)),
                f"{value:.0f}",
                color="white",
                fontsize=8,
                ha="center",
                va="center",
                bbox=box,
                clip_on=True,
            )
    index = int(np.abs(made.slice_mm - made.centre.slice_mm).argmin())
    panel.axhline(v[index], color="white", linewidth=0.7, linestyle=":")
    panel.set_xlim(float(sides[0]), float(sides[-1]))
    panel.set_ylim(float(edges[0]), float(edges[-1]))
    panel.set_aspect("equal")
    panel.set_facecolor("#999999")
    sides_of_eye = {"OD": "right eye, nasal is right", "OS": "left eye, nasal is left"}
    sides_shown = "B-scans run up or down" if is_vertical else sides_of_eye.get(made.orientation.eye, "eye not known")
    panel.set_title(f"Thickness, {sides_shown}", fontsize=9)
    panel.set_xlabel(f"mm from the {'fovea' if made.centre.kind == 'fovea' else 'middle of the scan'}", fontsize=8)
    panel.set_ylabel("mm, across the B-scans" if is_vertical else "mm, superior up", fontsize=8)
    panel.tick_params(labelsize=7)


assert len(LINE_COLOURS) == len(BOUNDARY_NAMES) == len(BOUNDARIES)
