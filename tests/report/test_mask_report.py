"""The mask report as files and as an element of the page."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from command_line import call
from octjepa.errors import UsageError
from octjepa.locks import writer_lock
from octjepa.report.figures.masks import mask_chart, report_masks
from octjepa.train import mask_statistics
from synthetic import MemoryStore, small_recipe


@pytest.fixture(autouse=True)
def few_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mask_statistics, "SAMPLES", 16)
    monkeypatch.setattr(mask_statistics, "MOST_VOLUMES", 8)


@pytest.mark.slow
def test_a_store_gives_json_and_figure(tmp_path: Path) -> None:
    recipe = small_recipe(masks={"target_share": 0.5})
    store = MemoryStore(recipe.preprocessing)
    summary = report_masks(recipe, store, list(store.volumes)[:8], tmp_path / "new" / "folder")
    assert Path(summary.figure).read_bytes().startswith(b"\x89PNG")
    measured = json.loads(Path(summary.report).read_text())
    assert measured["counts"] == {"tokens": 24, "context": 10, "target": 7, "hidden": 14}
    assert summary.exact
    assert summary.copy_nearest["runs"] == measured["families"]["runs"]["copy_nearest"]["error"]["value"]
    chart = mask_chart(mask_statistics.MaskStatistics.from_json(measured))
    assert ElementTree.fromstring(chart).tag == "svg"
    assert "#0102" not in chart  # every stand-in colour is the page's
    everything = json.dumps(measured)
    assert not any(person in everything for person in store.table["person_id"].astype(str) + '"')


@pytest.mark.slow
@pytest.mark.usefixtures("without_memory")
def test_the_verb_without_a_store(tmp_path: Path) -> None:
    small = ("preprocessing.image_size=[8,64,64]", "preprocessing.margin=[0,4,4]")
    planned = call("plan", "smoke_test", *small, "--masks", tmp_path / "masks", "--json").json
    assert planned["masks"]["exact"] is True
    assert "copy_nearest" not in planned["masks"]
    assert json.loads((tmp_path / "masks" / "masks.json").read_text())["synthetic"] is True


def test_a_folder_that_another_process_writes_to_is_refused(tmp_path: Path) -> None:
    with writer_lock(tmp_path / "masks"):
        refused = call("plan", "smoke_test", "--masks", tmp_path / "masks")
    assert refused.code == 2
    assert "another process is writing to" in refused.err
    assert not (tmp_path / "masks").exists()


def test_a_file_is_no_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="is a file: name a folder"):
        report_masks(small_recipe(), None, None, tmp_path / "file")
    refused = call("plan", "smoke_test", "--masks", tmp_path / "file")
    assert refused.code == 2
    assert "is a file" in refused.err
