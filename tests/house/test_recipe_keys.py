"""Every key of a recipe is read by the code: a key that nothing reads would be a promise nobody keeps."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from pydantic import BaseModel

from octjepa.recipe import Recipe


def keys_of(model: type[BaseModel]) -> list[tuple[str, str]]:
    """(section, key) of every leaf key below `model`."""
    keys = []
    for name, field in model.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            keys += [(name, key) for _, key in keys_of(field.annotation)]
        else:
            keys.append(("", name))
    return keys


def attributes_read(tree: ast.AST) -> set[str]:
    return {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)}


@pytest.fixture(scope="module")
def read_by_the_code(root: Path) -> set[str]:
    """Attribute names read in src outside the recipe package, and those that its own used properties read."""
    source = root / "src" / "octjepa"
    read: set[str] = set()
    for path in source.rglob("*.py"):
        if source / "recipe" not in path.parents:
            read |= attributes_read(ast.parse(path.read_text(encoding="utf-8")))
    recipe_trees = [ast.parse(path.read_text(encoding="utf-8")) for path in (source / "recipe").glob("*.py")]
    properties = {
        node.name: attributes_read(ast.Module(body=node.body, type_ignores=[]))
        for recipe_tree in recipe_trees
        for node in ast.walk(recipe_tree)
        if isinstance(node, ast.FunctionDef) and any(ast.unparse(mark) == "property" for mark in node.decorator_list)
    }
    grown = True
    while grown:  # a property may read another one
        before = len(read)
        for name, reads in properties.items():
            if name in read:
                read |= reads
        grown = len(read) > before
    return read


def test_the_code_reads_every_key(read_by_the_code: set[str]) -> None:
    unreadable = [".".join(pair).lstrip(".") for pair in keys_of(Recipe) if pair[1] not in read_by_the_code]
    assert not unreadable, f"no code outside octjepa.recipe reads {unreadable}: use them or take them out"
