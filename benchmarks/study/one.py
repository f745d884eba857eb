"""One entry of the study, in a process of its own: trains what has to be trained, measures it, leaves `figures.json`.

    python -m benchmarks.study.one JOB.json [--calibrate]

`--calibrate` only measures what an update costs here, which says how many fit the budget. The job holds the entry and
where things lie. Nothing is written to the results here: the study does that, once.
"""

from __future__ import annotations

import hashlib
import json
import os
import platform
import sys
import time
from dataclasses import fields
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

import octjepa
from octjepa.checkpoint import load_encoder
from octjepa.config import load_recipe
from octjepa.errors import OctjepaError
from octjepa.files import write_atomic, write_json
from octjepa.store import Store
from octjepa.train.run_folder import code_and_versions, data_hash

from . import dense, fluid, frozen, pretrain, supervised
from .cohort import Eyes
from .features import all_tokens, histograms, of_encoder, of_pixels, pooled, untrained
from .plan import RECIPE, Entry
from .results import Row, row

FIGURES, COPIES = "figures.json", "copies.npz"
_MEASURED_BY = ("cohort", "features", "frozen", "dense", "fluid", "supervised", "one")
_OF_THE_PACKAGE = (
    "probe/linear_knn", "metrics/bootstrap", "metrics/scores", "metrics/intervals", "tasks/segment/dice",
    "tasks/segment/linear",
)  # fmt: skip


@cache
def measuring_hash() -> str:
    """Of the files that turn a trained run into figures, here and in the package."""
    files = [Path(__file__).with_name(f"{name}.py") for name in _MEASURED_BY]
    files += [Path(octjepa.__file__).parent / f"{name}.py" for name in _OF_THE_PACKAGE]
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:16]


def figures_of(folder: Path) -> dict[str, Any] | None:
    """{about, rows} of an ended run; None where it has not ended, or was measured by other code: then it is again."""
    path = folder / FIGURES
    made: dict[str, Any] | None = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else None
    return made if made is not None and made["about"].get("measured_by") == measuring_hash() else None


class Figures:
    """Collects the rows of one run."""

    def __init__(self, entry: Entry) -> None:
        self.entry = entry
        self.rows: list[Row] = []

    def __call__(self, metric: str, value: float, low: float | None, high: float | None, n: int) -> None:
        self.rows.append(row(self.entry.arm, self.entry.seed, metric, value, low, high, n, self.entry.run))


def job_of(entry: Entry, work: Path, cohort: Path, data: Path | None, bootstrap: int, threads: int) -> dict[str, Any]:
    """What `main` reads."""
    return {
        "entry": {one.name: getattr(entry, one.name) for one in fields(entry)}, "work": str(work),
        "cohort": str(cohort), "data": None if data is None else str(data),
        "bootstrap": bootstrap, "threads": threads,
    }  # fmt: skip


def entry_of(job: dict[str, Any]) -> Entry:
    """The entry in a job that went through JSON."""
    given = dict(job["entry"])
    return Entry(**{**given, "overrides": tuple(given["overrides"])})


def is_calibrated(entry: Entry, calibration: Path, threads: int) -> bool:
    """Whether it is known how many updates fit the entry's budget; rows that train nothing on the cohort need none."""
    if entry.kind == "pretrain":
        return pretrain.calibration_key(RECIPE, entry.overrides, threads) in pretrain.calibrations(calibration)
    return entry.kind != "supervised" or supervised.key_of(threads) in pretrain.calibrations(calibration)


def calibrate(job: dict[str, Any]) -> None:
    torch.set_num_threads(job["threads"])
    entry, calibration = entry_of(job), Path(job["work"]) / "calibration.json"
    eyes = Eyes.open(Path(job["cohort"]))
    if entry.kind == "supervised":
        supervised.calibrate(eyes, RECIPE, entry.budget, calibration)
    else:
        pretrain.calibrate(eyes.store, RECIPE, entry.overrides, entry.budget, calibration)


def run_entry(job: dict[str, Any]) -> None:
    """Raises Interrupted after a signal; the same job then goes on from its checkpoint."""
    torch.set_num_threads(job["threads"])
    entry, work = entry_of(job), Path(job["work"])
    folder = work / "runs" / entry.run
    folder.mkdir(parents=True, exist_ok=True)
    figures = Figures(entry)
    about: dict[str, Any] = {}
    if entry.kind == "fluid":
        about = _fluid(entry, job, folder, figures)
    else:
        cohort = Path(job["cohort"])
        bench = frozen.Bench(Eyes.open(cohort), figures, job["bootstrap"])
        about = {"eyes_hash": data_hash(bench.eyes.store, bench.eyes.ids)}
        about |= _of_cohort(entry, bench, cohort, work, folder)
        write_atomic(folder / COPIES, lambda file: np.savez(file, allow_pickle=False, **bench.copies))  # type: ignore[arg-type]
    about = code_and_versions() | about | {
        "group": entry.group, "kind": entry.kind, "cohort": entry.cohort, "threads": torch.get_num_threads(),
        "machine": f"{os.cpu_count()} cores {platform.machine()}", "torch": torch.__version__,
        "measured_by": measuring_hash(),
        "cpu_seconds_of_process": round(time.process_time(), 1),
        "ended": datetime.now(UTC).isoformat(timespec="seconds"),
    }  # fmt: skip
    write_json(folder / FIGURES, {"about": about, "rows": figures.rows})


def _of_cohort(entry: Entry, bench: frozen.Bench, cohort: Path, work: Path, folder: Path) -> dict[str, Any]:
    eyes, calibration = bench.eyes, work / "calibration.json"
    if entry.kind == "supervised":
        return supervised.run(folder, bench, RECIPE, entry.seed, entry.budget, entry.people, calibration)
    if entry.kind == "majority":
        frozen.say_all(bench, {"none": np.ones((len(eyes.ids), 1))})
        dense.say_place_prior(bench)
        return {}
    if entry.kind == "histogram":
        features = histograms(eyes.store, eyes.ids, untrained(RECIPE, entry.overrides, entry.seed))
        frozen.say_all(bench, {"histogram": features})
        return {}
    about: dict[str, Any] = {}
    if entry.kind == "untrained":
        encoder = untrained(RECIPE, entry.overrides, entry.seed)
    elif entry.kind == "shipped":
        encoder = load_encoder(entry.arm)
    else:
        about = pretrain.run(folder, eyes.store, RECIPE, entry.overrides, entry.seed, entry.budget, calibration)
        encoder = load_encoder(folder / "run")
    found = all_tokens(of_encoder(encoder), eyes.store, eyes.ids)
    frozen.say_all(bench, pooled(found))
    dense.say_dense(bench, found, encoder.recipe.grid)
    return about


def _fluid(entry: Entry, job: dict[str, Any], folder: Path, figures: Figures) -> dict[str, Any]:
    work, data = Path(job["work"]), Path(job["data"])
    recipe = load_recipe(RECIPE)
    place = fluid.real_store(work, data, RECIPE)
    eyes = fluid.read_eyes(place, data)
    about: dict[str, Any] = {"of": entry.of} if entry.of else {}
    if entry.arm == "raw_intensity":
        score = fluid.with_intensity(recipe)
    elif entry.arm == "raw_patches":
        score = fluid.with_tokens(of_pixels(recipe), recipe)
    elif entry.arm == "unet":
        score = fluid.with_unet(recipe, entry.seed, entry.budget)
        about["cpu_seconds_each_way"] = entry.budget
    else:
        if entry.arm == "untrained":
            encoder = untrained(RECIPE, entry.overrides, entry.seed)
        elif entry.further:
            start = work / "runs" / entry.of / "run"
            began = load_encoder(start).recipe
            given = (
                f"objective.name={began.objective.name}", f"model.warm_start={start}",
                f"train.base_lr={began.train.base_lr / 4}",
                *entry.overrides,
            )  # fmt: skip
            about |= pretrain.run(
                folder, Store.open(place), RECIPE, given, entry.seed, entry.budget, work / "calibration.json"
            )
            about["overrides"] = [one for one in about["overrides"] if not one.startswith("model.warm_start=")]
            encoder = load_encoder(folder / "run")
        else:
            encoder = load_encoder(work / "runs" / entry.of / "run")
        score = fluid.with_tokens(of_encoder(encoder), encoder.recipe)
    fluid.say_fluid(eyes, score, figures, job["bootstrap"])
    return about


def main() -> int:
    """Exit code 0, 1 with a message, or 128 + the signal after an orderly stop."""
    try:
        job = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8"))
        if "--calibrate" in sys.argv[2:]:
            calibrate(job)
        else:
            run_entry(job)
    except OctjepaError as error:
        print(f"study: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
