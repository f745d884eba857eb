"""The documentation as a site: it builds without a warning, holds everything that the code offers, needs no network."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from scripts.site import check, reference

import octjepa
from octjepa.config import PRETRAINING
from octjepa.reasons import REASONS

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)


@pytest.fixture(scope="module")
def pages() -> dict[str, str]:
    """{file name: Markdown} of the generated reference."""
    return reference.pages()


def test_the_reference_has_every_key_of_a_recipe_with_its_default_and_comment(pages: dict[str, str]) -> None:
    text = pages["recipes.md"]
    for section, field in PRETRAINING.model.model_fields.items():
        for key in getattr(field.annotation, "model_fields", ()):
            assert f"`{section}.{key}" in text, f"{section}.{key}"
    assert "| `data.balance_power` | `Share` | `0.0` | a domain of n volumes is drawn" in text
    assert "`stages.head`" in text
    assert "`decoder.updates`" in text
    assert "| *machine*" in text


def test_the_reference_has_every_reason_command_and_public_name(
    pages: dict[str, str], cli_commands: dict[str, Any]
) -> None:
    for code, reason in REASONS.items():
        assert f"| `{code}` | {reason.meaning.replace('<', '&lt;')}" in pages["reasons.md"]
    for name, command in cli_commands.items():
        assert f"\n## octjepa {name}\n" in pages["cli.md"]
        for parameter in getattr(command, "params", ()):
            assert all(f"`{option}`" in pages["cli.md"] for option in parameter.opts if option.startswith("--"))
    for name in octjepa.__all__:
        assert f"## octjepa.{name}\n" in pages["python.md"]
    assert "### Store.open" in pages["python.md"]
    assert "### PretrainedEncoder.embed" in pages["python.md"]


def test_a_broken_link_and_a_foreign_file_are_found(tmp_path: Path) -> None:
    (tmp_path / "index.html").write_text(
        '<h1 id="top">A</h1><a href="b.html#here">b</a><a href="#top">t</a><a href="https://example.org">e</a>'
        '<a href="c.html">c</a><a href="b.html#there">b</a><script src="https://example.org/x.js"></script>'
    )
    (tmp_path / "b.html").write_text('<h1 id="here">B</h1>')
    assert check.faults(tmp_path) == [
        "index.html loads https://example.org/x.js",
        "index.html links to c.html: no such file",
        "index.html links to b.html#there: no such heading",
    ]


@pytest.fixture(scope="module")
def site(root: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built in strict mode: a warning is a failure."""
    folder = tmp_path_factory.mktemp("site")
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--quiet", "--strict", "--site-dir", str(folder)],
        cwd=root,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.mark.slow
@pytest.mark.timeout(900)  # the site is built first, a minute of one idle core
def test_every_link_of_the_site_leads_somewhere_and_nothing_is_loaded_from_elsewhere(site: Path) -> None:
    assert check.faults(site) == []
    assert (site / "search" / "search_index.js").stat().st_size > 100_000
    assert "neither DICOM nor another format" in (site / "reference" / "reasons.html").read_text()


@pytest.mark.slow
@pytest.mark.skipif(BROWSER is None, reason="no chromium on this machine")
def test_search_finds_a_word_offline(site: Path, tmp_path: Path) -> None:
    """The search answers on a page that was opened from a disk, where browsers start no Worker."""
    assert BROWSER is not None
    page = subprocess.run(
        [
            BROWSER,
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-background-networking",
            "--disable-sync",
            f"--user-data-dir={tmp_path / 'profile'}",
            "--virtual-time-budget=15000",
            "--dump-dom",
            f"file://{site}/index.html?q=quarantine",
        ],
        capture_output=True,
        text=True,
        check=True,
        timeout=100,
    ).stdout
    assert "matching documents" in page
    assert "ingest.html?h=quarantine" in page
