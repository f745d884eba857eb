"""What each choice of the exam's encoders is worth: one changed at a time, beside its random initialisation.

    python -m benchmarks.ablations [--only mae/lr_1e-3:0] [--seeds 0,1] [--threads 1]

Trains the runs of `exam/ablations.yaml` (as `make exam` does, in its folder), reads each on training and validation
people, never on test people, and writes ablations.json and ablations.md as each ends; goes on where it stopped. Eyes
are read as by `benchmarks.pooling`, with `zones_centered`; tokens from 30 of 150 training people, tested on everyone
else. Needs the cohorts of `make exam`. A run takes five minutes on two cores with AMX, without bf16 much longer.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import yaml
from benchmarks.exam import training
from benchmarks.exam.cohorts import Cohort, make_cohorts, phantom_store
from benchmarks.exam.lesion_tasks import TokenTruth, token_lesion
from benchmarks.exam.page import LEFT_OUT, table
from benchmarks.exam.reading import projected_eyes
from benchmarks.exam.results import Finding, patch_text
from benchmarks.exam.settings import EXAM, PAGES, RESULTS, WORK
from benchmarks.exam.tokens import of_encoder, token_table
from benchmarks.exam.training import Plan
from benchmarks.pooling import LABELLED, learned_from, mean_auroc, without_test_people
from filelock import FileLock

from octjepa.encoders import PretrainedEncoder, load_encoder
from octjepa.files import write_atomic, write_json
from octjepa.phantom import LESIONS

CHOICES = Path(__file__).parent / "exam" / "ablations.yaml"
TOKEN_TRAIN = 150  # training people that the labelled eyes of the token task are drawn from
EYES_LABELLED = 30
POOL = "zones_centered"  # by which the first of them were read; rows of two poolings do not compare
FIGURES = ("token_ap_30", *(f"auroc_{count}" for count in LABELLED))
HEAD = """# What each choice is worth

Written by `python -m benchmarks.ablations` from `benchmarks/records/exam`; do not edit. Encoders of [the
exam](README.md) with one choice changed, at the updates of the heading, in bf16; evaluated on training and
validation people, not on test people: average precision by token from {eyes} eyes, AUROC of an eye over five lesions
from {labelled} people, by the pooling `{pool}`. Parentheses: the difference from the same network with random weights,
in the order of the seeds. Most choices have one seed, and seeds of one choice differ by as much as many choices do: a
small difference, or one that is not there in every seed, says nothing.
A value is left out if no patch of the labelled eyes holds enough of the lesion to learn from, such as drusen in
coarse patches.
"""


def plans_by_choice() -> dict[str, Plan]:
    """ "ENCODER/CHOICE" -> its plan: the encoder's, in bf16, with the choice's overrides last."""
    given: dict[str, dict[str, dict[str, Any]]] = yaml.safe_load(CHOICES.read_text(encoding="utf-8"))
    known = {plan.name: plan for plan in training.read_plans()}
    return {
        f"{name}/{choice}": replace(
            known[name],
            name=f"{name}-{choice}",
            about=one["about"],
            overrides=(*known[name].overrides, "train.precision=bf16", *one.get("overrides", ())),
            updates=one.get("updates", known[name].updates),
        )
        for name, choices in given.items()
        for choice, one in choices.items()
    }


def read(cohort: Cohort, encoder: PretrainedEncoder, what: str) -> dict[str, float]:
    """`FIGURES` of an encoder, without that of tokens where the exam leaves a lesion out."""
    tokens = token_table(of_encoder(encoder), cohort, encoder, what)
    x = projected_eyes(cohort, tokens, POOL)
    found = {
        f"auroc_{count}": float(
            np.mean([mean_auroc(cohort, x, cohort.lesions[:, number], count) for number in range(len(LESIONS))])
        )
        for count in LABELLED
    }
    parts = learned_from(cohort, TOKEN_TRAIN)
    truth = TokenTruth(parts, tokens)
    for one in token_lesion(parts, tokens, truth):
        if isinstance(one, Finding) and (one.metric, one.labels) == ("token_ap", EYES_LABELLED):
            found["token_ap_30"] = one.estimate.value
    return {name: round(value, 4) for name, value in found.items()}


def main() -> None:
    """Trains and reads what is missing."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--work", type=Path, default=WORK, help="the exam's cohorts and runs (default: exam/)")
    parser.add_argument("--out", type=Path, default=RESULTS, help="records; their page is in docs/exam, or here")
    parser.add_argument("--only", nargs="*", help="ENCODER/CHOICE, each; default: all")
    parser.add_argument("--seeds", default="0", help="comma-separated")
    parser.add_argument("--threads", type=int, default=1)
    plans = plans_by_choice()
    given = parser.parse_args()
    for unknown in set(given.only or ()) - set(plans):
        parser.error(f"no choice {unknown}: one of {', '.join(plans)}")
    torch.set_num_threads(given.threads)
    cohort = without_test_people(Cohort.open(make_cohorts(given.work, EXAM, ("main",)), "main"))
    for seed in map(int, given.seeds.split(",")):
        for choice in given.only or plans:
            plan = plans[choice]
            if _has(given.out, choice, seed):
                continue
            run = training.train(given.work, plan, seed, phantom_store(given.work, EXAM, plan.recipe(seed)))
            encoder = load_encoder(str(run / "run"))
            twin = _twin_name(plan, seed)
            if not _has(given.out, twin, seed):
                model = training.untrained(plan, seed)
                _add(given.out, {"choice": twin, "seed": seed, **read(cohort, model, twin)})
            row = {
                "choice": choice,
                "about": plan.about,
                "seed": seed,
                "twin": twin,
                "updates": plan.updates,
                "views": plan.views,
                "run": run.name,
                **read(cohort, encoder, choice),
            }
            _add(given.out, row)


def _twin_name(plan: Plan, seed: int) -> str:
    """Architectures alike share their untrained network, and its patches."""
    recipe = plan.recipe(seed)
    return f"{training.twin_name(recipe, plan.name)} {patch_text(recipe.tokens.patch_size)}"


def _rows(out: Path) -> list[dict[str, Any]]:
    path = out / "ablations.json"
    return list(json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else []


def _has(out: Path, choice: str, seed: int) -> bool:
    return any((one["choice"], one["seed"], one["pool"]) == (choice, seed, POOL) for one in _rows(out))


def _add(out: Path, row: dict[str, Any]) -> None:
    """Writes a row, in place of one by another pooling, and the page anew; several processes may."""
    out.mkdir(parents=True, exist_ok=True)
    row = {**row, "pool": POOL}
    with FileLock(out / ".lock"):
        rows = [one for one in _rows(out) if (one["choice"], one["seed"]) != (row["choice"], row["seed"])] + [row]
        write_json(out / "ablations.json", sorted(rows, key=lambda one: (one["choice"], one["seed"])))
        write_page(PAGES if out == RESULTS else out, rows)


def write_page(out: Path, rows: Sequence[dict[str, Any]]) -> None:
    """ablations.md: a table for each encoder."""
    text = HEAD.format(pool=POOL, eyes=EYES_LABELLED, labelled=" and ".join(map(str, LABELLED)))
    by_choice: dict[str, list[dict[str, Any]]] = {}
    for row in sorted(rows, key=lambda one: int(one["seed"])):
        by_choice.setdefault(row["choice"], []).append(row)
    lines: dict[str, list[list[str]]] = {}  # by the heading that they stand under: equal updates together
    for choice in plans_by_choice():
        if choice in by_choice:
            found, (encoder, _, name) = by_choice[choice], choice.partition("/")
            lines.setdefault(f"{encoder}, {found[0]['updates']:,} updates", []).append(
                [
                    f"`{name}`",
                    found[0]["about"],
                    ", ".join(str(one["seed"]) for one in found),
                    *(_cell(found, by_choice.get(found[0]["twin"], []), figure) for figure in FIGURES),
                ]
            )
    heads = ["choice", "what", "seeds", "tokens", *(f"eyes, {count} people" for count in LABELLED)]
    for heading, part in lines.items():
        text += f"\n## {heading}\n\n{table(heads, part)}\n"
    write_atomic(out / "ablations.md", lambda file: file.write(text.encode()))


def _cell(rows: Sequence[dict[str, Any]], twins: Sequence[dict[str, Any]], figure: str) -> str:
    """Every seed's value, and what it is above its twin."""
    twin = {one["seed"]: one for one in twins}
    parts = []
    for row in rows:
        less = twin.get(row["seed"], {}).get(figure)
        one = row.get(figure)
        parts.append(LEFT_OUT if one is None else f"{one:.3f}" + ("" if less is None else f" ({one - less:+.3f})"))
    return ", ".join(parts)


if __name__ == "__main__":
    main()
