"""Token features of every volume on disk: read by the attentive probe and dense work without running the encoder again.

    tokens.json             encoder, hash of its weights, contract, dim, grid, and the volumes of each part in order
    PART.vector.npy         float16 [tokens, dim], memory-mapped; the tokens of its volumes, one volume after the other
    PART.untrained.npy      the same of the randomly initialised encoder
    PART.positions.npy      int32 [tokens], position of each token in the raster order of the grid
    PART.counts.npy         int32 [volumes], number of tokens of each volume

Half precision: rounding is 0.05 % of a feature. Fails with UsageError on a folder that is none, OctjepaError on a part
that is damaged.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Float16, Int32

from octjepa.errors import OctjepaError, UsageError
from octjepa.files import write_atomic, write_json
from octjepa.locks import LOCK
from octjepa.parsing import read_object
from octjepa.views.tokens import grid_coordinates

INDEX = "tokens.json"
VIEWS = ("vector", "untrained")
# Files of a part called `shard.Job.name`, and what a kill leaves of one: any other array in the folder is the user's.
_PART_FILE = re.compile(r"[0-9a-f]{12}-\d{6,}\.(vector|untrained|positions|counts)\.npy")
_LEFT_OVER = re.compile(rf"\.({_PART_FILE.pattern}|{re.escape(INDEX)})\.tmp")


def check_folder(folder: Path) -> None:
    """Raises UsageError where `folder` cannot be used for tokens, or holds anything else."""
    if folder.is_dir():
        strange = [
            path.name
            for path in folder.iterdir()
            if path.name not in (INDEX, LOCK)
            and not _PART_FILE.fullmatch(path.name)
            and not _LEFT_OVER.fullmatch(path.name)
        ]
        if strange:
            raise UsageError(f"{folder} holds {strange[0]} and more: give --tokens a new folder or one of tokens")
    elif folder.exists() or folder.is_symlink() or not folder.parent.is_dir():
        raise UsageError(f"{folder} cannot be made: give --tokens a new folder in one that exists")
    else:
        folder.mkdir(exist_ok=True)


def half_precision(features: Float[np.ndarray, "k dim"], volume_id: str) -> Float16[np.ndarray, "k dim"]:
    """Features as they are stored. Raises OctjepaError: one that is not finite, or is beyond half precision."""
    with np.errstate(over="ignore"):
        halves = features.astype(np.float16)
    if not np.isfinite(halves).all():
        raise OctjepaError(
            f"a token of volume {volume_id} has a feature of size {np.abs(features).max():.3g}, and half precision "
            f"ends at {np.finfo(np.float16).max:,.0f}; check the checkpoint"
        )
    return halves


def write_part(folder: Path, part: str, arrays: Mapping[str, np.ndarray]) -> None:
    """Writes `vector`, `untrained`, `positions` and `counts` of one part, each atomically."""
    for name, array in arrays.items():
        write_atomic(folder / f"{part}.{name}.npy", partial(np.save, arr=array, allow_pickle=False))


def write_index(folder: Path, parts: Mapping[str, Sequence[str]], about: Mapping[str, Any]) -> None:
    """Writes the index over `parts` {name: volume ids} and removes what an earlier embedding left there."""
    write_json(folder / INDEX, {**about, "parts": [{"name": n, "volumes": list(v)} for n, v in sorted(parts.items())]})
    for file in list(folder.iterdir()):
        is_of_others = _PART_FILE.fullmatch(file.name) and file.name.split(".")[0] not in parts
        if is_of_others or _LEFT_OVER.fullmatch(file.name):  # by an earlier embedding, or a killed one
            file.unlink()


class PaddedTokens(NamedTuple):
    """Tokens of several volumes, filled up with zeros to the folder's longest: `valid` says which are tokens.

    coordinates: of each token's centre (slice, depth, column) in its grid, from -1 to 1 at the grid's faces.
    """

    features: Float16[np.ndarray, "volumes k dim"]
    coordinates: Float[np.ndarray, "volumes k 3"]
    valid: Bool[np.ndarray, "volumes k"]


@dataclass(frozen=True)
class TokenFolder:
    """Tokens by volume. Arrays are memory maps; nothing is read before it is used.

    index: part of each volume, and which of the part's tokens are its own. parts: of each view, the arrays in order.
    """

    folder: Path
    encoder: str
    weights: str
    contract: str
    dim: int
    grid: tuple[int, ...]
    index: dict[str, tuple[int, slice]]
    parts: dict[str, list[Float16[np.ndarray, "_ dim"]]]
    positions: list[Int32[np.ndarray, " _"]]

    @classmethod
    def open(cls, folder: str | Path) -> TokenFolder:
        """Raises UsageError (no token folder) and OctjepaError (a part of it is absent or not what the index says)."""
        folder = Path(folder)
        try:
            about = read_object(folder / INDEX)
            listed = [(str(part["name"]), [str(name) for name in part["volumes"]]) for part in about["parts"]]
            head = {key: str(about[key]) for key in ("encoder", "weights", "contract")}
            dim, grid = int(about["dim"]), tuple(int(size) for size in about["grid"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UsageError(
                f"{folder} is not a folder of tokens ({type(error).__name__} at {INDEX}): make one with octjepa embed "
                "... --tokens FOLDER, and let it end"
            ) from None
        parts: dict[str, list[np.ndarray]] = {name: [] for name in (*VIEWS, "positions")}
        index: dict[str, tuple[int, slice]] = {}
        for number, (part, volumes) in enumerate(listed):
            stem = folder / Path(part).name
            counts = _load(stem, "counts", (len(volumes),))
            ends = np.cumsum(counts).tolist()
            total = ends[-1] if ends else 0
            for name, arrays in parts.items():
                arrays.append(_load(stem, name, (total, dim) if name in VIEWS else (total,)))
            for volume, start, end in zip(volumes, [0, *ends], ends, strict=False):
                index[volume] = number, slice(start, end)
        positions = parts.pop("positions")
        return cls(folder, head["encoder"], head["weights"], head["contract"], dim, grid, index, parts, positions)

    def features(self, view: str, volume_id: str) -> Float16[np.ndarray, "k dim"]:
        """The tokens of one volume. Raises UsageError as `read`."""
        self._require([volume_id])
        part, rows = self.index[volume_id]
        return self.parts[view][part][rows]

    def grid_index(self, volume_id: str) -> Int32[np.ndarray, " k"]:
        """The position of each token of one volume in the raster order of the grid. Raises UsageError as `read`."""
        self._require([volume_id])
        part, rows = self.index[volume_id]
        return self.positions[part][rows]

    def read(self, view: str, volume_ids: Sequence[str]) -> PaddedTokens:
        """Tokens of these volumes, in this order. Raises UsageError for a volume that is not here."""
        self._require(volume_ids)
        where = [self.index[name] for name in volume_ids]
        counts = np.array([rows.stop - rows.start for _, rows in where], dtype=np.int64)
        # Always the same length: a volume's sums are taken in one order, whatever volumes are read next to it.
        longest = max((rows.stop - rows.start for _, rows in self.index.values()), default=0)
        features = np.zeros((len(where), longest, self.dim), np.float16)
        coordinates = np.zeros((len(where), longest, 3), np.float32)
        for number, (part, rows) in enumerate(where):
            features[number, : counts[number]] = self.parts[view][part][rows]
            coordinates[number, : counts[number]] = grid_coordinates(self.positions[part][rows], self.grid)
        return PaddedTokens(features, coordinates, np.arange(longest) < counts[:, None])

    def _require(self, volume_ids: Sequence[str]) -> None:
        absent = sum(name not in self.index for name in volume_ids)
        if absent:
            raise UsageError(f"{self.folder} holds no tokens of {absent} of the {len(volume_ids)} volumes: embed again")


def _load(stem: Path, name: str, shape: tuple[int, ...]) -> np.ndarray:
    """One array of a part as a memory map. Raises OctjepaError: damaged, absent or of another shape."""
    file = stem.with_name(f"{stem.name}.{name}.npy")
    try:
        array: np.ndarray = np.load(file, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError) as error:
        raise OctjepaError(f"{file} is damaged ({error}): embed again") from None
    if array.shape != shape:
        raise OctjepaError(f"{file} holds {array.shape}, expected {shape}: embed again")
    return array
