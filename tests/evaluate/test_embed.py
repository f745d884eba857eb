"""The embedding table of a store: every eye once, keyed, beside what knows nothing."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from octjepa.checkpoint import load_encoder
from octjepa.errors import ContractError, UsageError
from octjepa.evaluate import embed
from octjepa.evaluate.embed import embed_store, histogram
from octjepa.evaluate.probe import run_probes
from octjepa.evaluate.table import read_embeddings
from octjepa.train.loop import pretrain
from synthetic import MemoryStore, small_recipe


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    recipe = small_recipe()
    out = tmp_path_factory.mktemp("embed") / "run"
    pretrain(recipe, MemoryStore(recipe.preprocessing), out)
    return out


def store_of():
    return MemoryStore(small_recipe().preprocessing)


def test_every_raster_volume_once_with_its_keys(run, tmp_path):
    store = store_of()
    store.table.loc[2, "pattern"] = "radial"
    store.participants = pd.DataFrame({"person_id": ["1000", "1001"], "age": [61, 70], "clinical_site": ["UW", "UAB"]})
    figures = embed_store(run, store, tmp_path / "e.parquet")
    assert (figures["rows"], figures["missing"], figures["dim"]) == (19, 1, 192)
    table = read_embeddings(tmp_path / "e.parquet")
    assert table.vector.shape == table.untrained.shape == (19, 3 * 192)
    keyed = table.frame.set_index("volume_id")
    assert keyed.loc["volume0001", ["person_id", "content_hash", "split", "age", "clinical_site"]].tolist() == [
        "1001",
        "hash-volume0001",
        "train",
        70.0,
        "UAB",
    ]
    assert np.isnan(keyed.loc["volume0005", "age"])
    assert keyed.loc["volume0005", "clinical_site"] == ""
    assert "volume0002" not in keyed.index


def test_values_do_not_depend_on_the_batch(run, tmp_path, monkeypatch):
    embed_store(run, store_of(), tmp_path / "a.parquet")
    monkeypatch.setattr(embed, "_BATCH", 3)
    embed_store(run, store_of(), tmp_path / "b.parquet")
    a, b = read_embeddings(tmp_path / "a.parquet"), read_embeddings(tmp_path / "b.parquet")
    assert a.frame["volume_id"].tolist() == b.frame["volume_id"].tolist()
    assert np.allclose(a.vector, b.vector, atol=1e-5)


def test_trained_and_untrained_rows_differ(run, tmp_path):
    embed_store(run, store_of(), tmp_path / "e.parquet")
    table = read_embeddings(tmp_path / "e.parquet")
    assert not np.allclose(table.vector, table.untrained, atol=1e-3)


def test_the_histogram_is_of_tissue_alone(run):
    encoder, store = load_encoder(run), store_of()
    volume = store.read("volume0000")
    shares = histogram(volume, encoder)
    assert shares.sum() == pytest.approx(1.0)
    assert shares[: 60 // 8].sum() < 0.1  # the dark vitreous is outside the band


def test_people_seen_in_pretraining_cannot_be_tested_on(run, tmp_path):
    store = store_of()
    assert embed_store(run, store, tmp_path / "e.parquet")["leaked"] == 0
    store.table.loc[store.table["person_id"].isin(["1000", "1003"]), "split"] = "test"
    assert embed_store(run, store, tmp_path / "e.parquet")["leaked"] == 2
    labels = tmp_path / "labels.tsv"
    labels.write_text("person_id\tsick\n" + "".join(f"{1000 + n}\t{n % 2}\n" for n in range(20)))
    with pytest.raises(UsageError, match="pretrained on eyes of 2 people"):
        run_probes([read_embeddings(tmp_path / "e.parquet")], labels, ["sick"])


def test_another_contract_is_refused_by_field(run, tmp_path):
    store = store_of()
    store.preprocessing = store.preprocessing.model_copy(update={"flatten": "plane"})
    with pytest.raises(ContractError, match="flatten: store plane, recipe quadratic"):
        embed_store(run, store, tmp_path / "e.parquet")
    assert not (tmp_path / "e.parquet").exists()


def test_a_store_without_raster_volumes_is_refused(run, tmp_path):
    store = store_of()
    store.table["pattern"] = "radial"
    with pytest.raises(UsageError, match="no raster volume"):
        embed_store(run, store, tmp_path / "e.parquet")
