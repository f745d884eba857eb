"""The flow and the tables of files on the page: every count from the store, long lists cut and said to be."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path

import pytest

from index_entries import index_entry, store_of
from octjepa.cohort.selection import select
from octjepa.ingest.source_flow import record_ignored
from octjepa.recipe import DataRecipe
from octjepa.record import to_json
from octjepa.report import write_report
from octjepa.report.cohort import (
    MAX_FILES_PER_REASON,
    MAX_VOLUMES,
    accepted_files,
    refused_files,
    summarise_cohort,
)
from octjepa.store.index import IndexChange, IndexEntry

WHEN = "2026-01-01T00:00:00+00:00"


def quarantine_record(number: int, reason: str, file: str = "") -> dict[str, str]:
    file = file or f"topcon_triton/{number}.dcm"
    return {
        "file": file,
        "hash": "",
        "stage": "read",
        "reason": reason,
        "detail": "told",
        "when": WHEN,
        "file_key": f"q{number}",
    }


def test_the_stages_add_up_from_files_to_splits(tmp_path: Path) -> None:
    rows = [
        index_entry(number, split="train" if number < 8 else "test", site="A" if number < 6 else "")
        for number in range(10)
    ]
    rows[9] |= {"pattern": "radial", "uncertain": "slice"}
    store = store_of(tmp_path / "store", rows)
    for number, reason in enumerate(["truncated", "truncated", "not_dicom", "duplicate_content"]):
        store.refuse(quarantine_record(number, reason))
    record_ignored(store.path, [tmp_path / "one"], {".tsv": 2, "hidden": 5})
    record_ignored(store.path, [tmp_path / "one"], {".tsv": 3})  # the same source again takes the place of the first
    record_ignored(store.path, [tmp_path / "two"], {".tsv": 1})
    counted = summarise_cohort(store)
    assert [(stage.number, stage.what) for stage in counted.stages] == [
        (18, "files found or listed"),
        (14, "scans to read"),
        (10, "volumes read and accepted"),
        (9, "raster volumes"),
    ]
    for stage, following in zip(counted.stages[:2], counted.stages[1:], strict=False):
        assert stage.number - sum(out.number for out in stage.exclusions) == following.number
    assert [(out.number, out.parts, out.bad) for stage in counted.stages for out in stage.exclusions] == [
        (4, ((".tsv", 4),), False),
        (3, (("truncated", 2), ("not_dicom", 1)), True),
        (1, (("duplicate_content", 1),), False),
        (1, (("radial", 1),), False),
    ]
    assert counted.stages[2].details == ("5 people, 10 eyes", "topcon triton 10", "A 6, unknown 4")
    assert [(name, counts.people, counts.volumes) for name, counts in counted.splits] == [
        ("train", 4, 8),
        ("val", 0, 0),
        ("test", 1, 1),
    ]
    assert (counted.files, counted.refused, counted.uncertain) == (14, 3, 1)
    assert [table.title for table in counted.tables] == ["device", "site"]
    assert counted.tables[1].rows["all sites"]["all"].volumes == 9


def test_refused_files_are_listed_by_reason_with_device_and_site_of_their_path(tmp_path: Path) -> None:
    store = store_of(tmp_path / "store", [index_entry(0)], [{"person_id": "1001", "clinical_site": "UW"}])
    store.refuse(quarantine_record(0, "duplicate_content"))
    store.refuse(quarantine_record(1, "empty_file", "zeiss_cirrus/1001/1001_cirrus_mac_oct_l_1.2.dcm"))
    store.refuse(quarantine_record(2, "empty_file", "who knows.dcm"))
    first, last = refused_files(store, tmp_path)
    assert (first.counts.reason, first.counts.files, first.counts.lost, first.action) == (
        "empty_file",
        2,
        True,
        "copy or download it again",
    )
    assert first.counts.by_device == {"unknown": 1, "zeiss_cirrus": 1}
    assert first.counts.by_site == {"UW": 1, "unknown": 1}
    assert (last.counts.reason, last.counts.lost) == ("duplicate_content", False)


@pytest.mark.slow
def test_ten_thousand_files_make_a_small_page_soon(tmp_path: Path) -> None:
    rows = [index_entry(number, split="train") for number in range(10_000)]
    rows[7777] |= {"uncertain": "slice"}
    rows[8888] |= {"notes": "laterality_disagrees"}
    store = store_of(tmp_path / "store", rows[:1])
    for row in rows:
        store.index.apply(
            IndexChange(volume=IndexEntry(**row))
        )  # the index alone: writing it row by row is not what is timed here
    for number in range(5000):
        refused = quarantine_record(number, "truncated" if number % 5 else "empty_file")
        store.index.apply(IndexChange(refused=refused))
    store.consolidate()
    started = time.perf_counter()
    text = write_report(store.path, tmp_path / "page.html").read_text(encoding="utf-8")
    assert (
        time.perf_counter() - started < 20
    )  # about 2 s on one core; minutes would mean a cost that grows with the square
    assert len(text) < 1.5e6
    assert text.count('<tr><td class="file">') == MAX_VOLUMES + 2 * MAX_FILES_PER_REASON
    assert "300 of 10,000 are shown" in text
    assert "The first 40 of 4,000 by name; <code>quarantine.jsonl</code>" in text
    shown = [one.row.volume_id for one in accepted_files(store)]
    assert {rows[7777]["volume_id"], rows[8888]["volume_id"]} <= set(shown)


@pytest.mark.slow
def test_the_page_of_a_run_shows_how_it_chose(demo: Path) -> None:
    from octjepa.store import Store

    data = DataRecipe(min_quality=0.5, devices=("zeiss_cirrus", "topcon_maestro2"))
    store = Store.open(demo / "store")
    about = json.loads((demo / "run" / "run.json").read_text(encoding="utf-8"))
    about["flow"] = {split: to_json(select(store, data, split).flow.stages) for split in ("train", "val")}
    about["domains"] = {
        "zeiss_cirrus": {"volumes": 2, "per_epoch": 4},
        "topcon_maestro2": {"volumes": 6, "per_epoch": 4},
    }
    (demo / "run" / "run.json").write_text(json.dumps(about), encoding="utf-8")
    text = write_report(demo).read_text(encoding="utf-8")
    shown = text[text.index("Who of them took part in this run") : text.index('<section id="eyes">')]
    left = about["flow"]["train"][-1]["left"]
    assert re.search(rf"quality 0.5 at least</th><td class=\"num\">{left['people']}</td>", shown)
    assert "device zeiss cirrus or topcon maestro2" in shown
    assert "The same for validation: " in shown
    assert (
        '<th scope="row">zeiss cirrus</th><td class="num">2</td><td class="num">4</td><td class="num">2.00</td>'
        in shown
    )
    assert not any(str(person) in shown for person in store.table["person_id"])
