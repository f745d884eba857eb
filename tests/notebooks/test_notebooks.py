"""The notebooks run from top to bottom, offline, within a minute, and are saved with the outputs of their code."""

from __future__ import annotations

import ast
import hashlib
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
def test_it_is_whole_and_holds_the_outputs_of_its_code(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    assert not re.search(r"/(?:home|root|work|Users|mnt|tmp|var)/", text), "a path of one machine"
    assert len(text) < 250_000
    notebook = json.loads(text)
    assert set(notebook) == {"cells", "metadata", "nbformat", "nbformat_minor"}
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    assert notebook["metadata"]["kernelspec"]["name"] == "python3"
    cells = notebook["cells"]
    assert len({cell["id"] for cell in cells}) == len(cells)
    assert cells[0]["cell_type"] == "markdown"
    assert all(isinstance(line, str) for cell in cells for line in cell["source"])
    code = [cell for cell in cells if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in code] == list(range(1, len(code) + 1)), "not run in one go"
    for cell in code:
        assert cell["metadata"] == {}
        assert all(output["output_type"] != "error" and output.get("name") != "stderr" for output in cell["outputs"])
        shows = isinstance(ast.parse("".join(cell["source"])).body[-1], ast.Expr)
        assert bool(cell["outputs"]) or not shows, "a cell that shows something was saved without its output"
    code_hash = hashlib.sha256(json.dumps(["".join(cell["source"]) for cell in code]).encode()).hexdigest()
    assert code_hash == notebook["metadata"]["octjepa"]["executed_code_sha256"], (
        "the code is newer than its outputs: run scripts/site/notebooks.py"
    )


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
