"""The notebooks run from top to bottom, offline, within a minute, and are kept without outputs."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

NOTEBOOKS = sorted((Path(__file__).resolve().parents[2] / "notebooks").glob("*.ipynb"))

# What a kernel does: every cell in one namespace, the value of a last expression shown.
RUN = """
import ast, json, sys
space = {"__name__": "__main__"}
for number, cell in enumerate(json.load(open(sys.argv[1], encoding="utf-8"))["cells"]):
    if cell["cell_type"] != "code":
        continue
    tree = ast.parse("".join(cell["source"]))
    last = tree.body.pop() if tree.body and isinstance(tree.body[-1], ast.Expr) else None
    exec(compile(tree, f"cell {number}", "exec"), space)
    if last is not None:
        print(eval(compile(ast.Expression(last.value), f"cell {number}", "eval"), space))
"""


def test_there_are_notebooks() -> None:
    assert [path.name for path in NOTEBOOKS] == ["01_read_a_volume.ipynb", "02_embeddings_and_a_probe.ipynb"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_is_a_notebook_without_outputs(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert not re.search(r"/(?:home|root|work|Users|mnt)/", text), "a place on one machine"
    result = json.loads(text)
    assert set(result) == {"cells", "metadata", "nbformat", "nbformat_minor"}
    assert (result["nbformat"], result["nbformat_minor"]) == (4, 5)
    assert result["metadata"]["kernelspec"]["name"] == "python3"
    assert len({cell["id"] for cell in result["cells"]}) == len(result["cells"])
    for cell in result["cells"]:
        assert cell["cell_type"] in {"markdown", "code"}
        assert all(isinstance(line, str) for line in cell["source"])
        if cell["cell_type"] == "code":
            assert (cell["outputs"], cell["execution_count"]) == ([], None)
    assert result["cells"][0]["cell_type"] == "markdown"


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_it_runs_from_top_to_bottom(path: Path, tmp_path: Path) -> None:
    closed = {"http_proxy": "http://127.0.0.1:9", "https_proxy": "http://127.0.0.1:9", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [sys.executable, "-W", "error::FutureWarning", "-c", RUN, str(path)],
        cwd=tmp_path,
        env={**os.environ, **closed, "MPLBACKEND": "Agg", "OMP_NUM_THREADS": "1", "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip()
