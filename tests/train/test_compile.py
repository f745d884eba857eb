"""Compiled blocks compute the same, save their usual names, and a missing compiler is said before the first update."""

from __future__ import annotations

import shutil
import subprocess
import sys

import pytest
import torch

from octjepa.distributed.runtime import check_compiler
from octjepa.errors import UsageError
from ranks import PYTHONPATH

pytestmark = pytest.mark.slow

# In a process of its own: torch's compiler cannot trace the shape checks that tests put around every function.
RUN = """
import sys
from pathlib import Path
import torch
from octjepa.checkpoint import folder
from octjepa.train.loop import pretrain
from synthetic import MemoryStore, small_recipe

torch.set_num_threads(1)
torch._dynamo.config.error_on_recompile = False
weights = []
for compiled in (False, True):
    recipe = small_recipe(
        train={"max_updates": 3, "global_batch": 4, "base_lr": 1e-3, "precision": "fp32"},
        machine={"compile": compiled}, monitor={"every_updates": 1},
    )
    out = Path(sys.argv[1]) / str(compiled)
    pretrain(recipe, MemoryStore(recipe.preprocessing), out)
    weights.append(folder.read_tensors(folder.list_checkpoints(out / "checkpoints")[-1], "model.safetensors"))
plain, built = weights
assert plain.keys() == built.keys()
worst = max(float((plain[name] - built[name]).abs().max()) for name in plain)
assert worst < 2e-4, worst
graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
assert 0 < graphs <= 4, graphs
print("compiled", graphs)
"""


@pytest.mark.skipif(shutil.which("g++", path="/usr/bin:/bin") is None, reason="builds kernels with g++")
def test_compiled_blocks_train_the_same_model_and_are_built_for_training_alone(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", RUN, str(tmp_path)],
        env={
            "PYTHONPATH": PYTHONPATH,
            "PATH": "/usr/bin:/bin",
            "TORCHINDUCTOR_CACHE_DIR": str(tmp_path / "kernels"),
            "TORCHINDUCTOR_COMPILE_THREADS": "1",
        },  # a pool of compilers imports torch once more
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert "compiled" in done.stdout


def test_without_a_compiler_the_run_reports_so_before_it_starts(monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.raises(UsageError, match=r"machine.compile=true needs a C\+\+ compiler.*no-such-compiler"):
        check_compiler(torch.device("cpu"))
    check_compiler(torch.device("cuda"))
    monkeypatch.setenv("CXX", sys.executable)
    check_compiler(torch.device("cpu"))
