"""docs/capabilities.md stays honest: a row per requirement, and what is said to work has a command and a test."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
TABLE = ROOT / "docs" / "capabilities.md"
TESTS = ROOT / "tests" / "capabilities.json"  # requirement -> the tests that hold it
REQUIREMENTS = [f"R{number}" for number in range(1, 31)]
# What an unfinished row waits for; docs/capabilities.md explains it.
THEMES = {"training anywhere"}


def rows() -> dict[str, list[list[str]]]:
    """Requirement -> the cells after its id, of every row that it has."""
    found: dict[str, list[list[str]]] = {}
    for line in TABLE.read_text(encoding="utf-8").splitlines():
        if re.match(r"\|\s*R\d+\s*\|", line):
            number, *cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
            found.setdefault(number, []).append(cells)
    return found


def state_of(cells: list[str]) -> tuple[str, str]:
    """('works' | 'partly' | 'planned', theme that finishes it or '')."""
    state, _, theme = cells[1].partition(": ")
    return state, theme


def only_row(requirement: str) -> list[str]:
    return rows()[requirement][0]


def test_every_requirement_has_exactly_one_row_in_order() -> None:
    assert list(rows()) == REQUIREMENTS
    assert {requirement: len(found) for requirement, found in rows().items()} == dict.fromkeys(REQUIREMENTS, 1)


def test_a_row_says_what_and_in_which_state() -> None:
    for requirement in REQUIREMENTS:
        cells = only_row(requirement)
        assert len(cells) == 3, "columns: id | what | state | command"
        assert len(cells[0]) > 20, requirement
        state, theme = state_of(cells)
        assert state in {"works", "partly", "planned"}, requirement
        assert (theme in THEMES) == (state != "works"), f"{requirement}: {state} names a theme unless it works"


def test_what_works_has_a_command_that_exists(cli_commands: dict[str, Any], make_targets: set[str]) -> None:
    for requirement in REQUIREMENTS:
        cells = only_row(requirement)
        commands = re.findall(r"`([^`]+)`", cells[2])
        planned = state_of(cells)[0] == "planned"
        assert bool(commands) != planned, f"{requirement}: name the command that shows it, none where it is planned"
        for command in commands:
            program, verb = command.split()[:2]
            known = {"octjepa": set(cli_commands), "make": make_targets}[program]
            assert verb in known, f"`{command}` does not exist"


def functions_in(path: Path) -> set[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.ClassDef)}


def test_what_works_has_tests_that_exist() -> None:
    tests_of = json.loads(TESTS.read_text(encoding="utf-8"))
    assert set(tests_of) <= set(REQUIREMENTS)
    for requirement in REQUIREMENTS:
        tests = tests_of.get(requirement, [])
        planned = state_of(only_row(requirement))[0] == "planned"
        assert bool(tests) != planned, f"{requirement}: name the tests that hold it, none where it is planned"
        for test in tests:
            file, *nodes = test.split("::")
            assert (ROOT / file).is_file(), f"{requirement}: {file} does not exist"
            assert set(nodes) <= functions_in(ROOT / file), f"{requirement}: {test} does not exist"
