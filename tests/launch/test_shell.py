"""All launch scripts: they parse, are clean, may be run, and say what they do."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

LAUNCH = Path(__file__).resolve().parents[2] / "scripts" / "launch"
SCRIPTS = sorted(path for path in LAUNCH.iterdir() if path.is_file())


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_a_script_parses_and_stops_at_the_first_error(script: Path) -> None:
    assert os.access(script, os.X_OK), f"chmod +x {script}"
    assert "\nset -euo pipefail\n" in script.read_text()
    checked = subprocess.run(["bash", "-n", str(script)], capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stderr


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.name)
def test_shellcheck_finds_nothing(script: Path) -> None:
    beside = Path(sys.executable).with_name("shellcheck")
    shellcheck = shutil.which("shellcheck") or (str(beside) if beside.is_file() else None)
    if shellcheck is None:
        pytest.skip("no shellcheck: make setup installs it")
    checked = subprocess.run([shellcheck, str(script)], capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stdout


@pytest.mark.parametrize("script", ["one_machine", "slurm.sbatch", "tpu"])
def test_help_names_every_option(script: str) -> None:
    output = subprocess.run(["bash", str(LAUNCH / script), "--help"], capture_output=True, text=True, check=True).stdout
    assert "RECIPE [k=v ...]" in output
    options = {
        word
        for line in (LAUNCH / script).read_text().splitlines()
        if line.strip().startswith("--") and line.endswith(")")
        for word in line.strip(" )").split(" | ")
    }
    assert not [option for option in options if option not in output]
