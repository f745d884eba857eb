"""The embedding table: one entry per volume, with keys, covariates and feature blocks, in one parquet file.

`embed` writes it, the probes read it. Every entry carries person, eye, volume id and content hash, so a join is by key
and never by position. `vector` holds the encoder's features by the table's poolings one after the other, `untrained`
the same from the same architecture with its first weights, `histogram` and `intensity` statistics of intensity without
a network. Fails with UsageError on a file that is not such a table, on a repeated volume and on features that are not
finite.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pandas as pd
from jaxtyping import Float

from octjepa.encoders import pooling
from octjepa.encoders.base import FrozenEncoder
from octjepa.errors import UsageError, counted
from octjepa.files import write_atomic
from octjepa.parsing import read_arrow, read_parquet

if TYPE_CHECKING:
    import pyarrow as pa

_log = logging.getLogger(__name__)
KEY_COLUMNS = ("person_id", "eye", "volume_id", "content_hash", "device", "split", "age", "clinical_site")
FEATURE_COLUMNS = ("vector", "untrained", "histogram")
# Features without poolings; tables of other encoders have no intensity.
UNPOOLED = ("histogram", "intensity")
_BLOCKS = tuple(dict.fromkeys((*FEATURE_COLUMNS, *UNPOOLED)))
# Used to aggregate several volumes; unknown if a frame to write has none.
OPTIONAL_COLUMNS = ("visit", "quality")
NUMERIC_COLUMNS = ("age", "quality")
SPLITS = ("train", "val", "test")
TOKENS = ("tissue", "all")  # all that hold tissue; the whole grid
SCHEMA = 1  # of the table
_LIST_VALUES = 2**31 - 1  # in a list column whose offsets have 32 bits
_METADATA = ("dim", "encoder", "contract", "leaked", "pools", "weights", "tokens", "store")


@dataclass(frozen=True)
class TableFacts:
    """The metadata of a table about its encoder and its volumes; the fields as in `Embeddings`."""

    dim: int
    encoder: str
    contract: str
    leaked: int = 0
    pools: tuple[str, ...] = (pooling.POSITION_FREE_POOL,)
    weights: str = ""
    tokens: str = "all"
    store: str = ""


@dataclass(frozen=True)
class Embeddings:
    """Features of `volumes` volumes and their keys, in the same order.

    frame: KEY_COLUMNS and OPTIONAL_COLUMNS; eye is "OD", "OS" or ""; age in years, NaN where unknown; split one of
    SPLITS or ""; quality 0..1. vector, untrained: float32 [volumes, features], the poolings `pools` one after the
    other. histogram: float32 [volumes, bins]. dim: the encoder's width. encoder: its name in results. contract: hash of
    the preprocessing contract. leaked: number of people of val and test the encoder was pretrained on. weights: hash of
    the encoder's weights, "" if it has none. intensity: float32 [volumes, statistics of regions]. tokens: which of a
    volume's tokens the encoder read, one of TOKENS. store: path of the store relative to the table's folder, "" of one
    in a bucket.
    """

    frame: pd.DataFrame
    vector: Float[np.ndarray, "volumes features"]
    untrained: Float[np.ndarray, "volumes untrained_features"]
    histogram: Float[np.ndarray, "volumes bins"]
    dim: int
    encoder: str
    contract: str
    leaked: int = 0
    pools: tuple[str, ...] = (pooling.POSITION_FREE_POOL,)
    weights: str = ""
    intensity: Float[np.ndarray, "volumes statistics"] | None = None
    tokens: str = "all"
    store: str = ""

    def __post_init__(self) -> None:
        _check(self, f"embeddings of {self.encoder!r}")

    def __len__(self) -> int:
        return len(self.frame)

    def features(self, view: str, pool: str) -> Float[np.ndarray, "volumes features"]:
        """A feature view as float64: `vector` or `untrained` by one pooling of the table; those of UNPOOLED whole.

        Raises UsageError for a view or a pooling that the table does not hold.
        """
        if view not in (*FEATURE_COLUMNS, *self.unpooled):
            raise UsageError(f"no feature view {view!r}: known are {', '.join(FEATURE_COLUMNS)}")
        block: np.ndarray = getattr(self, view)
        if view not in self.unpooled:
            block = block[:, pooling.pool_columns(self.pools, pool, self.dim)]
        return block.astype(np.float64)

    @property
    def unpooled(self) -> tuple[str, ...]:
        """The views of UNPOOLED that it holds."""
        return tuple(name for name in UNPOOLED if getattr(self, name) is not None)

    @property
    def default_pool(self) -> str:
        """The pooling to compare by."""
        return pooling.default_pool(pooling.readable_pools(self.pools))

    def take(self, positions: Iterable[int]) -> Embeddings:
        """The entries at `positions`, in that order."""
        chosen = np.asarray(list(positions), dtype=np.int64)
        blocks: dict[str, Any] = {name: getattr(self, name)[chosen] for name in ("vector", "untrained", *self.unpooled)}
        return replace(self, frame=self.frame.iloc[chosen].reset_index(drop=True), **blocks)


def _check(table: Embeddings, where: str) -> None:
    """Raises UsageError where an embedding table breaks a rule of the module; `where` begins the message."""
    frame = table.frame
    missing = [name for name in KEY_COLUMNS if name not in frame.columns]
    if missing:
        raise UsageError(f"{where} lack the column(s) {', '.join(missing)}; write them with octjepa embed")
    if not len(frame):
        raise UsageError(f"{where} hold no volume: nothing can be probed; embed a store that is not empty")
    repeated = int(frame["volume_id"].duplicated().sum())
    if repeated:
        raise UsageError(
            f"{where}: repeated volume_id in {counted(repeated, 'row')}, expected a row per volume; embed again"
        )
    nameless = int((frame["person_id"].astype(str).str.strip() == "").sum())
    if nameless:
        raise UsageError(f"{where}: no person_id in {counted(nameless, 'row')}, so people cannot be kept apart")
    for column, allowed, expected in (("split", SPLITS, "train, val, test"), ("eye", ("OD", "OS"), "OD, OS")):
        strange = sorted(set(frame[column]) - {*allowed, ""})
        if strange:
            raise UsageError(f"{where}: {column} holds {strange}, expected {expected} or empty")
    widths = sum(pooling.POOL_WIDTHS[name] for name in pooling.check_pools(table.pools))
    for name in ("vector", "untrained", *table.unpooled):
        block: np.ndarray = getattr(table, name)
        if block.ndim != 2 or len(block) != len(frame):
            raise UsageError(f"{where}: {name} has shape {block.shape}, expected [{len(frame)}, features]")
        if name not in UNPOOLED and block.shape[1] != widths * table.dim:
            raise UsageError(
                f"{where}: {name} has {block.shape[1]} features, expected {widths} x dim = {widths * table.dim} for "
                f"{', '.join(table.pools)}"
            )
        broken = int((~np.isfinite(block).all(axis=1)).sum())
        if broken:
            raise UsageError(f"{where}: {name} is not finite in {broken} of {len(frame)} rows; check the checkpoint")


def complete_keys(frame: pd.DataFrame) -> pd.DataFrame:
    """The frame with only KEY_COLUMNS and OPTIONAL_COLUMNS, with the types as stored. Absent optional columns are
    unknown."""
    columns = [name for name in (*KEY_COLUMNS, *OPTIONAL_COLUMNS) if name in frame]
    frame = frame[columns].reindex(columns=[*columns, *(name for name in OPTIONAL_COLUMNS if name not in columns)])
    for name in frame:
        texts = frame[name].astype(object)
        numeric = name in NUMERIC_COLUMNS
        frame[name] = frame[name].astype(float) if numeric else texts.where(texts.notna(), "").astype(str)
    return frame


def write_embeddings(path: str | Path, frame: pd.DataFrame, facts: TableFacts) -> Path:
    """Writes a frame of KEY_COLUMNS, OPTIONAL_COLUMNS, FEATURE_COLUMNS and UNPOOLED (float32 arrays) as parquet.

    All of it or nothing. Raises UsageError if the frame is not what `read_embeddings` would accept or the folder does
    not exist, OctjepaError if the disk refuses; what was there before stays.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    path = Path(path)
    missing = [name for name in (*KEY_COLUMNS, *FEATURE_COLUMNS) if name not in frame.columns]
    if missing:
        raise UsageError(f"the embeddings for {path} lack the column(s) {', '.join(missing)}")
    names = [name for name in _BLOCKS if name in frame]
    keys = complete_keys(frame.drop(columns=names).reset_index(drop=True))
    blocks: dict[str, Any] = {name: _stack(frame[name], path) for name in names}
    table = Embeddings(keys, **blocks, **vars(facts))
    if not path.parent.is_dir():
        raise UsageError(f"no folder {path.parent} to write {path.name} into: create it first")
    columns = {
        name: pa.array(keys[name].to_numpy(), pa.float64() if name in NUMERIC_COLUMNS else pa.string())
        for name in (*KEY_COLUMNS, *OPTIONAL_COLUMNS)
    }
    for name, block in blocks.items():
        is_large = block.size > _LIST_VALUES
        ends = np.arange(len(block) + 1, dtype=np.int64 if is_large else np.int32) * block.shape[1]
        lists = pa.LargeListArray if is_large else pa.ListArray
        columns[name] = lists.from_arrays(pa.array(ends), pa.array(np.ascontiguousarray(block).reshape(-1)))
    values = {name: getattr(table, name) for name in _METADATA} | {"pools": ",".join(table.pools), "schema": SCHEMA}
    content = pa.table(columns).replace_schema_metadata(
        {f"octjepa.{name}": str(value) for name, value in values.items()}
    )
    write_atomic(path, lambda file: pq.write_table(content, file))
    return path


def write_table(path: str | Path, table: Embeddings) -> Path:
    """`write_embeddings` of a table in memory."""
    blocks = {name: list(getattr(table, name)) for name in ("vector", "untrained", *table.unpooled)}
    facts = TableFacts(**{name: getattr(table, name) for name in _METADATA})
    return write_embeddings(path, table.frame.assign(**blocks), facts)


def _stack(column: pd.Series, path: Path) -> Float[np.ndarray, "volumes features"]:
    lengths = {len(values) for values in column}
    if len(lengths) != 1:
        raise UsageError(f"the embeddings for {path}: {column.name} holds lists of length {sorted(lengths)}")
    return np.stack(column.to_list()).astype(np.float32)


def read_embeddings(path: str | Path) -> Embeddings:
    """The table that `write_embeddings` wrote.

    Raises UsageError: no such file, not parquet, not an embedding table, another schema, repeated volumes, features of
    uneven length.
    """
    path = Path(path)
    if not path.is_file():
        raise UsageError(f"no embeddings at {path}: expected the .parquet file that octjepa embed writes")
    try:
        content = read_arrow(path)
    except (ValueError, OSError) as error:
        raise UsageError(f"{path} is not a readable parquet file ({str(error).splitlines()[0]})") from None
    metadata = {key.decode(): value.decode() for key, value in (content.schema.metadata or {}).items()}
    schema = int(metadata.get("octjepa.schema", SCHEMA))  # a table without one is refused below
    if schema != SCHEMA:
        way_out = "update octjepa" if schema > SCHEMA else "run octjepa embed again"
        raise UsageError(f"{path} has schema {schema}, this octjepa reads {SCHEMA}: {way_out}")
    keys = [*KEY_COLUMNS, *OPTIONAL_COLUMNS]
    missing = [name for name in (*keys, *FEATURE_COLUMNS) if name not in content.column_names]
    if missing:
        raise UsageError(f"{path} lacks the column(s) {', '.join(missing)}: it is not a table of octjepa embed")
    missing = [name for name in (f"octjepa.{fact}" for fact in (*_METADATA, "schema")) if name not in metadata]
    if missing:
        raise UsageError(f"{path} lacks the parquet metadata {', '.join(missing)}: it is not a table of octjepa embed")
    blocks: dict[str, Any] = {
        name: _matrix(content.column(name), f"{path}: {name}") for name in _BLOCKS if name in content.column_names
    }
    return Embeddings(
        complete_keys(content.select(keys).to_pandas()),
        **blocks,
        dim=int(metadata["octjepa.dim"]),
        encoder=metadata["octjepa.encoder"],
        contract=metadata["octjepa.contract"],
        leaked=int(metadata["octjepa.leaked"]),
        pools=tuple(metadata["octjepa.pools"].split(",")),
        weights=metadata["octjepa.weights"],
        tokens=metadata["octjepa.tokens"],
        store=metadata["octjepa.store"],
    )


def check_split(path: str | Path, table: Embeddings) -> None:
    """Compares the split in the table at `path` with that of its store, if the store was not moved.

    `octjepa split` after `octjepa embed` changes the store only. A probe of the table would then train on people whom
    the store holds for tests. Entries that are not volumes of the store, as those of `octjepa visits`, are compared by
    person. Raises UsageError that says which of both is newer.
    """
    path = Path(path)
    index = path.parent / table.store / "volumes.parquet"
    if not table.store or not index.is_file():
        return
    try:
        now = read_parquet(index, ["volume_id", "person_id", "split"]).fillna({"split": ""}).astype(str)
        written = [datetime.fromtimestamp(file.stat().st_mtime, UTC) for file in (path, index)]
    except (ValueError, OSError) as error:
        _log.warning("%s cannot be compared with the split in %s: %s", path, table.store, error)
        return
    frame = table.frame
    of_person = now.drop_duplicates(["person_id", "split"]).drop_duplicates("person_id", keep=False)
    stored = frame["volume_id"].map(now.set_index("volume_id")["split"])
    stored = stored.fillna(frame["person_id"].map(of_person.set_index("person_id")["split"]))
    is_differing = stored.notna() & (stored != frame["split"])
    if not is_differing.any():
        return
    people = frame.loc[is_differing, "person_id"].nunique()
    newer = "the store's split is newer" if written[1] >= written[0] else "the table is newer"
    dates = [f"{date:%Y-%m-%d %H:%M UTC}" for date in written]
    raise UsageError(
        f"{path} holds another split than its store {index.parent}: {is_differing.sum()} of {stored.notna().sum()} "
        f"volumes, of {people} people, differ. By the dates of the files the table was written {dates[0]}, the store "
        f"{dates[1]}: {newer}. Run `octjepa embed` again (and `octjepa visits` for pairs of visits), or give the store "
        "the split of the table"
    )


def relocated_store(table: Embeddings, path: Path, out: Path) -> str:
    """`store` of the table at `path` for a table derived from it at `out`: relative to the folder of `out`."""
    if not table.store:
        return ""
    return os.path.relpath(os.path.realpath(path.parent / table.store), os.path.realpath(out.parent))


def _matrix(column: pa.ChunkedArray, where: str) -> Float[np.ndarray, "volumes features"]:
    """A parquet list column as one float32 matrix. Raises UsageError if the lists differ in length or are missing."""
    import pyarrow as pa
    import pyarrow.compute as pc

    lists = column.combine_chunks()
    kind = lists.type
    if not (pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)):
        raise UsageError(f"{where} holds {kind}, expected a list of float32 per volume")
    lengths = set(pc.list_value_length(lists).to_pylist())
    if len(lengths) > 1 or None in lengths:
        raise UsageError(f"{where} holds lists of different or missing length {sorted(map(str, lengths))}")
    values = lists.flatten().to_numpy(zero_copy_only=False).astype(np.float32, copy=False)
    return values.reshape(len(lists), lengths.pop() if lengths else 0)


def write_bscan_table(
    path: Path,
    frame: pd.DataFrame,
    means: Float[np.ndarray, "volumes slices dim"],
    counts: Float[np.ndarray, "volumes slices"],
    encoder: FrozenEncoder,
) -> None:
    """Writes features of B-scans: an entry per volume of `frame` and slice of the token grid, in one parquet file.

    A token covers several neighbouring B-scans of the canonical volume, so they share an
    entry, which names the first and the last. `offset_mm` is the distance of their middle from the middle of the scan
    along the slow axis. `vector` is the mean over the slice's tokens, empty if none was selected: `tokens` is 0
    then. Raises OctjepaError: the disk refuses.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    slices, preprocessing = means.shape[1], encoder.preprocessing
    depth = preprocessing.image_size[0]
    thickness = depth // slices
    grid_slice = np.tile(np.arange(slices), len(frame))
    first = grid_slice * thickness + preprocessing.margin[0]  # counted in the stored volume, margin included
    keys = ("person_id", "eye", "volume_id", "content_hash", "device", "split")
    columns = {name: pa.array(np.repeat(frame[name].to_numpy(), slices), pa.string()) for name in keys}
    columns["slice"] = pa.array(grid_slice, pa.int32())
    columns["first_bscan"] = pa.array(first, pa.int32())
    columns["last_bscan"] = pa.array(first + thickness - 1, pa.int32())
    offset = ((grid_slice + 0.5) * thickness - depth / 2) * preprocessing.target_spacing_mm[0]
    columns["offset_mm"] = pa.array(offset, pa.float32())
    columns["tokens"] = pa.array(counts.reshape(-1).astype(np.int32))
    vectors = means.reshape(-1, means.shape[2])  # [volumes * slices, dim]
    finite = [vector if np.isfinite(vector).all() else None for vector in vectors]
    list_type = pa.large_list if vectors.size > _LIST_VALUES else pa.list_
    columns["vector"] = pa.array(finite, list_type(pa.float32()))
    metadata = {"octjepa.dim": str(encoder.dim), "octjepa.encoder": encoder.name}
    write_atomic(path, lambda file: pq.write_table(pa.table(columns).replace_schema_metadata(metadata), file))
