"""Embeds every volume of a store: features of the encoder, of its randomly initialised encoder and of intensity.

The encoder is ours or another project's (`encoders.base.FrozenEncoder`). The volumes, sorted by id, are cut into parts.
Processes of torchrun, workers of a Ray cluster or this process take them in turn and write each when it is computed
(`shard.Embedder.write`). So a killed run can be resumed, and the table does not depend on how the work is divided.
Tokens and features of B-scans are written next to it on demand.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import ClassVar, Literal

import numpy as np
import pandas as pd

from octjepa.config import science_hash
from octjepa.distributed.runtime import Runtime, distributed_context
from octjepa.embed import token_folder
from octjepa.embed.leakage import count_leaked_people, recorded_training_set, warn_of_leaks
from octjepa.embed.parts import PART_VOLUMES, lock_outputs, parts_folder, read_part, remove_parts
from octjepa.embed.shard import Embedder, EmbeddingOptions, Job, job_key
from octjepa.embed.table import FEATURE_COLUMNS, UNPOOLED, TableFacts, write_bscan_table, write_embeddings
from octjepa.encoders.base import FrozenEncoder, GridEncoder
from octjepa.encoders.external import ExternalEncoder
from octjepa.encoders.external.prepared import PreparedExternal
from octjepa.encoders.locate import current_checkpoint, open_encoder, prepare_external
from octjepa.errors import ContractError, OctjepaError, UsageError
from octjepa.progress import bar
from octjepa.record import Record
from octjepa.remote import is_remote
from octjepa.store import Store
from octjepa.store.contract import contract_differences

_log = logging.getLogger(__name__)

_STALLED_SECONDS = 1800.0
Engine = Literal["local", "ray"]


@dataclass(frozen=True)
class Division:
    """How the work is divided, which does not change the table.

    engine: "local" for this process or those of torchrun, "ray" for a Ray cluster, of `workers` if it is started
    here. batch: volumes in a forward pass. part: volumes that a kill can cost, and that a rank takes at a time.
    """

    engine: Engine = "local"
    workers: int | None = None
    batch: int = 16
    part: int = PART_VOLUMES


@dataclass(frozen=True)
class EmbeddingSummary(Record):
    """The output of `embed_store`. embeddings, bscans, tokens: the files and the folder.

    rows: volumes of the table; missing: volumes of the store with another scan pattern. leaked: people of val and test
    on whose eyes the encoder was trained; probes refuse such a table. resumed: volumes of an earlier, interrupted call.
    tokens_per_volume: least, median, most. weights: `FrozenEncoder.origin` of another project's encoder.
    """

    rows: int
    dim: int
    pools: tuple[str, ...]
    missing: int
    leaked: int
    resumed: int
    tokens_per_volume: Mapping[str, float]
    volumes_per_second: float
    embeddings: str
    bscans: str | None = None
    tokens: str | None = None
    weights: Mapping[str, str] | None = None
    OMITTED: ClassVar[tuple[str, ...]] = ("bscans", "tokens", "weights")


def embed_store(
    source: str | Path | FrozenEncoder | ExternalEncoder,
    store: Store,
    out: Path,
    pools: Sequence[str] = (),
    tokens: Path | None = None,
    per_bscan: bool = False,
    division: Division = Division(),
) -> EmbeddingSummary:
    """Writes the embeddings of every volume of `store` whose scan pattern the encoder reads to `out`.

    source: an encoder, ours or another project's, or its location. pools: poolings, by default those of the encoder.
    Only scan patterns select volumes: the effect of another device, site or quality is measured by the evaluation.
    `tokens` is a folder for token features, `per_bscan` asks for a table of B-scan features next to `out`.
    Under torchrun each process takes its share of the parts, and each returns the summary.

    Raises CheckpointError (no or damaged weights, or no encoder), ContractError (the store has another preprocessing),
    UsageError and what `load_external` raises. UsageError: nothing to embed, a pooling that is unknown or that the
    encoder's tokens do not allow, tokens without positions, a folder that cannot be used, another process that writes
    the table.
    """
    encoder = _opened(source, store)
    if isinstance(encoder, PreparedExternal) and (per_bscan or division.engine != "local"):
        raise ours_alone(encoder.name)
    if division.engine == "ray" and not isinstance(source, str | Path):
        raise UsageError("--engine ray loads the encoder on every machine: give its location")
    pools = encoder.check_pools(pools or encoder.default_pools)
    options = EmbeddingOptions(pools, "" if tokens is None else str(tokens.resolve()), per_bscan, division.batch)
    where = source if isinstance(source, str | Path) else encoder.name
    require_same_contract(encoder, store, where)
    rows = select_volumes(encoder, store)
    if tokens is not None:
        if encoder.grid is None:
            raise UsageError(
                f"--tokens: the tokens of {encoder.name} have no positions in the volume (a class token, a vector, or "
                "an order that is not known): embed without --tokens, or let the module return a feature map"
            )
        token_folder.check_folder(tokens)
    # Files that are ingested again, for example with --spacing, keep their id and hash: their stored voxels do not.
    hashes = ("volume_id", "content_hash", "chunk_hash")
    contents = [" ".join(row) for row in zip(*(rows[name] for name in hashes), strict=True)]
    weights = encoder.weights_hash()
    key = job_key(weights, science_hash(store.preprocessing), contents, options, division.part)
    # Workers of Ray open the checkpoint later, when a run that is still training has a newer one.
    checkpoint = current_checkpoint(where) if division.engine == "ray" else where
    job = Job(_absolute(checkpoint), _absolute(store.location), parts_folder(out, key), key, options, weights)
    leaked = count_leaked_people(rows, recorded_training_set(encoder.recorded_training, encoder.location))
    ids = rows["volume_id"].tolist()
    parts = [ids[start : start + division.part] for start in range(0, len(ids), division.part)]
    started = time.perf_counter()
    with distributed_context() as runtime, ExitStack() as locks:
        if runtime.rank == 0:
            warn_of_leaks(leaked, "pretrained" if encoder.origin is None else "fine-tuned")
        runtime.run_on_rank_zero(partial(lock_outputs, locks, out, tokens, job.folder))
        todo = [number for number in range(len(parts)) if not job.file(number).is_file()]
        before = len(parts) - len(todo)
        runtime.sum_numbers([before])  # barrier: all ranks list the existing parts before any writes
        with bar("embed", len(ids), "volume", done=sum(map(len, parts)) - sum(len(parts[n]) for n in todo)) as shown:
            if division.engine == "ray":
                from octjepa.embed.ray_tasks import embed_on_ray

                if runtime.world_size > 1:
                    raise UsageError("--engine ray under torchrun would divide the work twice: use one of them")
                for number in embed_on_ray(job, [(number, parts[number]) for number in todo], division.workers):
                    shown.advance(len(parts[number]))
            else:
                worker = Embedder(encoder, options, runtime.device)
                for number in todo[runtime.rank :: runtime.world_size]:
                    worker.write(job, number, store, parts[number])
                    shown.advance(len(parts[number]))
        _wait_for_all(runtime, job, len(parts))
        seconds = time.perf_counter() - started
        contract = science_hash(store.preprocessing)
        about = TableFacts(
            encoder.dim,
            encoder.name,
            contract,
            leaked,
            pools,
            weights,
            encoder.token_choice,
            path_from_table(store, out),
        )
        join = partial(_join, out, job, parts, rows, store, encoder, about)
        counts = runtime.run_on_rank_zero(join)
    computed = sum(len(parts[number]) for number in todo)
    return EmbeddingSummary(
        rows=len(rows),
        dim=encoder.dim,
        pools=options.pools,
        missing=len(store.table) - len(rows),
        leaked=leaked,
        resumed=len(rows) - computed,
        tokens_per_volume=dict(zip(("least", "median", "most"), counts, strict=True)),
        volumes_per_second=computed / seconds,
        embeddings=str(out),
        bscans=str(bscan_path(out)) if per_bscan else None,
        tokens=None if tokens is None else str(tokens),
        weights=encoder.origin,
    )


def ours_alone(name: str) -> UsageError:
    """The error if an external encoder has to give more than vectors and tokens."""
    return UsageError(f"{name}: --per-bscan and --engine ray work only with encoders of octjepa")


def _opened(source: str | Path | FrozenEncoder | ExternalEncoder, store: Store) -> FrozenEncoder:
    if isinstance(source, str | Path):
        return open_encoder(source, store.preprocessing)
    return prepare_external(source, store.preprocessing) if isinstance(source, ExternalEncoder) else source


def path_from_table(store: Store, out: Path) -> str:
    """The path of a local store from the folder of the table, so that both can be moved together; "" in a bucket."""
    return "" if is_remote(store.location) else os.path.relpath(store.path, out.parent)


def bscan_path(out: Path) -> Path:
    """Where features of B-scans go: `eyes.parquet` -> `eyes.bscans.parquet`."""
    return out.with_name(f"{out.stem}.bscans.parquet")


def _absolute(location: str | Path) -> str:
    """The absolute path of what exists on disk; urls and names of weights in the package stay."""
    return str(Path(location).resolve()) if Path(location).exists() else str(location)


def require_same_contract(encoder: FrozenEncoder, store: Store, weights: str | Path) -> None:
    """Raises ContractError where `store` was not prepared as the encoder expects; `weights`: its name for the user."""
    differences = contract_differences(store.preprocessing, encoder.preprocessing)
    if differences:
        raise ContractError(
            f"store {store.location} was prepared otherwise than the weights of {weights} expect:\n  "
            + "\n  ".join(differences)
            + "\nIngest the files into a new store with the recipe of the weights (octjepa ingest ... --recipe)."
        )


def _check_bscans(encoder: FrozenEncoder, store: Store) -> None:
    """Raises ContractError if a single B-scan of the store does not fill the patches of an encoder of octjepa."""
    slices = encoder.recipe.tokens.patch_size[0] if isinstance(encoder, GridEncoder) else 1
    if store.bscan_slices % slices:
        raise ContractError(
            f"the B-scans of {store.location} fill {store.bscan_slices} slices each, and a patch of {encoder.name} "
            f"spans {slices}: ingest them into a new store with the recipe of the weights (octjepa ingest --images)"
        )


def select_volumes(encoder: FrozenEncoder, store: Store) -> pd.DataFrame:
    """The store's volumes to embed, sorted by volume id; a device or site that is lost as a whole is logged.

    A store of single B-scans is embedded whole. Raises UsageError if there is none; ContractError: single B-scans
    that fill a part of this encoder's patches only.
    """
    table, patterns = store.table, encoder.patterns
    if store.bscan_slices:
        _check_bscans(encoder, store)
        patterns = ("line",)
    rows = table[table["pattern"].isin(patterns)].sort_values("volume_id")
    if rows.empty:
        raise UsageError(f"store {store.location} holds no {' or '.join(patterns)} volume to embed")
    for column in ("device", "site"):
        for name in sorted(set(table[column]) - set(rows[column]) - {""}):
            _log.warning(
                "%s %s is lost: none of its %d volumes is %s",
                column,
                name,
                int((table[column] == name).sum()),
                " or ".join(patterns),
            )
    return rows


def _wait_for_all(runtime: Runtime, job: Job, count: int) -> None:
    """Waits for the parts of every process by their files: waiting for hours does not mean that a rank is dead.

    Raises OctjepaError if no part has come for _STALLED_SECONDS.
    """
    missing, since = set(range(count)), time.monotonic()
    while missing:
        still = {number for number in missing if not job.file(number).is_file()}
        if len(still) < len(missing):
            missing, since = still, time.monotonic()
        elif time.monotonic() - since > _STALLED_SECONDS:
            raise OctjepaError(
                f"no part has come for {_STALLED_SECONDS / 60:.0f} minutes, {len(still)} of {count} are missing: do "
                f"all machines see {job.folder.parent}? What is finished is kept: run the same command again"
            )
        if missing:
            time.sleep(0.2)
    runtime.sum_numbers([1.0])


def _join(
    out: Path,
    job: Job,
    parts: Sequence[Sequence[str]],
    rows: pd.DataFrame,
    store: Store,
    encoder: FrozenEncoder,
    about: TableFacts,
) -> list[float]:
    """Writes one table from all parts and the indexes next to it, then removes the parts.

    Returns the least, the median and the greatest number of tokens of a volume.
    """
    loaded = [read_part(job.file(number), ids, FEATURE_COLUMNS) for number, ids in enumerate(parts)]
    frame = add_participants(rows, store.participants)
    for name in dict.fromkeys((*FEATURE_COLUMNS, *UNPOOLED)):
        if name in loaded[0]:
            frame[name] = list(np.concatenate([part[name] for part in loaded]))
    if job.options.per_bscan:
        means, counts = (np.concatenate([part[name] for part in loaded]) for name in ("bscan", "bscan_tokens"))
        write_bscan_table(bscan_path(out), frame, means, counts, encoder)
    if job.options.tokens:
        index = {"encoder": about.encoder, "weights": about.weights, "contract": about.contract, "dim": about.dim}
        named = {job.name(number): ids for number, ids in enumerate(parts)}
        token_folder.write_index(Path(job.options.tokens), named, {**index, "grid": list(encoder.grid or ())})
    write_embeddings(out, frame, about)
    remove_parts(out)
    return [float(f) for f in np.quantile(np.concatenate([part["token_count"] for part in loaded]), (0, 0.5, 1))]


def add_participants(rows: pd.DataFrame, participants: pd.DataFrame) -> pd.DataFrame:
    """The keys of an embedding table for a store's volumes, with age and clinical site if they are known."""
    columns = ["person_id", "eye", "volume_id", "content_hash", "device", "split", "visit", "quality"]
    frame = rows[columns].reset_index(drop=True)
    by_person = participants.set_index("person_id") if len(participants) else pd.DataFrame()
    age, site = (dict(by_person[name]) if name in by_person else {} for name in ("age", "clinical_site"))
    ages = pd.Series([age.get(person) for person in frame["person_id"]])
    frame["age"] = pd.to_numeric(ages, errors="coerce").astype(float)
    frame["clinical_site"] = [str(site.get(person) or "") for person in frame["person_id"]]
    return frame
