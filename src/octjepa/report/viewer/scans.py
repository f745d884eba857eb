"""What the viewer shows of a volume: its B-scans, en face view and band, and the token grid in colours.

Pictures are PNG in the voxels of the store, so that the page can lay one over the other without knowing any geometry
but the corner of the view. Of a person only the eye's side is given.
"""

from __future__ import annotations

import io
import threading
from contextlib import suppress
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
from jaxtyping import UInt8

from octjepa.report.figures import eyes, masks, tokens
from octjepa.report.html import file_name
from octjepa.store.cohort_flow import cohort_table, text_column
from octjepa.store.storage import DamagedVolume

if TYPE_CHECKING:
    from octjepa.checkpoint import PretrainedEncoder
    from octjepa.store import CanonicalVolume, Store

LAYERS = ("tokens", *masks.FAMILIES)
_COLUMNS = ("eye", "device", "protocol", "pattern", "region", "split", "site")
_MAX_FITTED = 4
_CACHED = 64  # pictures of each kind
# Red, green, blue and opacity of a token's state under a mask: unselected, context, target, hidden.
_STATE_COLOURS = np.array([[0, 0, 0, 170], [40, 120, 220, 90], [240, 140, 20, 130], [90, 90, 90, 120]], np.uint8)
_TOKEN_OPACITY = 150


class Scans:
    """The volumes of `store`, and with `encoder` their tokens and masks. Its methods may be called from threads."""

    def __init__(self, store: Store, encoder: PretrainedEncoder | None, missing: str = "") -> None:
        """`missing` says why there is no encoder where one was to be expected."""
        self.store, self.encoder, self.missing = store, encoder, missing
        table = cohort_table(store)
        self._table = table.assign(**{name: text_column(table[name]) for name in (*_COLUMNS, "uncertain", "notes")})
        self.ids = frozenset(self._table["volume_id"])
        self._lock = threading.Lock()
        self.grid_png = lru_cache(_CACHED)(self._grid_png)
        self.en_face_png = lru_cache(_CACHED)(self._en_face_png)
        self._volume = lru_cache(4)(store.read)

    def about(self) -> dict[str, Any]:
        """The shape, spacing and view that all volumes share, and the layers that can be laid over them."""
        preprocessing = self.store.preprocessing
        result: dict[str, Any] = {
            "shape": list(preprocessing.stored_size), "spacing_mm": list(preprocessing.target_spacing_mm),
            "layers": [], "encoder": "", "volumes": len(self.ids), "missing": self.missing,
        }  # fmt: skip
        if self.encoder is not None:
            recipe = self.encoder.recipe
            used = [name for name in masks.FAMILIES if getattr(recipe.masks, name) > 0]
            result |= {
                "layers": ["tokens", *used], "encoder": self.encoder.name, "grid": list(recipe.grid),
                "patch": list(recipe.tokens.patch_size), "corner": list(preprocessing.margin),
            }  # fmt: skip
        return result

    def listing(self) -> list[dict[str, Any]]:
        """A row per volume, by device and id."""
        rows = [
            {
                "id": str(row["volume_id"]), "file": file_name(str(row["source"])),
                **{name: row[name] for name in _COLUMNS}, "mirrored": str(row["mirrored"]) == "True",
                "quality": round(float(row["quality"]), 3) if row["quality"] == row["quality"] else None,
                "notes": [note for note in row["notes"].split(";") if note],
                "axes": [
                    {
                        "axis": axis.axis, "count": axis.count, "spacing_mm": round(axis.spacing_mm, 6),
                        "extent_mm": round(axis.extent_mm, 2), "from": axis.provenance, "uncertain": axis.uncertain,
                    } for axis in eyes.native_geometry(row)
                ],
            } for row in eyes.records(self._table)
        ]  # fmt: skip
        return sorted(rows, key=lambda row: (row["device"], row["id"]))

    def slice_png(self, volume_id: str, number: int) -> bytes:
        """A B-scan. Raises IndexError: no such slice."""
        pixels = self._volume(volume_id).pixels
        if not 0 <= number < len(pixels):
            raise IndexError(number)
        return _png(np.asarray(pixels[number]))

    def _en_face_png(self, volume_id: str) -> bytes:
        volume = self._volume(volume_id)
        depth_mm = self.store.preprocessing.target_spacing_mm[1]
        return _png(eyes.en_face(np.asarray(volume.pixels), np.asarray(volume.band), depth_mm))

    def band(self, volume_id: str) -> list[list[list[int]]]:
        """[ILM, lower edge][slice][column]: depth indices of the store's volume, -1 where there is no tissue."""
        band: list[list[list[int]]] = np.asarray(self._volume(volume_id).band).tolist()
        return band

    def central(self, volume_id: str) -> int:
        """The slice to open a volume on: near the middle, and with tissue where the scan fills a part of the grid."""
        return eyes.central((np.asarray(self._volume(volume_id).band[0]) >= 0).sum(axis=1))

    def _grid_png(self, volume_id: str, layer: str) -> bytes:
        """A pixel per token, one slab of the grid below the other: its colour, or its state under the mask `layer`.

        Raises KeyError: no such layer here.
        """
        if self.encoder is None or layer not in LAYERS:
            raise KeyError(layer)
        volume = self._volume(volume_id)
        depth, height, width = self.encoder.recipe.grid
        if layer == "tokens":
            painted = self._token_colours(self.encoder, volume)
        else:
            painted = _STATE_COLOURS[masks.mask_states(volume, self.encoder.recipe, layer)]
        return _png(painted.reshape(depth * height, width, 4))

    def _token_colours(self, encoder: PretrainedEncoder, volume: CanonicalVolume) -> UInt8[np.ndarray, "d h w 4"]:
        with self._lock:
            components = self._components
            features, positions = tokens.tissue_tokens(encoder, volume)
        painted = np.zeros((*encoder.recipe.grid, 4), np.uint8)
        colours = components.colours(features)
        painted[tuple(positions.T)] = np.column_stack([colours, np.full(len(colours), _TOKEN_OPACITY, np.uint8)])
        return painted

    @cached_property
    def _components(self) -> tokens.Components:
        """Fitted on the eyes of the report, the first of each device, so that a colour means the same in all volumes.

        Damaged ones are left out. Raises ValueError: the others hold too few tokens.
        """
        assert self.encoder is not None
        tissue: list[Any] = []
        rest = self._table
        while len(rest) and not tissue:
            chosen = eyes.one_per_device(rest) or eyes.records(rest)[:_MAX_FITTED]
            for row in chosen:
                with suppress(DamagedVolume):  # its own page reports it
                    tissue.append(tokens.tissue_tokens(self.encoder, self.store.read(str(row["volume_id"]))))
            rest = rest[~rest["volume_id"].isin([row["volume_id"] for row in chosen])]
        if not tissue:
            raise ValueError("no volume can be read to fit the colours on")
        return tokens.principal_components([part for part, _ in tissue], [positions[:, 1] for _, positions in tissue])


def _png(pixels: np.ndarray) -> bytes:
    from PIL import Image

    stream = io.BytesIO()
    Image.fromarray(np.ascontiguousarray(pixels)).save(stream, "PNG")
    return stream.getvalue()
