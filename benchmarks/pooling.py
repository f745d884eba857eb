"""Which pooling reads eyes best, of which encoder? On training and validation people of the exam, not on test people.

    OMP_NUM_THREADS=1 python -m benchmarks.pooling --out benchmarks/records/pooling.json
    OMP_NUM_THREADS=1 python -m benchmarks.pooling --out benchmarks/records/pooling.json --encoder exam/runs/NAME/run
    OMP_NUM_THREADS=1 python -m benchmarks.pooling --out benchmarks/records/pooling.json --amounts

Rows are intensity without a network, phantom-tiny before its first update, phantom-tiny, and other encoders. Each
pooled vector is read as in the exam: 128 principal components, logistic regression, its penalty by cross-validation
over the labelled people. These are drawn from the training people; everyone else is predicted. --amounts reads how
much of a lesion an eye has instead of whether, as the exam's task severity, from 30 or 100 of 300 training people,
tested on the others. Figures that the file holds are not read again. Needs the cohorts of `make exam`. About three
minutes a row on one core.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from benchmarks.exam.cohorts import Cohort, make_cohorts
from benchmarks.exam.measurement_tasks import severity
from benchmarks.exam.reading import projected_eyes
from benchmarks.exam.readings import choose_strength, draw_labelled, logistic_scores
from benchmarks.exam.results import Finding
from benchmarks.exam.settings import EXAM, WORK
from benchmarks.exam.tokens import Featurise, TokenTable, of_encoder, of_intensity, token_table
from jaxtyping import Bool, Float
from sklearn.metrics import roc_auc_score

from octjepa.encoders import load_encoder
from octjepa.encoders.pooling import POOL_WIDTHS
from octjepa.files import write_json
from octjepa.phantom import LESIONS

ENCODER = "phantom-tiny"
POOLS = ("mean", "mean_std_max", "mean_std_max_min", "zones", "zones_centered", "zones_whitened")
LABELLED = (30, 100)
DRAWS = 5
AMOUNTS_TRAIN = 300


def without_test_people(cohort: Cohort) -> Cohort:
    """Training and validation people alone."""
    chosen = np.flatnonzero(cohort.splits != "test")
    people, devices, splits = cohort.people[chosen], cohort.devices[chosen], cohort.splits[chosen]
    rows, entries = (tuple(some[number] for number in chosen) for some in (cohort.rows, cohort.entries))
    return replace(
        cohort,
        ids=[cohort.ids[number] for number in chosen],
        people=people,
        devices=devices,
        splits=splits,
        rows=rows,
        entries=entries,
    )


def learned_from(cohort: Cohort, people: int) -> Cohort:
    """So many training people to learn from; everyone else takes the place of test people."""
    learned = np.isin(np.arange(len(cohort.ids)), cohort.indices("train")[:people])
    return replace(cohort, splits=np.where(learned, "train", "test"))


def mean_auroc(cohort: Cohort, x: Float[np.ndarray, "V f"], truth: Bool[np.ndarray, " V"], count: int) -> float:
    """Over draws of `count` labelled training people, of everyone who is not among them."""
    train, found = cohort.indices("train"), []
    for draw in range(DRAWS):
        labelled = draw_labelled(train, truth[train], count, "pooling", draw)
        assert labelled is not None, f"fewer than two of {count} people have the lesion"
        others = np.setdiff1d(np.arange(len(truth)), labelled)
        strength = choose_strength(x[labelled], truth[labelled])
        found.append(roc_auc_score(truth[others], logistic_scores(x[labelled], truth[labelled], x[others], strength)))
    return float(np.mean(found))


def read(cohort: Cohort, table: TokenTable, name: str, pool: str) -> list[dict[str, object]]:
    """AUROC of each lesion and their mean, by number of labelled people."""
    x = projected_eyes(cohort, table, pool)
    rows: list[dict[str, object]] = []
    for count in LABELLED:
        each = {
            lesion: round(mean_auroc(cohort, x, cohort.lesions[:, number], count), 4)
            for number, lesion in enumerate(LESIONS)
        }
        auroc = round(float(np.mean(list(each.values()))), 4)
        rows.append({"name": name, "pool": pool, "width": POOL_WIDTHS[pool], "labelled": count, "auroc": auroc, **each})
        print(json.dumps(rows[-1]), flush=True)
    return rows


def read_amounts(cohort: Cohort, table: TokenTable, name: str, pool: str) -> list[dict[str, object]]:
    """R2 of fluid volume, atrophy area and central thickness, by number of labelled people where there are as many."""
    parts = learned_from(cohort, AMOUNTS_TRAIN)
    found = severity(parts, projected_eyes(parts, table, pool))
    rows: list[dict[str, object]] = [
        {
            "name": name,
            "pool": pool,
            "labelled": one.labels,
            "metric": one.metric,
            "value": round(one.estimate.value, 4),
        }
        for one in found
        if isinstance(one, Finding) and one.metric.startswith("r2")
    ]
    print(json.dumps(rows), flush=True)
    return rows


def main() -> None:
    """Reads every row by every pooling and writes what was found."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--work", type=Path, default=WORK, help="folder of the exam's cohorts (default: exam/)")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--pool", nargs="*", choices=POOLS, default=POOLS, help="default: all of them")
    parser.add_argument("--encoder", action="append", default=[], help="another encoder, as `octjepa embed` takes it")
    parser.add_argument("--amounts", action="store_true")
    given = parser.parse_args()
    cohort = without_test_people(Cohort.open(make_cohorts(given.work, EXAM, ("main",)), "main"))
    shipped = load_encoder(ENCODER)
    featurisers: dict[str, Callable[[], Featurise]] = {
        "intensity": lambda: of_intensity(shipped),
        "untrained": lambda: of_encoder(shipped.untrained()),
        **{name: partial(_of_named, name) for name in (ENCODER, *given.encoder)},
    }
    file: dict[str, Any] = json.loads(given.out.read_text(encoding="utf-8")) if given.out.is_file() else {}
    part, read_one = ("amounts", read_amounts) if given.amounts else ("rows", read)
    known = file.get(part, [])
    for path, featurise in featurisers.items():
        name = _row_name(path)
        there = {row["pool"] for row in known if row["name"] == name}
        missing = [pool for pool in given.pool if pool not in there]
        if not missing:
            continue
        table = token_table(featurise(), cohort, shipped, name)
        for pool in missing:
            known += read_one(cohort, table, name, pool)
            write_json(given.out, {**file, "people": len(cohort.ids), "draws": DRAWS, part: known})


def _row_name(encoder: str) -> str:
    """The name of a run, not its path."""
    return Path(encoder).parent.name if Path(encoder).is_dir() else encoder


def _of_named(encoder: str) -> Featurise:
    return of_encoder(load_encoder(encoder))


if __name__ == "__main__":
    main()
