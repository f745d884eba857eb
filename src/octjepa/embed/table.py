"""The embedding table: a row per volume, with keys, covariates and three feature blocks, in one parquet file.

`embed` writes it, the probes read it. Every row carries person, eye, volume id and content hash, so a join is by key
and never by position. `vector` holds the encoder's features by the table's poolings one after the other, `untrained`
the same from the same architecture with its first weights, `histogram` and `intensity` what grey levels tell without a
network. Fails with UsageError on a file that is not such a table, on a repeated volume and on features that are not
finite.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pandas as pd
from jaxtyping import Float

from octjepa.checkpoint import PretrainedEncoder
from octjepa.embed import pooling
from octjepa.errors import OctjepaError, UsageError
from octjepa.files import write_atomic

KEY_COLUMNS = ("person_id", "eye", "volume_id", "content_hash", "device", "split", "age", "clinical_site")
FEATURE_COLUMNS = ("vector", "untrained", "histogram")
# Features without poolings; tables of before, and those of encoders that are not ours, have no intensity.
UNPOOLED = ("histogram", "intensity")
# Of use to the protocol of several volumes; tables of before have neither: no visit and no quality are known then.
OPTIONAL_COLUMNS = ("visit", "quality")
NUMERIC_COLUMNS = ("age", "quality")
SPLITS = ("train", "val", "test")


@dataclass(frozen=True)
class Embeddings:
    """Features of `volumes` rows and their keys, in the same order.

    frame: KEY_COLUMNS and OPTIONAL_COLUMNS; eye is "OD", "OS" or ""; age in years, NaN where unknown; split one of
    SPLITS or ""; quality 0..1. vector, untrained: float32 [volumes, features], the poolings `pools` one after the
    other. histogram: float32 [volumes, bins]. dim: the encoder's width. encoder: its name in result rows. contract:
    hash of the preprocessing contract. leaked: how many people of val and test the encoder was pretrained on.
    weights: hash of the encoder's weights, "" in tables of before. intensity: float32 [volumes, statistics of zones].
    """

    frame: pd.DataFrame
    vector: Float[np.ndarray, "volumes features"]
    untrained: Float[np.ndarray, "volumes untrained_features"]
    histogram: Float[np.ndarray, "volumes bins"]
    dim: int
    encoder: str
    contract: str
    leaked: int = 0
    pools: tuple[str, ...] = pooling.DEFAULT_POOLS
    weights: str = ""
    intensity: Float[np.ndarray, "volumes statistics"] | None = None

    def __post_init__(self) -> None:
        _check(self, f"embeddings of {self.encoder!r}")

    def __len__(self) -> int:
        return len(self.frame)

    def features(self, view: str, pool: str) -> Float[np.ndarray, "volumes features"]:
        """A feature view as float64: `vector` or `untrained` by one of the poolings it holds; those of PLAIN whole."""
        if view in self.unpooled:
            whole: np.ndarray = getattr(self, view)
            return whole.astype(np.float64)
        if view not in FEATURE_COLUMNS:
            raise UsageError(f"no feature view {view!r}: known are {', '.join(FEATURE_COLUMNS)}")
        block: np.ndarray = getattr(self, view)
        return block[:, pooling.pool_columns(self.pools, pool, self.dim)].astype(np.float64)

    @property
    def unpooled(self) -> tuple[str, ...]:
        """Those of PLAIN that it holds."""
        return tuple(name for name in UNPOOLED if getattr(self, name) is not None)

    def take(self, positions: Iterable[int]) -> Embeddings:
        """The rows at `positions`, in that order."""
        rows = np.asarray(list(positions), dtype=np.int64)
        return replace(
            self,
            frame=self.frame.iloc[rows].reset_index(drop=True),
            vector=self.vector[rows],
            untrained=self.untrained[rows],
            histogram=self.histogram[rows],
            intensity=None if self.intensity is None else self.intensity[rows],
        )


def _check(table: Embeddings, where: str) -> None:
    frame = table.frame
    missing = [name for name in KEY_COLUMNS if name not in frame.columns]
    if missing:
        raise UsageError(f"{where} lack the column(s) {', '.join(missing)}; write them with octjepa embed")
    if not len(frame):
        raise UsageError(f"{where} hold no volume: nothing can be probed; embed a store that is not empty")
    repeated = int(frame["volume_id"].duplicated().sum())
    if repeated:
        raise UsageError(f"{where}: {repeated} row(s) repeat a volume_id, expected a row per volume; embed again")
    nobody = int((frame["person_id"].astype(str).str.strip() == "").sum())
    if nobody:
        raise UsageError(f"{where}: {nobody} row(s) have no person_id, so people cannot be kept apart")
    strange = sorted(set(frame["split"]) - {*SPLITS, ""})
    if strange:
        raise UsageError(f"{where}: split holds {strange}, expected train, val, test or empty")
    strange = sorted(set(frame["eye"]) - {"OD", "OS", ""})
    if strange:
        raise UsageError(f"{where}: eye holds {strange}, expected OD, OS or empty")
    wide = sum(pooling.POOL_WIDTHS[name] for name in pooling.check_pools(table.pools))
    for name in dict.fromkeys((*FEATURE_COLUMNS, *table.unpooled)):
        block: np.ndarray = getattr(table, name)
        if block.ndim != 2 or len(block) != len(frame):
            raise UsageError(f"{where}: {name} has shape {block.shape}, expected [{len(frame)}, features]")
        if name not in UNPOOLED and block.shape[1] != wide * table.dim:
            raise UsageError(
                f"{where}: {name} has {block.shape[1]} features, expected {wide} x dim = {wide * table.dim} for "
                f"{', '.join(table.pools)}"
            )
        broken = int((~np.isfinite(block).all(axis=1)).sum())
        if broken:
            raise UsageError(f"{where}: {name} is not finite in {broken} of {len(frame)} rows; check the checkpoint")


def write_embeddings(
    path: str | Path,
    frame: pd.DataFrame,
    dim: int,
    encoder: str,
    contract: str,
    leaked: int = 0,
    pools: tuple[str, ...] = pooling.DEFAULT_POOLS,
    weights: str = "",
) -> Path:
    """Writes a frame of KEY_COLUMNS, OPTIONAL_COLUMNS, FEATURE_COLUMNS and PLAIN (float32 arrays) as parquet.

    All of it or nothing: a temporary file beside it, then a rename. Raises UsageError if the frame is not what
    `read_embeddings` would accept or the folder does not exist, OctjepaError if the disk refuses; what was there
    before stays.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = Path(path)
    missing = [name for name in (*KEY_COLUMNS, *FEATURE_COLUMNS) if name not in frame.columns]
    if missing:
        raise UsageError(f"the embeddings for {path} lack the column(s) {', '.join(missing)}")
    features = [name for name in dict.fromkeys((*FEATURE_COLUMNS, *UNPOOLED)) if name in frame]
    keys = complete_keys(frame[[name for name in frame if name not in features]].reset_index(drop=True))
    blocks = {name: _stacked(frame[name], path) for name in features}
    table = Embeddings(
        keys, **blocks, dim=dim, encoder=encoder, contract=contract, leaked=leaked, pools=pools, weights=weights
    )
    if not path.parent.is_dir():
        raise UsageError(f"no folder {path.parent} to write {path.name} into: create it first")
    columns = {
        name: pa.array(table.frame[name].to_numpy(), pa.float64() if name in NUMERIC_COLUMNS else pa.string())
        for name in (*KEY_COLUMNS, *OPTIONAL_COLUMNS)
    }
    for name in features:
        block = np.ascontiguousarray(getattr(table, name), dtype=np.float32)
        ends = np.arange(len(block) + 1, dtype=np.int32) * block.shape[1]
        columns[name] = pa.ListArray.from_arrays(pa.array(ends), pa.array(block.reshape(-1)))
    content = pa.table(columns)
    content = content.replace_schema_metadata(
        {
            b"octjepa.dim": str(table.dim).encode(),
            b"octjepa.encoder": table.encoder.encode(),
            b"octjepa.contract": table.contract.encode(),
            b"octjepa.leaked": str(table.leaked).encode(),
            b"octjepa.pools": ",".join(table.pools).encode(),
            b"octjepa.weights": table.weights.encode(),
        }
    )
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with partial.open("wb") as file:
            pq.write_table(content, file)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except OSError as error:
        raise OctjepaError(f"{path} could not be written ({error.strerror or error}); nothing was changed") from error
    finally:
        partial.unlink(missing_ok=True)
    return path


def complete_keys(frame: pd.DataFrame) -> pd.DataFrame:
    """The frame with KEY_COLUMNS and OPTIONAL_COLUMNS alone, absent optional ones unknown; their types as stored."""
    known = [name for name in (*KEY_COLUMNS, *OPTIONAL_COLUMNS) if name in frame]
    frame = frame[known].reindex(columns=[*known, *(name for name in OPTIONAL_COLUMNS if name not in known)])
    for name in frame:
        texts = frame[name].astype(object)
        frame[name] = (
            frame[name].astype(float) if name in NUMERIC_COLUMNS else texts.where(texts.notna(), "").astype(str)
        )
    return frame


def _stacked(column: pd.Series, path: Path) -> Float[np.ndarray, "volumes features"]:
    lengths = {len(values) for values in column}
    if len(lengths) != 1:
        raise UsageError(f"the embeddings for {path}: {column.name} holds lists of length {sorted(lengths)}")
    return np.stack(column.to_list()).astype(np.float32)


def read_embeddings(path: str | Path) -> Embeddings:
    """The table that `write_embeddings` wrote.

    Raises UsageError: no such file, not parquet, not an embedding table, repeated volumes, features of uneven length.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = Path(path)
    if not path.is_file():
        raise UsageError(f"no embeddings at {path}: expected the .parquet file that octjepa embed writes")
    try:
        content = pq.read_table(path)
    except (pa.ArrowInvalid, OSError) as error:
        raise UsageError(f"{path} is not a readable parquet file ({str(error).splitlines()[0]})") from None
    missing = [name for name in (*KEY_COLUMNS, *FEATURE_COLUMNS) if name not in content.column_names]
    if missing:
        raise UsageError(f"{path} lacks the column(s) {', '.join(missing)}: it is no table of octjepa embed")
    metadata = content.schema.metadata or {}
    unsaid = [name for name in ("octjepa.dim", "octjepa.encoder", "octjepa.contract") if name.encode() not in metadata]
    if unsaid:
        raise UsageError(f"{path} lacks the parquet metadata {', '.join(unsaid)}: it is no table of octjepa embed")
    keys = [name for name in (*KEY_COLUMNS, *OPTIONAL_COLUMNS) if name in content.column_names]
    frame = complete_keys(content.select(keys).to_pandas())
    features = [name for name in dict.fromkeys((*FEATURE_COLUMNS, *UNPOOLED)) if name in content.column_names]
    return Embeddings(
        frame,
        **{name: _matrix(content.column(name), f"{path}: {name}") for name in features},
        dim=int(metadata[b"octjepa.dim"]),
        encoder=metadata[b"octjepa.encoder"].decode(),
        contract=metadata[b"octjepa.contract"].decode(),
        leaked=int(metadata.get(b"octjepa.leaked", b"0")),
        pools=tuple(metadata.get(b"octjepa.pools", b"mean_std_max").decode().split(",")),
        weights=metadata.get(b"octjepa.weights", b"").decode(),
    )


def _matrix(column: object, where: str) -> Float[np.ndarray, "volumes features"]:
    """A parquet list column as one float32 matrix. Raises UsageError if the lists differ in length or are missing."""
    import pyarrow as pa
    import pyarrow.compute as pc

    lists = column.combine_chunks()  # type: ignore[attr-defined]
    kind = lists.type
    if not (pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)):
        raise UsageError(f"{where} holds {kind}, expected a list of float32 per volume")
    lengths = set(pc.list_value_length(lists).to_pylist())
    if len(lengths) > 1 or None in lengths:
        raise UsageError(f"{where} holds lists of different or missing length {sorted(map(str, lengths))}")
    values = lists.flatten().to_numpy(zero_copy_only=False).astype(np.float32, copy=False)
    return values.reshape(len(lists), lengths.pop() if lengths else 0)


_KEYS = ("person_id", "eye", "volume_id", "content_hash", "device", "split")


def write_bscan_table(
    path: Path,
    frame: pd.DataFrame,
    means: Float[np.ndarray, "volumes slabs dim"],
    counts: Float[np.ndarray, "volumes slabs"],
    encoder: PretrainedEncoder,
) -> None:
    """Writes the rows of `frame`'s volumes, slice by slice. Raises OctjepaError: the disk refuses."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    recipe = encoder.recipe
    thick, depth = recipe.tokens.patch_size[0], recipe.preprocessing.image_size[0]
    slabs = means.shape[1]
    slab = np.tile(np.arange(slabs), len(frame))
    first = slab * thick + recipe.preprocessing.margin[0]  # counted in the stored volume, whose margin the view leaves
    columns = {name: pa.array(np.repeat(frame[name].to_numpy(), slabs), pa.string()) for name in _KEYS}
    columns["slice"] = pa.array(slab, pa.int32())
    columns["first_bscan"] = pa.array(first, pa.int32())
    columns["last_bscan"] = pa.array(first + thick - 1, pa.int32())
    offset = ((slab + 0.5) * thick - depth / 2) * recipe.preprocessing.target_spacing_mm[0]
    columns["offset_mm"] = pa.array(offset, pa.float32())
    columns["tokens"] = pa.array(counts.reshape(-1).astype(np.int32))
    rows = means.reshape(-1, means.shape[2])
    columns["vector"] = pa.array([row if np.isfinite(row).all() else None for row in rows], pa.list_(pa.float32()))
    table = pa.table(columns).replace_schema_metadata(
        {b"octjepa.dim": str(encoder.dim).encode(), b"octjepa.encoder": encoder.name.encode()}
    )
    write_atomic(path, lambda file: pq.write_table(table, file))
