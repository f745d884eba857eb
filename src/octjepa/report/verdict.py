"""The verdict at the top of the page: one word for all results together, and the results it comes from."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from octjepa.metrics.findings import Fault
from octjepa.report.contents import Contents
from octjepa.report.headlines import Headline

Word = Literal["healthy", "suspicious", "broken", "not known"]


@dataclass(frozen=True)
class OverallVerdict:
    """A word, the sentence that says what it means here, and the results behind it."""

    word: Word
    sentence: str
    reasons: tuple[str, ...]


def overall_verdict(
    contents: Contents, headlines: Sequence[Headline], faults: Sequence[Fault]
) -> OverallVerdict | None:
    """Healthy, suspicious, broken or not known, from the results that the page shows below; None for a mere store.

    Broken: the figures cannot be believed (a fault, a loss that is no number, the monitor's last alarms, lost files).
    Suspicious: a result fails or is not shown, the strongest baseline among them. Healthy: every result was measured
    and holds. Not known: nothing is wrong, but a result was not measured.
    """
    if contents.kind == "store":
        return None
    broken = [fault.what for fault in faults]
    broken += _training_faults(contents)
    broken += [_reason(one) for one in headlines if one.title == "Files read" and one.verdict == "bad"]
    if broken:
        return OverallVerdict(
            "broken", "Do not use these results until the following problems are fixed.", tuple(broken)
        )
    weak = [one for one in headlines if one.verdict in ("bad", "open")]
    if weak:
        sentence = "It ran as it should, but it does not show that what was learned is worth having."
        return OverallVerdict("suspicious", sentence, tuple(map(_reason, weak)))
    unmeasured = [one for one in headlines if one.verdict == "none"]
    if unmeasured:
        sentence = "Nothing is wrong in what was measured; these results are missing."
        return OverallVerdict("not known", sentence, tuple(one.title for one in unmeasured))
    sentence = "Every result holds, also against the strongest baseline that was measured."
    return OverallVerdict("healthy", sentence, tuple(_reason(one) for one in headlines))


def _reason(headline: Headline) -> str:
    words = {"good": "holds", "open": "is not shown", "bad": "fails", "none": "was not measured"}
    return f"{headline.title} {words[headline.verdict]}: {headline.figure}"


def _training_faults(contents: Contents) -> list[str]:
    """What the journal of a pretraining says against it: a loss that is no number, alarms of its last evaluation."""
    if contents.run is None:
        return []
    losses: list[Any] = [line["train/loss"] for line in contents.run.lines if line.get("train/loss") is not None]
    faults = ["the last loss is no number"] if losses and not math.isfinite(float(losses[-1])) else []
    monitored = contents.run.lines_with("monitor/lidar")
    alarms = monitored[-1].get("alarms", {}) if monitored else {}
    return faults + [f"alarm of the monitor at its last evaluation: {name.replace('_', ' ')}" for name in alarms]
