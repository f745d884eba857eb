"""Findings of a result in words: faults, which a reader must see before any number, and notes on left-out data."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from octjepa.record import Record

log = logging.getLogger(__name__)

# Results that use no trained encoder, in the order in which they are shown next to it.
BASELINES = ("untrained", "intensity", "histogram", "covariates", "majority")

# With fewer test people no statement is made: the exam leaves out such metrics as well (docs/exam).
FEWEST_TEST_PEOPLE = 20

# Every kind of fault, as its heading in print.
FAULT_KINDS = {
    "constant_predictor": "Constant predictor",
    "lost_group": "Lost site or device",
    "one_sided_group": "Site or device on one side of the split",
    "leaked_person": "Leaked people",
    "test_used_before": "Test set used before",
    "different_labels": "Different test volumes",
    "few_to_choose_by": "Few people to choose by",
    "class_never_said": "Class never found",
    "rare_class": "Class of few test people",
}


@dataclass(frozen=True)
class Fault(Record):
    """A fault that a reader must see before any value. kind: one of FAULT_KINDS; what: a sentence, without an id."""

    kind: str
    what: str


@dataclass(frozen=True)
class TestSetUse(Record):
    """looks: different uses of this test set, this one included. measured: different things measured in all of them.

    file: the ledger's.
    """

    __test__ = False  # not a test class, although its name begins like one

    target: str
    looks: int
    measured: int
    file: Path


@dataclass
class Findings:
    """faults: shown first in every output. notes: what was left out or degraded.

    uses: how often each test set was used; empty if no ledger was kept.
    """

    faults: list[Fault] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    uses: list[TestSetUse] = field(default_factory=list)

    def add_note(self, text: str) -> None:
        """Adds a note once and logs it."""
        if text and text not in self.notes:
            self.notes.append(text)
            log.warning("%s", text)

    def add_notes(self, texts: Iterable[str]) -> None:
        """Adds every note of `texts`."""
        for text in texts:
            self.add_note(text)

    def add_fault(self, kind: str, what: str) -> None:
        """Adds a fault once and logs it."""
        fault = Fault(kind, what)
        if fault not in self.faults:
            self.faults.append(fault)
            log.warning("%s: %s", FAULT_KINDS[kind], what)
