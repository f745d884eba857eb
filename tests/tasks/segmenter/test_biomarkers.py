"""Thickness and fluid as a table that probe and leaderboard read next to encoders."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from command_line import call
from octjepa import load_encoder
from octjepa.embed.table import read_embeddings
from octjepa.errors import UsageError
from octjepa.files import replace_folder
from octjepa.store import Store
from octjepa.store.index import IndexEntry
from octjepa.store.storage import stage_chunk
from octjepa.tasks.segmenter.biomarkers import FEATURES, embed_biomarkers, filled
from octjepa.tasks.segmenter.retained_layers import LayerCache, RetainedLayers
from octjepa.volume import OCTVolume

VOLUMES = 48  # two of each person


class FlatLayers(LayerCache):
    """Layers of even thickness: that of the retina is 100 rows, and 30 more for every second person."""

    def layers(self, volume: OCTVolume, advance: Callable[[int], None] | None = None) -> RetainedLayers:
        thick = 100 + 30 * (int(volume.person_id) % 2)
        rows = 10 + thick * np.linspace(0, 1, 8, dtype=np.float32)[:, None, None]
        shape = (8, volume.shape[0], volume.shape[2])
        classes = np.zeros(volume.shape, np.uint8)
        classes[:, 40:44] = 1
        return RetainedLayers(np.broadcast_to(rows, shape), np.ones(shape, np.float32), classes, volume.spacing_mm)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    from index_entries import index_entry
    from synthetic import volume

    preprocessing = load_encoder("phantom-tiny").recipe.preprocessing
    made = Store.create(tmp_path_factory.mktemp("biomarkers") / "store", preprocessing)
    with made.writing():
        for number in range(VOLUMES):
            row = index_entry(number, split=("train", "train", "val", "test")[number // 4 % 4], pattern="raster")
            staged = stage_chunk(made.chunk_folder(row["volume_id"]), volume(preprocessing, number))
            replace_folder(staged, made.chunk_folder(row["volume_id"]))
            made.add(IndexEntry(**row))
    made.consolidate()
    return Store.open(made.path)


def read(entry: IndexEntry) -> OCTVolume:
    """A scan of noise; its person is the number at the end of the id in the index."""
    number = int("".join(sign for sign in entry.person_id if sign.isdigit())) // 1
    pixels = np.random.default_rng(number).integers(0, 255, (24, 160, 96)).astype(np.uint8)
    return OCTVolume(pixels, (0.25, 0.0039, 0.0625), {}, str(number), "device", laterality="OD")


@pytest.mark.slow
def test_the_table_is_read_as_one_of_embeddings_and_its_columns_have_names(store: Store, tmp_path: Path) -> None:
    made = embed_biomarkers(store, read, tmp_path / "b.parquet", FlatLayers())
    table = read_embeddings(tmp_path / "b.parquet")
    assert (made["rows"], made["features"]) == table.vector.shape == (VOLUMES, len(FEATURES))
    assert table.encoder == "biomarkers"
    assert (tmp_path / table.store).resolve() == store.path.resolve()  # so that a later split is noticed
    named = pd.read_csv(tmp_path / "b.tsv", sep="\t")
    assert set(np.round(named["retina_central_um"])) == {390.0, 507.0}
    layers = [name for name in FEATURES if name.endswith("_central_um") and not name.startswith("retina")]
    np.testing.assert_allclose(named[layers].sum(axis=1), named["retina_central_um"], rtol=1e-4)
    assert (named["intraretinal_fluid_mm3"] > 0).all()
    assert made["empty"] == int(named.isna().sum().sum())


@pytest.mark.slow
def test_a_probe_reads_the_table_beside_others(store: Store, tmp_path: Path) -> None:
    embed_biomarkers(store, read, tmp_path / "b.parquet", FlatLayers())
    people = store.table["person_id"].astype(str)
    numbers = [int("".join(sign for sign in name if sign.isdigit())) for name in people]
    labels = pd.DataFrame({"person_id": people, "swollen": ["yes" if n % 2 else "no" for n in numbers]})
    labels.to_csv(tmp_path / "labels.tsv", sep="\t", index=False)
    words = ["--labels", tmp_path / "labels.tsv", "--target", "swollen", "--json", "--quiet"]
    outcome = call("leaderboard", f"biomarkers={tmp_path / 'b.parquet'}", *words, "--out", tmp_path / "board")
    assert outcome.code == 0, outcome.err
    assert "biomarkers" in outcome.out


def test_a_scan_that_is_not_found_ends_it_with_the_reason(store: Store, tmp_path: Path) -> None:
    def missing(entry: Mapping[str, Any]) -> OCTVolume:
        raise UsageError("its file is in none of the folders")

    with pytest.raises(UsageError, match=f"{VOLUMES} of {VOLUMES} failed: its file is in none"):
        embed_biomarkers(store, missing, tmp_path / "b.parquet", FlatLayers())
    assert not (tmp_path / "b.parquet").exists()


def test_an_empty_value_gets_the_median_of_the_others() -> None:
    table = np.array([[1, np.nan, np.nan], [3, 4, np.nan], [np.nan, 6, np.nan]], np.float32)
    np.testing.assert_array_equal(filled(table), [[1, 5, 0], [3, 4, 0], [2, 6, 0]])
