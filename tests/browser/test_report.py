"""The report on a phone and on paper: nothing is wider than the page, and paper is white in a dark browser as well."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

import octjepa.report
from browser import CHROMIUM, Page, browser_page
from octjepa import load_encoder
from octjepa.ingest.build import build_store
from octjepa.phantom import write_cohort
from octjepa.report import write_report

pytestmark = [pytest.mark.slow, pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine")]
WIDER = """[...document.querySelectorAll('body *')].filter((node) => !node.closest('.scroll, .strip')
    && node.getBoundingClientRect().right > innerWidth + 1).map((node) => node.outerHTML.slice(0, 80))"""


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    root = tmp_path_factory.mktemp("report")
    write_cohort(root / "eyes", people=1, seed=3, devices=["zeiss_cirrus"], size="small", workers=1)
    build_store([root / "eyes"], root / "store", load_encoder("phantom-tiny").recipe.preprocessing)
    out = write_report(root / "store", root / "report.html")
    with browser_page(tmp_path_factory.mktemp("profile")) as opened:
        opened.look(390, 844, phone=True)
        opened.open(out.as_uri())
        opened.wait("document.querySelector('footer')")
        yield opened


def test_nothing_is_wider_than_a_phone(page: Page) -> None:
    page.look(390, 844, phone=True)
    assert page.value("document.documentElement.scrollWidth") <= 390
    assert page.value(WIDER) == []


def test_nothing_is_cut_off_on_paper_which_is_white(page: Page) -> None:
    page.look(688, 971)  # A4 within margins of 14 mm, at 96 dots an inch
    scheme = {"name": "prefers-color-scheme", "value": "dark"}
    page.send("Emulation.setEmulatedMedia", media="print", features=[scheme])
    page.value("document.querySelectorAll('details').forEach((one) => { one.open = true; })")
    assert page.value(WIDER.replace(".scroll, .strip", ".nothing")) == []
    assert page.value("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    assert page.value("getComputedStyle(document.querySelector('section')).backgroundColor") == "rgb(255, 255, 255)"
    assert page.value("getComputedStyle(document.querySelector('h1')).color") == "rgb(26, 35, 48)"
    page.send("Emulation.setEmulatedMedia", media="screen")


def test_no_page_break_cuts_an_eye_or_a_line_of_a_table_or_leaves_a_heading_alone(page: Page) -> None:
    page.send("Emulation.setEmulatedMedia", media="print")
    style = "getComputedStyle(document.querySelector('{}')).{}"
    whole = {one: page.value(style.format(one, "breakInside")) for one in (".eye", "figure", "tr", ".key", "p", "pre")}
    assert set(whole.values()) == {"avoid"}, whole
    after = {one: page.value(style.format(one, "breakAfter")) for one in ("h2", "h3", "caption", ".lead", "summary")}
    assert set(after.values()) == {"avoid"}, after
    assert page.value(style.format("thead", "display")) == "table-header-group"  # again on every page
    page.send("Emulation.setEmulatedMedia", media="screen")


def test_values_and_intervals_of_a_probe_are_on_a_phone_without_scrolling(tmp_path: Path) -> None:
    """The rows of a probe as the report writes them: a name, a drawing 260 px wide or more, the value, the volumes."""
    row = "<th>untrained:phantom-truth</th><td><svg class='forest' viewBox='0 0 260 14'></svg></td>"
    row += "<td><b>0.944</b> 0.923 to 0.960</td><td>289</td>"
    caption = "The linear probe on zones whitened pooling, which was named before any test value was read."
    style = (Path(octjepa.report.__file__).parent / "templates" / "style.css").read_text()
    (tmp_path / "probe.html").write_text(
        f"<!doctype html><meta name=viewport content='width=device-width'><style>{style}</style>"
        f"<div class='wrap'><section><div class='scroll'><table class='probe'>"
        f"<caption>{caption}</caption><colgroup><col><col class='plot'></colgroup><thead><tr><th>Features</th>"
        f"<th>95 % interval</th><th>Value</th><th>Volumes</th></tr></thead><tbody><tr>{row}</tr></tbody></table></div>"
        "</section></div>"
    )
    with browser_page(tmp_path / "profile") as page:
        page.look(390, 844, phone=True)
        page.open((tmp_path / "probe.html").as_uri())
        page.wait("document.querySelector('svg')")
        right = "Math.max(...[...document.querySelectorAll('caption, svg, b, td:nth-child(3)')].map("
        assert page.value(right + "(node) => node.getBoundingClientRect().right))") <= 390
        assert page.value("document.querySelector('.scroll').scrollWidth") <= 390
