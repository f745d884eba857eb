"""Features of B-scans: a row per volume and slice of the token grid, in one parquet file beside the embeddings.

A token holds several neighbouring B-scans of the canonical volume (`tokens.patch_size[0]`), so they share a row, which
names the first and the last. `offset_mm` is the distance of their middle from the middle of the scan along the slow
axis. `vector` is the mean over the slice's tokens, empty where none was selected: `tokens` is 0 then.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
from jaxtyping import Float

from octjepa.checkpoint import PretrainedEncoder
from octjepa.files import write_atomic

_KEYS = ("person_id", "eye", "volume_id", "content_hash", "device", "split")


def write_bscans(
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
