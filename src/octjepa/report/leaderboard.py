"""The leaderboard as files: CSV for machines, Markdown for a paper's supplement, one HTML page for readers.

Every form begins with what is wrong, how many comparisons were made and how often the test set was used. Values
without an honest interval say so; nothing is ranked by a metric that validation did not select.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from octjepa.errors import UsageError, counted
from octjepa.evaluate.results import BoardRow
from octjepa.files import write_atomic
from octjepa.metrics.findings import FAULT_KINDS
from octjepa.metrics.intervals import LOWER_IS_BETTER
from octjepa.record import Record, to_json
from octjepa.report.figures.forest import forest
from octjepa.report.headlines import Contrast, Headline, paired_headline
from octjepa.report.html import render_template
from octjepa.report.markdown import escape_markdown
from octjepa.tables import format_table

if TYPE_CHECKING:
    from octjepa.evaluate.leaderboard.board import Board

NAMES = (
    "leaderboard.html",
    "leaderboard.md",
    "leaderboard.csv",
    "comparisons.csv",
    "trainings.csv",
    "leaderboard.json",
)
_MAX_HEADLINES = 12


def prepare_folder(out: Path) -> None:
    """Makes the folder before the work. Raises UsageError if it cannot be one."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"{out} cannot be a folder for the board ({error.strerror}): name another --out") from None


def write_leaderboard(board: Board, out: Path) -> list[Path]:
    """Writes all forms of a board into `out` and returns their paths. Raises OctjepaError: the disk refuses."""
    texts = {
        "leaderboard.html": leaderboard_html(board),
        "leaderboard.md": leaderboard_markdown(board),
        "leaderboard.csv": csv_text(to_json(board.rows)),
        "comparisons.csv": csv_text(to_json(board.comparisons)),
        "trainings.csv": csv_text(to_json(board.trainings)),
        "leaderboard.json": json.dumps(board.payload(), indent=1, allow_nan=False) + "\n",
    }
    for name in NAMES:
        text = texts[name].encode()
        write_atomic(out / name, lambda file, text=text: file.write(text))  # type: ignore[misc]
    return [out / name for name in NAMES]


def csv_text(rows: Sequence[Mapping[str, Any]]) -> str:
    """A line per row; an absent value is an empty cell. A name that a spreadsheet would execute is quoted."""
    if not rows:
        return ""
    return format_table(list(rows[0]), (row.values() for row in rows), ",")


def leaderboard_markdown(board: Board) -> str:
    """Faults, uses of the test set, primary metric of every row, comparisons, what validation selected, notes."""
    lines = ["# Leaderboard", ""]
    if board.faults:
        lines += ["## Read this first", ""]
        lines += [f"- **{FAULT_KINDS[fault.kind]}**: {escape_markdown(fault.what)}" for fault in board.faults] + [""]
    lines += [f"- {escape_markdown(sentence)}" for sentence in summary(board)] + [""]
    table: list[tuple[str, ...]]
    head: tuple[str, ...]
    for target, rows in _primary_rows(board).items():
        table = [
            (
                row.name,
                figure_text(row),
                f"{row.n} ({row.n_people})",
                seeds_text(row),
                figure_text(row, None, "recipe_low", "recipe_high"),
                " ".join(part for part in (row.probe, row.pool) if part != "none"),
            )
            for row in rows
        ]
        lines += _section(target, ("row", rows[0].metric, "n (people)", "seeds", "recipe", "read by"), table)
    if board.comparisons:
        table = [
            (
                pair.name,
                pair.target,
                figure_text(pair, "difference"),
                *(p_text(p) for p in (pair.p, pair.p_holm, pair.q_bh)),
                pair.p_of,
            )
            for pair in board.comparisons
        ]
        head = ("row", "target", f"minus {board.reference}", "p", "p (Holm)", "q (BH)", "p of")
        lines += _section("Differences on the same people", head, table)
    if board.strongest:
        table = [(pair.name, pair.target, pair.reference, figure_text(pair, "difference")) for pair in board.strongest]
        head = ("row", "target", "strongest baseline, by its test metric", "difference")
        lines += _section("Against the strongest baseline", head, table)
    table = [
        (
            training.name,
            *map(str, (training.seed, training.target, training.checkpoint, training.pool, training.probe)),
            "" if training.validation is None else f"{training.validation:.3f}",
            figure_text(training),
        )
        for training in board.trainings
    ]
    head = ("row", "seed", "target", "checkpoint", "pool", "probe", "validation", "test")
    lines += _section("What validation chose", head, table)
    lines += ["## Notes", "", *(f"- {escape_markdown(note)}" for note in board.notes)]
    return "\n".join(lines) + "\n"


def _section(title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """A heading and a table, with an empty line after each."""
    table = [head, ["---"] * len(head), *rows]
    return [
        f"## {escape_markdown(title)}",
        "",
        *("| " + " | ".join(map(escape_markdown, line)) + " |" for line in table),
        "",
    ]


def leaderboard_html(board: Board) -> str:
    """One self-contained page in the report's style: no script, nothing fetched."""
    primary = _primary_rows(board)
    return render_template(
        "leaderboard.html.j2",
        board=board,
        summary=summary(board),
        headlines=strongest_headlines(board),
        forests={target: forest([*rows], ordered=True)[0] for target, rows in primary.items()},
        kinds=FAULT_KINDS,
        figure_text=figure_text,
        seeds_text=seeds_text,
        p_text=p_text,
        version=version("octjepa"),
    )


def strongest_headlines(board: Board) -> list[Headline]:
    """Every entry against the strongest baseline of each target; none if they are too many to read."""
    pairs = board.strongest
    if len(pairs) > _MAX_HEADLINES:
        return []
    return [
        paired_headline(
            pair,
            Contrast(
                f"{pair.target}: {pair.name} minus {pair.reference}",
                f"{pair.name} scores {{0}} than",
                f"{pair.reference}, the strongest baseline on these people,",
                f"{pair.name} and {pair.reference}, the strongest baseline on these people,",
                "the encoder",
            ),
            pair.metric in LOWER_IS_BETTER,
        )
        for pair in pairs
    ]


def summary(board: Board) -> list[str]:
    """Facts that a reader must know about every value: the reference, the family, the uses, the meaning of an
    interval.
    """
    differences, family = len(board.comparisons), sum(pair.p is not None for pair in board.comparisons)
    return [
        f"{differences} differences to {board.reference!r} were taken on the same people; {family} have a p-value, "
        "corrected over all of them (Holm; Benjamini and Hochberg)",
        f"{len(board.choices)} candidates (checkpoint, pooling, probe) were compared on validation; the test set was "
        "read once for what validation chose",
        *(
            f"the test set of {use.target} has been used {counted(use.looks, 'time')}, "
            f"for {counted(use.measured, 'different row')}"
            for use in board.uses
        ),
        *(() if board.protocol is None else (board.protocol.text,)),
        "95 % intervals are by person; 'recipe' also holds the spread of the seeds",
    ]


def _primary_rows(board: Board) -> dict[str, list[BoardRow]]:
    """target -> its rows of the primary metric: encoders in the order given, then the baselines."""
    rows: dict[str, list[BoardRow]] = {}
    for row in board.rows:
        if row.primary:
            rows.setdefault(row.target, []).append(row)
    return rows


def figure_text(row: Record, value: str | None = "value", low: str = "low", high: str = "high") -> str:
    """`0.812 [0.74, 0.87]` of these fields; only the interval if `value` is None, "-" if there is nothing."""
    least, most = getattr(row, low), getattr(row, high)
    interval = "" if least is None or most is None else f"[{least:.2f}, {most:.2f}]"
    if value is None:
        return interval or "-"
    cell_value = getattr(row, value)
    return "-" if cell_value is None else f"{cell_value:.3f} {interval or '(no interval)'}"


def seeds_text(row: BoardRow) -> str:
    """The number of seeds, and their standard deviation if there are several."""
    return "1" if row.seed_sd is None else f"{row.seeds}, SD {row.seed_sd:.3f}"


def p_text(p: float | None) -> str:
    """A p-value as papers print it; "-" if there is none."""
    if p is None:
        return "-"
    return "< 0.001" if p < 0.001 else f"{p:.3f}"
