"""What a result says in words: faults, which a reader must see before any figure, and notes on what was left out."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Any

log = logging.getLogger(__name__)

# Rows that know nothing of an encoder, in the order in which they stand beside it.
BASELINES = ("untrained", "intensity", "histogram", "covariates", "majority")

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


@dataclass
class Findings:
    """faults: {kind, what}, kinds of KINDS, named first in every output. notes: what was left out or degraded.

    uses: how often each test set was looked at; empty where no ledger was kept.
    """

    faults: list[dict[str, str]] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    uses: list[dict[str, Any]] = field(default_factory=list)

    def add_note(self, text: str) -> None:
        """Keeps a note once and says it on the log."""
        if text and text not in self.notes:
            self.notes.append(text)
            log.warning("%s", text)

    def add_fault(self, kind: str, what: str) -> None:
        """Keeps a fault once and says it on the log."""
        fault = {"kind": kind, "what": what}
        if fault not in self.faults:
            self.faults.append(fault)
            log.warning("%s: %s", FAULT_KINDS[kind], what)
