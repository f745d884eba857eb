"""Keep the layers and fluid of a scan that was segmented, in memory and in a cache folder.

In: an `OCTVolume`. Out: its `RetainedLayers`: boundaries, expected errors and classes. The probabilities of voxels are
left out, because they are large. A file in the cache is found by a hash of pixels, geometry and weights. A scan
that was segmented before is not segmented again, and other weights never answer for the present ones. The files hold
no name, no path and no identifier of a person. They lie in `layers/` of the cache folder (OCTJEPA_CACHE).
"""

from __future__ import annotations

import hashlib
import zipfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Final

import numpy as np
from jaxtyping import Float, UInt8

from octjepa.checkpoint.boundary_unet import PACKAGED
from octjepa.errors import OctjepaError
from octjepa.files import write_atomic
from octjepa.remote.cache import cache_folder
from octjepa.tasks.segmenter.inference import Segmentation, Segmenter
from octjepa.volume import OCTVolume

_METHOD: Final = 2  # changes whenever the same weights give other boundaries


@dataclass(frozen=True, eq=False)
class RetainedLayers:
    """The retained part of a `Segmentation`; the fields are those of that class."""

    boundaries_px: Float[np.ndarray, "8 D W"]
    expected_error_um: Float[np.ndarray, "8 D W"]
    classes: UInt8[np.ndarray, "D H W"]
    spacing_mm: tuple[float, float, float]

    @classmethod
    def of(cls, found: Segmentation) -> RetainedLayers:
        """The part of `found` that is retained."""
        return cls(found.boundaries_px, found.expected_error_um, found.classes, found.spacing_mm)

    @property
    def boundaries_um(self) -> Float[np.ndarray, "8 D W"]:
        """Depth of each boundary in um below the first row."""
        return self.boundaries_px * np.float32(1000 * self.spacing_mm[1])


class LayerCache:
    """Segments scans with the packaged network, or with that in `weights`, and keeps the results in a folder."""

    def __init__(self, weights: Path | None = None, folder: Path | None = None) -> None:
        """`folder` is by default `layers/` in the cache folder. Nothing is loaded before the first scan."""
        self._weights, self._folder = PACKAGED if weights is None else weights, folder
        self._segmenter = lru_cache(1)(self._load)
        self._weights_hash = lru_cache(1)(self._hash_weights)

    @property
    def is_adapted(self) -> bool:
        """Whether the network is not the packaged one."""
        return self._weights != PACKAGED

    def layers(self, volume: OCTVolume, advance: Callable[[int], None] | None = None) -> RetainedLayers:
        """Reads the layers of `volume` from the cache, or segments it.

        `advance` is called with the number of B-scans that are done; it may raise to end the work. Raises OctjepaError:
        the network cannot be read, or the scan cannot be segmented.
        """
        retained = self.retained(volume)
        if retained is None:
            retained = RetainedLayers.of(self._segmenter().segment(volume, advance))
            with suppress(OSError, OctjepaError):  # a cache that cannot be written is done without
                _write(self._file(volume), retained)
        return retained

    def retained(self, volume: OCTVolume) -> RetainedLayers | None:
        """The layers of `volume` that are in the cache; None if there are none, or if their file is damaged."""
        try:
            return _read(self._file(volume), volume)
        except (OSError, OctjepaError, ValueError, KeyError, zipfile.BadZipFile):
            return None

    def _file(self, volume: OCTVolume) -> Path:
        geometry = (_METHOD, volume.spacing_mm, volume.pattern, volume.uncertain)
        positions = b"" if volume.slice_positions_mm is None else np.asarray(volume.slice_positions_mm).tobytes()
        code = hashlib.sha256(f"{volume.content_hash} {geometry} {self._weights_hash()}".encode() + positions)
        folder = cache_folder("layers") if self._folder is None else self._folder
        return folder / f"{code.hexdigest()[:40]}.npz"

    def _load(self) -> Segmenter:
        from octjepa.tasks.segmenter.inference import load_segmenter

        return load_segmenter(self._weights)

    def _hash_weights(self) -> str:
        code = hashlib.sha256()
        for name in ("segmenter.safetensors", "segmenter.json"):
            try:
                code.update((self._weights / name).read_bytes())
            except OSError:
                raise OctjepaError(
                    f"{self._weights} holds no {name}: expected the folder of a segmentation network"
                ) from None
        return code.hexdigest()


def _write(path: Path, retained: RetainedLayers) -> None:
    arrays = {
        "boundaries_px": retained.boundaries_px.astype(np.float32),
        "expected_error_um": retained.expected_error_um.astype(np.float16),
        "classes": retained.classes,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    write_atomic(path, lambda file: np.savez_compressed(file, **arrays))  # type: ignore[arg-type]


def _read(path: Path, volume: OCTVolume) -> RetainedLayers:
    """Raises OSError, ValueError, KeyError: there is no file, or it is damaged."""
    slices, _, columns = volume.shape
    with path.open("rb") as stream, np.load(stream, allow_pickle=False) as file:
        boundaries, error, classes = (file[name] for name in ("boundaries_px", "expected_error_um", "classes"))
    if boundaries.shape != (8, slices, columns) or error.shape != boundaries.shape or classes.shape != volume.shape:
        raise ValueError(f"{path.name} is of another scan")
    return RetainedLayers(boundaries, error.astype(np.float32), classes, volume.spacing_mm)
