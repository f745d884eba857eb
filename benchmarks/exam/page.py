"""The page with all rows of the first exam, written from its results: a value that is not there is named as missing."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from benchmarks.exam.decoys import DECOYS

from octjepa.files import write_atomic
from octjepa.phantom import LESIONS

from .admission import add_admitted_means, questions
from .aims import aims_lines
from .openings import described
from .plots import plot_compute
from .results import (
    NO_PATCH,
    READINGS,
    SUPERVISED,
    UNTRAINED,
    Patch,
    Results,
    RowName,
    compare,
    difference_text,
    digits_of,
    patch_text,
)
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
    NOT_SEALED,
    SEALED,
    TOKEN_SHARE,
    TUNED,
)
from .summary import summary_table
from .training import first_plan, plan_in_package, read_plans

Figures = Sequence[tuple[str, str]]
# (key of the figure, heading): the columns of the table of rows
LESION_FIGURES = (
    ("token_lesion/token_ap/10", "token AP, 10 eyes"),
    ("token_lesion/token_ap/30", "30 eyes"),
    ("token_lesion/token_ap/100", "100 eyes"),
    ("eye_lesion/auroc_admitted/30", "AUROC of admitted lesions, 30 people"),
    ("eye_lesion/auroc_admitted/all", "all"),
    ("eye_lesion/auroc/30", "AUROC of all five, 30 people"),
    ("eye_lesion/auroc/100", "100"),
    ("eye_lesion/auroc/all", "all"),
    ("eye_lesion_centered/auroc/30", "by `zones_centered`, 30"),
    ("eye_lesion_centered/auroc/all", "all"),
    ("added_value/added_auroc/30", "added to intensity, 30"),
    ("added_value/added_auroc/all", "all"),
    ("decoys/auroc_admitted/100", "admitted decoys, 100 people"),
    ("decoys/auroc/30", "all four, 30 people"),
    ("decoys/auroc/100", "100"),
)
OTHER_FIGURES = (
    ("surfaces/error_um/5", "surfaces in um, 5 eyes"),
    ("surfaces/error_um/30", "30 eyes"),
    ("severity/r2_fluid_mm3/100", "R2 fluid volume, 100"),
    ("severity/r2_atrophy_mm2/100", "atrophy area"),
    ("severity/r2_central_thickness_um/100", "central thickness"),
    ("same_eye/top_1/0", "same eye, top-1"),
    ("tuning/auroc/30", "tuned: AUROC, 30 people"),
    ("tuning/auroc/100", "100"),
    ("tuning_segmentation/dice/30", "tuned: Dice, 30 people"),
    ("tuning_segmentation/dice/100", "100"),
    ("frozen/auroc/30", "frozen, those people: AUROC, 30"),
    ("frozen/auroc/100", "100"),
    ("real_fluid/dice/1", "real fluid: Dice"),
    ("real_fluid/ap/1", "AP"),
    ("real_fluid_decoder/dice/1", "by a decoder: Dice"),
    ("real_fluid_decoder/ap/1", "AP"),
    ("real_surfaces/error_um/1", "real surfaces in um"),
)
HEADLINES = (*LESION_FIGURES, *OTHER_FIGURES)
# The tasks that a row without an encoder of its own is asked; an encoder is asked those of its plan.
TASKS_OF = {
    "intensity": set(READINGS) - {"added_value", *TUNED},
    "raw_patches": set(READINGS) - {"real_fluid_decoder", *TUNED},
    "context": set(READINGS) - {"real_fluid_decoder", *TUNED},
    "position": {"token_lesion"},
    "covariates": {"eye_lesion", "severity"},
    "graders": {"real_surfaces"},
    SUPERVISED: {"real_fluid"},
    "tissue": {"surfaces", "real_surfaces"},
}
MISSING, LEFT_OUT = "missing", "left out"
TEMPLATE = Path(__file__).with_name("template.md")
SEALED_TEMPLATE = Path(__file__).with_name("sealed.md")


def write_page(results: Results, folder: Path) -> None:
    """rows.md and compute.svg, all rows of the first exam, in `folder`.

    The sealed cohort is read from the folder `sealed` beside the results, if there is one.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for patch in [patch for (name, patch) in row_names(results) if name == "intensity"]:
        add_admitted_means(results, patch)
    sealed = Results(results.path.parent / "sealed", results.samples / "sealed")
    text = TEMPLATE.read_text(encoding="utf-8").format(
        **EXAM.as_dict(),
        missing=MISSING,
        summary=summary_table(results, sealed),
        encoders=encoders_table(results),
        package=plan_in_package().name,
        aims=aims_table(results),
        sealed=sealed_section(sealed, results) if sealed.entries else MISSING,
        lesion_rows=rows_table(results, LESION_FIGURES),
        other_rows=rows_table(results, OTHER_FIGURES),
        lesion_differences=differences(results, LESION_FIGURES),
        other_differences=differences(results, OTHER_FIGURES),
        admission=admission(results),
        details=details(results),
        left_out=left_out(results),
        decoys=", ".join(DECOYS).replace("_", " "),
        token_share=TOKEN_SHARE,
        labelled_eyes=_listed(LABELLED_EYES),
        labelled_people=_listed(LABELLED_PEOPLE),
        boundary_eyes=_listed(BOUNDARY_EYES),
        components=COMPONENTS,
        draws=DRAWS,
        max_intensity=MAX_INTENSITY,
        min_cnn=MIN_CNN,
        max_few=MAX_CNN_FEW,
        few_labels=_few_labels(results),
    )
    write_atomic(folder / "rows.md", lambda file: file.write(text.encode()))
    plot_compute(results, folder / "compute.svg")
    for measured in (results, sealed):
        measured.differences.save()


def sealed_section(results: Results, main: Results) -> str:
    """The part of rows.md on the sealed cohort; `main` are the exam's results, which decide what is admitted."""
    for patch in [patch for (name, patch) in row_names(results) if name == "intensity"]:
        add_admitted_means(results, patch, main)
    lesions, others = (
        [(key, heading) for key, heading in figures if key.partition("/")[0] not in NOT_SEALED]
        for figures in (LESION_FIGURES, OTHER_FIGURES)
    )
    return SEALED_TEMPLATE.read_text(encoding="utf-8").format(
        **SEALED.as_dict(),
        openings="\n".join(f"- {opening}" for opening in described(results.path.parent)),
        aims=aims_table(results, NOT_SEALED),
        lesion_rows=rows_table(results, lesions),
        other_rows=rows_table(results, others),
        lesion_differences=differences(results, lesions),
        other_differences=differences(results, others),
        details=details(results),
        left_out=left_out(results),
    )


def _few_labels(results: Results) -> str:
    """AUROC of the CNN that learned from 30 people."""
    return ", ".join(f"{one:.3f}" for one in results.values(SUPERVISED, "eye_lesion/auroc/30").values()) or MISSING


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))


def row_names(results: Results) -> dict[tuple[str, Patch], list[RowName]]:
    """Rows by name and patch, each with its seeds, in the order in which they were measured."""
    found: dict[tuple[str, Patch], list[RowName]] = {}
    for entry in results.entries:
        row = entry.row_name
        seeds = found.setdefault((row.name, row.patch), [])
        if row not in seeds:
            seeds.append(row)
    return {key: sorted(rows, key=lambda one: one.seed) for key, rows in found.items()}


def table(heads: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """A table in Markdown."""
    return "\n".join(
        ["| " + " | ".join(heads) + " |", "|---" * len(heads) + "|"]
        + ["| " + " | ".join(line) + " |" for line in lines]
    )


def cell(results: Results, rows: Sequence[RowName], key: str) -> str:
    """A figure of a row: over seeds, or with its interval; how many seeds, where not all of them were read."""
    if key.partition("/")[0] not in tasks_of(rows[0].name):
        return "-"
    read = {row: value for row in rows if (value := results.value(row, key)) is not None}
    values = list(read.values())
    if not values:
        return LEFT_OUT if any(results.is_left_out(row, key) for row in rows) else MISSING
    digits = digits_of(key)
    entry = results.entry(next(iter(read)), key)
    text = f"{np.mean(values):.{digits}f}"
    if len(values) > 1:
        text += f" [{min(values):.{digits}f}, {max(values):.{digits}f}]"
    elif entry.low is not None:
        text += f" ({entry.low:.{digits}f} to {entry.high:.{digits}f})"
    if len(values) < len(rows):
        text += f", {len(values)} seed{'s' * (len(values) > 1)}"
    return text


def tasks_of(name: str) -> set[str]:
    """The tasks that a row is asked."""
    plans = {plan.name: set(plan.tasks) for plan in read_plans()}
    return TASKS_OF.get(name) or plans.get(name) or set(READINGS)


def rows_table(results: Results, figures: Figures) -> str:
    """Every row that was asked any of `figures`, with what it answered."""
    lines = [
        [f"`{name}`", _patch(patch), _views(results, name), str(len(rows))]
        + [cell(results, rows, key) for key, _ in figures]
        for (name, patch), rows in row_names(results).items()
        if tasks_of(name) & {key.partition("/")[0] for key, _ in figures}
    ]
    heads = ["row", "patch", "views", "seeds", *(heading for _, heading in figures)]
    return table(heads, lines) if lines else MISSING


def _patch(patch: Patch) -> str:
    return "-" if patch == NO_PATCH else patch_text(patch)


def encoders_table(results: Results) -> str:
    """What each encoder is that was read, and its updates."""
    known = {name for name, _ in row_names(results)}
    lines = [[f"`{plan.name}`", plan.about, f"{plan.updates:,}"] for plan in read_plans() if plan.name in known]
    return table(["encoder", "what", "updates"], lines) if lines else MISSING


def aims_table(results: Results, left_out: Sequence[str] = ()) -> str:
    """What the package's encoder reaches of what was aimed at, but for the tasks `left_out`."""
    return table(["aim", "value", ""], aims_lines(results, plan_in_package().name, left_out))


def _views(results: Results, name: str) -> str:
    """Views of pretraining, those of the run that it begins with first, and of how many eyes where the run says so."""
    known = next((one for one in results.entries if one.name == name and one.views), None)
    if known is None:
        return "-"
    start = next((first_plan(plan) for plan in read_plans() if plan.name == name), None)
    before = "" if start is None else f"{start.views:,} and "
    return f"{before}{known.views:,}" + ("" if known.eyes is None else f" of {known.eyes:,} eyes")


def differences(results: Results, figures: Figures) -> str:
    """Each encoder less random initialisation, intensity and raw patches."""
    known, lines = row_names(results), []
    starts = {plan.name: first_plan(plan) for plan in read_plans()}
    for (name, patch), rows in known.items():
        trained = any(entry.name == name and (entry.views or entry.trained) for entry in results.entries)
        random_rows = known.get((f"{UNTRAINED}:{name}", patch)) or (known.get((UNTRAINED, patch)) if trained else None)
        if random_rows is None:
            continue
        random_by_seed = {row.seed: row for row in random_rows}
        rows = [row for row in rows if row.seed in random_by_seed]
        others = {"random initialisation": [random_by_seed[row.seed] for row in rows]}
        for floor in ("intensity", "raw_patches"):
            if (floor, patch) in known:
                others[floor] = known[floor, patch][:1] * len(rows)
        start = starts.get(name)
        if start is not None:
            others[f"its start, {start.name}"] = [RowName(start.name, patch, row.seed) for row in rows]
        for other, theirs in others.items():
            cells = []
            for key, _ in figures:
                found = compare(results, rows, theirs, key)
                cells.append("-" if found is None else difference_text(found, digits_of(key)))
            if set(cells) != {"-"}:
                lines.append([f"`{name}` less {other}", *cells])
    return table(["", *(heading for _, heading in figures)], lines) if lines else f"No encoder yet: {MISSING}."


def admission(results: Results) -> str:
    """Floors and ceilings of each question, and whether it is admitted."""
    lines = []
    for patch in [patch for (name, patch) in row_names(results) if name == "intensity"]:
        for one in questions(results, patch):
            verdict = {None: MISSING, True: "admitted", False: "not admitted"}[one.admitted]
            figures = [MISSING if x is None else f"{x:.3f}" for x in (one.intensity, one.ample, one.few)]
            lines.append([one.name, _patch(patch), *figures, verdict])
    return table(["question", "patch", "intensity, 30", "CNN, ample", "CNN, 30", ""], lines) if lines else MISSING


def details(results: Results) -> str:
    """Each lesion and decoy of every row."""
    keys = [(f"has: {name}", f"eye_lesion/auroc_{name}/{labels}") for name in LESIONS for labels in ("30", "all")]
    keys += [(f"decoy: {name}", f"decoys/auroc_{name}/100") for name in DECOYS]
    keys += [(f"token AP: {name}", f"token_lesion/token_ap_{name}/30") for name in LESIONS]
    lines = [
        [f"`{name}`", _patch(patch), *(cell(results, rows, key) for _, key in keys)]
        for (name, patch), rows in row_names(results).items()
        if tasks_of(name) & {"eye_lesion", "decoys", "token_lesion"}
    ]
    heads = [f"{name.replace('_', ' ')}, {key.rpartition('/')[2]}" for name, key in keys]
    return table(["row", "patch", *heads], lines) if lines else MISSING


def left_out(results: Results) -> str:
    """What was not measured, and why."""
    lines = [[f"`{one.row}`", f"{one.task}/{one.metric}/{one.labels}", one.reason] for one in results.left_out]
    return table(["row", "value", "why"], lines) if lines else "Nothing."
