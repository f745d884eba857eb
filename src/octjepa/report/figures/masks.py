"""What the model is asked to do: which tokens it sees and which it must predict, on a real sample of each mask family.

The sample is the fixed validation sample of one volume, drawn by the very code that training uses, with a copy of the
recipe in which the other families have weight 0.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Int
from markupsafe import Markup

from octjepa.recipe import Recipe
from octjepa.report.figures import scan

if TYPE_CHECKING:
    from octjepa.store import CanonicalVolume

FAMILIES = {
    "tubes": "Tubes: rectangles through every B-scan, so no hole can be filled from the slice beside it.",
    "blocks": "Blocks: boxes of limited depth along the slow axis.",
    "runs": "Runs: whole runs of neighbouring B-scans.",
}
_CLASSES = ("tok-unselected", "tok-context", "tok-target", "tok-hidden")
UNSELECTED, CONTEXT, TARGET, HIDDEN = range(4)


@dataclass(frozen=True)
class MaskPicture:
    """One family on one volume: a picture per slab of B-scans, and how many tokens are what."""

    family: str
    sentence: str
    slabs: tuple[Markup, ...]
    counts: dict[str, int]
    in_use: bool


def only(recipe: Recipe, family: str) -> Recipe:
    """The recipe with `family` alone."""
    weights = {name: float(name == family) for name in FAMILIES}
    return recipe.model_copy(update={"masks": recipe.masks.model_copy(update=weights)})


def mask_states(volume: CanonicalVolume, recipe: Recipe, family: str) -> Int[np.ndarray, "d h w"]:
    """UNSELECTED, CONTEXT, TARGET or HIDDEN for every place of the grid, in the fixed sample under `family`."""
    from octjepa.views.sample import make_sample

    sample = make_sample(volume, only(recipe, family), None)
    state = np.full(recipe.grid_tokens, UNSELECTED)
    state[sample.grid_index] = HIDDEN
    state[sample.grid_index[sample.context]] = CONTEXT
    state[sample.grid_index[sample.target]] = TARGET
    return state.reshape(recipe.grid)


def mask_picture(volume: CanonicalVolume, recipe: Recipe, family: str) -> MaskPicture:
    """The fixed sample of `volume` under `family`."""
    from octjepa.views import geometry

    view = geometry.apply_geometry(
        np.asarray(volume.pixels), geometry.center_crop(recipe.preprocessing), recipe.preprocessing.image_size
    )
    per_slab = mask_states(volume, recipe, family)
    thick, *size = recipe.tokens.patch_size
    slabs = []
    for number, states in enumerate(per_slab):
        first = number * thick
        overlays = [
            scan.cells(states == value, (size[0], size[1]), css, inset=0.0 if value == UNSELECTED else 0.6)
            for value, css in enumerate(_CLASSES)
        ]
        seen, predicted = (int(np.count_nonzero(states == value)) for value in (CONTEXT, TARGET))
        alt = f"{family}, B-scans {first + 1} to {first + thick}: {seen} tokens seen, {predicted} predicted"
        slabs.append(scan.picture(view[first + thick // 2], alt, overlays))
    counts = {
        name: int(np.count_nonzero(per_slab == value))
        for name, value in (("seen", CONTEXT), ("predicted", TARGET), ("hidden", HIDDEN), ("left out", UNSELECTED))
    }
    return MaskPicture(family, FAMILIES[family], tuple(slabs), counts, getattr(recipe.masks, family) > 0)
