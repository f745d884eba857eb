"""Boundaries are corrected in a real browser, with the mouse and with the keyboard, and saved."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from browser import CHROMIUM, Page, browser_page
from flat_layers import FlatLayers
from octjepa.viewer.corrections import Corrections
from octjepa.viewer.scan_layers import ScanLayers
from octjepa.viewer.scans import Scans
from octjepa.viewer.server import open_scans
from viewer_server import served

pytestmark = [pytest.mark.slow, pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine")]
pytest.importorskip("uvicorn")
KEY = "key-of-the-address"
STATE = "document.querySelector('#pane-a .corrections-state').textContent"
SHOWN = "document.querySelector('#pane-a .sectors table')"


@pytest.fixture(scope="module")
def labels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("labels")


@pytest.fixture(scope="module")
def correctable(folder: Path, labels: Path) -> Scans:
    made = open_scans(folder / "store", [str(folder / "eyes")])
    made.layers = ScanLayers(FlatLayers())
    made.corrections = Corrections(labels)
    return made


@pytest.fixture(scope="module")
def url(correctable: Scans) -> Iterator[str]:
    with served(correctable, key=KEY) as address:
        yield address


@pytest.fixture
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    """A browser for each test: the page of another address does not answer in a browser that left a saved page."""
    with browser_page(tmp_path_factory.mktemp("profile")) as opened:
        opened.look(1300, 900)
        yield opened


def shown_eye(page: Page) -> tuple[str, int, list[list[float | None]], list[int]]:
    """The id of the volume on the page, the B-scan, its boundaries as the server has them, and the scan's shape."""
    answer: dict[str, Any] = page.value(
        "(async () => {const id = document.querySelector('#list [aria-current=true]').dataset.id;"
        " const number = Number(document.querySelector('#pane-a .native-slider').value);"
        " const read = async (path) => (await fetch(`/volumes/${id}/native${path}`)).json();"
        " return {id, number, lines: await read(`/surfaces/slice/${number}`), shape: (await read('')).shape}})()"
    )
    return answer["id"], answer["number"], answer["lines"], answer["shape"]


def open_for_correction(page: Page, address: str) -> None:
    page.open(address)
    page.wait(SHOWN)
    page.wait("!document.querySelector('#pane-a .native-correct').disabled")
    page.wait("!document.querySelector('[data-state=reading]')")
    page.click("#pane-a .native-correct")
    page.wait("!document.querySelector('#pane-a .corrections').hidden")


def test_a_boundary_is_drawn_saved_moved_by_keys_and_removed(page: Page, url: str, labels: Path) -> None:
    open_for_correction(page, f"{url}/?key={KEY}")
    volume_id, number, before, shape = shown_eye(page)
    file = labels / f"{volume_id}_boundaries.npz"
    assert "No B-scan is saved yet" in page.value(STATE)

    # The mouse draws the lower boundary through the left half of the B-scan, and undo takes the whole stroke back.
    page.choose("#pane-a .native-boundary", 7)
    target = 0.9
    for _ in range(2):
        page.drag("#pane-a .bscan", (0.3, target), (0.45, target))
        page.wait(f"{STATE}.startsWith('Changed, not saved')")
        if not file.exists() and _ == 0:
            page.click("#pane-a .native-undo")
            page.wait(f"{STATE}.startsWith('No B-scan')")
    assert not file.exists()
    page.click("#pane-a .native-save")
    page.wait(f"{STATE}.startsWith('Saved B-scans: {number + 1}.')")
    _, _, saved, _ = shown_eye(page)
    changed = [column for column, row in enumerate(saved[7]) if row != before[7][column]]
    assert 0.12 * shape[2] < len(changed) < 0.2 * shape[2]
    rows = np.array([saved[7][column] for column in changed], float)
    assert abs(rows.mean() - target * shape[1]) < 0.03 * shape[1]
    with np.load(file) as arrays:
        assert np.isfinite(arrays["rows"]).any((0, 2)).sum() == 1
    page.wait(
        "document.querySelector('#pane-a .sectors caption').textContent.includes('1 B-scans are corrected by hand')"
    )

    # Keys: a click chooses the nearest boundary, arrows move it, Enter saves.
    column = int(0.7 * shape[2])
    ilm = saved[0][column]
    assert ilm is not None
    page.click("#pane-a .bscan", (column + 0.5) / shape[2], (ilm - 1) / shape[1])
    page.wait("document.querySelector('#pane-a .native-boundary').value === '0'")
    for key in ("ArrowUp", "ArrowUp", "ArrowUp", "ArrowUp", "Enter"):
        page.press(key)
    page.wait(f"{STATE}.startsWith('Saved B-scans')")
    _, still, moved, _ = shown_eye(page)
    assert still == number  # arrow keys did not turn to another B-scan
    differences = [
        new - old for new, old in zip(moved[0], saved[0], strict=True) if new is not None and old is not None
    ]
    assert min(differences) == pytest.approx(-2, abs=0.05)

    page.click("#pane-a .native-remove")
    page.wait(f"{STATE}.startsWith('No B-scan is saved yet')")
    assert not file.exists()
    assert shown_eye(page)[2] == before
    assert page.console == []
    leave = "const e = new Event('beforeunload', {cancelable: true}); dispatchEvent(e); return e.defaultPrevented"
    assert page.value(f"(() => {{{leave}}})()") is False


def test_without_the_key_the_page_says_that_nothing_was_saved(page: Page, url: str, labels: Path) -> None:
    open_for_correction(page, f"{url}/")
    page.drag("#pane-a .bscan", (0.3, 0.2), (0.5, 0.2))
    page.click("#pane-a .native-save")
    page.wait(f"{STATE}.startsWith('Not saved: open the viewer with the whole address')")
    assert list(labels.iterdir()) == []
    page.value("window.onbeforeunload = null")
