"""Runs modules of the viewer's page in node, without a browser."""

from __future__ import annotations

import json
import shutil
import subprocess
from importlib.resources import files
from pathlib import Path
from typing import Any

NODE = shutil.which("node")


def run_page(folder: Path, script: str) -> dict[str, Any]:
    """What `script`, which may import the page's modules as `./NAME.js`, leaves in `made`."""
    static = files("octjepa.viewer").joinpath("static")
    for file in static.iterdir():
        if file.name.endswith(".js"):
            (folder / file.name).write_text(file.read_text(encoding="utf-8").replace('from "/', 'from "./'))
    (folder / "package.json").write_text('{"type": "module"}')
    (folder / "page.js").write_text(f"const made = {{}};\n{script}\nconsole.log(JSON.stringify(made));")
    assert NODE is not None
    run = subprocess.run([NODE, "page.js"], cwd=folder, capture_output=True, text=True, timeout=60, check=False)
    assert run.returncode == 0, run.stderr
    made: dict[str, Any] = json.loads(run.stdout)
    return made
