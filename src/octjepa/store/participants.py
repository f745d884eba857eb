"""What participants tables say of people, kept once a person, and what two tables say differently."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any

PARTICIPANT_COLUMNS = ("person_id", "clinical_site", "study_group", "age", "recommended_split")
_log = logging.getLogger(__name__)


def merged_people(rows: Iterable[Mapping[Any, object]]) -> list[Mapping[Any, object]]:
    """One row a person, sorted by id; the last one counts. Warns where rows of one person differ."""
    merged: dict[str, Mapping[Any, object]] = {}
    changed = set()
    for row in rows:
        person = str(row["person_id"])
        before = merged.get(person, row)
        if any(str(before[key]) != str(row[key]) for key in PARTICIPANT_COLUMNS):
            changed.add(person)
        merged[person] = row
    if changed:
        _log.warning(
            "participants.tsv says otherwise than before of %d people (split, site, group or age): the later table "
            "counts. Splits that stand are kept; `octjepa split STORE --by recommended` follows the table. Two studies "
            "may use the same ids by chance: ingest them into stores of their own.",
            len(changed),
        )
    return [merged[person] for person in sorted(merged)]
