"""Fixtures of the report's tests; the demo folder itself is in tests/support/demo_folder.py."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from demo_folder import probe_of
from short_pages import shorten_pages


@pytest.fixture(scope="session")
def page(made: Path) -> str:
    """The page of the whole demo folder."""
    from octjepa.report import write_report

    out = made.parent / "page.html"
    assert write_report(made, out) == out
    return out.read_text(encoding="utf-8").replace("<wbr>", "")  # where a long file name may break


@pytest.fixture
def rewrite_probe() -> Callable[[Path, float, float], None]:
    def rewrite(folder: Path, low: float, high: float) -> None:
        (folder / "probe.json").write_text(json.dumps(probe_of(low, high)), encoding="utf-8")

    return rewrite


@pytest.fixture(autouse=True)
def short_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every page but `page`, which has all pictures: a session fixture is made before a test patches anything."""
    shorten_pages(monkeypatch)
