"""Text from other people in the Markdown files that octjepa writes: the data card and the leaderboard.

In: names of rows, labels, people's columns and files, which may hold anything. Out: text that every reader of Markdown
shows as it is. A name could otherwise break a table, or bring HTML and links into a page that renders the file.
"""

from __future__ import annotations

import re
from typing import Final

_MARKUP: Final = re.compile(r"[\\|\[\]!*`#~]")


def escape_markdown(text: object) -> str:
    """`text` on one line, so that it is not read as Markdown or HTML."""
    escaped = _MARKUP.sub(r"\\\g<0>", " ".join(str(text).split()))
    return escaped.replace("&", "&amp;").replace("<", "&lt;")
