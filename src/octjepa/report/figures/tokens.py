"""What the encoder sees: its token features as colours over the B-scan, by one PCA over all shown eyes jointly.

Tokens of like colour have like features. The colours are comparable between the shown eyes because the components are
fitted once over all of them, and the eyes are the first held-out ones of each device by id, not chosen by their looks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float, Int, UInt8
from markupsafe import Markup

from octjepa.report.figures import scan

COMPONENTS = 3


@dataclass(frozen=True, eq=False)
class Components:
    """Three principal components as red, green and blue, each from its 2nd to 98th percentile over what was fitted.

    `explained` is the share of the variance they tell; `by_depth` the share of that which a token's row in the grid
    alone explains: not the eye's own.
    """

    mean: Float[np.ndarray, " dim"]
    axes: Float[np.ndarray, "3 dim"]
    low: Float[np.ndarray, " 3"]
    high: Float[np.ndarray, " 3"]
    explained: float
    by_depth: float

    def colours(self, features: Float[np.ndarray, "t dim"]) -> UInt8[np.ndarray, "t 3"]:
        """RGB of every token."""
        scores = (features.astype(np.float64) - self.mean) @ self.axes.T
        shares = np.clip((scores - self.low) / np.maximum(self.high - self.low, 1e-12), 0, 1)
        return (shares * 255).round().astype(np.uint8)


@dataclass(frozen=True)
class TokenPicture:
    volume_id: str
    device: str
    eye: str
    split: str
    plain: Markup
    coloured: Markup


@dataclass(frozen=True)
class TokenMaps:
    pictures: tuple[TokenPicture, ...]
    explained: float
    by_depth: float
    tokens: int
    patch_mm: tuple[float, float, float]


def principal_components(features: Sequence[Float[np.ndarray, "t dim"]], rows: Sequence[np.ndarray]) -> Components:
    """The components of the tokens of several volumes together.

    `rows` holds the grid row (depth) of every token. Signs are fixed so that the same features give the same colours.
    Raises ValueError: too few tokens.
    """
    every = np.concatenate(features).astype(np.float64)
    if len(every) <= COMPONENTS:
        raise ValueError(f"{len(every)} tokens are too few for {COMPONENTS} components")
    mean = every.mean(axis=0)
    _, singular, axes = np.linalg.svd(every - mean, full_matrices=False)
    axes = axes[:COMPONENTS]
    axes *= np.sign(axes[np.arange(len(axes)), np.abs(axes).argmax(axis=1)])[:, None]
    scores = (every - mean) @ axes.T
    total = float((singular**2).sum())
    depth = np.concatenate(rows)
    means = np.stack([scores[depth == row].mean(axis=0) for row in np.unique(depth)])
    placed = means[np.searchsorted(np.unique(depth), depth)]
    spread = float((scores**2).sum())
    low, high = np.percentile(scores, [2, 98], axis=0)
    return Components(
        mean, axes, low, high,
        float((singular[:COMPONENTS] ** 2).sum()) / total if total else 0.0,
        float((placed**2).sum()) / spread if spread else 0.0,
    )  # fmt: skip


def token_maps(store: Any, rows: Sequence[dict[str, Any]], encoder: Any) -> TokenMaps:
    """The maps of `rows` of the store's table under `encoder` (as of `octjepa.checkpoint.load_encoder`)."""
    from octjepa.views import geometry

    recipe = encoder.recipe
    volumes = [store.read(row["volume_id"]) for row in rows]
    found = [tissue_tokens(encoder, volume) for volume in volumes]
    components = principal_components([features for features, _ in found], [places[:, 1] for _, places in found])
    thick, high, wide = recipe.tokens.patch_size
    middle = recipe.grid[0] // 2
    pictures = []
    for row, volume, (features, places) in zip(rows, volumes, found, strict=True):
        view = geometry.apply_geometry(
            np.asarray(volume.pixels), geometry.center_crop(recipe.preprocessing), recipe.preprocessing.image_size
        )
        grid = np.zeros((*recipe.grid[1:], 3), np.uint8)
        there = np.zeros(recipe.grid[1:], bool)
        here = places[:, 0] == middle
        grid[places[here, 1], places[here, 2]] = components.colours(features[here])
        there[places[here, 1], places[here, 2]] = True
        shown = view[middle * thick + thick // 2]
        name = f"{row['device']}, {row['eye'] or 'eye unknown'}, volume {row['volume_id']}"
        pictures.append(
            TokenPicture(
                str(row["volume_id"]),
                str(row["device"]),
                str(row["eye"]),
                str(row["split"]),
                scan.picture(shown, f"B-scan: {name}"),
                scan.picture(
                    shown, f"Token map over the B-scan: {name}", [scan.coloured_cells(grid, there, (high, wide))]
                ),
            )
        )
    spacing = recipe.preprocessing.target_spacing_mm
    patch_mm = (thick * spacing[0], high * spacing[1], wide * spacing[2])
    shown_tokens = sum(len(features) for features, _ in found)
    return TokenMaps(tuple(pictures), components.explained, components.by_depth, shown_tokens, patch_mm)


def tissue_tokens(encoder: Any, volume: Any) -> tuple[Float[np.ndarray, "t dim"], Int[np.ndarray, "t 3"]]:
    """Features of the tokens that hold enough tissue, and the place of each in the grid (slab, row, column)."""
    from octjepa.views.tokens import TISSUE_SHARE

    seen = encoder.tokens(volume)
    kept = seen.tissue >= TISSUE_SHARE
    return seen.features[kept], np.stack(np.unravel_index(seen.grid_index[kept], seen.grid), axis=-1)
