"""Words that were replaced by the field's do not come back as identifiers."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CODE = [path for folder in ("src", "tests", "benchmarks") for path in sorted((ROOT / folder).rglob("*.py"))]
# Retired word -> what to write instead.
RETIRED = {
    "told": "broadcast, findings, message, summary",
    "tell": "print, log, report, describe",
    "said": "output, message, header_fields",
    "asked": "requested, targets, the name of the thing",
    "kept": "retained, selected",
    "judge": "evaluate, score, check",
    "judged": "evaluated, scored",
    "judgement": "validation, evaluation",
    "learnt": "learned, trained",
    "dealt": "sharded, assigned",
    "unfit": "skipped",
    "lineup": "alignment",
    "likeness": "similarity, near_duplicates",
    "crew": "worker_pool",
    "steepness": "slope",
    "fading": "distance_weight",
    "founding": "reference",
    "hopeless": "what is computed",
    "lively": "what is computed",
    "strangers": "what is computed",
    "grey": "intensity",
    "membrane": "retinal surface (a membrane is a disease)",
    "membranes": "retinal surfaces",
    "arm": "objective",
    "arms": "objectives",
    "lit": "intensity",
    "soften": "blur",
    "upright": "orientation",
    "pace": "throughput",
    "trail": "metrics buffer",
    "unread": "unreadable",
    "place": "position, location, path",
    "places": "positions",
}


def identifiers(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """(line, name) of everything that the file names: definitions, arguments, variables, attributes, keywords."""
    for node in ast.walk(tree):
        line = getattr(node, "lineno", 0)
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield line, node.name
        elif isinstance(node, ast.arg):
            yield line, node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield line, node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield line, node.attr
        elif isinstance(node, ast.alias) and node.asname:
            yield line, node.asname


def words(name: str) -> list[str]:
    """Parts of an identifier in lower case: `MaskedTokens_left` -> masked, tokens, left."""
    return [part.lower() for part in re.findall(r"[A-Z]?[a-z0-9]+|[A-Z]+(?![a-z])", name)]


def test_no_identifier_holds_a_retired_word() -> None:
    found = []
    for path in CODE:
        if path == Path(__file__):
            continue
        name_of = path.relative_to(ROOT).as_posix()
        names = [(0, path.stem), *identifiers(ast.parse(path.read_text(encoding="utf-8")))]
        for line, name in names:
            if "epiretinal" in words(name):
                continue
            found += [f"{name_of}:{line} {name}: write {RETIRED[word]}" for word in words(name) if word in RETIRED]
    assert not found, f"{len(found)} identifiers:\n" + "\n".join(sorted(set(found)))
