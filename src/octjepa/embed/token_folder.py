"""Token features of every volume on disk: read by the attentive probe and dense work without running the encoder again.

    tokens.json             encoder, hash of its weights, contract, dim, grid, and the volumes of each part in order
    PART.vector.npy         float16 [volumes, K, dim], memory-mapped; K selected tokens of each volume
    PART.untrained.npy      the same of the untrained twin
    PART.positions.npy      int32 [volumes, K], position of each token in the raster order of the grid

Half precision: rounding is 0.05 % of a feature. Fails with UsageError on a folder that is none, OctjepaError on a part
that is damaged.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float16, Int32

from octjepa.errors import OctjepaError, UsageError
from octjepa.files import write_atomic, write_json

INDEX = "tokens.json"
VIEWS = ("vector", "untrained")


def check_folder(folder: Path) -> None:
    """Raises UsageError where `folder` cannot be used for tokens, or holds anything else."""
    if folder.is_dir():
        strange = [one.name for one in folder.iterdir() if one.name != INDEX and not one.name.endswith(".npy")]
        if strange:
            raise UsageError(f"{folder} holds {strange[0]} and more: give --tokens a new folder or one of tokens")
    elif folder.exists() or not folder.parent.is_dir():
        raise UsageError(f"{folder} cannot be made: give --tokens a new folder in one that exists")
    else:
        folder.mkdir(exist_ok=True)


def write_part(folder: Path, part: str, arrays: Mapping[str, np.ndarray]) -> None:
    """Writes `vector`, `untrained` and `positions` of one part, each atomically."""
    for name, array in arrays.items():
        write_atomic(folder / f"{part}.{name}.npy", partial(np.save, arr=array, allow_pickle=False))


def write_index(folder: Path, parts: Mapping[str, Sequence[str]], about: Mapping[str, Any]) -> None:
    """Writes the index over `parts` {name: volume ids} and removes what an earlier embedding left there."""
    write_json(folder / INDEX, {**about, "parts": [{"name": n, "volumes": list(v)} for n, v in sorted(parts.items())]})
    for file in folder.glob("*.npy"):
        if file.name.split(".")[0] not in parts:
            file.unlink()


@dataclass(frozen=True)
class TokenFolder:
    """Tokens by volume: `places[volume]` is (part, row). Arrays are memory maps; nothing is read before it is used."""

    folder: Path
    encoder: str
    weights: str
    contract: str
    dim: int
    index: dict[str, tuple[int, int]]
    parts: dict[str, list[Float16[np.ndarray, "_ k dim"]]]
    positions: list[Int32[np.ndarray, "_ k"]]

    @classmethod
    def open(cls, folder: str | Path) -> TokenFolder:
        """Raises UsageError: no token folder; OctjepaError: a part of it is absent or not what the index says."""
        folder = Path(folder)
        try:
            about = json.loads((folder / INDEX).read_text(encoding="utf-8"))
            listed = [(str(part["name"]), [str(name) for name in part["volumes"]]) for part in about["parts"]]
            head = {key: str(about[key]) for key in ("encoder", "weights", "contract")}
            dim = int(about["dim"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UsageError(
                f"{folder} is no folder of tokens ({type(error).__name__} at {INDEX}): make one with octjepa embed "
                "... --tokens FOLDER, and let it end"
            ) from None
        arrays: dict[str, list[np.ndarray]] = {name: [] for name in (*VIEWS, "positions")}
        for part, volumes in listed:
            for name, parts in arrays.items():
                file = folder / f"{Path(part).name}.{name}.npy"
                try:
                    array = np.load(file, mmap_mode="r", allow_pickle=False)
                except (OSError, ValueError) as error:
                    raise OctjepaError(f"{file} is damaged ({error}): embed again") from None
                if len(array) != len(volumes) or (name in VIEWS and array.shape[2:] != (dim,)):
                    raise OctjepaError(f"{file} holds {array.shape}, not {len(volumes)} volumes of {dim}: embed again")
                parts.append(array)
        index = {name: (p, n) for p, (_, volumes) in enumerate(listed) for n, name in enumerate(volumes)}
        positions = arrays.pop("positions")
        return cls(folder, head["encoder"], head["weights"], head["contract"], dim, index, arrays, positions)

    def read(self, view: str, volume_ids: Sequence[str]) -> Float16[np.ndarray, "volumes k dim"]:
        """Tokens of these volumes, in this order. Raises UsageError for a volume that is not here."""
        absent = sum(name not in self.index for name in volume_ids)
        if absent:
            raise UsageError(f"{self.folder} holds no tokens of {absent} of the {len(volume_ids)} volumes: embed again")
        return np.stack([self.parts[view][part][n] for part, n in (self.index[name] for name in volume_ids)])
