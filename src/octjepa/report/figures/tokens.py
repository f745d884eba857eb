"""Token features as colours over the B-scan, by one PCA over all shown eyes together.

Tokens of like colour have like features. The colours are comparable between the shown eyes because the components are
fitted once over all of them, and the eyes are the first held-out eyes of each device by id, not chosen by their looks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from markupsafe import Markup

from octjepa.explain.components import Components, principal_components, tissue_tokens
from octjepa.report.figures import svg
from octjepa.report.figures.eyes import central, central_slice, volume_title
from octjepa.store.index import IndexEntry

if TYPE_CHECKING:
    from octjepa.encoders import PretrainedEncoder
    from octjepa.store import Store


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
