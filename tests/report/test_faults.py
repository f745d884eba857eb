"""Planted faults stand at the top of the page, named: a constant predictor, a lost site, leaked people, a used test."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pyarrow.parquet as pq
import pytest

from octjepa.evaluate.probe import ProbeResult
from octjepa.report import write_report
from octjepa.store import Store


def first_words(folder: Path) -> str:
    """The page's head, without marks."""
    text = write_report(folder).read_text(encoding="utf-8")
    return " ".join(re.sub(r"<[^>]+>", " ", text[text.index("<header>") : text.index("</header>")]).split())


@pytest.mark.slow
def test_a_page_without_faults_names_none(made: Path, page: str) -> None:
    assert "Read this first" not in page


@pytest.mark.slow
def test_what_the_probe_named_is_read_first(demo: Path) -> None:
    result = ProbeResult()
    result.add_fault("constant_predictor", "tiny_cpu (linear, mean) says 'healthy' of every test case of drusen")
    result.add_fault("lost_group", "drusen: site UAB is lost: none of its 9 people with a label has an embedded scan")
    result.add_fault("test_used_before", "drusen: its test set is used for the 3rd time")
    probe = json.loads((demo / "probe.json").read_text(encoding="utf-8")) | {"faults": result.payload()["faults"]}
    (demo / "probe.json").write_text(json.dumps(probe), encoding="utf-8")
    head = first_words(demo)
    assert "Read this first ✕ 3 faults" in head
    assert "Constant predictor. tiny_cpu (linear, mean) says 'healthy' of every" in head.replace("&#39;", "'")
    assert "Lost site or device. drusen: site UAB is lost" in head
    assert "Test set used before. drusen" in head
    assert head.index("Read this first") < head.index("Files read")


@pytest.mark.slow
def test_leaked_people_are_named_though_no_probe_ran(demo: Path) -> None:
    (demo / "probe.json").unlink()
    table = pq.read_table(demo / "embeddings.parquet")
    leaked = table.replace_schema_metadata({**table.schema.metadata, b"octjepa.leaked": b"4"})
    pq.write_table(leaked, demo / "embeddings.parquet")
    store = Store.open(demo / "store")
    entry = next(entry for entry in store.entries() if entry.split == "test")
    with store.writing():
        store.add(replace(entry, split="train", volume_id="f" * 16, content_hash="f" * 64, file="other.dcm"))
        store.consolidate()
    head = first_words(demo)
    assert "Leaked people. people in more than one split of the store: 1." in head
    assert "Leaked people. people of val or test whose eyes the encoder was pretrained on: 4." in head


@pytest.mark.slow
def test_a_site_of_which_nothing_came_is_named(demo: Path) -> None:
    people = sorted(set(Store.open(demo / "store").table["person_id"]))
    rows = [{"person_id": one, "clinical_site": "UW"} for one in people]
    rows += [{"person_id": f"7{number:03d}", "clinical_site": "UAB"} for number in range(5)]
    columns = Store.open(demo / "store").participants.columns
    frame = pd.DataFrame(rows).reindex(columns=columns)
    frame.to_parquet(demo / "store" / "participants.parquet")
    assert "clinical site UAB is lost: none of its 5 people in participants.tsv has a volume" in first_words(demo)
