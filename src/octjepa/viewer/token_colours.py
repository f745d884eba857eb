"""The token grid of a volume in colours: principal components, the states of a mask, similarity to one token."""

from __future__ import annotations

import threading
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import Float, UInt8

from octjepa.cohort import examples
from octjepa.explain import native
from octjepa.explain.components import Components, principal_components, tissue_tokens
from octjepa.explain.similarity import cosine_with
from octjepa.recipe import Recipe
from octjepa.record import Record
from octjepa.report.figures import masks
from octjepa.store.index import entries_of
from octjepa.store.storage import DamagedVolume
from octjepa.viewer.native_scan import coloured

if TYPE_CHECKING:
    from octjepa.encoders import PretrainedEncoder
    from octjepa.store import Store
    from octjepa.viewer.listing import VolumeList

LAYERS = ("tokens", "similarity", *masks.FAMILIES)
_MAX_FITTED = 4
_CACHED = 16
# Red, green, blue and opacity of a token's state under a mask: unselected, context, target, hidden.
_STATE_COLOURS = np.array([[0, 0, 0, 170], [40, 120, 220, 90], [240, 140, 20, 130], [90, 90, 90, 120]], np.uint8)
_TOKEN_OPACITY, _SIMILARITY_OPACITY = 150, 170


@dataclass(frozen=True)
class SimilarityRange(Record):
    """The cosines with `token` of the first and last colour of the layer "similarity"."""

    token: int
    low: float
    high: float


class TokenColours:
    """Colours of the grid of `recipe`; without `encoder` only those of masks. May be used by several threads."""

    def __init__(
        self, store: Store, volumes: VolumeList, recipe: Recipe | None, encoder: PretrainedEncoder | None
    ) -> None:
        self.store, self.recipe, self.encoder = store, recipe, encoder
        self._table = volumes.table
        self._lock = threading.RLock()
        self.colours = lru_cache(_CACHED)(self._colours)
        self._tissue = lru_cache(4)(self._tissue_tokens)

    @property
    def layers(self) -> list[str]:
        """The layers that can be drawn."""
        if self.recipe is None:
            return []
        used = [name for name in masks.FAMILIES if getattr(self.recipe.masks, name) > 0]
        return [*(("tokens", "similarity") if self.encoder is not None else ()), *used]

    def _colours(self, volume_id: str, layer: str, token: int = -1) -> UInt8[np.ndarray, "d h w 4"]:
        """`token` is the index in the grid that others are compared with. Raises KeyError: no such layer or token."""
        if self.recipe is None or layer not in LAYERS:
            raise KeyError(layer)
        if layer in masks.FAMILIES:
            return _STATE_COLOURS[masks.mask_states(self.store.read(volume_id), self.recipe, layer)]
        if self.encoder is None:
            raise KeyError(layer)
        with self._lock:
            features, positions = self._tissue(volume_id)
            painted = np.zeros((*self.recipe.grid, 4), np.uint8)
            if layer == "tokens":
                shown = self._components.colours(features)
                painted[tuple(positions.T)] = np.column_stack([shown, np.full(len(shown), _TOKEN_OPACITY, np.uint8)])
                return painted
        cosine = self._cosine(features, positions, token)
        painted[tuple(positions.T)] = coloured(cosine, *_range(cosine), _SIMILARITY_OPACITY)
        return painted

    def similarity(self, volume_id: str, token: int) -> SimilarityRange:
        """The range of the layer "similarity" of one token. Raises KeyError: the token does not hold tissue."""
        if self.encoder is None:
            raise KeyError(token)
        with self._lock:
            features, positions = self._tissue(volume_id)
        low, high = _range(self._cosine(features, positions, token))
        return SimilarityRange(token, round(low, 3), round(high, 3))

    def _cosine(self, features: np.ndarray, positions: np.ndarray, token: int) -> Float[np.ndarray, " t"]:
        assert self.recipe is not None
        index = np.ravel_multi_index(tuple(positions.T), self.recipe.grid)
        here = np.flatnonzero(index == token)
        if not len(here):
            raise KeyError(token)
        return cosine_with(features, int(here[0]))

    def token_at(self, canonical: list[float]) -> int | None:
        """The index in the grid of the token at a position of the stored volume; None outside the grid."""
        if self.recipe is None:
            return None
        cell = native.token_at(np.array(canonical)[None], self.store.preprocessing, self.recipe)[0]
        if ((cell < 0) | (cell >= self.recipe.grid)).any():
            return None
        return int(np.ravel_multi_index(tuple(cell), self.recipe.grid))

    def _tissue_tokens(self, volume_id: str) -> tuple[np.ndarray, np.ndarray]:
        assert self.encoder is not None
        return tissue_tokens(self.encoder, self.store.read(volume_id))

    @cached_property
    def _components(self) -> Components:
        """Fitted on the eyes of the report, the first of each device, so that a colour means the same in all volumes.

        Damaged volumes are left out. Raises ValueError: the others hold too few tokens.
        """
        tissue: list[Any] = []
        rest = self._table
        while len(rest) and not tissue:
            chosen = examples.one_per_device(rest) or entries_of(rest[:_MAX_FITTED])
            for entry in chosen:
                with suppress(DamagedVolume):  # its own page reports it
                    tissue.append(self._tissue_tokens(entry.volume_id))
            rest = rest[~rest["volume_id"].isin([entry.volume_id for entry in chosen])]
        if not tissue:
            raise ValueError("no volume can be read to fit the colours on")
        return principal_components([part for part, _ in tissue], [positions[:, 1] for _, positions in tissue])


def _range(cosine: np.ndarray) -> tuple[float, float]:
    """From the least similar twentieth to 1."""
    return float(np.percentile(cosine, 5)), 1.0
