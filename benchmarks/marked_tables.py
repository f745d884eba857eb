"""A table that a script writes into a page, between `<!-- NAME -->` and `<!-- end -->`."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path


def table(head: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """Markdown: a line for `head`, a line for each row."""
    return "\n".join("| " + " | ".join(map(str, row)) + " |" for row in [head, ["---"] * len(head), *rows])


def replace_marked(page: Path, name: str, content: str) -> None:
    """Puts `content` between the marks. Raises ValueError where the page has no such marks."""
    pattern = re.compile(rf"(<!-- {re.escape(name)} -->\n).*?(<!-- end -->)", re.DOTALL)
    text, count = pattern.subn(lambda found: f"{found[1]}{content}\n{found[2]}", page.read_text(encoding="utf-8"))
    if count != 1:
        raise ValueError(f"{page} has {count} marks <!-- {name} -->, expected one")
    page.write_text(text, encoding="utf-8")
