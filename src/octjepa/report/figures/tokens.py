"""What the encoder sees: its token features as colours over the B-scan, by one PCA over all shown eyes jointly.

Tokens of like colour have like features. The colours are comparable between the shown eyes because the components are
fitted once over all of them, and the eyes are the first held-out ones of each device by id, not chosen by their looks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from jaxtyping import Float, UInt8
from markupsafe import Markup

from octjepa.report.figures import scan

COMPONENTS = 3


@dataclass(frozen=True)
class Colours:
    """RGB of every shown tissue token, one array per volume, and how much of their variance they tell.

    `by_depth` is the share of that variance which the token's row in the grid alone explains: not the eye's own.
    """

    per_volume: list[UInt8[np.ndarray, "t 3"]]
    explained: float
    by_depth: float


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


def principal_colours(features: Sequence[Float[np.ndarray, "t dim"]], rows: Sequence[np.ndarray]) -> Colours:
    """Three principal components of all tokens together as red, green, blue, each from its 2nd to 98th percentile.

    `rows` holds the grid row (depth) of every token. Signs are fixed so that the same features give the same colours.
    """
    every = np.concatenate(features).astype(np.float64)
    if len(every) <= COMPONENTS:
        raise ValueError(f"{len(every)} tokens are too few for {COMPONENTS} components")
    centred = every - every.mean(axis=0)
    _, singular, axes = np.linalg.svd(centred, full_matrices=False)
    axes = axes[:COMPONENTS]
    axes *= np.sign(axes[np.arange(len(axes)), np.abs(axes).argmax(axis=1)])[:, None]
    scores = centred @ axes.T
    total = float((singular**2).sum())
    depth = np.concatenate(rows)
    means = np.stack([scores[depth == row].mean(axis=0) for row in np.unique(depth)])
    placed = means[np.searchsorted(np.unique(depth), depth)]
    spread = float((scores**2).sum())
    low, high = np.percentile(scores, [2, 98], axis=0)
    colours = (np.clip((scores - low) / np.maximum(high - low, 1e-12), 0, 1) * 255).round().astype(np.uint8)
    ends = np.cumsum([len(one) for one in features])[:-1]
    return Colours(
        np.split(colours, ends),
        float((singular[:COMPONENTS] ** 2).sum()) / total if total else 0.0,
        float((placed**2).sum()) / spread if spread else 0.0,
    )


def token_maps(store: Any, rows: Sequence[dict[str, Any]], encoder: Any) -> TokenMaps:
    """The maps of `rows` of the store's table under `encoder` (as of `octjepa.checkpoint.load_encoder`)."""
    from octjepa.views import geometry
    from octjepa.views.tokens import TISSUE_SHARE

    recipe = encoder.recipe
    volumes = [store.read(row["volume_id"]) for row in rows]
    seen = [encoder.tokens(volume) for volume in volumes]
    kept = [one.tissue >= TISSUE_SHARE for one in seen]
    pairs = list(zip(seen, kept, strict=True))
    steps = [np.stack(np.unravel_index(one.grid_index[keep], one.grid), axis=-1) for one, keep in pairs]
    colours = principal_colours([one.features[keep] for one, keep in pairs], [places[:, 1] for places in steps])
    thick, high, wide = recipe.tokens.patch_size
    middle = recipe.grid[0] // 2
    pictures = []
    for row, volume, places, painted in zip(rows, volumes, steps, colours.per_volume, strict=True):
        view = geometry.apply(
            np.asarray(volume.pixels), geometry.centred(recipe.preprocessing), recipe.preprocessing.image_size
        )
        grid = np.zeros((*recipe.grid[1:], 3), np.uint8)
        there = np.zeros(recipe.grid[1:], bool)
        here = places[:, 0] == middle
        grid[places[here, 1], places[here, 2]] = painted[here]
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
    return TokenMaps(tuple(pictures), colours.explained, colours.by_depth, sum(int(k.sum()) for k in kept), patch_mm)
