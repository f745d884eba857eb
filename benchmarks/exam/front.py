"""The first page of the exam: four questions, one plot, one table. It is written from the results alone.

In go the results of the exam and of the sealed exam, out come `README.md` and `summary.svg`. All rows are on the other
page (`page.py`). Questions that the sealed cohort answers are answered with it, because no choice was made with its
people.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from octjepa.evaluate.results import RecipePaired
from octjepa.files import write_atomic

from .results import SUPERVISED, UNTRAINED, Results, RowName, compare, digits_of
from .training import plan_in_package

if TYPE_CHECKING:
    from matplotlib.axes import Axes

TEMPLATE = Path(__file__).with_name("front.md")
INTENSITY = "intensity"
NAMES = {INTENSITY: "intensity", UNTRAINED: "random initialisation"}
COLORS = {INTENSITY: "0.55", UNTRAINED: "#c8a24a", "encoder": "#3458a8"}


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
PLOTTED = (0, 2, 4, 6)  # the first row of each question


def write_front_page(results: Results, sealed: Results, folder: Path) -> None:
    """README.md and summary.svg in `folder`."""
    lines = ["| | task and metric | octjepa | intensity | random initialisation | octjepa is |", "|---" * 6 + "|"]
    for question in QUESTIONS:
        source = sealed if question.sealed else results
        texts = [_text(source, name, question.key) for name in ("encoder", INTENSITY, UNTRAINED)]
        lines.append(f"| {question.number} | {question.text} | {' | '.join(texts)} | {answer(source, question)} |")
    text = TEMPLATE.read_text(encoding="utf-8").format(
        table="\n".join(lines),
        unet=_text(results, SUPERVISED, "real_fluid/ap/1"),
        unet_dice=_text(results, SUPERVISED, "real_fluid/dice/1"),
    )
    folder.mkdir(parents=True, exist_ok=True)
    write_atomic(folder / "README.md", lambda file: file.write(text.encode()))
    plot_summary(results, sealed, folder / "summary.svg")


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


def plot_summary(results: Results, sealed: Results, path: Path) -> None:
    """A panel for each question: a bar for the encoder and for each baseline, with the 95 % interval of one seed."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    mpl.rcParams["svg.hashsalt"] = "octjepa"  # the same results give the same file
    figure = Figure(figsize=(10, 2.6), layout="constrained")
    for axes, number in zip(figure.subplots(1, len(PLOTTED)), PLOTTED, strict=True):
        question = QUESTIONS[number]
        _plot_bars(axes, sealed if question.sealed else results, question)
    figure.savefig(path, metadata={"Date": None})


def _plot_bars(axes: Axes, results: Results, question: Question) -> None:
    labels = {"encoder": "octjepa", **NAMES}
    for position, name in enumerate(labels):
        rows = _rows(results, name, question.key)
        if not rows:
            continue
        value = float(np.mean([results.value_of(row, question.key) for row in rows]))
        entry = results.entry(rows[0], question.key)
        axes.bar(position, value, color=COLORS[name], width=0.7)
        if len(rows) == 1 and entry.low is not None and entry.high is not None:
            errors = [[max(value - entry.low, 0)], [max(entry.high - value, 0)]]
            axes.errorbar(position, value, errors, color="black", lw=1, capsize=3)
    title, _, metric = question.text.partition(";")
    better = "less is better" if question.lower_is_better else "more is better"
    axes.set_title(f"{question.number}. {title.partition(',')[0]}", fontsize="medium")
    axes.set_ylabel(f"{metric.strip()}\n({better})", fontsize="small")
    axes.set_xticks(range(3), ["octjepa", "intensity", "random\ninit."], fontsize="small")
