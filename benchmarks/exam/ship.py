"""Puts a run of the exam into the package as the encoder phantom-tiny: weights in 16 bit, a card with its figures."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.packaged_weights import PACKAGED, write_package

from octjepa.encoders.export import export
from octjepa.errors import UsageError

from .page import HEADLINES, cell, table
from .results import CENTERED, EYES, SAME_EYE, Results, RowName
from .settings import EXAM, ROOT, TUNED
from .training import NAME, STARTS, Plan, finished_run, first_plan, is_trained, run_folder, twin_name

TARGET = PACKAGED / NAME


def ship(plan: Plan, work: Path, results: Results, target: Path = TARGET) -> None:
    """Writes `target` anew from a run of the exam.

    Raises UsageError: the run has not ended, was not read, or has seen real eyes.
    """
    seed = plan.seeds[0]
    folder, about = _ended_run(plan, work)
    figures = card_figures(plan, seed, results, folder.name, about)

    def edit(card: str) -> str:
        title = next(line for line in card.splitlines() if line.startswith("# "))
        return f"{card.replace(title, f'# {NAME}', 1).rstrip()}\n\n{figures}"

    _write(NAME, folder, edit, about, target)


def store_start(plan: Plan, work: Path) -> Path:
    """Writes the encoder of a run in 16 bit into `STARTS`, for runs that begin with it on other machines.

    Returns its folder. Raises UsageError: the run has not ended, or has seen real eyes.
    """
    folder, about = _ended_run(plan, work)
    target = STARTS / folder.name
    target.parent.mkdir(parents=True, exist_ok=True)
    _write(target.relative_to(ROOT).as_posix(), folder, str, about, target)
    return target


def _ended_run(plan: Plan, work: Path) -> tuple[Path, dict[str, Any]]:
    """The folder of the run of the plan's first seed, and what is known of it. Raises UsageError."""
    seed = plan.seeds[0]
    folder = run_folder(work, plan, seed)
    if plan.cohort != "phantoms":
        raise UsageError(f"{plan.name} has learned from real eyes, which the project must not hold: name another run")
    if not is_trained(folder):
        raise UsageError(f'{folder} has not ended: `make exam ARGS="--train {plan.name}:{seed}"` continues it')
    found = finished_run(work, plan, seed)
    assert found is not None  # it has ended
    return folder, found[1]


def _write(name: str, folder: Path, edit: Callable[[str], str], about: dict[str, Any], target: Path) -> None:
    write_package(
        name,
        lambda exported: export(folder / "run", "safetensors", exported, licence="apache-2.0"),
        edit,
        {"alarms": _alarms(folder / "run"), **about},
        target,
    )


def card_figures(plan: Plan, seed: int, results: Results, run: str, about: dict[str, Any]) -> str:
    """The part of the card on the run and its figures. Raises UsageError where it was not read."""
    patch = plan.recipe(seed).tokens.patch_size
    rows = {
        plan.name: RowName(plan.name, patch, seed),
        "untrained": RowName(twin_name(plan.recipe(seed), plan.name), patch, seed),
        "intensity": RowName("intensity", patch),
    }
    lines = []
    for key, _ in HEADLINES:
        if results.value(rows[plan.name], key) is None:
            continue
        task, figure, labels = key.split("/")
        lines.append([task, figure, labels, *(cell(results, [row], key) for row in rows.values())])
    if not lines:
        raise UsageError(f"{plan.name}:{seed} was not read: run `make exam` first")
    return f"""## The run

`{run}`, made by `make exam`: {about["updates"]:,} updates, {about["views"]:,} views
of {about["eyes"]:,} phantom eyes, each of another synthetic person (difficulty exam, seed {EXAM.pretraining_seed}).
{_start(plan)}It is the run of seed {seed}: no seed was chosen. Weights are kept in 16 bit.
What is known of the run is in run.json.

It has seen no human eye. It shows how a pretrained encoder is used, and is a start for small trials; it is no
foundation model.

On people that it has not seen, frozen but for {" and ".join(f"`{task}`" for task in TUNED)},
with so many labelled eyes or people (docs/exam says what each figure is; whole eyes by `{EYES}`,
`eye_lesion_centered` and `severity` by `{CENTERED}`, `same_eye` by `{SAME_EYE}`;
95 % interval over people, of the two real eyes over their B-scans):

{table(["task", "figure", "labelled", *rows], lines)}
"""


def _start(plan: Plan) -> str:
    """A sentence on the run that it begins with."""
    first = first_plan(plan)
    if first is None:
        return ""
    return f"It begins with the weights of `{first.name}`: {first.updates:,} updates, {first.views:,} views more.\n"


def _alarms(run: Path) -> dict[str, object]:
    return dict(json.loads((run / "summary.json").read_text(encoding="utf-8")).get("alarms", {}))
