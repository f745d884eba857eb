"""The board on paper: CSV for machines, Markdown for a paper's supplement, one HTML page without network for readers.

Every form says on top what is wrong, how many comparisons were made and how often the test set was used. Figures
without an honest interval say so; nothing is ranked by a figure that validation did not choose.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from typing import Any

from octjepa.errors import UsageError
from octjepa.files import write_atomic
from octjepa.metrics.findings import BASELINES, FAULT_KINDS

NAMES = (
    "leaderboard.html",
    "leaderboard.md",
    "leaderboard.csv",
    "comparisons.csv",
    "trainings.csv",
    "leaderboard.json",
)
CHANCE = {"auroc": 0.5, "auroc_ovr": 0.5, "quadratic_kappa": 0.0, "r2": 0.0}


def ready(out: Path) -> None:
    """Makes the folder before the work. Raises UsageError where it cannot be one."""
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(f"{out} cannot be a folder for the board ({error.strerror}): name another --out") from None


def write_board(board: Mapping[str, Any], out: Path) -> list[Path]:
    """Writes all forms of `Board.payload` into `out` and returns their paths. Raises OctjepaError: the disk refuses."""
    contents = {
        "leaderboard.html": as_html(board),
        "leaderboard.md": as_markdown(board),
        "leaderboard.csv": as_csv(board["rows"]),
        "comparisons.csv": as_csv(board["comparisons"]),
        "trainings.csv": as_csv(board["trainings"]),
        "leaderboard.json": json.dumps(board, indent=1, allow_nan=False) + "\n",
    }
    for name in NAMES:
        text = contents[name].encode()
        write_atomic(out / name, lambda file, text=text: file.write(text))  # type: ignore[misc]
    return [out / name for name in NAMES]


def as_csv(rows: Sequence[Mapping[str, Any]]) -> str:
    """A line a row; what does not exist is an empty cell. A name that a spreadsheet would run is quoted."""
    if not rows:
        return ""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(rows[0])
    writer.writerows([[_cell(value) for value in row.values()] for row in rows])
    return text.getvalue()


def _cell(value: Any) -> Any:
    return f"'{value}" if isinstance(value, str) and value.startswith(("=", "+", "-", "@")) else value


def as_markdown(board: Mapping[str, Any]) -> str:
    """Faults, uses of the test set, the primary figure of every row, the comparisons, what validation chose, notes."""
    lines = ["# Leaderboard", ""]
    if board["faults"]:
        lines += ["## Read this first", ""]
        lines += [f"- **{FAULT_KINDS[fault['kind']]}**: {fault['what']}" for fault in board["faults"]] + [""]
    lines += [f"- {sentence}" for sentence in summary(board)] + [""]
    for target in targets_of(board):
        shown = primary_rows(board, target)
        lines += [f"## {target}", "", _line("row", shown[0]["metric"], "n (people)", "seeds", "recipe", "read by")]
        lines.append(_line(*["---"] * 6))
        for row in shown:
            how = " ".join(part for part in (row["probe"], row["pool"]) if part != "none")
            lines.append(
                _line(
                    _escaped(row["name"]),
                    said(row),
                    f"{row['n']} ({row['n_people']})",
                    seeds_said(row),
                    said(row, None, "recipe_low", "recipe_high"),
                    how,
                )
            )
        lines.append("")
    if board["comparisons"]:
        lines += ["## Differences on the same people", ""]
        lines += [_line("row", "target", f"minus {_escaped(board['reference'])}", "p", "p (Holm)", "q (BH)", "p of")]
        lines.append(_line(*["---"] * 7))
        for row in board["comparisons"]:
            figures = [p_said(row[key]) for key in ("p", "p_holm", "q_bh")]
            cells = [_escaped(row["name"]), _escaped(row["target"]), said(row, "difference"), *figures, row["p_of"]]
            lines.append(_line(*cells))
        lines.append("")
    lines += ["## What validation chose", ""]
    lines += [_line("row", "seed", "target", "checkpoint", "pool", "probe", "validation", "test")]
    lines.append(_line(*["---"] * 8))
    for row in board["trainings"]:
        chosen = [str(row[key]) for key in ("seed", "target", "checkpoint", "pool", "probe")]
        validation = "" if row["validation"] is None else f"{row['validation']:.3f}"
        lines.append(_line(_escaped(row["name"]), *map(_escaped, chosen), validation, said(row)))
    lines += ["", "## Notes", ""] + [f"- {_escaped(note)}" for note in board["notes"]]
    return "\n".join(lines) + "\n"


def as_html(board: Mapping[str, Any]) -> str:
    """One self-contained page: no script, nothing fetched."""
    from jinja2 import Environment, StrictUndefined

    text = files("octjepa.leaderboard").joinpath("page.html.j2").read_text(encoding="utf-8")
    environment = Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)
    environment.filters["spaced"] = lambda value: str(value).replace("_", " ")
    environment.globals |= {
        "said": said, "seeds_said": seeds_said, "p_said": p_said, "kinds": FAULT_KINDS, "chance": CHANCE,
        "primary_rows": primary_rows, "scale": scale, "baselines": BASELINES,
    }  # fmt: skip
    rendered: str = environment.from_string(text).render(board=board, summary=summary(board), targets=targets_of(board))
    return rendered


def summary(board: Mapping[str, Any]) -> list[str]:
    """What a reader must know beside any figure: the reference, the family, the uses, the meaning of an interval."""
    taken, family = len(board["comparisons"]), sum(row["p"] is not None for row in board["comparisons"])
    told = [
        f"{taken} differences to {board['reference']!r} were taken on the same people; {family} have a p-value, "
        "corrected over all of them (Holm; Benjamini and Hochberg)",
        f"{len(board['choices'])} readings (checkpoint, pooling, probe) were compared on validation; the test set was "
        "read once for what validation chose",
    ]
    for use in board["uses"]:
        told.append(
            f"the test set of {use['target']} has been used {use['looks']} time(s), for {use['measured']} different "
            "rows"
        )
    return [
        *told,
        board["protocol"]["text"],
        "95 % intervals are by person; 'recipe' also holds the spread of the seeds",
    ]


def targets_of(board: Mapping[str, Any]) -> list[str]:
    return list(dict.fromkeys(row["target"] for row in board["rows"]))


def primary_rows(board: Mapping[str, Any], target: str) -> list[dict[str, Any]]:
    """Of one target, the primary metric: encoders in the order given, then what knows nothing."""
    return [row for row in board["rows"] if row["target"] == target and row["primary"]]


def said(row: Mapping[str, Any], value: str | None = "value", low: str = "low", high: str = "high") -> str:
    """`0.812 [0.74, 0.87]`; the interval alone where `value` is None, "-" where there is nothing."""
    ends = "" if row[low] is None or row[high] is None else f"[{row[low]:.2f}, {row[high]:.2f}]"
    if value is None:
        return ends or "-"
    if row[value] is None:
        return "-"
    return f"{row[value]:.3f} {ends or '(no interval)'}"


def seeds_said(row: Mapping[str, Any]) -> str:
    return "1" if row["seed_sd"] is None else f"{row['seeds']}, SD {row['seed_sd']:.3f}"


def p_said(p: float | None) -> str:
    if p is None:
        return "-"
    return "< 0.001" if p < 0.001 else f"{p:.3f}"


def scale(rows: Sequence[Mapping[str, Any]]) -> tuple[float, float]:
    """Ends of the axis that holds all figures and intervals, at least 0.1 wide."""
    ends = [row[key] for row in rows for key in ("value", "low", "high") if row[key] is not None]
    low, high = (min(ends), max(ends)) if ends else (0.0, 1.0)
    room = max(0.02, 0.05 * (high - low))
    return low - room, high + room


def _line(*cells: str) -> str:
    return "| " + " | ".join(cells) + " |"


def _escaped(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
