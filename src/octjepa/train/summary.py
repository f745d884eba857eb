"""The summary of a finished pretraining run: `summary.json`, read by the report, the demo and `octjepa inspect`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from octjepa.files import write_json
from octjepa.record import Record
from octjepa.train.run_folder import SUMMARY, read_run_file


@dataclass(frozen=True)
class ValidationSummary(Record):
    """Metrics of a validation on fixed samples; baseline_*: the same metric of each baseline, by name."""

    loss: float
    cosine: float
    baseline_cosine: Mapping[str, float]
    baseline_loss: Mapping[str, float]


@dataclass(frozen=True)
class RunSummary(ValidationSummary):
    """A finished run: its last validation, with the views of the recipe and with centred views, and what it took.

    validated_on: val, or train_fixed if no person is held out. encoder: the exported one, target or student. volumes:
    of training. seconds, volumes_per_second, data_wait_share: of this start. alarms: update by name. best, checkpoint:
    names of checkpoints, None if there is none; `checkpoint` is relative to the run folder.
    """

    updates: int
    validated_on: str
    centred: ValidationSummary
    rankme: float
    encoder: str
    volumes: int
    unreadable_volumes: int
    volumes_per_second: float
    data_wait_share: float
    seconds: float
    skipped_updates: int
    alarms: Mapping[str, int]
    best: str | None
    checkpoint: str | None
    KEYS: ClassVar[tuple[str, ...]] = (
        *("updates", "validated_on", "loss", "cosine", "baseline_cosine", "baseline_loss", "centred", "rankme"),
        *("encoder", "volumes", "unreadable_volumes", "volumes_per_second", "data_wait_share", "seconds"),
        *("skipped_updates", "alarms", "best", "checkpoint"),
    )

    def write(self, out: Path) -> None:
        """Writes the summary into the run folder."""
        write_json(out / SUMMARY, self.to_json())


def read_summary(out: Path) -> RunSummary:
    """The summary of a finished run. Raises OctjepaError: damaged."""
    return RunSummary.from_json(read_run_file(out / SUMMARY))


def validation_summary(result: Mapping[str, float]) -> ValidationSummary:
    """The metrics of a validation that are in a run's summary."""
    return ValidationSummary(
        result["loss"], result["cosine"], _with_prefix(result, "baseline/"), _with_prefix(result, "baseline_loss/")
    )


def _with_prefix(values: Mapping[str, float], prefix: str) -> dict[str, float]:
    return {key.removeprefix(prefix): value for key, value in values.items() if key.startswith(prefix)}
