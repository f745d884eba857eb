"""A table of embeddings whose store was split again afterwards is not probed with the old split."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from command_line import call
from index_entries import index_entry, store_of
from octjepa.embed.table import TableFacts, check_split, read_embeddings, write_embeddings, write_table
from octjepa.errors import UsageError
from octjepa.locks import file_lock

SPLITS = ["train"] * 6 + ["val"] * 2 + ["test"] * 2


@pytest.fixture
def table(tmp_path: Path) -> Path:
    """Embeddings of ten people in `tables`, and their store, with the same split."""
    entries = [index_entry(2 * number, split=split) for number, split in enumerate(SPLITS)]
    store_of(tmp_path / "store", entries)
    rng = np.random.default_rng(0)
    keys = ("person_id", "eye", "volume_id", "content_hash", "device", "split")
    rows = [
        {name: entry[name] for name in keys}
        | {"age": 50.0, "clinical_site": ""}
        | {name: rng.normal(size=4).astype(np.float32) for name in ("vector", "untrained", "histogram")}
        for entry in entries
    ]
    (tmp_path / "tables").mkdir()
    facts = TableFacts(4, "octjepa", "c" * 64, pools=("mean",), store="../store")
    return write_embeddings(tmp_path / "tables" / "eyes.parquet", pd.DataFrame(rows), facts)


def split_again(table: Path, seconds: float) -> None:
    """Moves a person of train to test in the store, whose index is so much younger than the table."""
    index = table.parent.parent / "store" / "volumes.parquet"
    frame = pd.read_parquet(index)
    frame.loc[frame["split"] == "train", "split"] = ["test", *["train"] * 5]
    frame.to_parquet(index, index=False)
    then = table.stat().st_mtime + seconds
    os.utime(index, (then, then))


def test_the_split_of_the_store_is_the_one_of_the_table(table: Path) -> None:
    check_split(table, read_embeddings(table))


@pytest.mark.parametrize(("seconds", "newer"), [(60, "the store's split is newer"), (-60, "the table is newer")])
def test_another_split_stops_a_probe_and_says_which_is_newer(table: Path, seconds: float, newer: str) -> None:
    split_again(table, seconds)
    with pytest.raises(UsageError, match=f"1 of 10 volumes, of 1 people, differ.*{newer}.*octjepa embed"):
        check_split(table, read_embeddings(table))
    labels = table.with_name("labels.tsv")
    labels.write_text("person_id\tgrade\n" + "".join(f"{1001 + n}\t{n % 2}\n" for n in range(10)))
    outcome = call("probe", table, "--labels", labels, "--target", "grade")
    assert outcome.code == 2
    assert newer in outcome.err


def test_pairs_of_visits_are_compared_with_the_store_by_person(table: Path, tmp_path: Path) -> None:
    embedded = read_embeddings(table)
    later = embedded.frame.assign(volume_id=[f"later{n}" for n in range(10)], visit="v2")
    frame = pd.concat([embedded.frame.assign(visit="v1"), later], ignore_index=True)
    blocks = {name: np.concatenate([getattr(embedded, name)] * 2) for name in ("vector", "untrained", "histogram")}
    write_table(table, replace(embedded, frame=frame, **blocks))
    order = table.with_name("order.tsv")
    order.write_text("visit\torder\nv1\t1\nv2\t2\n")
    (tmp_path / "results" / "deep").mkdir(parents=True)
    out = tmp_path / "results" / "deep" / "changes.parquet"
    words = ("visits", table, "--visit-order", order, "--out", out)
    with file_lock(out):
        second = call(*words)
    assert (second.code, "another process is writing to" in second.err) == (2, True)
    outcome = call(*words)
    assert outcome.code == 0, outcome.err
    changes = read_embeddings(out)
    assert changes.store == "../../store"
    check_split(out, changes)
    split_again(table, 60)
    with pytest.raises(UsageError, match=r"1 of 10 volumes, of 1 people, differ.*octjepa visits"):
        check_split(out, changes)
    out.unlink()
    outcome = call(*words)
    assert outcome.code == 2
    assert "holds another split than its store" in outcome.err
    assert not out.exists()


def test_a_table_without_its_store_is_used_as_it_is(table: Path, tmp_path: Path) -> None:
    split_again(table, 60)
    (tmp_path / "store").rename(tmp_path / "elsewhere")
    check_split(table, read_embeddings(table))


def test_a_damaged_index_is_a_warning(table: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "store" / "volumes.parquet").write_bytes(b"PAR1")
    check_split(table, read_embeddings(table))
    assert "cannot be compared with the split" in caplog.text
