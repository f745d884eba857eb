"""The measures of benchmarks/structure.py stay within their limits, and CONTRIBUTING.md shows them."""

from __future__ import annotations

import ast
from pathlib import Path

from benchmarks.structure import (
    LIMITS,
    WALKS,
    functions_with_many_parameters,
    measure,
    modules,
    run_time_imports_upwards,
    tree,
)

ROOT = Path(__file__).resolve().parents[2]


def test_no_measure_of_the_structure_grows() -> None:
    """A limit in benchmarks/structure_limits.json falls when the code improves; it never rises."""
    values = measure()
    over = {name: f"{values[name]}, at most {limit}" for name, limit in LIMITS.items() if values[name] > limit}
    assert not over, (over, functions_with_many_parameters(), run_time_imports_upwards())


def test_contributing_names_the_command_that_computes_them() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    assert "make structure" in text
    assert all(name in text for name in LIMITS)


def test_only_the_package_distributed_asks_whether_a_device_is_xla() -> None:
    """An algorithm that XLA needs in place of another is chosen in octjepa.distributed."""
    asking = {
        module
        for module in modules()
        for node in ast.walk(tree(module))
        if isinstance(node, ast.Constant) and node.value == "xla"
    }
    assert "octjepa.distributed.runtime" in asking
    assert {module for module in asking if not module.startswith("octjepa.distributed.")} == set()


def test_only_the_package_explain_computes_maps_of_an_encoder() -> None:
    """The report and the viewer draw what octjepa.explain computes."""
    computing = {"tokens", "embed", "select_tokens", "encode_volumes"}
    calls = {
        f"{module}:{node.lineno} {node.func.attr}"
        for module in modules()
        if module.startswith(("octjepa.report", "octjepa.viewer"))
        for node in ast.walk(tree(module))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in computing
    }
    assert not calls


def test_the_walks_name_functions_that_exist() -> None:
    for walk in WALKS.values():
        for name in (*walk.within, *walk.without):
            file, _, function = name.partition(":")
            parsed = tree(f"octjepa.{file.removesuffix('.py').replace('/', '.')}")
            owner, _, method = function.rpartition(".")
            classes = [node for node in ast.walk(parsed) if isinstance(node, ast.ClassDef) and node.name == owner]
            (holder,) = classes or [parsed]
            assert any(isinstance(node, ast.FunctionDef) and node.name == method for node in holder.body), name
