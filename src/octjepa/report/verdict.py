"""The verdict at the top of the page.

For a pretraining or a demo it answers two separate questions: did the software work, and did this training teach
something. For other folders it is one word for all results. Input are the results and faults that the page shows below.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from octjepa.metrics.findings import FEWEST_TEST_PEOPLE, Fault
from octjepa.report.contents import Contents
from octjepa.report.headlines import Headline

Word = Literal["healthy", "suspicious", "broken", "not known", "too small to conclude"]
# Faults of a test set that is too small, while nothing is wrong with the software or the training.
SMALL_FAULTS = {"few_to_choose_by", "rare_class", "class_never_said"}


@dataclass(frozen=True)
class Answer:
    """A question about a pretraining, its answer in a few words, and the results behind the answer."""

    question: str
    answer: str
    reasons: tuple[str, ...] = ()


@dataclass(frozen=True)
class OverallVerdict:
    """A word, the sentence that explains it, and the results behind it. `answers` only for a pretraining or a demo."""

    word: Word
    sentence: str
    reasons: tuple[str, ...]
    answers: tuple[Answer, ...] = ()


def overall_verdict(
    contents: Contents, headlines: Sequence[Headline], faults: Sequence[Fault]
) -> OverallVerdict | None:
    """The verdict on the results that the page shows below; None for a store.

    Broken: the metrics are not valid (a fault, a loss that is not finite, alarms of the last evaluation, lost files).
    Too small to conclude: the only faults are those of a small test set. Suspicious: a result fails or is not shown.
    Not known: a result was not measured. Healthy: every result was measured and holds.
    """
    if contents.kind == "store":
        return None
    verdict = _one_word(contents, headlines, faults)
    if contents.kind not in ("run", "demo"):
        return verdict
    return replace(verdict, answers=(_software_answer(verdict), _training_answer(headlines, faults)))


def _one_word(contents: Contents, headlines: Sequence[Headline], faults: Sequence[Fault]) -> OverallVerdict:
    """One word for all results together."""
    broken = [fault.what for fault in faults if fault.kind not in SMALL_FAULTS]
    broken += _training_faults(contents)
    broken += [
        _reason(headline) for headline in headlines if headline.title == "Files read" and headline.verdict == "bad"
    ]
    if broken:
        return OverallVerdict(
            "broken", "Do not use these results until the following problems are fixed.", tuple(dict.fromkeys(broken))
        )
    if faults:
        sentence = "Too few people have these labels. Collect more labelled people before you draw a conclusion."
        reasons = tuple(dict.fromkeys(fault.what for fault in faults))
        return OverallVerdict("too small to conclude", sentence, reasons)
    weak = [headline for headline in headlines if headline.verdict in ("bad", "open")]
    if weak:
        sentence = "The software ran without a problem. The following results do not hold or are not shown."
        return OverallVerdict("suspicious", sentence, tuple(map(_reason, weak)))
    unmeasured = [headline for headline in headlines if headline.verdict == "none"]
    if unmeasured:
        sentence = "No measured result fails, but the following results are missing."
        return OverallVerdict("not known", sentence, tuple(check.title for check in unmeasured))
    sentence = "Every result holds, including the comparison with the strongest baseline."
    return OverallVerdict("healthy", sentence, tuple(_reason(headline) for headline in headlines))


def _software_answer(verdict: OverallVerdict) -> Answer:
    """Whether every stage ran correctly; what was learned plays no part."""
    question = "Did the software work?"
    if verdict.word == "broken":
        return Answer(question, "No. Do not use the results until the following problems are fixed.", verdict.reasons)
    return Answer(question, "Yes. Every stage ran, and no check found a problem.")


def _training_answer(headlines: Sequence[Headline], faults: Sequence[Fault]) -> Answer:
    """Whether the encoder learned something; the results of the files and of packaged models play no part."""
    question = "Did this training teach something?"
    results = [headline for headline in headlines if headline.title not in ("Files read", "Packaged segmenter")]
    reasons = tuple(map(_reason, results))
    small = [fault for fault in faults if fault.kind in SMALL_FAULTS]
    if small or any(result.too_few_people for result in results):
        text = f"Unknown. There are too few test people to conclude anything; use at least {FEWEST_TEST_PEOPLE}."
        return Answer(question, text, reasons)
    measured = [result for result in results if result.verdict != "none"]
    if not measured:
        return Answer(question, "Unknown. It was not measured.", reasons)
    if all(check.verdict == "good" for check in measured):
        return Answer(question, "Yes. Every comparison below holds.", reasons)
    if any(check.verdict == "good" for check in measured):
        return Answer(question, "In part. Some of the comparisons below hold.", reasons)
    return Answer(question, "Not shown. None of the comparisons below holds.", reasons)


def _reason(headline: Headline) -> str:
    words = {"good": "holds", "open": "is not shown", "bad": "fails", "none": "was not measured"}
    return f"{headline.title} {words[headline.verdict]}: {headline.figure}"


def _training_faults(contents: Contents) -> list[str]:
    """Problems in the metrics of a pretraining: a loss that is not finite, alarms of the last evaluation."""
    if contents.run is None:
        return []
    losses: list[Any] = [line["train/loss"] for line in contents.run.lines if line.get("train/loss") is not None]
    faults = ["the last loss is not finite"] if losses and not math.isfinite(float(losses[-1])) else []
    monitored = contents.run.lines_with("monitor/lidar")
    alarms = monitored[-1].get("alarms", {}) if monitored else {}
    return faults + [f"alarm of the monitor at its last evaluation: {name.replace('_', ' ')}" for name in alarms]
