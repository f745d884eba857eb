"""The registry: decorator, modules imported late, entry points of other packages, and its errors."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from octjepa.errors import UsageError
from octjepa.registry import Registry, modules_of
from user_package import Install

GROUP = "octjepa.test_parts"


def test_a_decorator_registers_and_a_second_of_the_name_is_refused() -> None:
    registry: Registry[type] = Registry("part", GROUP)

    @registry.register("one")
    class One:
        pass

    assert registry.get("one") is One
    assert registry.names() == ["one"]
    assert "one" in registry
    assert "two" not in registry
    with pytest.raises(ValueError, match="'one' is registered twice"):
        registry.register("one")(int)


def test_a_builtin_is_imported_when_first_requested(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "late_parts").mkdir()
    (tmp_path / "late_parts" / "__init__.py").write_text(
        "from octjepa.registry import Registry, modules_of\n"
        f"PARTS = Registry('part', {GROUP!r}, modules_of('late_parts'))\n"
    )
    (tmp_path / "late_parts" / "slow.py").write_text(
        "from late_parts import PARTS\n\n@PARTS.register('slow')\ndef slow(): return 7\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    import late_parts  # type: ignore[import-not-found] # written above

    assert late_parts.PARTS.names() == ["slow"]
    assert "late_parts.slow" not in sys.modules
    assert late_parts.PARTS.get("slow")() == 7


def test_an_unknown_name_lists_the_known_ones() -> None:
    registry: Registry[str] = Registry("objective", GROUP)
    registry.register("vjepa")("here")
    with pytest.raises(UsageError, match="unknown objective 'jepa': one of vjepa"):
        registry.get("jepa")


def test_an_installed_package_adds_a_part(install_package: Install) -> None:
    install_package("parts_of_a_user", GROUP, "theirs = parts_of_a_user:PART", "PART = 3\n")
    registry: Registry[int] = Registry("part", GROUP)
    assert registry.names() == ["theirs"]
    assert "theirs" in registry
    assert registry.get("theirs") == 3


def test_errors_of_a_package_name_it(install_package: Install) -> None:
    install_package("broken_parts", GROUP, "bad = broken_parts:PART\ntwice = broken_parts:ONE", "1 / 0\n")
    install_package("other_parts", GROUP, "twice = other_parts:ONE", "ONE = 1\n")
    registry: Registry[int] = Registry("part", GROUP)
    with pytest.raises(UsageError, match=r"'bad' of package broken_parts .* cannot be loaded: ZeroDivisionError"):
        registry.get("bad")
    with pytest.raises(UsageError, match=r"declared by several packages: .*(broken_parts|other_parts)"):
        registry.get("twice")


def test_modules_of_a_package_are_listed_without_importing_them() -> None:
    code = "import sys; from octjepa.registry import modules_of; print(sorted(modules_of('octjepa.model'))); "
    code += "assert 'torch' not in sys.modules"
    listed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert "vjepa3d" in listed
    assert "__init__" not in listed
    assert modules_of("octjepa.model")["vjepa3d"] == "octjepa.model.vjepa3d"
