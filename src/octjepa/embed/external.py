"""The embedding table of another project's encoder: its vectors, those of its untrained twin, and the histogram.

The volumes are computed in one process, one after the other, and written part by part: a run that was stopped goes on.
Tokens are written beside the table on demand, by encoders whose tokens have positions.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from octjepa.config import science_hash
from octjepa.distributed.runtime import Runtime
from octjepa.embed import token_folder
from octjepa.embed.embedding import add_participants
from octjepa.embed.leakage import count_leaked_people, recorded_training_set, warn_of_leaks
from octjepa.embed.parts import PART_VOLUMES, lock_outputs, parts_folder, read_part, remove_parts
from octjepa.embed.shard import EmbeddingOptions, Job, intensity_histogram, job_key
from octjepa.embed.table import write_embeddings
from octjepa.encoders.external import ExternalEncoder, load_external
from octjepa.encoders.pooling import POSITION_FREE_POOL, pool_features
from octjepa.errors import OctjepaError, UsageError
from octjepa.files import write_atomic
from octjepa.progress import bar
from octjepa.store import Store
from octjepa.store.contract import check_same_contract
from octjepa.views import geometry
from octjepa.volume import CANONICAL_VERSION

PATTERNS = ("raster",)  # scan patterns that external encoders are given; ours name theirs in their recipe
_BLOCKS = ("vector", "untrained", "histogram")
_VERSION = "external 1"  # of the contents of a part


def embed_external(
    encoder: ExternalEncoder | str | Path,
    store: Store,
    out: Path,
    pools: Sequence[str] = (POSITION_FREE_POOL,),
    tokens: Path | None = None,
    part: int = PART_VOLUMES,
) -> dict[str, Any]:
    """Writes a vector of every raster volume of `store` to `out`; returns a summary as `embed_store` does.

    tokens: a folder for the features of every token; part: volumes that a kill can cost.

    `leaked` counts people of val and test on whom an encoder was fine-tuned (0 for others): probes refuse such a table.

    Raises what `load_external` raises; ContractError: fine-tuned on volumes prepared otherwise; UsageError: no volume
    to embed, a pooling that needs positions, tokens of an encoder whose tokens have none, a folder that cannot be used,
    another process writes the table.
    """
    device = Runtime("fp32").device
    encoder = (encoder if isinstance(encoder, ExternalEncoder) else load_external(encoder)).to(device)
    tuned = encoder.tuned_on
    if tuned is not None:
        check_same_contract(str(store.location), store.preprocessing, CANONICAL_VERSION, tuned.preprocessing)
    rows = store.table[store.table["pattern"].isin(PATTERNS)].sort_values("volume_id")
    if rows.empty:
        raise UsageError(f"store {store.location} holds no {' or '.join(PATTERNS)} volume to embed")
    leaked = 0 if tuned is None else count_leaked_people(rows, recorded_training_set(tuned.volume_ids, tuned.folder))
    warn_of_leaks(leaked, "fine-tuned")
    grid = None if tokens is None else _token_grid(encoder, store)
    if tokens is not None:
        token_folder.check_folder(tokens)
    weights, contract = network_hash(encoder.network), science_hash(store.preprocessing)
    options = EmbeddingOptions(tuple(pools), "" if tokens is None else str(tokens.resolve()), batch=1)
    contents = (rows["volume_id"] + rows["content_hash"]).tolist()
    key = job_key(f"{_VERSION} {weights}", contract, contents, options, part)
    job = Job(encoder.name, str(store.location), parts_folder(out, key), key, options)
    ids: list[str] = rows["volume_id"].tolist()
    parts = [ids[start : start + part] for start in range(0, len(ids), part)]
    started = time.perf_counter()
    with ExitStack() as locks:
        lock_outputs(locks, out, tokens, job.folder)
        todo = [number for number in range(len(parts)) if not job.file(number).is_file()]
        computed = sum(len(parts[number]) for number in todo)
        networks = {"vector": encoder, "untrained": encoder.untrained().to(device)}
        with bar("embed", len(ids), "volume", done=len(ids) - computed) as progress:
            for number in todo:
                _write_part(networks, job, number, store, parts[number], grid)
                progress.advance(len(parts[number]))
        arrays = [read_part(job.file(number), some, _BLOCKS) for number, some in enumerate(parts)]
        joined = {name: np.concatenate([one[name] for one in arrays]) for name in (*_BLOCKS, "token_count", "dim")}
        dim = int(joined["dim"][0])
        if tokens is not None:
            about = {"encoder": encoder.name, "weights": weights, "contract": contract, "dim": dim, "grid": grid}
            token_folder.write_index(tokens, {job.name(number): some for number, some in enumerate(parts)}, about)
        frame = add_participants(rows, store.participants)
        for name in _BLOCKS:
            frame[name] = list(joined[name])
        write_embeddings(out, frame, dim, encoder.name, contract, leaked, tuple(pools), weights)
        remove_parts(out)
    counts = map(float, np.quantile(joined["token_count"], (0, 0.5, 1)))
    return {
        "rows": len(rows),
        "dim": dim,
        "pools": list(pools),
        "missing": len(store.table) - len(rows),
        "leaked": leaked,
        "resumed": len(rows) - computed,
        "tokens_per_volume": dict(zip(("least", "median", "most"), counts, strict=True)),
        "volumes_per_second": computed / (time.perf_counter() - started),
        "embeddings": str(out),
        **({} if tokens is None else {"tokens": str(tokens)}),
        "weights": encoder.origin,
    }


def _token_grid(encoder: ExternalEncoder, store: Store) -> list[int]:
    """(slices, depth, columns) of the tokens of every volume. Raises UsageError: tokens without positions."""
    grid = encoder.grid(store.preprocessing.image_size)
    if grid is None:
        raise UsageError(
            f"--tokens: the tokens of {encoder.name} have no positions in the volume (a class token, a vector, or "
            "an order that is not known): embed without --tokens, or let the module return a feature map"
        )
    return list(grid)


def _write_part(
    networks: dict[str, ExternalEncoder],
    job: Job,
    number: int,
    store: Store,
    volume_ids: Sequence[str],
    grid: Sequence[int] | None,
) -> None:
    """Computes part `number` and writes it, its tokens first. Raises OctjepaError: tokens that do not fill `grid`."""
    preprocessing = store.preprocessing
    crop = geometry.center_crop(preprocessing)
    blocks: dict[str, list[Any]] = {name: [] for name in (*_BLOCKS, "token_count", "dim")}
    halves: dict[str, list[np.ndarray]] = {name: [] for name in networks}
    for volume_id in volume_ids:
        volume = store.read(volume_id)
        view = geometry.apply_transform(volume.pixels, crop, preprocessing.image_size)
        for name, network in networks.items():
            tokens = network.tokens(view)  # [tokens, dim]
            blocks[name].append(np.concatenate([pool_features(tokens, pool) for pool in job.options.pools]))
            if grid is not None:
                if len(tokens) != np.prod(grid):
                    raise OctjepaError(f"{network.name} gives {len(tokens)} tokens, and its grid is {tuple(grid)}")
                halves[name].append(tokens.astype(np.float16))
        blocks["token_count"].append(np.int32(len(tokens)))
        blocks["dim"].append(np.int32(tokens.shape[1]))
        blocks["histogram"].append(intensity_histogram(volume, preprocessing))
    if grid is not None:
        arrays = {name: np.concatenate(some) for name, some in halves.items()}
        arrays["counts"] = np.array(blocks["token_count"])
        arrays["positions"] = np.tile(np.arange(np.prod(grid), dtype=np.int32), len(volume_ids))
        token_folder.write_part(Path(job.options.tokens), job.name(number), arrays)
    made = {name: np.stack(some) for name, some in blocks.items()} | {"volume_id": np.array(volume_ids, dtype=np.str_)}
    write_atomic(job.file(number), lambda file: np.savez(file, allow_pickle=False, **made))


def network_hash(network: nn.Module) -> str:
    """SHA-256 over class, names and values of a network's weights."""
    digest = hashlib.sha256(type(network).__name__.encode())
    for name, value in sorted(network.state_dict().items()):
        digest.update(name.encode() + np.ascontiguousarray(value.detach().cpu().float().numpy()).tobytes())
    return digest.hexdigest()
