"""The pictures of one eye: occlusion and similarity, and where an attentive probe or a tuned head looks."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Float

from octjepa.errors import UsageError
from octjepa.explain.attention import TokenAttention
from octjepa.explain.eyes import OccludedVolume
from octjepa.explain.native import tokens_to_native
from octjepa.explain.writer import NativeWriter

_PICTURE: Mapping[str, Any] = {"cmap": "magma", "vmin": 0.0, "interpolation": "nearest"}


def write_attention_maps(writer: NativeWriter, maps: Sequence[TokenAttention]) -> None:
    """`ID.attention.TARGET.nii.gz` and `.png` of every target; that of the randomly initialised encoder is only in the
    picture.

    The file holds multiples of an even share. Raises UsageError: the maps are of another token grid.
    """
    names: dict[str, str] = {}  # target -> its part of the file names; no two targets share one
    twins = {attention.target: attention for attention in maps if attention.untrained}
    for attention in maps:
        if attention.untrained:
            continue
        if attention.grid != writer.recipe.grid:
            raise UsageError(f"attention of a token grid {attention.grid}, the encoder's is {writer.recipe.grid}")
        name = re.sub(r"[^A-Za-z0-9_-]+", "_", attention.target)
        if attention.target not in names:
            names[attention.target] = name if name not in names.values() else f"{name}-{len(names) + 1}"
        kind = f"attention.{names[attention.target]}"
        values = writer.write_map(kind, attention.even_shares())
        twin = twins.get(attention.target)
        other = None if twin is None else tokens_to_native(twin.even_shares(), writer.native, writer.recipe)
        _write_attention_figure(writer, kind, attention, values, other)


def _write_attention_figure(
    writer: NativeWriter,
    kind: str,
    attention: TokenAttention,
    values: Float[np.ndarray, "N R C"],
    twin: Float[np.ndarray, "N R C"] | None,
) -> None:
    """En face the share of each column of tokens, and the B-scan of the token that gets the most."""
    from matplotlib.figure import Figure

    strongest = np.unravel_index(int(np.nanargmax(attention.even_shares())), attention.grid)
    at = writer.centre((int(strongest[0]), int(strongest[1]), int(strongest[2])))
    number, (dz, dy, dx) = writer.nearest_b_scan(at), writer.native.spacing_mm
    faces = {"trained": _en_face(values, attention, writer)}
    if twin is not None:
        faces["untrained"] = _en_face(twin, attention, writer)
    face_extent, extent = writer.extents()
    figure = Figure(figsize=(11 if twin is None else 14, 4.4), dpi=90, layout="constrained")
    axes = figure.subplot_mosaic([[*faces, "b_scan"]], width_ratios=[0.8] * len(faces) + [1.2])
    # Twice what an even attention would give, at least: small differences have no colour.
    even = float(np.nanmean(faces["trained"]))
    most = max(2 * even, *(float(np.nanmax(face)) for face in faces.values()))
    for name, face in faces.items():
        shown = axes[name].imshow(face, extent=face_extent, vmax=most, **_PICTURE)
        axes[name].set(xlabel="mm", facecolor="0.8")
    axes["trained"].set_ylabel("mm, across the B-scans")
    axes["trained"].axhline((number + 0.5) * dz, color="white", linewidth=0.8)
    figure.colorbar(shown, ax=axes[name], shrink=0.6, label="% of the attention")
    axes["b_scan"].imshow(writer.b_scan(number), cmap="gray", extent=extent)
    laid = axes["b_scan"].imshow(values[number], alpha=0.5, extent=extent, vmax=max(2.0, np.nanmax(values)), **_PICTURE)
    axes["b_scan"].plot((at[2] + 0.5) * dx, (at[1] + 0.5) * dy, "o", color="none", markeredgecolor="white")
    axes["b_scan"].set(xlabel="mm", ylabel="mm, depth")
    figure.colorbar(laid, ax=axes["b_scan"], location="bottom", shrink=0.6, label="even shares")
    titles = {
        "trained": f"{attention.target}: attention of each\ncolumn of tokens",
        "untrained": "The same probe on the\nuntrained encoder",
        "b_scan": f"Attention over B-scan {number + 1}; 1 is an even share.\nThe circle marks the token of the most",
    }
    for name, panel in axes.items():
        panel.set_title(titles[name], loc="left", fontsize=10)
    writer.write_figure(figure, kind)


def _en_face(
    values: Float[np.ndarray, "N R C"], attention: TokenAttention, writer: NativeWriter
) -> Float[np.ndarray, "N C"]:
    """Per cent of the attention that the column of tokens at each A-scan gets; NaN if there is none."""
    total = np.nansum(values, axis=1) * 100 / (writer.token_depth * len(attention.attention))
    return np.where(np.isfinite(values).any(axis=1), total, np.nan)


def _what_changes(eye: OccludedVolume) -> str:
    return "what the prediction loses" if eye.caption else "how far the embedding turns (cosine distance)"


def write_figure(
    writer: NativeWriter, volumes: dict[str, Float[np.ndarray, "N R C"]], token: tuple[int, int, int]
) -> None:
    """The en face map, and both maps over the B-scan of `token`, that others are compared with, in mm."""
    from matplotlib.cm import ScalarMappable
    from matplotlib.figure import Figure

    at, (dz, dy, dx) = writer.centre(token), writer.native.spacing_mm
    number, (face_extent, extent) = writer.nearest_b_scan(at), writer.extents()
    behind = writer.b_scan(number)
    most = max(float(np.nanmax(np.abs(volumes["occlusion"]))), 1e-12)
    changes: dict[str, Any] = {"cmap": "PuOr_r", "vmin": -most, "vmax": most}
    figure = Figure(figsize=(11, 4.4), dpi=110, layout="constrained")
    axes = figure.subplot_mosaic([["face", "occlusion"], ["face", "similarity"]], width_ratios=(0.8, 1))
    is_measured = np.isfinite(volumes["occlusion"])
    total, count = np.nan_to_num(volumes["occlusion"]).sum(axis=1), is_measured.sum(axis=1)
    columnwise = np.where(count > 0, total / np.maximum(count, 1), np.nan)
    shown = axes["face"].imshow(columnwise, extent=face_extent, interpolation="nearest", **changes)
    axes["face"].axhline((number + 0.5) * dz, color="black", linewidth=0.8)
    axes["face"].set(xlabel="mm", ylabel="mm, across the B-scans")
    figure.colorbar(shown, ax=axes["face"], shrink=0.8)
    options: dict[str, dict[str, Any]] = {"occlusion": changes, "similarity": {"cmap": "viridis", "vmax": 1.0}}
    for kind, values in volumes.items():
        axes[kind].imshow(behind, cmap="gray", extent=extent)
        laid = axes[kind].imshow(values[number], alpha=0.55, extent=extent, interpolation="nearest", **options[kind])
        axes[kind].plot((at[2] + 0.5) * dx, (at[1] + 0.5) * dy, "o", color="white", markeredgecolor="black")
        axes[kind].set(xlabel="mm", ylabel="mm, depth")
        if kind == "similarity":
            figure.colorbar(ScalarMappable(laid.norm, laid.cmap), ax=axes[kind], shrink=0.8)
    titles = {
        "face": f"A column of tokens left out:\n{_what_changes(writer.eye)}",
        "occlusion": f"The same over B-scan {number + 1}",
        "similarity": "Cosine with the token marked, the strongest in depth",
    }
    for kind, title in titles.items():
        axes[kind].set_title(title, loc="left", fontsize=10)
    writer.write_figure(figure)
