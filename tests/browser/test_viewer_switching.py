"""No panel of the viewer ever shows one eye under the name of another, however slow or wrong the server is.

Panels are found in the page by `data-panel`, so a new panel is tested without a change here.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from typing import Any

import pytest

from browser import CHROMIUM, Page, browser_page
from octjepa.viewer.scans import Scans
from viewer_server import Gate, served

pytestmark = [pytest.mark.slow, pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine")]
pytest.importorskip("uvicorn")
Panels = dict[str, dict[str, Any]]

# Every panel: its state, the volume that it shows, its text, and whether its canvas holds anything.
PANELS = """Object.fromEntries([...document.querySelectorAll('[data-panel]')].map((node) => {
  const pane = node.closest('[data-pane]'), canvas = node.querySelector('canvas');
  const blank = document.createElement('canvas');
  if (canvas) Object.assign(blank, { width: canvas.width, height: canvas.height });
  return [`${pane ? pane.dataset.pane : 'page'} ${node.dataset.panel}`, {
    state: node.dataset.state, volume: node.dataset.volume, text: node.textContent.replace(/\\s+/g, ' ').trim(),
    options: [...node.querySelectorAll('option')].map((one) => one.value),
    drawn: canvas ? canvas.toDataURL() !== blank.toDataURL() : false,
    picture: canvas ? canvas.toDataURL() : '',
  }];
}))"""
OF_THE_EYE = {
    *(f"a {name}" for name in ("file", "bscan", "cross", "face", "overlay", "sectors")),
    *(f"page {name}" for name in ("stored-scan", "stored-face", "stored-overlay", "near", "compare")),
}
BESIDE = {name.replace("a ", "b ") for name in OF_THE_EYE if name.startswith("a ")}
BEING_READ = dict.fromkeys(("overlay", "stored-overlay"), "Overlay: being read …") | {
    "sectors": "Thickness: being read …"
}
# Words of the page itself, which stay while a panel is being read.
FIXED = {
    "page compare": "Side by side with ",
    "page stored-face": "En face: mean over the lowest 0.25 mm of the band, true proportions. "
    "Click to choose the slice.",
}


@pytest.fixture(scope="module")
def gate(scans: Scans) -> Gate:
    return Gate(scans)


@pytest.fixture(scope="module")
def url(scans: Scans, gate: Gate) -> Iterator[str]:
    with served(scans, gate) as address:
        yield address


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    with browser_page(tmp_path_factory.mktemp("profile")) as opened:
        opened.look(1300, 900)
        yield opened


@pytest.fixture
def page(browser: Page, url: str, gate: Gate) -> Iterator[Page]:
    """The page on its first eye, with the token map over both views of it."""
    gate.open()
    browser.console.clear()
    browser.open(f"{url}/")
    settled(browser)
    for field in ("#pane-a .native-layer", "#layer"):
        browser.choose(field, "tokens")
    browser.choose("#pane-a .native-plane", "thickness")
    settled(browser)
    yield browser
    gate.open()


def settled(page: Page) -> Panels:
    """The panels when nothing is read any more."""
    page.wait("document.querySelector('#title').textContent !== '–' && !document.querySelector('[data-state=reading]')")
    last: Panels = {}
    while last != (last := page.value(PANELS)):
        time.sleep(0.3)
    return last


def click(page: Page, volume_id: str) -> Panels:
    """The panels in the moment after a click on a volume of the list."""
    return dict(page.value(f"(document.querySelector('#list [data-id=\"{volume_id}\"]').click(), {PANELS})"))


def check_cleared(panels: Panels, names: set[str]) -> None:
    for name in names:
        assert panels[name]["state"] == "reading", name
        assert panels[name]["volume"] == ""
        assert panels[name]["text"] == f"{FIXED.get(name, '')}{BEING_READ.get(name.split()[1], 'Being read …')}"
        assert not panels[name]["drawn"], name
        assert panels[name]["options"] == []


def check_of(panels: Panels, volume_id: str) -> None:
    """Whatever shows something shows it of this volume."""
    for name in OF_THE_EYE:
        assert panels[name]["volume"] == (volume_id if panels[name]["state"] == "shown" else ""), name
        if panels[name]["state"] != "shown":
            assert not panels[name]["drawn"], name


def shown_names(panels: Panels) -> set[str]:
    return {name for name, panel in panels.items() if panel["state"] == "shown"}


def test_every_eye_is_shown_under_its_own_name_however_slow_the_server_is(page: Page, gate: Gate, scans: Scans) -> None:
    eyes = page.value("[...document.querySelectorAll('#list button')].map((one) => one.dataset.id)")
    assert len(eyes) == 3
    first = settled(page)
    assert {name for name in first if name[0] in "ap" and name != "page misread"} == OF_THE_EYE
    assert shown_names(first) == OF_THE_EYE | {"page misread"}
    seen = {eyes[0]: first}
    for volume_id in (*eyes[1:], eyes[0], *eyes):
        gate.holds = lambda path, held=volume_id: held in path  # type: ignore[misc]
        page.value("document.querySelector('#pane-a .readout').textContent = 'intensity of the eye before'")
        check_cleared(click(page, volume_id), OF_THE_EYE)
        time.sleep(0.3)
        check_cleared(page.value(PANELS), OF_THE_EYE)  # the server does not answer yet
        assert volume_id in page.value("document.querySelector('#subtitle').textContent")
        assert page.value("document.querySelector('#pane-a .readout').textContent") == ""
        assert page.value("document.querySelector('#pane-a .number').textContent") == ""
        gate.open()
        panels = settled(page)
        check_of(panels, volume_id)
        if scans.native_about(volume_id).reason == "":
            central = int(scans.etdrs(volume_id).sectors["central"] + 0.5)  # rounds a half up, as the page does
            assert (
                page.value("document.querySelector('#pane-a .sectors').textContent").find(f"centre 1 mm{central}") >= 0
            )
            assert shown_names(panels) == OF_THE_EYE | {"page misread"}
        else:
            assert "--scans" in panels["a file"]["text"]
            assert panels["page stored-scan"]["state"] == "shown"
        assert {name: panels[name]["picture"] for name in OF_THE_EYE} == {
            name: seen.setdefault(volume_id, panels)[name]["picture"] for name in OF_THE_EYE
        }
    assert seen[eyes[0]]["a face"]["picture"] != seen[eyes[1]]["a face"]["picture"]
    assert page.console == []


def test_an_answer_that_comes_too_late_is_dropped(page: Page, gate: Gate) -> None:
    eyes = page.value("[...document.querySelectorAll('#list button')].map((one) => one.dataset.id)")
    page.value("{ const real = fetch; window.fetch = (url) => real(url); }")  # nothing can be aborted
    click(page, eyes[1])
    settled(page)
    wanted = settled(page)
    for late in (eyes[0], eyes[2]):
        gate.holds = lambda path, held=late: held in path  # type: ignore[misc]
        click(page, late)
        time.sleep(0.5)
        click(page, eyes[1])
        panels = settled(page)
        gate.open()
        time.sleep(1.5)
        for name in OF_THE_EYE:
            assert page.value(PANELS)[name] == panels[name] == wanted[name], name


def test_an_answer_about_another_eye_is_refused_and_not_drawn(page: Page, gate: Gate) -> None:
    first, second, _ = page.value("[...document.querySelectorAll('#list button')].map((one) => one.dataset.id)")
    gate.turns = lambda path: path.replace(second, first)
    click(page, second)
    panels = settled(page)
    for name in OF_THE_EYE:
        assert panels[name]["state"] in ("failed", "empty"), name
        assert not panels[name]["drawn"], name
    assert f"answered about {first} instead of {second}" in panels["a file"]["text"]


def test_an_overlay_that_fails_leaves_no_other_drawn(page: Page, gate: Gate) -> None:
    layers, views = ("#pane-a .native-layer", "#layer"), ("a bscan", "page stored-scan")
    with_tokens = settled(page)
    for field in layers:
        page.choose(field, "")
    bare = settled(page)
    for field in layers:
        page.choose(field, "tokens")
    assert [settled(page)[name]["picture"] for name in views] == [with_tokens[name]["picture"] for name in views]
    assert bare["a bscan"]["picture"] != with_tokens["a bscan"]["picture"]
    gate.fails = lambda path: "random" in path
    for field in layers:
        page.choose(field, "random")
    panels = settled(page)
    assert [panels[name]["picture"] for name in views] == [bare[name]["picture"] for name in views]
    assert panels["a overlay"]["text"] == "Overlay: out of order"
    assert panels["page stored-overlay"]["text"] == "Overlay: out of order"


def test_side_by_side_shows_its_own_eye_and_goes_with_the_first(page: Page, gate: Gate, scans: Scans) -> None:
    first, second, third = page.value("[...document.querySelectorAll('#list button')].map((one) => one.dataset.id)")
    gate.holds = lambda path: second in path and path != f"/volumes/{second}"
    page.choose("#compare", second)
    page.wait("!document.querySelector('#pane-b').hidden")
    check_cleared(page.value(PANELS), BESIDE)
    gate.open()
    panels = settled(page)
    for name in BESIDE - {"b overlay"}:
        assert (panels[name]["state"], panels[name]["volume"]) == ("shown", second), name
    check_of(panels, first)
    assert panels["a sectors"]["text"] != panels["b sectors"]["text"]
    after = click(page, third)
    check_cleared(after, OF_THE_EYE)
    for name in BESIDE:
        assert (after[name]["state"], after[name]["text"], after[name]["drawn"]) == ("empty", "", False), name
    settled(page)
    click(page, first)
    settled(page)
    gate.holds = lambda path: (
        path == f"/volumes/{second}"
    )  # asked for next to the first eye, answered next to the third
    page.choose("#compare", second)
    time.sleep(0.3)
    click(page, third)
    gate.open()
    settled(page)
    time.sleep(0.5)
    assert page.value("document.querySelector('#pane-b').hidden")


def test_another_target_clears_the_list_of_misread_eyes(page: Page, gate: Gate) -> None:
    assert "60" in settled(page)["page misread"]["text"]
    gate.holds = lambda path: path == "/misread"
    page.choose("#misread-target", "weight")
    panel = page.value(PANELS)["page misread"]
    assert (panel["state"], panel["text"]) == ("reading", "Being read …")
    gate.open()
    assert "true 90, predicted 70" in settled(page)["page misread"]["text"]


def test_a_new_checkpoint_removes_the_token_maps_of_the_one_before(
    page: Page, gate: Gate, scans: Scans, monkeypatch: pytest.MonkeyPatch
) -> None:
    settled(page)
    assert scans.live is not None
    gate.holds = lambda path: path == "/about"
    monkeypatch.setattr(scans.live, "newest_checkpoint", lambda: "update_00000002")
    page.wait("document.querySelectorAll('[data-state=reading]').length > 8", timeout=20)
    check_cleared(page.value(PANELS), OF_THE_EYE)
    gate.open()
    panels = settled(page)
    assert shown_names(panels) == OF_THE_EYE | {"page misread"}
    assert json.dumps(panels["a overlay"]["text"]).find("principal components") >= 0
