"""Text tables (TSV and CSV) that people open in a spreadsheet: one writer that no cell can turn into a formula.

Ids, file names, labels and class names come from other people's files. A spreadsheet executes a cell that begins with
=, +, - or @, also in a table that another program wrote. So every table of octjepa is written by `format_table`, which
puts an apostrophe before such a cell; numbers stay as they are. Readers of octjepa's own tables remove it again
(`plain_cell`), so that ids match those of the store.
"""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Iterable, Sequence
from typing import Literal

_FORMULA = re.compile(r"\s*[=+\-@＝＋－＠]")
_NUMBER = re.compile(r"\s*[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?\s*")
_GUARDED = re.compile(r"'\s*[=+\-@＝＋－＠]")


def table_cell(value: object) -> str:
    """The text of a cell; "" for None and NaN, and an apostrophe before text that a spreadsheet would execute."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return ""
    if isinstance(value, float):
        return repr(float(value))  # NumPy's own text of a number differs
    text = str(value).replace("\r", "\n")  # the csv module does not quote a cell that holds a carriage return
    return f"'{text}" if _FORMULA.match(text) and not _NUMBER.fullmatch(text) else text


def plain_cell(text: str) -> str:
    """The text that `table_cell` was given, except for carriage returns."""
    return text[1:] if _GUARDED.match(text) else text


def format_table(columns: Sequence[str], rows: Iterable[Iterable[object]], delimiter: Literal["\t", ","] = "\t") -> str:
    """A header and a line per row. Cells that hold the delimiter, a quote or a line end are quoted."""
    text = io.StringIO(newline="")
    writer = csv.writer(text, delimiter=delimiter, lineterminator="\n")
    writer.writerow(map(table_cell, columns))
    writer.writerows(map(table_cell, row) for row in rows)
    return text.getvalue()
