"""Finds person ids that two people share: files under one id that contradict each other about who is shown.

In: the index entry of each volume, and the person that its file states. Out: the contradicted ids, with the kinds of
contradiction. Two clinics count their patients from 1, and exports replace ids by 1111. Names, dates and sex stay in
memory while an ingest runs; only the note `person_contradicted=KINDS` is stored, which quotes none of them.

Names without a common word, birth dates of two years and two sexes contradict each other. One person may have both eyes
and be scanned by several devices and clinics, so devices and institutions count only together with such a
contradiction. They also count if the id is one that exports write for everyone (1111, 1234) and no name or birth date
is stated.
"""

from __future__ import annotations

import re
from collections import defaultdict
from typing import Final

from octjepa.read.personal_data import StatedPerson, is_placeholder, words
from octjepa.store.index import IndexEntry

_NO_DATES = {"19000101", "19010101", "00000000", "11111111", "99991231", "99999999"}  # that stand for none
_SEXES = {"m": "M", "male": "M", "1": "M", "f": "F", "female": "F", "2": "F", "w": "F"}  # numbers as in ISO 5218
_FOR_EVERYONE = re.compile(r"(.)\1{2,}|0*1234(5(6(7(8(9)?)?)?)?)?")
CONTRADICTED_NOTE: Final = "person_contradicted"
CONTRADICTION_KINDS: Final = ("names", "birth_years", "sex", "devices", "sites")
ABOUT_PERSON: Final = frozenset({"names", "birth_years", "sex"})


class PersonClaims:
    """The people, devices and institutions that the files of each person id state."""

    def __init__(self) -> None:
        self._names: defaultdict[str, set[frozenset[str]]] = defaultdict(set)
        self._others: dict[str, defaultdict[str, set[str]]] = {
            kind: defaultdict(set) for kind in CONTRADICTION_KINDS[1:]
        }

    def learn(self, entry: IndexEntry, person: StatedPerson) -> None:
        """The file of the index entry `entry` states `person`. Empty texts and placeholders say nothing."""
        person_id = entry.person_id
        parts = frozenset(word for word in words(person.name) if not word.isdigit() and not is_placeholder(word))
        if parts and not is_placeholder(person.name):
            self._names[person_id].add(parts)
        digits = re.sub(r"\D", "", person.birth_date)
        born = digits[:4] if len(digits) == 8 and digits not in _NO_DATES else ""
        stated = {
            "birth_years": born,
            "sex": _SEXES.get(person.sex.strip().lower(), ""),
            "devices": "" if entry.device == "unknown" else entry.device,
            "sites": entry.site,
        }
        for kind, value in stated.items():
            if value:
                self._others[kind][person_id].add(value)

    def contradictions(self) -> dict[str, tuple[str, ...]]:
        """The kinds of contradiction, in the order of `CONTRADICTION_KINDS`, by contradicted person id."""
        contradictions: defaultdict[str, set[str]] = defaultdict(set)
        for person_id, names in self._names.items():
            if any(not name & other for name in names for other in names):
                contradictions[person_id].add("names")
        for kind in ("birth_years", "sex"):
            for person_id, values in self._others[kind].items():
                if len(values) > 1:
                    contradictions[person_id].add(kind)
        for kind in ("devices", "sites"):
            for person_id, values in self._others[kind].items():
                if len(values) > 1 and (person_id in contradictions or self._is_for_everyone(person_id)):
                    contradictions[person_id].add(kind)
        return {
            person_id: tuple(k for k in CONTRADICTION_KINDS if k in kinds)
            for person_id, kinds in contradictions.items()
        }

    def _is_for_everyone(self, person_id: str) -> bool:
        """Whether exports write this id for everyone, and no file names the person or the birth year."""
        named = self._names.get(person_id) or self._others["birth_years"].get(person_id)
        return not named and _FOR_EVERYONE.fullmatch(person_id) is not None
