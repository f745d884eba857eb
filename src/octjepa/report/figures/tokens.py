"""Token features as colours over the B-scan, by one PCA over all shown eyes together.

Tokens of like colour have like features. The colours are comparable between the shown eyes because the components are
fitted once over all of them, and the eyes are the first held-out eyes of each device by id, not chosen by their looks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Float, Int, UInt8
from markupsafe import Markup

from octjepa.report.figures import svg
from octjepa.report.figures.eyes import central, central_slice, volume_title
from octjepa.store.index import IndexEntry

if TYPE_CHECKING:
    from octjepa.encoders import PretrainedEncoder
    from octjepa.store import Store
    from octjepa.volume import CanonicalVolume

COMPONENTS = 3


@dataclass(frozen=True, eq=False)
class Components:
    """Three principal components as red, green and blue, each from its 2nd to 98th percentile over what was fitted.

    `explained` is their share of the variance; `by_depth` the share of that which a token's depth in the grid alone
    explains, and which is therefore not the eye's own.
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
    """A volume with a central B-scan that holds tissue, plain and under its tokens."""

    row: IndexEntry
    plain: Markup
    coloured: Markup


@dataclass(frozen=True)
class TokenMaps:
    """The pictures, the components' shares of variance, and the number and size of the tokens they were fitted on."""

    pictures: tuple[TokenPicture, ...]
    components: Components
    tokens: int
    patch_mm: tuple[float, ...]


def principal_components(features: Sequence[Float[np.ndarray, "t dim"]], depths: Sequence[np.ndarray]) -> Components:
    """The components of the tokens of several volumes together.

    `depths` holds the depth index of every token in the grid. Signs are fixed so that the same features give the same
    colours. Raises ValueError: too few tokens.
    """
    stacked = np.concatenate(features).astype(np.float64)  # [tokens, dim]
    if len(stacked) <= COMPONENTS:
        raise ValueError(f"{len(stacked)} tokens are too few for {COMPONENTS} components")
    mean = stacked.mean(axis=0)
    _, singular, axes = np.linalg.svd(stacked - mean, full_matrices=False)
    axes = axes[:COMPONENTS]
    axes *= np.sign(axes[np.arange(len(axes)), np.abs(axes).argmax(axis=1)])[:, None]
    scores = (stacked - mean) @ axes.T  # [tokens, 3]
    total = float((singular**2).sum())
    levels, level = np.unique(np.concatenate(depths), return_inverse=True)
    depth_means = np.stack([scores[level == number].mean(axis=0) for number in range(len(levels))])[level]
    spread = float((scores**2).sum())
    low, high = np.percentile(scores, [2, 98], axis=0)
    explained = float((singular[:COMPONENTS] ** 2).sum()) / total if total else 0.0
    return Components(mean, axes, low, high, explained, float((depth_means**2).sum()) / spread if spread else 0.0)


def token_maps(store: Store, entries: Sequence[IndexEntry], encoder: PretrainedEncoder) -> TokenMaps:
    """The maps of some volumes of `store` under `encoder`."""
    from octjepa.views import geometry

    recipe = encoder.recipe
    preprocessing = recipe.preprocessing
    volumes = [store.read(entry.volume_id) for entry in entries]
    tissue = [tissue_tokens(encoder, volume) for volume in volumes]
    components = principal_components([part for part, _ in tissue], [positions[:, 1] for _, positions in tissue])
    _, high, wide = recipe.tokens.patch_size
    pictures = []
    for entry, volume, (features, positions) in zip(entries, volumes, tissue, strict=True):
        view = geometry.apply_transform(
            np.asarray(volume.pixels), geometry.center_crop(preprocessing), preprocessing.image_size
        )
        colours, chosen = np.zeros((*recipe.grid[1:], 3), np.uint8), np.zeros(recipe.grid[1:], bool)
        slab = central(np.bincount(positions[:, 0], minlength=recipe.grid[0]))
        in_slab = positions[:, 0] == slab
        at = positions[in_slab, 1], positions[in_slab, 2]
        colours[at], chosen[at] = components.colours(features[in_slab]), True
        b_scan, title = view[central_slice(volume, recipe, slab)], volume_title(entry)
        overlay = svg.coloured_cells(colours, chosen, (high, wide))
        pictures.append(
            TokenPicture(
                entry,
                svg.scan(b_scan, f"B-scan: {title}"),
                svg.scan(b_scan, f"Token map over the B-scan: {title}", [overlay]),
            )
        )
    patch_mm = tuple(
        size * mm for size, mm in zip(recipe.tokens.patch_size, preprocessing.target_spacing_mm, strict=True)
    )
    return TokenMaps(tuple(pictures), components, sum(len(features) for features, _ in tissue), patch_mm)


def tissue_tokens(
    encoder: PretrainedEncoder, volume: CanonicalVolume
) -> tuple[Float[np.ndarray, "t dim"], Int[np.ndarray, "t 3"]]:
    """Features of the tokens that hold enough tissue, and their grid positions (slab, depth, column)."""
    from octjepa.views.tokens import holds_tissue

    tokens = encoder.tokens(volume)
    tissue = holds_tissue(tokens.tissue)
    return tokens.features[tissue], np.stack(np.unravel_index(tokens.grid_index[tissue], tokens.grid), axis=-1)
