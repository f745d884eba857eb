"""The table of `octjepa embed` against a script that takes one volume at a time through the same encoders.

Both load `phantom-tiny`, read every volume of a store, take it through the trained and the untrained network and the
intensity histogram, and write one parquet file. Ours takes batches, hashes weights and contents, writes parts that
survive a kill and looks for people whom the encoder was trained on.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pandas as pd
import torch

from octjepa.bench.alternating_runs import Comparison, rate
from octjepa.bench.data import phantom_store
from octjepa.checkpoint import load_encoder
from octjepa.checkpoint.pooling import DEFAULT_POOL
from octjepa.distributed.runtime import Runtime
from octjepa.embed.embedding import embed_store
from octjepa.embed.shard import intensity_histogram
from octjepa.store import Store

ENCODER = "phantom-tiny"
POOL = DEFAULT_POOL


def one_by_one(store: Store, out: Path) -> int:
    """What a script would do; returns how many volumes it embedded."""
    device = Runtime("fp32").device
    encoder = load_encoder(ENCODER).to(device)
    untrained = encoder.untrained().to(device)
    rows = []
    for name in store.table["volume_id"]:
        volume = store.read(name)
        row = {"volume_id": name, "histogram": intensity_histogram(volume, encoder.recipe.preprocessing)}
        rows.append(row | {"vector": encoder.embed(volume, POOL), "untrained": untrained.embed(volume, POOL)})
    pd.DataFrame(rows).to_parquet(out)
    return len(rows)


@contextmanager
def compare_with_single() -> Iterator[Comparison]:
    """`octjepa embed` and the script on one phantom store, in volumes a second."""
    preprocessing = load_encoder(ENCODER).recipe.preprocessing
    with phantom_store(preprocessing) as (work, store):

        def ours() -> int:
            return int(embed_store(ENCODER, store, work / "ours.parquet", [POOL])["rows"])

        setup = {
            "encoder": ENCODER,
            "volumes": len(store.table),
            "device": str(Runtime("fp32").device),
            "threads": torch.get_num_threads(),
        }
        yield Comparison(rate(ours), rate(lambda: one_by_one(store, work / "other.parquet")), setup)
