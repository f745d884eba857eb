"""Finds person ids that two people share: files under one id whose headers state different names or birth dates.

In: the person id of each volume, and the name and birth date that its file states. Out: the ids that are contradicted.
Two clinics count their patients from 1, and exports replace ids by 1111. Names and dates stay in memory while an ingest
runs; only the note `person_contradicted` is stored.
"""

from __future__ import annotations

import re
from collections import defaultdict

from octjepa.read.personal_data import is_placeholder, words

_NO_DATES = {"19000101", "19010101", "00000000", "11111111", "99991231", "99999999"}  # that stand for none
CONTRADICTED_NOTE = "person_contradicted"


class PersonClaims:
    """Who the files of each person id say that they show."""

    def __init__(self) -> None:
        self._names: defaultdict[str, set[frozenset[str]]] = defaultdict(set)
        self._births: defaultdict[str, set[str]] = defaultdict(set)

    def learn(self, person_id: str, name: str, birth_date: str) -> None:
        """A file of `person_id` states this name and birth date (YYYYMMDD); "" and placeholders say nothing."""
        parts = frozenset(word for word in words(name) if not word.isdigit())
        if parts and not is_placeholder(name) and not all(map(is_placeholder, parts)):
            self._names[person_id].add(parts)
        digits = re.sub(r"\D", "", birth_date)
        if len(digits) == 8 and digits not in _NO_DATES:
            self._births[person_id].add(digits)

    def contradicted(self) -> set[str]:
        """The ids with two names that share no word, or with birth dates of two years."""
        found = {
            person
            for person, names in self._names.items()
            if any(not name & other for name in names for other in names)
        }
        return found | {person for person, births in self._births.items() if len({born[:4] for born in births}) > 1}
