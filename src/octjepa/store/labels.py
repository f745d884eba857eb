"""Labels that came in the scans' files: kept in the index row as JSON, written out as labels.tsv for `octjepa probe`.

labels.tsv has a row per labelled volume: volume_id, person_id, eye, then a column per label; empty where a volume has
none. It is made anew whenever the index is.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Mapping
from typing import Any

LABELS_FILE = "labels.tsv"
KEYS = ("volume_id", "person_id", "eye")


def labels_text(labels: Mapping[str, float | str]) -> str:
    """The labels of one volume as the index keeps them; "" for none."""
    return json.dumps(dict(labels), sort_keys=True, allow_nan=False) if labels else ""


def labels_of(row: Mapping[str, Any]) -> dict[str, float | str]:
    """The labels of an index row; the first indexes have no such column."""
    text = row.get("labels")
    found: dict[str, float | str] = json.loads(text) if isinstance(text, str) and text else {}
    return found


def labels_table(rows: Iterable[Mapping[str, Any]]) -> str:
    """The text of labels.tsv, sorted by volume; "" where no row has a label. A label called like a key gets a "_"."""
    labelled = {str(row["volume_id"]): (row, labels) for row in rows if (labels := labels_of(row))}
    if not labelled:
        return ""
    names = sorted({name for _, labels in labelled.values() for name in labels})
    table = io.StringIO()
    writer = csv.writer(table, delimiter="\t", lineterminator="\n")
    writer.writerow([*KEYS, *(f"{name}_" if name in KEYS else name for name in names)])
    for _, (row, labels) in sorted(labelled.items()):
        values = [labels.get(name, "") for name in names]
        shown = [f"{value:.12g}" if isinstance(value, float | int) else value for value in values]
        writer.writerow([*(str(row[key]) for key in KEYS), *shown])
    return table.getvalue()
