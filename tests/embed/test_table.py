"""The embedding table survives a round trip and refuses what is not one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from octjepa.embed import table as table_module
from octjepa.embed.table import TableFacts, read_embeddings, write_embeddings
from octjepa.errors import OctjepaError, UsageError

Cohort = Callable[..., tuple[pd.DataFrame, pd.DataFrame]]


def test_round_trip_and_metadata(tmp_path: Path, cohort: Cohort) -> None:
    frame, _ = cohort(people=5)
    frame.loc[0, "age"] = np.nan
    path = write_embeddings(tmp_path / "e.parquet", frame, TableFacts(16, "octjepa", "abc"))
    table = read_embeddings(path)
    assert (table.dim, table.encoder, table.contract, len(table)) == (16, "octjepa", "abc", 10)
    assert (table.vector == np.stack(frame["vector"].to_list())).all()
    assert (table.untrained == np.stack(frame["untrained"].to_list())).all()
    assert table.histogram.shape == (10, 8)
    assert table.frame["person_id"].tolist() == frame["person_id"].tolist()
    assert np.isnan(table.frame["age"][0])
    schema = pq.read_schema(path)
    assert schema.metadata[b"octjepa.dim"] == b"16"
    assert schema.field("vector").type == pa.list_(pa.float32())
    assert [entry.name for entry in tmp_path.iterdir()] == ["e.parquet"]


def test_a_table_beyond_the_offsets_of_32_bits(tmp_path: Path, cohort: Cohort, monkeypatch: pytest.MonkeyPatch) -> None:
    frame, _ = cohort(people=5)
    small = read_embeddings(write_embeddings(tmp_path / "small.parquet", frame, TableFacts(16, "octjepa", "abc")))
    monkeypatch.setattr(table_module, "_LIST_VALUES", 200)  # of vector and untrained 480, of histogram 80
    path = write_embeddings(tmp_path / "large.parquet", frame, TableFacts(16, "octjepa", "abc"))
    schema = pq.read_schema(path)
    assert schema.field("vector").type == schema.field("untrained").type == pa.large_list(pa.float32())
    assert schema.field("histogram").type == pa.list_(pa.float32())
    large = read_embeddings(path)
    for name in ("vector", "untrained", "histogram"):
        assert np.array_equal(getattr(large, name), getattr(small, name))
    assert large.frame.equals(small.frame)


def test_pools_and_views(tmp_path: Path, cohort: Cohort) -> None:
    frame, _ = cohort(people=3)
    table = read_embeddings(write_embeddings(tmp_path / "e.parquet", frame, TableFacts(16, "octjepa", "abc")))
    assert (table.features("vector", "mean") == np.stack(frame["vector"].to_list())[:, :16]).all()
    assert table.features("untrained", "mean_std_max").shape == (6, 48)
    assert table.features("histogram", "none").shape == (6, 8)
    with pytest.raises(UsageError, match="pooling 'median'"):
        table.features("vector", "median")
    with pytest.raises(UsageError, match="view 'labels'"):
        table.features("labels", "mean")
    assert table.take([4, 1]).frame["volume_id"].tolist() == [f"{4:016x}", f"{1:016x}"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda f: f.drop(columns=["age"]), "lack the column.*age"),
        (lambda f: f.assign(volume_id="0" * 16), "repeated volume_id in 5 rows"),
        (lambda f: f.assign(person_id=[" ", *f["person_id"][1:]]), "no person_id in 1 row"),
        (lambda f: f.assign(split="holdout"), "split holds.*holdout"),
        (lambda f: f.assign(eye="left"), "eye holds.*left"),
        (lambda f: f.assign(vector=[np.full(48, np.nan, np.float32), *f["vector"][1:]]), "not finite in 1 of 6"),
        (lambda f: f.assign(vector=[np.zeros(9, np.float32), *f["vector"][1:]]), "length"),
        (lambda f: f.assign(untrained=[np.zeros(9, np.float32)] * 6), "3 x dim = 48"),
        (lambda f: f.iloc[:0], "length|no volume"),
    ],
)
def test_a_frame_that_is_no_table_is_not_written(
    tmp_path: Path, cohort: Cohort, change: Callable[[pd.DataFrame], pd.DataFrame], message: str
) -> None:
    frame, _ = cohort(people=3)
    with pytest.raises(UsageError, match=message):
        write_embeddings(tmp_path / "e.parquet", change(frame), TableFacts(16, "octjepa", "abc"))
    assert not list(tmp_path.iterdir())


def test_wrong_files_are_named(tmp_path: Path, cohort: Cohort) -> None:
    with pytest.raises(UsageError, match="no embeddings at"):
        read_embeddings(tmp_path / "none.parquet")
    (tmp_path / "text.parquet").write_text("person_id\n1001\n")
    with pytest.raises(UsageError, match="not a readable parquet"):
        read_embeddings(tmp_path / "text.parquet")
    pq.write_table(pa.table({"person_id": ["1001"]}), tmp_path / "other.parquet")
    with pytest.raises(UsageError, match=r"lacks the column.*volume_id"):
        read_embeddings(tmp_path / "other.parquet")
    good = pq.read_table(
        write_embeddings(tmp_path / "e.parquet", cohort(people=3)[0], TableFacts(16, "octjepa", "abc"))
    )
    pq.write_table(good.replace_schema_metadata({}), tmp_path / "bare.parquet")
    with pytest.raises(UsageError, match=r"metadata octjepa\.dim"):
        read_embeddings(tmp_path / "bare.parquet")
    lists = good.column("vector").to_pylist()
    ragged = pa.array([lists[0][:5], *lists[1:]], pa.list_(pa.float32()))
    position = good.column_names.index("vector")
    pq.write_table(good.set_column(position, "vector", ragged), tmp_path / "ragged.parquet")
    with pytest.raises(UsageError, match="different or missing length"):
        read_embeddings(tmp_path / "ragged.parquet")
    text = pa.array(["x"] * 6)
    pq.write_table(good.set_column(position, "vector", text), tmp_path / "typed.parquet")
    with pytest.raises(UsageError, match="expected a list of float32"):
        read_embeddings(tmp_path / "typed.parquet")


def test_a_full_disk_leaves_the_old_table(tmp_path: Path, cohort: Cohort, monkeypatch: pytest.MonkeyPatch) -> None:
    frame, _ = cohort(people=3)
    path = write_embeddings(tmp_path / "e.parquet", frame, TableFacts(16, "old", "abc"))

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("octjepa.files.os.fsync", full)
    with pytest.raises(OctjepaError, match="disk is full"):
        write_embeddings(path, frame, TableFacts(16, "new", "abc"))
    assert read_embeddings(path).encoder == "old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["e.parquet"]
    with pytest.raises(UsageError, match="no folder"):
        write_embeddings(tmp_path / "absent" / "e.parquet", frame, TableFacts(16, "new", "abc"))
