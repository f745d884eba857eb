"""docs/peer_matrix.md stays true: fifty rows, a state in each, and a test or page that exists behind it."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "peer_matrix.md"


def rows() -> list[list[str]]:
    """The cells of every row: number, capability, state, where it is thread for, what shows it."""
    lines = PAGE.read_text(encoding="utf-8").splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if re.match(r"\| \d+ \|", line)]


def functions(file: Path) -> set[str]:
    """The names of a test file's functions."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


def test_there_are_fifty_rows_in_order_with_a_plain_state() -> None:
    assert [int(row[0]) for row in rows()] == list(range(1, 51))
    assert len({row[1] for row in rows()}) == 50
    for number, capability, state, thread, _ in rows():
        assert len(capability) > 15, number
        assert re.match(r"(yes|no)($|: )|in part: ", state), f"{number}: {state}"
        assert thread == "-" or re.fullmatch(r"\[[^]]+\]\(https://[^)]+\)", thread), f"{number}: {thread}"


def test_every_row_names_one_test_or_page_that_exists() -> None:
    for number, _, _, _, shown in rows():
        test, page = re.fullmatch(r"`(tests/[\w/]+\.py)::(\w+)`", shown), re.fullmatch(r"\[[^]]+\]\(([^)]+)\)", shown)
        if test:
            assert test[2] in functions(ROOT / test[1]), f"{number}: {shown}"
        else:
            assert page is not None, f"{number}: {shown}"
            assert (PAGE.parent / page[1]).is_file(), f"{number}: {shown}"


def test_what_works_has_a_test() -> None:
    for number, _, state, _, shown in rows():
        assert not state.startswith("yes") or shown.startswith("`tests/"), number
