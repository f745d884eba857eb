"""What all tests share: one thread, shapes in signatures checked, and where real scans lie."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import pytest
from jaxtyping import install_import_hook

# Before anything imports NumPy's or torch's thread pools.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Every call into these packages is checked against the shapes and types of its signature. The hook has to be in
# place before octjepa is imported, which is why no test imports octjepa in this file's head.
CHECKED = ["octjepa.model", "octjepa.objective", "octjepa.views", "octjepa.store", "octjepa.evaluate"]
install_import_hook(CHECKED, "shape_checker.check")

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="session")
def root() -> Path:
    """The checkout."""
    return ROOT


@pytest.fixture(scope="session")
def real_scans() -> Path:
    """Folder with real DICOM volumes; the test is skipped where there is none."""
    named = os.environ.get("OCTJEPA_DATA")
    folder = Path(named) if named else ROOT.parent / "shared" / "data"
    if not any(folder.glob("*.dcm")):
        pytest.skip(f"no real scans in {folder}: set OCTJEPA_DATA to a folder with .dcm files")
    return folder


@pytest.fixture(scope="session")
def cli_commands() -> dict[str, Any]:
    """Verb -> its command, as the command line offers them."""
    import typer

    from octjepa.cli import app

    return dict(typer.main.get_command(app).commands)


@pytest.fixture(scope="session")
def make_targets() -> set[str]:
    """Targets of the Makefile."""
    return set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
