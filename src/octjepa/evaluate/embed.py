"""A vector for every volume of a store, beside two that know nothing: the same network untrained, and a histogram.

Rows are sorted by volume id and each volume is pooled by itself, so order and values do not depend on the batch.
"""

from __future__ import annotations

import time
from collections.abc import Collection
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from jaxtyping import Float

from octjepa.checkpoint import PretrainedEncoder, load_encoder
from octjepa.checkpoint.encoder import pooled
from octjepa.config import science_hash
from octjepa.errors import ContractError, UsageError
from octjepa.evaluate.table import write_embeddings
from octjepa.progress import bar
from octjepa.store import CanonicalVolume, Store
from octjepa.train.runtime import Runtime
from octjepa.views import geometry
from octjepa.views.sample import check_contract

_BATCH = 16
_LEVELS = 32


def embed_store(checkpoint: str | Path, store: Store, out: Path) -> dict[str, Any]:
    """Writes the embeddings of every volume of `store` whose pattern the weights know to `out`; returns its figures.

    Only `data.patterns` of the recipe chooses here: what another device, site or quality does to an encoder is for the
    evaluation to find out.

    `leaked` counts people of val and test whose eyes the encoder was pretrained on; probes refuse such a table.

    Raises CheckpointError (no or damaged weights), ContractError (the store was prepared otherwise), UsageError (none
    to embed).
    """
    device = Runtime("fp32").device
    encoder = load_encoder(checkpoint).to(device)
    differences = check_contract(store.preprocessing, encoder.recipe)
    if differences:
        raise ContractError(
            f"store {store.location} was prepared otherwise than the weights of {checkpoint} expect:\n  "
            + "\n  ".join(differences)
            + "\nIngest the files into a new store with the recipe of the weights (octjepa ingest ... --recipe)."
        )
    table = store.table
    patterns = encoder.recipe.data.patterns
    rows = table[table["pattern"].isin(patterns)].sort_values("volume_id")
    if rows.empty:
        raise UsageError(f"store {store.location} holds no {' or '.join(patterns)} volume to embed")
    baseline = encoder.untrained().to(device)
    started = time.perf_counter()
    vectors: dict[str, list[np.ndarray]] = {"vector": [], "untrained": [], "histogram": []}
    with bar("embed", len(rows), "volume") as progress:
        for start in range(0, len(rows), _BATCH):
            volumes = [store.read(volume_id) for volume_id in rows["volume_id"].iloc[start : start + _BATCH]]
            for name, network in (("vector", encoder), ("untrained", baseline)):
                vectors[name] += [pooled(t.features, "mean_std_max") for t in network.many_tokens(volumes)]
            vectors["histogram"] += [histogram(volume, encoder) for volume in volumes]
            progress.advance(len(volumes))
    seconds = time.perf_counter() - started
    frame = _with_participants(rows, store.participants)
    for name, values in vectors.items():
        frame[name] = list(np.stack(values).astype(np.float32))
    leaked = leaked_people(rows, encoder.trained_on)
    write_embeddings(out, frame, encoder.dim, encoder.name, science_hash(store.preprocessing), leaked)
    return {
        "rows": len(frame),
        "dim": encoder.dim,
        "missing": len(table) - len(rows),
        "leaked": leaked,
        "volumes_per_second": len(rows) / seconds,
        "embeddings": str(out),
    }


def leaked_people(rows: pd.DataFrame, trained_on: Collection[str]) -> int:
    """People of val and test of whom at least one eye was pretrained on."""
    seen = set(rows.loc[rows["volume_id"].isin(trained_on), "person_id"])
    return len(seen & set(rows.loc[rows["split"].isin(("val", "test")), "person_id"]))


def histogram(volume: CanonicalVolume, encoder: PretrainedEncoder) -> Float[np.ndarray, " levels"]:
    """Shares of tissue voxels at 32 grey levels, in the centred view: what intensity alone tells."""
    preprocessing = encoder.recipe.preprocessing
    shape, size = geometry.centred(preprocessing), preprocessing.image_size
    view = geometry.apply(volume.pixels, shape, size)
    inside = geometry.tissue(volume.band, shape, volume.pixels.shape[1], size)
    values = view[inside] if inside.any() else view.ravel()
    counts = np.bincount(values // (256 // _LEVELS), minlength=_LEVELS)
    return (counts / counts.sum()).astype(np.float32)


def _with_participants(rows: pd.DataFrame, participants: pd.DataFrame) -> pd.DataFrame:
    kept = ["person_id", "eye", "volume_id", "content_hash", "device", "split"]
    frame = rows[kept].reset_index(drop=True)
    known = participants.set_index("person_id") if len(participants) else pd.DataFrame()
    age = dict(known["age"]) if "age" in known else {}
    site = dict(known["clinical_site"]) if "clinical_site" in known else {}
    frame["age"] = pd.to_numeric(pd.Series([age.get(person) for person in frame["person_id"]]), errors="coerce")
    frame["age"] = frame["age"].astype(float)
    frame["clinical_site"] = [str(site.get(person) or "") for person in frame["person_id"]]
    return frame
