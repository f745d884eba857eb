"""Thickness and fluid of every volume of a store as an embedding table: a hand-made baseline for probe and leaderboard.

In: a store, and a function that reads the scan of an index entry as it came. Out: an embedding table whose features are
the mean thickness of eight layers in nine ETDRS sectors and the volumes of three kinds of fluid, and next to it
a TSV with one named column per feature. An encoder that does not beat these features has learned nothing that
`octjepa segment` does not measure. A sector without a value gets the median of the other volumes, because probes need a
number; the TSV leaves it empty. The table has no untrained counterpart: that block is noise, the same in every table.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

import numpy as np
from jaxtyping import Float

from octjepa.config import science_hash
from octjepa.embed.embedding import add_participants, path_from_table
from octjepa.embed.shard import intensity_histogram
from octjepa.embed.table import TableFacts, write_embeddings
from octjepa.errors import OctjepaError, UsageError
from octjepa.files import write_atomic
from octjepa.layers import CLASSES, LAYERS
from octjepa.progress import bar
from octjepa.store import Store
from octjepa.store.index import IndexEntry, entries_of
from octjepa.tables import format_table
from octjepa.tasks.segmenter.measurement import Measurement, Preparation, measure
from octjepa.tasks.segmenter.retained_layers import LayerCache
from octjepa.tasks.thickness import SECTORS
from octjepa.volume import OCTVolume

NAME: Final = "biomarkers"
FEATURES: Final = (
    *(f"{layer}_{sector}_um" for layer, _, _ in LAYERS for sector in SECTORS),
    *(f"{name}_mm3" for name in CLASSES[1:]),
)


def embed_biomarkers(
    store: Store, read: Callable[[IndexEntry], OCTVolume], out: Path, cache: LayerCache | None = None
) -> dict[str, int | str]:
    """Writes the table to `out` and the named columns to OUT.tsv; returns {rows, features, empty, table, columns}.

    `empty` counts values that a scan does not have. Raises UsageError: the store has no raster volume, or scans of its
    volumes are not found or cannot be segmented.
    """
    cache = cache or LayerCache()
    rows = store.table[store.table["pattern"] == "raster"].sort_values("volume_id")
    if rows.empty:
        raise UsageError(f"store {store.location} holds no raster volume: thickness and fluid need an area")
    values: list[np.ndarray] = []
    histograms: list[Any] = []
    failed: list[str] = []
    with bar("biomarkers", len(rows), "scan") as progress:
        for entry in entries_of(rows):
            try:
                volume = read(entry)
                values.append(features(measure(volume, cache.layers(volume), Preparation.of_entry(entry))))
                histograms.append(intensity_histogram(store.read(entry.volume_id), store.preprocessing))
            except OctjepaError as error:
                failed.append(str(error))
            progress.advance()
    if failed:
        raise UsageError(f"biomarkers need the scan of every volume; {len(failed)} of {len(rows)} failed: {failed[0]}")
    table = np.stack(values)
    frame = add_participants(rows, store.participants)
    noise = np.random.default_rng(0).normal(size=table.shape).astype(np.float32)
    vectors = {"vector": list(filled(table)), "untrained": list(noise), "histogram": histograms}
    frame = frame.assign(**vectors)
    facts = TableFacts(
        len(FEATURES), NAME, science_hash(store.preprocessing), pools=("mean",), store=path_from_table(store, out)
    )
    write_embeddings(out, frame, facts)
    columns = out.with_suffix(".tsv")
    rows_of_eyes = frame[["volume_id", "person_id", "eye"]].join(_columns(table, frame.index))
    text = format_table([str(name) for name in rows_of_eyes.columns], rows_of_eyes.itertuples(index=False))
    write_atomic(columns, lambda file: file.write(text.encode()))
    empty = int((~np.isfinite(table)).sum())
    return {"rows": len(frame), "features": len(FEATURES), "empty": empty, "table": str(out), "columns": str(columns)}


def features(made: Measurement) -> Float[np.ndarray, " features"]:
    """The values of `FEATURES`, NaN where a scan has none."""
    fluid = [np.nan if made.fluid_mm3[name] is None else made.fluid_mm3[name] for name in CLASSES[1:]]
    return np.concatenate([made.etdrs_um.ravel(), np.array(fluid, float)]).astype(np.float32)


def filled(table: Float[np.ndarray, "volumes features"]) -> Float[np.ndarray, "volumes features"]:
    """`table` with the median of a feature in place of NaN, 0 if no volume has that feature."""
    known = np.isfinite(table)
    result = table.copy()
    for column in range(table.shape[1]):
        values = table[known[:, column], column]
        result[~known[:, column], column] = np.median(values) if len(values) else 0
    return result


def _columns(table: Float[np.ndarray, "volumes features"], index: Any) -> Any:
    import pandas as pd

    return pd.DataFrame(np.round(table.astype(float), 4), columns=list(FEATURES), index=index)
