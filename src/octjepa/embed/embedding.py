"""Embeds every volume of a store: features of the encoder, of its untrained twin and of intensity alone.

The volumes, sorted by id, are cut into parts. Processes of torchrun, workers of a Ray cluster or this process alone
take them in turn and write each when it is computed (`shard.Embedder.write`), so a killed run is resumed, and the table
is the same however the work is divided. Tokens and features of B-scans are written beside it on demand.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pandas as pd

from octjepa.checkpoint.location import parse_location
from octjepa.config import science_hash
from octjepa.distributed.runtime import Runtime, distributed_context
from octjepa.embed import token_folder
from octjepa.embed.leakage import count_leaked_people, recorded_training_set, warn_of_leaks
from octjepa.embed.parts import PART_VOLUMES, lock_outputs, parts_folder, read_part, remove_parts
from octjepa.embed.shard import Embedder, EmbeddingOptions, Job, job_key, weights_hash
from octjepa.embed.table import UNPOOLED, write_bscan_table, write_embeddings
from octjepa.encoders import PretrainedEncoder, load_encoder
from octjepa.encoders.pooling import DEFAULT_POOLS, check_pools
from octjepa.errors import ContractError, OctjepaError, UsageError
from octjepa.progress import bar
from octjepa.store import Store
from octjepa.store.contract import contract_differences

_log = logging.getLogger(__name__)

_STALLED_SECONDS = 1800.0
Engine = Literal["local", "ray"]


def embed_store(
    checkpoint: str | Path,
    store: Store,
    out: Path,
    pools: Sequence[str] = DEFAULT_POOLS,
    tokens: Path | None = None,
    per_bscan: bool = False,
    engine: Engine = "local",
    workers: int | None = None,
    batch: int = 16,
    part: int = PART_VOLUMES,
) -> dict[str, Any]:
    """Writes the embeddings of every volume of `store` whose scan pattern the weights know to `out`; returns a summary.

    Only `data.patterns` of the recipe selects volumes: the effect of another device, site or quality is measured by the
    evaluation. `tokens` is a folder for token features, `per_bscan` asks for a table of B-scan features beside `out`.
    Under torchrun each process takes its share of the parts, and each returns the summary.

    `leaked` counts people of val and test whose eyes the encoder was pretrained on; probes refuse such a table.

    Raises CheckpointError (no or damaged weights, or no encoder's), ContractError (the store was prepared otherwise),
    UsageError (none to embed, an unknown pool, a folder that cannot be used, another process writes the table).
    """
    options = EmbeddingOptions(check_pools(pools), "" if tokens is None else str(tokens.resolve()), per_bscan, batch)
    if tokens is not None:
        token_folder.check_folder(tokens)
    encoder = load_encoder(checkpoint)
    require_same_contract(encoder, store, checkpoint)
    rows = select_volumes(encoder, store)
    weights, contents = weights_hash(encoder), (rows["volume_id"] + rows["content_hash"]).tolist()
    key = job_key(weights, science_hash(store.preprocessing), contents, options, part)
    job = Job(_absolute(checkpoint), _absolute(store.location), parts_folder(out, key), key, options)
    leaked = count_leaked_people(rows, recorded_training_set(encoder.recorded_training, parse_location(checkpoint)))
    ids = rows["volume_id"].tolist()
    parts = [ids[start : start + part] for start in range(0, len(ids), part)]
    started = time.perf_counter()
    with distributed_context() as runtime, ExitStack() as locks:
        if runtime.rank == 0:
            warn_of_leaks(leaked, "pretrained")
        runtime.run_on_rank_zero(partial(lock_outputs, locks, out, tokens, job.folder))
        todo = [number for number in range(len(parts)) if not job.file(number).is_file()]
        before = len(parts) - len(todo)
        runtime.sum_numbers([before])  # nobody writes before everybody has seen what there is
        with bar("embed", len(ids), "volume", done=sum(map(len, parts)) - sum(len(parts[n]) for n in todo)) as shown:
            if engine == "ray":
                from octjepa.embed.ray_tasks import embed_on_ray

                if runtime.world_size > 1:
                    raise UsageError("--engine ray under torchrun would divide the work twice: use one of them")
                for number in embed_on_ray(job, [(number, parts[number]) for number in todo], workers):
                    shown.advance(len(parts[number]))
            else:
                worker = Embedder(encoder, options, runtime.device)
                for number in todo[runtime.rank :: runtime.world_size]:
                    worker.write(job, number, store, parts[number])
                    shown.advance(len(parts[number]))
        _wait_for_all(runtime, job, len(parts))
        seconds = time.perf_counter() - started
        join = partial(_join, out, job, parts, rows, store, encoder, weights, leaked)
        counts = runtime.run_on_rank_zero(join)
    computed = sum(len(parts[number]) for number in todo)
    figures: dict[str, Any] = {
        "rows": len(rows),
        "dim": encoder.dim,
        "pools": list(options.pools),
        "missing": len(store.table) - len(rows),
        "leaked": leaked,
        "resumed": len(rows) - computed,
        "tokens_per_volume": dict(zip(("least", "median", "most"), counts, strict=True)),
        "volumes_per_second": computed / seconds,
        "embeddings": str(out),
    }
    if per_bscan:
        figures["bscans"] = str(bscan_path(out))
    if tokens is not None:
        figures["tokens"] = str(tokens)
    return figures


def bscan_path(out: Path) -> Path:
    """Where features of B-scans go: `eyes.parquet` -> `eyes.bscans.parquet`."""
    return out.with_name(f"{out.stem}.bscans.parquet")


def _absolute(location: str | Path) -> str:
    """The absolute path of what exists on disk; urls and names of weights in the package stay."""
    return str(Path(location).resolve()) if Path(location).exists() else str(location)


def require_same_contract(encoder: PretrainedEncoder, store: Store, weights: str | Path) -> None:
    """Raises ContractError where `store` was not prepared as the encoder expects; `weights`: its name for the user."""
    differences = contract_differences(store.preprocessing, encoder.recipe)
    if differences:
        raise ContractError(
            f"store {store.location} was prepared otherwise than the weights of {weights} expect:\n  "
            + "\n  ".join(differences)
            + "\nIngest the files into a new store with the recipe of the weights (octjepa ingest ... --recipe)."
        )


def select_volumes(encoder: PretrainedEncoder, store: Store) -> pd.DataFrame:
    """The store's volumes to embed, sorted by volume id; a device or site that is lost as a whole is logged.

    Raises UsageError where there is none.
    """
    table, patterns = store.table, encoder.recipe.data.patterns
    rows = table[table["pattern"].isin(patterns)].sort_values("volume_id")
    if rows.empty:
        raise UsageError(f"store {store.location} holds no {' or '.join(patterns)} volume to embed")
    for column in ("device", "site"):
        for name in sorted(set(table[column]) - set(rows[column]) - {""}):
            _log.warning(
                "%s %s is lost: none of its %d volumes is %s", column, name, int((table[column] == name).sum()),
                " or ".join(patterns),
            )  # fmt: skip
    return rows


def _wait_for_all(runtime: Runtime, job: Job, count: int) -> None:
    """Waits for the parts of every process by their files: waiting for hours does not mean that a rank is dead.

    Raises OctjepaError where no part has come for _STALLED_SECONDS.
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
    encoder: PretrainedEncoder,
    weights: str,
    leaked: int,
) -> list[float]:
    """Writes one table from all parts and the indexes beside it, then removes the parts.

    Returns the least, the median and the greatest number of tokens of a volume.
    """
    loaded = [read_part(job.file(number), ids, UNPOOLED) for number, ids in enumerate(parts)]
    frame = add_participants(rows, store.participants)
    for name in ("vector", "untrained", *UNPOOLED):
        frame[name] = list(np.concatenate([part[name] for part in loaded]))
    contract = science_hash(store.preprocessing)
    if job.options.per_bscan:
        means, counts = (np.concatenate([part[name] for part in loaded]) for name in ("bscan", "bscan_tokens"))
        write_bscan_table(bscan_path(out), frame, means, counts, encoder)
    if job.options.tokens:
        about = {"encoder": encoder.name, "weights": weights, "contract": contract, "dim": encoder.dim}
        named = {job.name(number): ids for number, ids in enumerate(parts)}
        token_folder.write_index(Path(job.options.tokens), named, {**about, "grid": list(encoder.recipe.grid)})
    write_embeddings(
        out, frame, encoder.dim, encoder.name, contract, leaked, job.options.pools, weights,
        encoder.recipe.tokens.select,
    )  # fmt: skip
    remove_parts(out)
    return [float(f) for f in np.quantile(np.concatenate([part["token_count"] for part in loaded]), (0, 0.5, 1))]


def add_participants(rows: pd.DataFrame, participants: pd.DataFrame) -> pd.DataFrame:
    """The keys of an embedding table for a store's volumes, with age and clinical site where they are known."""
    columns = ["person_id", "eye", "volume_id", "content_hash", "device", "split", "visit", "quality"]
    frame = rows[columns].reset_index(drop=True)
    known = participants.set_index("person_id") if len(participants) else pd.DataFrame()
    age, site = (dict(known[name]) if name in known else {} for name in ("age", "clinical_site"))
    ages = pd.Series([age.get(person) for person in frame["person_id"]])
    frame["age"] = pd.to_numeric(ages, errors="coerce").astype(float)
    frame["clinical_site"] = [str(site.get(person) or "") for person in frame["person_id"]]
    return frame
