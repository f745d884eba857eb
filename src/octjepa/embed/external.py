"""The embedding table of another project's encoder: its vectors, those of its untrained twin, and the histogram.

The volumes are computed in one process, one after the other; a run that was stopped begins again.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch import nn

from octjepa.checkpoint.pooling import DEFAULT_POOLS, pool_features
from octjepa.config import science_hash
from octjepa.distributed.runtime import Runtime
from octjepa.embed.embedding import add_participants
from octjepa.embed.shard import intensity_histogram
from octjepa.embed.table import write_embeddings
from octjepa.errors import UsageError
from octjepa.external import ExternalEncoder, load_external
from octjepa.locks import file_lock
from octjepa.progress import bar
from octjepa.store import Store
from octjepa.views import geometry

PATTERNS = ("raster",)  # scan patterns that external encoders are given; ours name theirs in their recipe


def embed_external(
    encoder: ExternalEncoder | str | Path, store: Store, out: Path, pools: Sequence[str] = DEFAULT_POOLS
) -> dict[str, Any]:
    """Writes a vector of every raster volume of `store` to `out`; returns a summary as `embed_store` does.

    Raises what `load_external` raises; UsageError: no volume to embed, or a pooling that needs positions.
    """
    device = Runtime("fp32").device
    encoder = (encoder if isinstance(encoder, ExternalEncoder) else load_external(encoder)).to(device)
    rows = store.table[store.table["pattern"].isin(PATTERNS)].sort_values("volume_id")
    if rows.empty:
        raise UsageError(f"store {store.location} holds no {' or '.join(PATTERNS)} volume to embed")
    networks = {"vector": encoder, "untrained": encoder.untrained().to(device)}
    frame, preprocessing = add_participants(rows, store.participants), store.preprocessing
    blocks: dict[str, list[np.ndarray]] = {"vector": [], "untrained": [], "histogram": []}
    counts: list[int] = []
    dim, started = 0, time.perf_counter()
    with file_lock(out), bar("embed", len(rows), "volume") as progress:
        for volume_id in rows["volume_id"]:
            volume = store.read(volume_id)
            crop = geometry.center_crop(preprocessing)
            view = geometry.apply_transform(volume.pixels, crop, preprocessing.image_size)
            for name, network in networks.items():
                tokens = network.tokens(view)  # [tokens, dim]
                dim = tokens.shape[1]
                blocks[name].append(np.concatenate([pool_features(tokens, pool) for pool in pools]))
            counts.append(len(tokens))
            blocks["histogram"].append(intensity_histogram(volume, preprocessing))
            progress.advance()
        for name, values in blocks.items():
            frame[name] = list(np.stack(values))
        weights = network_hash(encoder.network)
        write_embeddings(
            out, frame, dim, encoder.name, science_hash(preprocessing), pools=tuple(pools), weights=weights
        )
    return {
        "rows": len(rows),
        "dim": dim,
        "pools": list(pools),
        "missing": len(store.table) - len(rows),
        "tokens_per_volume": dict(
            zip(("least", "median", "most"), map(float, np.quantile(counts, (0, 0.5, 1))), strict=True)
        ),
        "volumes_per_second": len(rows) / (time.perf_counter() - started),
        "embeddings": str(out),
        "weights": encoder.origin,
    }


def network_hash(network: nn.Module) -> str:
    """SHA-256 over class, names and values of a network's weights."""
    digest = hashlib.sha256(type(network).__name__.encode())
    for name, value in sorted(network.state_dict().items()):
        digest.update(name.encode() + np.ascontiguousarray(value.detach().cpu().float().numpy()).tobytes())
    return digest.hexdigest()
