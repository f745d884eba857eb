"""The page of the exam, written from the results alone: what is not there is named as missing, never guessed."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from octjepa.files import write_atomic
from octjepa.phantom import DECOYS, LESIONS

from .plots import plot_compute
from .results import SUPERVISED, UNTRAINED, Entry, Results, RowName, compare
from .settings import (
    BOUNDARY_EYES,
    COMPONENTS,
    DRAWS,
    EXAM,
    LABELLED_EYES,
    LABELLED_PEOPLE,
    MAX_CNN_FEW,
    MAX_INTENSITY,
    MIN_CNN,
    TOKEN_SHARE,
)

Patch = tuple[int, int, int]
# (key of the figure, heading): the columns of the table of rows
HEADLINES = (
    ("token_lesion/token_ap/10", "token AP, 10 eyes"),
    ("token_lesion/token_ap/30", "30 eyes"),
    ("token_lesion/token_ap/100", "100 eyes"),
    ("eye_lesion/auroc/30", "AUROC, 30 people"),
    ("eye_lesion/auroc/100", "100"),
    ("eye_lesion/auroc/all", "all"),
    ("added_value/added_auroc/30", "added to intensity, 30"),
    ("added_value/added_auroc/all", "all"),
    ("decoys/auroc/30", "decoys, 30 people"),
    ("decoys/auroc/100", "100"),
    ("surfaces/error_um/5", "surfaces in um, 5 eyes"),
    ("surfaces/error_um/30", "30 eyes"),
    ("severity/r2_fluid_mm3/100", "R2 fluid volume, 100"),
    ("severity/r2_atrophy_mm2/100", "atrophy area"),
    ("severity/r2_central_thickness_um/100", "central thickness"),
    ("same_eye/top_1/0", "same eye, top-1"),
    ("tuning/auroc/30", "tuned: AUROC, 30 people"),
    ("tuning/auroc/100", "100"),
    ("real_fluid/dice/1", "real fluid: Dice"),
    ("real_fluid/ap/1", "AP"),
    ("real_surfaces/error_um/1", "real surfaces in um"),
)
MISSING = "missing"
TEMPLATE = Path(__file__).with_name("template.md")


def write_page(results: Results, folder: Path) -> None:
    """README.md and compute.svg in `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    text = TEMPLATE.read_text(encoding="utf-8").format(
        **EXAM.as_dict(), missing=MISSING, rows=rows_table(results), differences=differences(results),
        admission=admission(results), details=details(results), left_out=left_out(results),
        decoys=", ".join(DECOYS).replace("_", " "),
        token_share=TOKEN_SHARE, labelled_eyes=_listed(LABELLED_EYES), labelled_people=_listed(LABELLED_PEOPLE),
        boundary_eyes=_listed(BOUNDARY_EYES), components=COMPONENTS, draws=DRAWS, max_intensity=MAX_INTENSITY,
        min_cnn=MIN_CNN, max_few=MAX_CNN_FEW,
    )  # fmt: skip
    write_atomic(folder / "README.md", lambda file: file.write(text.encode()))
    plot_compute(results, folder / "compute.svg")


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))


def row_names(results: Results) -> dict[tuple[str, Patch], list[RowName]]:
    """Rows by name and patch, each with its seeds, in the order in which they were measured."""
    found: dict[tuple[str, Patch], list[RowName]] = {}
    for entry in results.entries:
        patch = (entry["patch"][0], entry["patch"][1], entry["patch"][2])
        row = RowName(entry["encoder"], patch, entry["seed"])
        seeds = found.setdefault((row.name, patch), [])
        if row not in seeds:
            seeds.append(row)
    return {key: sorted(rows, key=lambda one: one.seed) for key, rows in found.items()}


def table(heads: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """A table in Markdown."""
    return "\n".join(["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
                     + ["| " + " | ".join(line) + " |" for line in lines])  # fmt: skip


def cell(results: Results, rows: Sequence[RowName], key: str) -> str:
    """A figure of a row: over seeds, or with its interval."""
    read = {row: value for row in rows if (value := results.value(row, key)) is not None}  # not every seed may be
    values = list(read.values())
    if not values:
        return "-"
    digits = 1 if "error_um" in key else 3
    if len(values) > 1:
        return f"{np.mean(values):.{digits}f} [{min(values):.{digits}f}, {max(values):.{digits}f}]"
    entry = next(
        one for one in results.entries
        if one["row"] == next(iter(read)).key and key.startswith(f"{one['task']}/{one['metric']}/")
        and key.endswith("/all" if one["labels"] is None else f"/{one['labels']}")
    )  # fmt: skip
    if entry["low"] is None:
        return f"{values[0]:.{digits}f}"
    return f"{values[0]:.{digits}f} ({entry['low']:.{digits}f} to {entry['high']:.{digits}f})"


def rows_table(results: Results) -> str:
    """Every row with its headline figures."""
    lines = [
        [f"`{name}`", "x".join(map(str, patch)), str(len(rows)), *(cell(results, rows, key) for key, _ in HEADLINES)]
        for (name, patch), rows in row_names(results).items()
    ]
    return table(["row", "patch", "seeds", *(heading for _, heading in HEADLINES)], lines) if lines else MISSING


def differences(results: Results) -> str:
    """Encoder less untrained twin, intensity and raw patches."""
    known, lines = row_names(results), []
    for (name, patch), rows in known.items():
        trained = any(entry["encoder"] == name and entry.get("views") for entry in results.entries)
        twins_of = known.get((f"{UNTRAINED}:{name}", patch)) or (known.get((UNTRAINED, patch)) if trained else None)
        if twins_of is None:
            continue
        twins = {one.seed: one for one in twins_of}
        rows = [row for row in rows if row.seed in twins]
        others = {"its untrained twin": [twins[row.seed] for row in rows]}
        for floor in ("intensity", "raw_patches"):
            if (floor, patch) in known:
                others[floor] = known[floor, patch][:1] * len(rows)
        for other, theirs in others.items():
            cells = []
            for key, _ in HEADLINES:
                found = compare(results, rows, theirs, key)
                digits = 1 if "error_um" in key else 3
                cells.append("-" if found is None else _difference(found, digits))
            lines.append([f"`{name}` less {other}", *cells])
    return table(["", *(heading for _, heading in HEADLINES)], lines) if lines else f"No encoder yet: {MISSING}."


def _difference(found: Entry, digits: int) -> str:
    if found["low"] is None:
        return f"{found['value']:+.{digits}f}"
    return f"{found['value']:+.{digits}f} ({found['low']:+.{digits}f} to {found['high']:+.{digits}f})"


def questions() -> list[tuple[str, str]]:
    """(name, start of the figure's key) of what is asked of an eye by AUROC."""
    return [(f"has: {name}", f"eye_lesion/auroc_{name}") for name in LESIONS] + [
        (f"decoy: {name}", f"decoys/auroc_{name}") for name in DECOYS
    ]


def admission(results: Results) -> str:
    """Floors and ceilings of each question, and whether it is admitted."""
    known, lines = row_names(results), []
    patches = [patch for (name, patch) in known if name == "intensity"]
    cnn = next((rows[0] for (name, _), rows in known.items() if name == SUPERVISED), None)
    for patch in patches:
        floor = known["intensity", patch][0]
        for name, key in questions():
            intensity = results.value(floor, f"{key}/30")
            ample, few = (None if cnn is None else results.value(cnn, f"{key}/{labels}") for labels in ("all", "30"))
            verdict = MISSING
            if intensity is not None and ample is not None and few is not None:
                passed = intensity <= MAX_INTENSITY and ample >= MIN_CNN and few <= MAX_CNN_FEW
                verdict = "admitted" if passed else "not admitted"
            figures = [MISSING if one is None else f"{one:.3f}" for one in (intensity, ample, few)]
            lines.append([name.replace("_", " "), "x".join(map(str, patch)), *figures, verdict])
    return table(["question", "patch", "intensity, 30", "CNN, ample", "CNN, 30", ""], lines) if lines else MISSING


def details(results: Results) -> str:
    """Each lesion and decoy of every row."""
    keys = [
        (name, f"{key}/{labels}")
        for name, key in questions()
        for labels in (("30", "all") if "has" in name else ("100",))
    ]
    keys += [(f"token AP: {name}", f"token_lesion/token_ap_{name}/30") for name in LESIONS]
    lines = [
        [f"`{name}`", "x".join(map(str, patch)), *(cell(results, rows, key) for _, key in keys)]
        for (name, patch), rows in row_names(results).items()
    ]
    heads = [f"{name.replace('_', ' ')}, {key.rpartition('/')[2]}" for name, key in keys]
    return table(["row", "patch", *heads], lines) if lines else MISSING


def left_out(results: Results) -> str:
    """What was not measured, and why."""
    lines = [
        [f"`{one['row']}`", f"{one['task']}/{one['metric']}/{one['labels']}", one["reason"]] for one in results.left_out
    ]
    return table(["row", "figure", "why"], lines) if lines else "Nothing."
