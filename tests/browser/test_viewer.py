"""The viewer's page in a real browser, under its own policy: every control, with nothing said in the console."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from browser import CHROMIUM, Page, browser_page
from octjepa.store import Store
from octjepa.viewer.scans import Scans
from viewer_server import served

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine")
pytest.importorskip("uvicorn")
NATIVE_SHOWN = "document.querySelector('#pane-a .sectors table')"


@pytest.fixture(scope="module")
def url(scans: Scans) -> Iterator[str]:
    with served(scans) as address:
        yield address


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    with browser_page(tmp_path_factory.mktemp("profile")) as opened:
        opened.look(1300, 900)
        yield opened


def text(page: Page, selector: str) -> str:
    return str(page.value(f"document.querySelector({json.dumps(selector)}).textContent"))


def drawn(page: Page, selector: str) -> str:
    """What a canvas holds, to be compared."""
    return str(page.value(f"document.querySelector({json.dumps(selector)}).toDataURL()"))


def check_quiet(page: Page, url: str) -> None:
    """Nothing in the console, nothing fetched from elsewhere."""
    assert page.console == []
    assert [one for one in page.fetched if not one.startswith((url, "about:", "blob:", "data:"))] == []


@pytest.mark.slow
def test_it_opens_on_a_slice_with_tissue_and_lists_what_is_there(page: Page, url: str) -> None:
    page.open(f"{url}/")
    page.wait(NATIVE_SHOWN)
    assert text(page, "#count") == "3 of 3 volumes"
    assert "&lt;img src=x" in page.value("document.querySelector('#list').innerHTML")
    assert "B-scans of" in text(page, "#pane-a .state")
    assert "Update 8" in text(page, "#live-state")
    assert "<b>low</b>" in text(page, "#alarms")
    assert page.value("document.querySelectorAll('#charts svg').length") >= 2
    page.choose("#search", "cirrus")
    page.wait("document.querySelector('#count').textContent.startsWith('1 of 3')")
    page.choose("#search", "")
    page.wait("document.querySelectorAll('#list button').length === 3")
    check_quiet(page, url)


@pytest.mark.slow
def test_the_address_asks_for_volume_slice_and_overlay(page: Page, url: str, folder: Path) -> None:
    last = max(Store.open(folder / "store").table["volume_id"])
    page.open(f"{url}/#{last}/2/tokens")
    page.wait("document.querySelector('#legend').textContent.includes('principal components')")
    assert last in text(page, "#subtitle")
    page.wait("document.querySelector('#number').textContent.startsWith('2 of ')")
    page.wait("!document.querySelector('[data-state=reading]')")
    time.sleep(1)  # the stored slice would follow the scan as it came
    assert text(page, "#number").startswith("2 of ")
    check_quiet(page, url)


@pytest.mark.slow
def test_every_control_of_the_native_view_changes_what_is_drawn(page: Page, url: str) -> None:
    page.open(f"{url}/")
    page.wait(NATIVE_SHOWN)
    page.wait("document.querySelector('#pane-a .cross-figure figcaption').textContent")
    before = drawn(page, "#pane-a .bscan")

    def changes(canvas: str = "bscan") -> None:
        nonlocal before
        page.wait(f"document.querySelector('#pane-a .{canvas}').toDataURL() !== {json.dumps(before)}")

    for selector, value in (
        (".native-slider", 3),
        (".native-surfaces", False),
        (".native-contrast", 2.5),
        (".native-stretch", 3),
        (".native-layer", "tokens"),
        (".native-layer", "random"),
    ):
        before = drawn(page, "#pane-a .bscan")
        page.choose(f"#pane-a {selector}", value)
        changes()
    before = drawn(page, "#pane-a .bscan")
    page.click("#pane-a .native-in")
    changes()
    before = drawn(page, "#pane-a .bscan")
    page.drag("#pane-a .bscan", (0.5, 0.5), (0.3, 0.4))  # pan
    changes()
    page.click("#pane-a .native-clear")
    before = drawn(page, "#pane-a .bscan")
    page.click("#pane-a .native-caliper")
    page.drag("#pane-a .bscan", (0.2, 0.3), (0.7, 0.3))
    changes()
    assert "intensity" in text(page, "#pane-a .readout")
    page.click("#pane-a .native-clear")
    before = drawn(page, "#pane-a .face")
    for plane in ("face", "depth", "thickness"):
        page.choose("#pane-a .native-plane", plane)
        changes("face")
        before = drawn(page, "#pane-a .face")
    page.choose("#pane-a .native-etdrs", False)
    changes("face")
    page.choose("#pane-a .native-etdrs", True)
    page.click("#pane-a .native-centre")
    page.click("#pane-a .face", 0.4, 0.5)
    page.wait("document.querySelector('#pane-a .sectors').textContent.includes('place clicked')")
    page.click("#pane-a .cross", 0.5, 0.5)
    page.wait("document.querySelector('#pane-a .number').textContent !== '4 of '")
    check_quiet(page, url)


@pytest.mark.slow
def test_similarity_to_the_token_that_was_clicked(page: Page, url: str) -> None:
    page.open(f"{url}/")
    page.wait(NATIVE_SHOWN)
    page.choose("#pane-a .native-layer", "similarity")
    page.wait("document.querySelector('#pane-a .legend').textContent.includes('Click on tissue')")
    lines = page.value(
        "fetch(`/volumes/${document.querySelector('#list button').dataset.id}/native`).then((a) => a.json()).then("
        "(a) => fetch(`/volumes/${document.querySelector('#list button').dataset.id}/native/surfaces/slice/"
        "${a.opening_slice}`).then((b) => b.json()).then((b) => [b[0], a.shape]))"
    )
    (ilm, shape), middle = lines, len(lines[0]) // 2
    page.click("#pane-a .bscan", 0.5, (ilm[middle] + 12) / shape[1])
    page.wait("document.querySelector('#pane-a .legend').textContent.includes('Cosine similarity')")
    check_quiet(page, url)


@pytest.mark.slow
def test_the_thickness_table_is_saved_and_copied_as_it_is_shown(page: Page, url: str) -> None:
    page.open(f"{url}/")
    page.wait(NATIVE_SHOWN)
    volume_id = page.value("document.querySelector('#list [aria-current=true]').dataset.id")
    page.value(
        "URL.createObjectURL = (blob) => { window.saved = blob; return 'blob:saved'; };"
        "HTMLAnchorElement.prototype.click = function () { window.name_saved = this.download; };"
        "navigator.clipboard.writeText = async (text) => { window.copied = text; }"
    )
    for number in (1, 2):
        page.value(f"document.querySelector('#pane-a .sectors button:nth-of-type({number})').click()")
    page.wait("window.saved && window.copied")
    table = str(page.value("window.saved.text()"))
    assert page.value("window.copied") == table.replace(",", "\t")
    assert str(page.value("window.name_saved")).endswith("_etdrs.csv")
    rows = [line.split(",") for line in table.splitlines()]
    assert len(rows) == 10
    assert {row[0] for row in rows[1:]} == {volume_id}
    central = {row[3]: row[4] for row in rows}["central"]
    shown = text(page, "#pane-a .sectors table tr:last-child td")
    assert shown == (f"{float(central):.0f}" if central else "–")
    check_quiet(page, url)


@pytest.mark.slow
def test_two_volumes_side_by_side_and_one_without_its_file(page: Page, url: str) -> None:
    page.open(f"{url}/")
    page.wait(NATIVE_SHOWN)
    page.wait("document.querySelector('#compare').options.length === 2")
    page.choose("#compare", page.value("document.querySelector('#compare').options[1].value"))
    page.wait("document.querySelector('#pane-b .sectors table')")
    assert text(page, "#pane-b h3") != text(page, "#pane-a h3")
    page.press("j")
    page.press("j")
    page.wait("document.querySelector('#pane-a .state').textContent.includes('--scans')")
    page.wait("document.querySelector('#scan-caption').textContent.includes('as stored')")
    assert page.value("document.querySelector('#pane-b').hidden")
    assert page.value("document.querySelector('#error').hidden")
    check_quiet(page, url)


@pytest.mark.slow
def test_a_misread_volume_and_a_near_eye_are_one_click_away(page: Page, url: str, folder: Path) -> None:
    page.open(f"{url}/")
    page.wait(NATIVE_SHOWN)
    wanted = page.value("document.querySelector('#misread-list button').dataset.id")
    assert text(page, "#misread-list b") == "true 60, predicted 40"
    page.click("#misread-list button")
    page.wait(f"document.querySelector('#subtitle').textContent.includes('{wanted}')")
    page.wait("document.querySelectorAll('#near-list li').length > 0")
    assert "embeddings of ours" in text(page, "#near-state")
    check_quiet(page, url)


@pytest.mark.slow
def test_nothing_is_wider_than_a_phone(page: Page, url: str) -> None:
    page.look(390, 844, phone=True)
    page.open(f"{url}/")
    page.wait(NATIVE_SHOWN)
    assert page.value("document.documentElement.scrollWidth") <= 390
    page.look(1300, 900)
    check_quiet(page, url)
