"""The viewer's page in a real browser: it runs under its own policy and shows what its address asks for."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from octjepa.config import load_recipe
from octjepa.files import replace_folder
from octjepa.report.viewer.scans import Scans
from octjepa.store import Store
from octjepa.store.storage import stage_chunk
from synthetic import volume
from viewer_server import served

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)

pytestmark = pytest.mark.skipif(BROWSER is None, reason="no chromium on this machine")
pytest.importorskip("uvicorn")


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    from index_entries import index_entry

    preprocessing = load_recipe(str(Path(__file__).parents[2] / "benchmarks" / "study" / "recipe.yaml")).preprocessing
    made = Store.create(tmp_path_factory.mktemp("browser") / "store", preprocessing)
    for number in range(3):
        row = index_entry(number, split="val", source=f"<img src=x onerror=alert(1)>{number}.dcm", quality=np.nan)
        eye = volume(preprocessing, number)
        replace_folder(stage_chunk(made.chunk_folder(row["volume_id"]), eye), made.chunk_folder(row["volume_id"]))
        made.add(row)
    made.consolidate()
    return Store.open(made.path)


@pytest.fixture(scope="module")
def url(store: Store) -> Iterator[str]:
    from octjepa import load_encoder

    with served(Scans(store, load_encoder("phantom-tiny"))) as address:
        yield address


def shown(url: str, profile: Path) -> tuple[str, list[str]]:
    """(the page as it stands after its script ran, what the browser's console held)."""
    assert BROWSER is not None
    done = subprocess.run(
        [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-sync",
         f"--user-data-dir={profile}", "--enable-logging=stderr", "--virtual-time-budget=20000", "--dump-dom", url],
        capture_output=True, text=True, check=True, timeout=100,
    )  # fmt: skip
    return done.stdout, [line for line in done.stderr.splitlines() if ":CONSOLE" in line]


def inside(page: str, name: str) -> str:
    found = re.search(rf'id="{name}"[^>]*>(.*?)</(?:p|h2|output|ul)>', page, re.DOTALL)
    assert found, name
    return found[1]


def test_it_opens_on_the_first_volume_and_its_middle(url: str, store: Store, tmp_path: Path) -> None:
    page, console = shown(f"{url}/", tmp_path)
    assert console == []
    assert inside(page, "count") == "3 of 3 volumes"
    assert (
        inside(page, "number")
        == f"{store.preprocessing.stored_size[0] // 2 + 1} of {store.preprocessing.stored_size[0]}"
    )
    assert min(store.table["volume_id"]) in inside(page, "subtitle")
    assert re.search(r'id="error"[^>]*hidden', page)
    assert "<img" not in inside(page, "list")
    assert "&lt;img src=x" in inside(page, "list")


def test_the_address_asks_for_volume_slice_and_overlay(url: str, store: Store, tmp_path: Path) -> None:
    last = max(store.table["volume_id"])
    page, console = shown(f"{url}/#{last}/2/tokens", tmp_path)
    assert console == []
    assert last in inside(page, "subtitle")
    assert inside(page, "number").startswith("2 of ")
    assert "principal components" in inside(page, "legend")
    assert re.search(r'id="error"[^>]*hidden', page)
