"""Executes the notebooks and saves them with their outputs, small enough to read in a diff.

Usage: python scripts/site/notebooks.py [NOTEBOOK...] (all of notebooks/, unless named)
Needs octjepa, nbclient and ipykernel: pip install nbclient ipykernel. They are no dependency of octjepa, not even for
development: tests/notebooks checks the saved outputs without them.
"""

from __future__ import annotations

import base64
import hashlib
import io
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parents[2] / "notebooks"
COLOURS = 48  # of a saved figure: a palette makes a PNG several times smaller
# nbclient starts the kernel with the environment of this process
QUIET = {"MPLBACKEND": "module://matplotlib_inline.backend_inline", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


def source_hash(cells: list[dict[str, Any]]) -> str:
    """SHA-256 of the code cells: it tells whether the outputs are those of the code."""
    code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    return hashlib.sha256(json.dumps(code).encode()).hexdigest()


def smaller_png(data: str) -> str:
    """A PNG in base64 with a palette of COLOURS colours."""
    from PIL import Image

    picture = Image.open(io.BytesIO(base64.b64decode(data))).convert("RGB")
    out = io.BytesIO()
    picture.quantize(COLOURS, dither=Image.Dither.NONE).save(out, "PNG", optimize=True)
    return base64.b64encode(out.getvalue()).decode()


def execute(path: Path) -> None:
    """Runs every cell in a new kernel, and rewrites the file with its outputs. Raises the error of a failing cell."""
    import nbformat
    from nbclient import NotebookClient

    notebook = nbformat.read(path, as_version=4)
    with tempfile.TemporaryDirectory() as folder:
        os.environ.update(QUIET, TMPDIR=folder)
        NotebookClient(
            notebook, timeout=1800, kernel_name="python3", resources={"metadata": {"path": folder}}
        ).execute()
    for cell in notebook.cells:
        cell.metadata = {}  # else the times of execution
        for output in cell.get("outputs", []):
            if output.output_type == "stream" and output.name == "stderr":
                raise SystemExit(f"{path.name}: a cell writes to stderr: {output.text}")
            if "image/png" in output.get("data", {}):
                output.data["image/png"] = smaller_png(output.data["image/png"])
                output.data.pop("text/plain", None)  # <Figure size ...>
            output.get("data", {}).pop("text/html", None)  # a table is in text/plain, too
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    notebook.metadata = {
        "kernelspec": kernel,
        "language_info": {"name": "python"},
        "octjepa": {"executed_code_sha256": source_hash(notebook.cells)},
    }
    text = nbformat.writes(notebook, indent=1)
    path.write_text(text + "\n", encoding="utf-8")
    print(f"{path.name}: {len(text) / 1024:.0f} kB")


if __name__ == "__main__":
    for chosen in map(Path, sys.argv[1:] or map(str, sorted(FOLDER.glob("*.ipynb")))):
        execute(chosen)
