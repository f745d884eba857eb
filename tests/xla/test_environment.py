"""The environment of torch_xla is pinned like the other one, and its set-up can be read by bash."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

ENVIRONMENTS = Path(__file__).resolve().parents[2] / "scripts" / "environments"


def pins(path: Path) -> dict[str, str]:
    found = [line.split("==") for line in path.read_text().splitlines()]
    assert all(len(pin) == 2 and re.fullmatch(r"[a-z0-9._-]+", pin[0]) for pin in found), path.name
    assert all(re.fullmatch(r"[A-Za-z0-9.]+", version) for _, version in found), path.name
    return {name: version for name, version in found}


def test_versions_are_those_of_the_tested_environment_but_for_torch() -> None:
    here, there = pins(ENVIRONMENTS / "xla.txt"), pins(ENVIRONMENTS.parents[1] / "constraints.txt")
    assert here["torch"] == here["torch-xla"] == "2.9.0"
    assert not [name for name in here if name.startswith("nvidia") or name == "triton"]
    differing = {name for name in here if here[name] != there.get(name)}
    assert differing == {"torch", "torch-xla"}, "scripts/environments/xla.txt: take the versions of constraints.txt"


def test_the_set_up_is_a_script() -> None:
    path = ENVIRONMENTS / "setup-xla"
    assert os.access(path, os.X_OK)
    assert "set -euo pipefail" in path.read_text()
    checked = subprocess.run(["bash", "-n", str(path)], capture_output=True, text=True, check=False)
    assert checked.returncode == 0, checked.stderr
