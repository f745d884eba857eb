"""A package of a user, installed for one test: what it declares as entry points is found, and nothing of it stays."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

Install = Callable[[str, str, str, str], None]


@pytest.fixture
def install_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    """`install_package(name, group, entry_points, code)` puts a distribution with one module on the path.

    Its module leaves `sys.modules` with the test: the next test's package of that name would be taken for this one.
    """
    installed: list[str] = []

    def install(name: str, group: str, entry_points: str, code: str) -> None:
        folder = tmp_path / f"site-{len(installed)}"
        info = folder / f"{name}-1.0.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text(f"[{group}]\n{entry_points}\n")
        (folder / f"{name}.py").write_text(code)
        assert name not in sys.modules, f"a test before this one left a module {name} behind"
        monkeypatch.syspath_prepend(str(folder))
        installed.append(name)

    yield install
    for name in installed:
        sys.modules.pop(name, None)
