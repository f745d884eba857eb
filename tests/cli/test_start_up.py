"""What a verb may load and show: typer alone for help, no torch where no network runs, a bar unless it is quiet."""

from __future__ import annotations

import os
import pty
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from command_line import COMMAND

_LISTS_MODULES = """
import sys
from octjepa.cli import main
sys.argv = ["octjepa", *sys.argv[1:]]
try:
    main()
except SystemExit as stop:
    print(stop.code or 0, *sys.modules, file=sys.stderr)
"""


def modules_of(*words: object, status: int = 0) -> set[str]:
    """The modules and top-level packages that a command loads, which must end with this exit status."""
    done = subprocess.run(
        [sys.executable, "-c", _LISTS_MODULES, *map(str, words)], capture_output=True, text=True, check=True
    )
    code, *modules = done.stderr.splitlines()[-1].split()
    assert code == str(status)
    assert "octjepa.cli" in modules
    return {*modules, *(name.partition(".")[0] for name in modules)}


@pytest.mark.parametrize("verb", ["inspect", "phantom", "ingest"])
def test_no_torch_where_no_network_runs(line: Any, tmp_path: Path, verb: str) -> None:
    words = {
        "inspect": [line.scan],
        "phantom": [tmp_path / "cohort", "--people", 1, "--workers", 1],
        "ingest": [line.scan, "--store", tmp_path / "store", "--workers", 1],
    }[verb]
    assert "torch" not in modules_of(verb, *words)


@pytest.mark.parametrize("verb", ["report", "plan"])
def test_a_mistyped_name_is_refused_before_torch_is_imported(tmp_path: Path, verb: str) -> None:
    assert "torch" not in modules_of(verb, tmp_path / "absent", status=2)


def test_training_loads_no_compiler_that_it_does_not_use(line: Any, tmp_path: Path) -> None:
    few = ("tokens.select=tissue", "tokens.budget=32", "train.max_updates=2")
    loaded = modules_of("pretrain", "smoke_test", *few, "--store", line.store, "--out", tmp_path / "run")
    assert "torch" in loaded
    assert not loaded & {"torch._dynamo", "torch._inductor", "sympy"}


@pytest.mark.parametrize("word", ["--help", "--version"])
def test_help_loads_typer_alone(word: str) -> None:
    loaded = modules_of(word) - set(sys.stdlib_module_names) - {"octjepa"}
    heavy = {"torch", "numpy", "pandas", "scipy", "sklearn", "pydantic", "pydicom", "yaml", "rich", "matplotlib"}
    assert not loaded & heavy
    assert "typer" in loaded


@pytest.mark.slow
@pytest.mark.parametrize("quiet", [False, True])
def test_a_bar_on_a_terminal_unless_quiet(tmp_path: Path, quiet: bool) -> None:
    ours, theirs = pty.openpty()
    words = ["phantom", str(tmp_path / "cohort"), "--people", "1", "--workers", "1", "--json"]
    process = subprocess.Popen(
        [*COMMAND, *words, *(["--quiet"] if quiet else [])],
        stdout=subprocess.PIPE,
        stderr=theirs,
        text=True,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "120"},
    )
    os.close(theirs)
    out, _ = process.communicate(timeout=60)
    shown = b""
    while part := _read(ours):
        shown += part
    os.close(ours)
    assert process.returncode == 0
    assert len(out.splitlines()) == 1
    assert (b"phantom" in shown) is not quiet
    assert not (quiet and shown)


def _read(terminal: int) -> bytes:
    try:
        return os.read(terminal, 65536)
    except OSError:  # how Linux tells that the other end of a terminal is closed
        return b""
