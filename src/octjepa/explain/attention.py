"""Where an attentive probe looks: the share of its attention that each token of a volume gets, as a table in a file.

The attention of a token is the mean over the heads, and over the networks of cross-validation if there are several.
It says which tokens were read, not why, nor that the prediction would change without them (Jain & Wallace 2019); and
a token that is read holds what the encoder brought there from others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
import pandas as pd
from jaxtyping import Float, Int

from octjepa.errors import UsageError
from octjepa.evaluate.attention import VolumeAttention
from octjepa.files import write_atomic
from octjepa.parsing import read_parquet

_COLUMNS = [field.name for field in fields(VolumeAttention)]


@dataclass(frozen=True)
class TokenAttention:
    """Of one volume and target: the attention of each token, which sums to 1, and its index in the raster of `grid`.

    untrained: whether it is of the randomly initialised encoder of the encoder.
    """

    target: str
    untrained: bool
    grid: tuple[int, int, int]
    grid_index: Int[np.ndarray, " k"]
    attention: Float[np.ndarray, " k"]

    def even_shares(self) -> Float[np.ndarray, "d h w"]:
        """The token grid in multiples of an even share: 1 is what every token gets if none stands out. Else NaN."""
        values = np.full(self.grid, np.nan, np.float32)
        values.reshape(-1)[self.grid_index] = self.attention * len(self.attention)
        return values


def write_attention(path: Path, rows: Sequence[VolumeAttention]) -> None:
    """Writes `rows` as Parquet."""
    values = [[getattr(row, name) for name in _COLUMNS] for row in rows]
    frame = pd.DataFrame(values, columns=_COLUMNS)
    write_atomic(path, lambda file: frame.to_parquet(file, index=False))


def read_attention(path: Path, volume_ids: Sequence[str]) -> dict[str, list[TokenAttention]]:
    """The maps of `volume_ids` in a file of `octjepa probe --attention`, of its first encoder and the random
    initialisation of that encoder.

    Raises UsageError: no such file, or none of the volumes is in it.
    """
    try:
        frame = read_parquet(path, columns=_COLUMNS, filters=[("volume_id", "in", list(volume_ids))])
    except (OSError, ValueError) as error:
        raise UsageError(f"no table of attention at {path} ({str(error).splitlines()[0]})") from None
    if frame.empty:
        raise UsageError(f"{path} holds none of the {len(volume_ids)} eyes that are mapped: was it made of this store?")
    first = frame.loc[~frame["twin"], "name"]
    frame = frame[frame["twin"] | (frame["name"] == first.iloc[0])].drop_duplicates(["volume_id", "target", "twin"])
    attention_by_volume: dict[str, list[TokenAttention]] = {}
    for row in frame.to_dict("records"):
        d, h, w = (int(size) for size in row["grid"])
        index, attention = np.asarray(row["grid_index"], np.int64), np.asarray(row["attention"], np.float32)
        attention_by_volume.setdefault(str(row["volume_id"]), []).append(
            TokenAttention(str(row["target"]), bool(row["twin"]), (d, h, w), index, attention)
        )
    return attention_by_volume
