"""Typed results of a fine-tuning: what `results.json` holds, and what the report and `octjepa inspect` read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

from octjepa.evaluate.results import (
    CaseProtocol,
    Choice,
    Confusion,
    ProbePaired,
    Row,
    SubgroupResult,
    TargetSummary,
    TunedChoice,
    TunedPaired,
)
from octjepa.metrics.bootstrap import MeasuredValue
from octjepa.metrics.findings import Fault, TestSetUse
from octjepa.record import Record


@dataclass(frozen=True)
class TunedWithFewerLabels(Record):
    """Results of the network that was tuned with the labels of a number of training people; why targets lack them."""

    rows: tuple[Row, ...] = ()
    paired: tuple[TunedPaired, ...] = ()
    left_out: tuple[str, ...] = ()


@dataclass(frozen=True)
class FinetuneResult(Record):
    """Test results of a tuned network next to everything that it is compared with.

    summary: one line. metrics: of the tuned network, by metric. checkpoint, predictions, results: files. labelled: by
    number of labelled training people. The other fields are those of `evaluate.probe.ProbeResult`.
    """

    checkpoint: str
    rows: tuple[Row, ...]
    paired: tuple[TunedPaired, ...]
    summary: str = ""
    metrics: Mapping[str, MeasuredValue] = field(default_factory=dict)
    faults: tuple[Fault, ...] = ()
    notes: tuple[str, ...] = ()
    uses: tuple[TestSetUse, ...] = ()
    baselines: tuple[ProbePaired, ...] = ()
    choices: tuple[Choice | TunedChoice, ...] = ()
    confusions: tuple[Confusion, ...] = ()
    targets: tuple[TargetSummary, ...] = ()
    protocol: CaseProtocol | None = None
    labelled: Mapping[str, TunedWithFewerLabels] = field(default_factory=dict)
    subgroups: tuple[SubgroupResult, ...] = ()
    predictions: str = ""
    results: str = ""
    KEYS: ClassVar[tuple[str, ...]] = (
        *("summary", "metrics", "checkpoint", "paired", "faults", "notes", "uses", "rows", "baselines", "choices"),
        *("confusions", "targets", "protocol", "labelled", "subgroups", "predictions", "results"),
    )

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> FinetuneResult:
        """As `Record.from_json`; a choice is of an update, or of a probe's setting."""
        choices = tuple(_choice(choice) for choice in data.get("choices") or ())
        others = {key: value for key, value in data.items() if key != "choices"}
        return replace(super().from_json(others), choices=choices)

    def tuned_choice(self, name: str | None = None) -> TunedChoice | None:
        """The update whose weights were selected, of the network `name` or of the first."""
        tuned = (choice for choice in self.choices if isinstance(choice, TunedChoice))
        return next((choice for choice in tuned if name in (None, choice.name)), None)


def _choice(data: Mapping[str, Any]) -> Choice | TunedChoice:
    return TunedChoice.from_json(data) if "update" in data else Choice.from_json(data)
