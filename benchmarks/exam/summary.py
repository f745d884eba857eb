"""The summary of the first exam, the first table of rows.md: `phantom-tiny` and two baselines, in eight rows.

In go the results of the exam and of the sealed exam. Questions that the sealed cohort answers are answered with it,
because no choice was made with its people. The packaged encoders of today are on the front page (`front.py`).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from octjepa.evaluate.results import RecipePaired

from .results import UNTRAINED, Results, RowName, compare, digits_of
from .training import plan_in_package

INTENSITY = "intensity"
NAMES = {INTENSITY: "intensity", UNTRAINED: "random initialisation"}


@dataclass(frozen=True)
class Question:
    """A row of the table. number: the question it belongs to. key: its metric, in the sealed cohort if `sealed`."""

    number: int
    text: str
    key: str
    sealed: bool = True

    @property
    def lower_is_better(self) -> bool:
        """Whether the metric is an error."""
        return "error_um" in self.key


QUESTIONS = (
    Question(1, "tokens with a lesion, 30 labelled eyes; average precision", "token_lesion/token_ap/30"),
    Question(1, "eyes with a lesion, 30 labelled people; AUROC", "eye_lesion/auroc/30"),
    Question(2, "depth of four surfaces, 30 labelled eyes; mean error in um", "surfaces/error_um/30"),
    Question(2, "area of atrophy, 100 labelled people; R2", "severity/r2_atrophy_mm2/100"),
    Question(3, "fine-tuned, 30 labelled people; AUROC", "tuning/auroc/30", sealed=False),
    Question(3, "fine-tuned, 30 labelled people; Dice", "tuning_segmentation/dice/30", sealed=False),
    Question(4, "fluid in two real eyes, linear; average precision", "real_fluid/ap/1", sealed=False),
    Question(4, "fluid in two real eyes, decoder; Dice", "real_fluid_decoder/dice/1", sealed=False),
)


def summary_table(results: Results, sealed: Results) -> str:
    """The rows of `QUESTIONS` as a table in Markdown."""
    lines = [
        "| | task and metric | phantom-tiny | intensity | random initialisation | phantom-tiny is |",
        "|---" * 6 + "|",
    ]
    for question in QUESTIONS:
        source = sealed if question.sealed else results
        texts = [_text(source, name, question.key) for name in ("encoder", INTENSITY, UNTRAINED)]
        lines.append(f"| {question.number} | {question.text} | {' | '.join(texts)} | {answer(source, question)} |")
    return "\n".join(lines)


def answer(results: Results, question: Question) -> str:
    """Whether the encoder is better than each baseline: the interval of the paired difference excludes zero."""
    better, measured = [], 0
    for baseline in (INTENSITY, UNTRAINED):
        difference = _difference(results, baseline, question.key)
        if difference is None:
            continue
        measured += 1
        limit = difference.high if question.lower_is_better else difference.low
        if limit is not None and (limit < 0 if question.lower_is_better else limit > 0):
            better.append(NAMES[baseline])
    if not measured:
        return "not compared"
    if len(better) == measured:
        return "better than both" if measured > 1 else f"better than {better[0]}"
    return f"better than {better[0]} only" if better else "not clearly better"


def _difference(results: Results, baseline: str, key: str) -> RecipePaired | None:
    rows = sorted(_rows(results, "encoder", key), key=lambda row: row.seed)
    others = _rows(results, baseline, key)
    pairs = []
    for row in rows:
        same = [other for other in others if other.patch == row.patch]
        other = next((other for other in same if other.seed == row.seed), same[0] if len(same) == 1 else None)
        if other is not None:
            pairs.append((row, other))
    if not pairs:
        return None
    return compare(results, [row for row, _ in pairs], [other for _, other in pairs], key)


def _rows(results: Results, name: str, key: str) -> list[RowName]:
    return list(results.values(plan_in_package().name if name == "encoder" else name, key))


def _text(results: Results, name: str, key: str) -> str:
    """The mean over seeds; "-" if there is no value."""
    values = [results.value(row, key) for row in _rows(results, name, key)]
    return f"{np.mean([value for value in values if value is not None]):.{digits_of(key)}f}" if values else "-"
