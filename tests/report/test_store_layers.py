"""The page about a store shows layers, thickness and fluid of its scans, and names the scans that it does not show."""

from __future__ import annotations

import re
import shutil
from pathlib import Path

import pytest

from command_line import call
from flat_layers import FlatLayers
from octjepa.encoders import load_encoder
from octjepa.errors import UsageError
from octjepa.ingest.build import build_store
from octjepa.phantom import make_eye
from octjepa.phantom.dicom import write_eye
from octjepa.store import Store
from octjepa.tasks.segmenter import store_layers
from octjepa.tasks.segmenter.store_layers import layers_of_store
from page_outline import Outline


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three eyes of two devices and the store that was made from them."""
    root = tmp_path_factory.mktemp("store_layers")
    (root / "eyes").mkdir()
    for number, device in enumerate(["heidelberg_spectralis", "heidelberg_spectralis", "zeiss_cirrus"]):
        write_eye(root / "eyes" / f"{number}.dcm", make_eye(6, number, "OD", device), 6)
    build_store([root / "eyes"], root / "store", load_encoder("phantom-tiny").recipe.preprocessing)
    return root


@pytest.fixture
def flat(monkeypatch: pytest.MonkeyPatch) -> FlatLayers:
    made = FlatLayers()
    monkeypatch.setattr(store_layers, "LayerCache", lambda: made)
    return made


@pytest.mark.slow
def test_the_page_of_a_small_store_measures_every_scan(folder: Path, flat: FlatLayers, tmp_path: Path) -> None:
    outcome = call("report", folder / "store", "--out", tmp_path / "page.html", "--scans", folder / "eyes", "--json")
    assert outcome.code == 0, outcome.err
    text = (tmp_path / "page.html").read_text()
    part = text[text.index('<section id="layers">') : text.index('<section id="files">')]
    ids = list(Store.open(folder / "store").table["volume_id"])
    assert len(flat.segmented) == len(ids) == 3
    assert "3 of 3 raster volumes are shown." in part
    assert part.count("data:image/jpeg;base64,") == 3
    assert all(f"<code>{volume_id}</code>, OD: central 300 um" in part for volume_id in ids)
    assert len(re.findall(r'<th scope="row">outer nasal</th>', part)) == 3
    assert "intraretinal fluid" in part
    assert "Not a medical device" in part
    outline = Outline(text)
    assert outline.open == []
    assert len(set(outline.ids)) == len(outline.ids)
    assert set(outline.targets) <= set(outline.ids)
    assert "Missing:" not in part


def test_when_the_time_is_used_up_the_page_shows_what_is_retained(folder: Path, flat: FlatLayers) -> None:
    store = Store.open(folder / "store")
    first = store.table.sort_values(["device", "volume_id"]).iloc[0]
    flat.held.add(str(first["content_hash"]))
    shown = layers_of_store(store, [str(folder / "eyes")], seconds=-1)
    assert [scan.scan for scan in shown.scans] == [first["volume_id"]]
    assert flat.segmented == []
    assert {one.volume_id for one in shown.left_out} == set(store.table["volume_id"]) - {first["volume_id"]}
    assert all("the time for layers was used up" in one.reason for one in shown.left_out)


@pytest.mark.slow
def test_a_large_store_shows_a_scan_of_each_device(
    folder: Path, flat: FlatLayers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("octjepa.cohort.examples.MOST_SHOWN", 2)
    shown = layers_of_store(Store.open(folder / "store"), [str(folder / "eyes")])
    assert (shown.rasters, shown.chosen) == (3, 2)
    assert [scan.device for scan in shown.scans] == ["heidelberg_spectralis", "zeiss_cirrus"]


def test_scans_that_are_gone_are_named_and_the_rest_of_the_page_is_whole(
    folder: Path, flat: FlatLayers, tmp_path: Path
) -> None:
    shutil.copytree(folder / "store", tmp_path / "moved" / "store")
    outcome = call("report", tmp_path / "moved" / "store", "--out", tmp_path / "page.html", "--json")
    assert outcome.code == 0, outcome.err
    text = (tmp_path / "page.html").read_text()
    assert "<strong>Missing: the layers.</strong> its file is not next to the store" in text
    assert "octjepa report STORE --scans FOLDER" in text
    assert text.count('<article class="eye">') == 3
    with pytest.raises(UsageError, match="no folder of scans at"):
        store_layers_page(tmp_path)


def store_layers_page(folder: Path) -> None:
    """The page of a store with a folder of scans that does not exist."""
    from octjepa.report import write_report

    write_report(folder / "moved" / "store", folder / "page.html", scans=[str(folder / "nowhere")])
