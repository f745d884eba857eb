"""The verdict at the top of the page.

For a pretraining or a demo it answers three separate questions: did the software work, did this training teach
something, and what to do next. For other folders it is one word for all results. Input are the results and faults that
the page shows below.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from octjepa.metrics.findings import FEWEST_TEST_PEOPLE, Fault
from octjepa.report.contents import Contents
from octjepa.report.headlines import Headline

Word = Literal["healthy", "suspicious", "broken", "not known", "too small to conclude"]
# Faults of a test set that is too small, while nothing is wrong with the software or the training.
SMALL_FAULTS = {"few_to_choose_by", "rare_class", "class_never_said"}
# A test set of few people lacks a site or a device by chance.
_SMALL_BY_CHANCE = {"one_sided_group"}


@dataclass(frozen=True)
class Answer:
    """A question about a pretraining, its answer in a few words, and the results behind the answer.

    commands: to copy, in this order.
    """

    question: str
    answer: str
    reasons: tuple[str, ...] = ()
    commands: tuple[str, ...] = ()


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
    training = _training_answer(headlines, faults)
    if contents.kind not in ("run", "demo"):
        return verdict
    return replace(
        verdict,
        answers=(_software_answer(contents, verdict), training, _next_answer(contents, verdict, training, headlines)),
    )


def _one_word(contents: Contents, headlines: Sequence[Headline], faults: Sequence[Fault]) -> OverallVerdict:
    """One word for all results together."""
    few_people = any(headline.too_few_people for headline in headlines)
    small_faults = SMALL_FAULTS | (_SMALL_BY_CHANCE if few_people else set())
    broken = [fault.what for fault in faults if fault.kind not in small_faults]
    broken += _training_faults(contents)
    broken += [
        _reason(headline) for headline in headlines if headline.title == "Files read" and headline.verdict == "bad"
    ]
    if broken:
        return OverallVerdict(
            "broken", "Do not use these results until the following problems are fixed.", tuple(dict.fromkeys(broken))
        )
    if faults or few_people:
        sentence = "Too few people have these labels. Collect more labelled people before you draw a conclusion."
        small = [_reason(headline) for headline in headlines if headline.too_few_people]
        reasons = tuple(dict.fromkeys(fault.what for fault in faults)) or tuple(small)
        return OverallVerdict("too small to conclude", sentence, reasons)
    weak = [headline for headline in headlines if headline.verdict in ("bad", "open")]
    if weak:
        sentence = "The software ran without a problem. The following results do not hold or are not shown."
        return OverallVerdict("suspicious", sentence, tuple(map(_reason, weak)))
    unmeasured = [headline for headline in headlines if headline.verdict == "none"]
    if unmeasured:
        sentence = "No measured result fails, but the following results are missing."
        return OverallVerdict("not known", sentence, tuple(check.title for check in unmeasured))
    sentence = "Every result holds."
    if any(headline.over_strongest for headline in headlines):
        sentence = "Every result holds, including the comparison with the strongest baseline."
    return OverallVerdict("healthy", sentence, tuple(_reason(headline) for headline in headlines))


def _software_answer(contents: Contents, verdict: OverallVerdict) -> Answer:
    """Whether every stage ran correctly; what was learned plays no part."""
    question = "Did the software work?"
    if verdict.word == "broken":
        return Answer(question, "No. Do not use the results until the following problems are fixed.", verdict.reasons)
    run = contents.run
    stages = {
        "the store": contents.store,
        "the run" if run is None else "the end of the training": None if run is None else run.summary,
        "the embeddings": contents.embeddings,
        "the probe": contents.probe,
    }
    missing = [name for name, part in stages.items() if part is None]
    if missing:  # parts that no check has seen
        text = f"No check found a problem, but these did not run or cannot be read: {', '.join(missing)}."
        return Answer(question, text)
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
        if unmeasured := [result.title for result in results if result.verdict == "none"]:
            text = f"In part. What was measured holds; not measured: {', '.join(unmeasured)}."
            return Answer(question, text, reasons)
        return Answer(question, "Yes. Every comparison below holds.", reasons)
    if any(check.verdict == "good" for check in measured):
        return Answer(question, "In part. Some of the comparisons below hold.", reasons)
    return Answer(question, "Not shown. None of the comparisons below holds.", reasons)


def _next_answer(
    contents: Contents, verdict: OverallVerdict, training: Answer, headlines: Sequence[Headline]
) -> Answer:
    """The next step of a user, with its commands: fix, measure, add people, train longer, or compare."""
    question, root = "What to do next?", contents.root.name or "RUN"
    run, table, probe = map(shlex.quote, (root, f"{root}/embeddings.parquet", f"{root}/probe.json"))
    if verdict.word == "broken":
        return Answer(question, "Fix the problems above, then make this page again.")
    if contents.embeddings is None:
        commands: tuple[str, ...] = (f"octjepa embed {run} --store STORE --out {table}",)
        return Answer(
            question, "Embed the store, so that a probe can compare the encoder with baselines.", (), commands
        )
    if contents.probe is None:
        commands = (
            f"octjepa probe {table} --labels LABELS --target TARGET --out {probe}",
            f"octjepa report {run}",
        )
        return Answer(question, "Compare the encoder with baselines on your labels.", (), commands)
    if any(headline.too_few_people for headline in headlines):
        text = f"Label more people, until at least {FEWEST_TEST_PEOPLE} of them are test people."
        return Answer(question, text, (), ("octjepa split STORE --by stratified --shares 0.6,0.1,0.3",))
    if verdict.word in ("healthy", "not known") and not training.answer.startswith("Unknown"):  # nothing fails
        commands = (f"octjepa leaderboard {run} phantom-unet --store STORE --labels LABELS --target TARGET",)
        return Answer(question, "Compare the encoder with others, or fine-tune it.", (), commands)
    text = "Train longer (train.max_updates) or on more people. The packaged encoder needs no training."
    commands = ("octjepa embed phantom-unet --store STORE --out embeddings.parquet",)
    return Answer(question, text, (), commands)


def _reason(headline: Headline) -> str:
    words = {"good": "holds", "open": "is not shown", "bad": "fails", "none": "was not measured"}
    value = "" if headline.verdict == "none" else f": {headline.figure}"
    return f"{headline.title} {words[headline.verdict]}{value}"


def _training_faults(contents: Contents) -> list[str]:
    """Problems in the metrics of a pretraining: a loss that is not finite, alarms of the last evaluation."""
    if contents.run is None:
        return []
    losses: list[Any] = [line["train/loss"] for line in contents.run.lines if line.get("train/loss") is not None]
    faults = ["the last loss is not finite"] if losses and not math.isfinite(float(losses[-1])) else []
    monitored = contents.run.lines_with("monitor/lidar")
    alarms = monitored[-1].get("alarms", {}) if monitored else {}
    return faults + [f"alarm of the monitor at its last evaluation: {name.replace('_', ' ')}" for name in alarms]
