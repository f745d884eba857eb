"""The exam, `make exam`: makes cohorts, measures floors and ceilings, trains and reads encoders, writes docs/exam.

Every step is kept as it ends, and the same command goes on with what is missing.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from benchmarks.exam.decoys import DECOYS

from octjepa.cli.failures import exit_with_message
from octjepa.config import load_recipe
from octjepa.encoders import PretrainedEncoder
from octjepa.encoders.base import GridEncoder
from octjepa.encoders.locate import open_encoder
from octjepa.errors import UsageError
from octjepa.locks import writer_lock
from octjepa.store import Store

from . import ceiling, real_tasks, training
from .cohorts import EXAMINED, PRETRAINING, Cohort, make_cohorts, phantom_store, signature
from .front import write_front_page
from .measured import Records
from .openings import close_seal, code, open_seal
from .page import row_names, write_page
from .reading import Exam
from .real_eyes import data_folder, pretraining_store, why_absent
from .results import NO_PATCH, READINGS, SUPERVISED, UNTRAINED, Results, RowName, patch_text
from .settings import EXAM, NOT_SEALED, PAGES, RECIPE, RESULTS, SEALED, WORK, Settings
from .ship import ship, store_start


def main() -> int:
    """Runs what the options ask for."""
    given = _parser().parse_args()
    _check(given)
    torch.set_num_threads(given.threads)
    if given.list:
        return _list(given)
    given.work.mkdir(parents=True, exist_ok=True)
    if given.train:
        for plan in training.read_plans(only=[given.train]):
            _train(given.work, EXAM, plan, plan.seeds[0])
        return 0
    if given.start:
        for plan in training.read_plans(only=[given.start]):
            print(store_start(plan, given.work), file=sys.stderr)
        return 0
    if given.ship:
        for plan in training.read_plans(only=[given.ship]):
            ship(plan, given.work, _results(given))
        return 0
    with writer_lock(given.work / "results"):
        if given.sealed:
            _examine_sealed(given)
        else:
            settings = _smaller(EXAM, given.people) if given.people else EXAM  # smaller: a trial of the machinery
            _examine(given, settings, _results(given), _pages(given))
    return 0


def _check(given: argparse.Namespace) -> None:
    """Raises UsageError for options that would spoil what the exam keeps."""
    if given.people and (given.work == WORK or given.out == RESULTS):
        raise UsageError(f"--people {given.people} is a trial: name a --work and an --out of its own")
    parts = (
        "list",
        "cohorts",
        "floors",
        "ceilings",
        "page",
        "only",
        "without",
        "train",
        "read",
        "start",
        "ship",
        "people",
    )
    for part in parts if given.sealed else ():
        if getattr(given, part):
            raise UsageError(f"--sealed and --{part}: the sealed cohort is read whole, once")


def _results(given: argparse.Namespace, cohort: str = "") -> Results:
    """The results of the open exam, or of another cohort. Only the bootstrap samples are outside the repository."""
    samples = given.work / "samples" if given.out == RESULTS else given.out / "samples"
    return Results(given.out / cohort, samples / cohort)


def _pages(given: argparse.Namespace) -> Path:
    """The folder of the pages."""
    return PAGES if given.out == RESULTS else given.out


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="make exam", description=__doc__)
    add = parser.add_argument
    add("--work", type=Path, default=WORK, help="cohorts, runs and resamples (default: exam/)")
    add(
        "--out",
        type=Path,
        default=RESULTS,
        help="results, and pages unless it is the default: benchmarks/records/exam, whose pages are in docs/exam",
    )
    add("--list", action="store_true", help="what is done and what is missing; runs nothing")
    add("--cohorts", action="store_true", help="only make the cohorts")
    add("--floors", action="store_true", help="only the floors, and untrained twins")
    add("--ceilings", action="store_true", help="only the supervised networks")
    add("--page", action="store_true", help="only write the pages and plots from the stored records")
    add("--only", metavar="NAME:SEED", action="append", help="of the encoders only this one; may be given again")
    add("--without", metavar="TASK", action="append", default=[], help="leave a task for later, such as tuning")
    add("--train", metavar="NAME:SEED", help="only train one run of encoders.yaml")
    add(
        "--read", metavar="RUN", help="read a run of your own, or an encoder of the package, next to its random weights"
    )
    add("--ship", metavar="NAME:SEED", help="put this run into the package as the encoder phantom-tiny")
    add("--start", metavar="NAME:SEED", help="store the weights of this run for runs that begin with it")
    add("--sealed", action="store_true", help="the package's encoder on people that nobody has looked at")
    add("--again", action="store_true", help="open the sealed cohort a second time; the record says so")
    add("--people", type=int, help="a trial with so many test people, for an --out of its own")
    add("--threads", type=int, default=2)
    return parser


def _smaller(settings: Settings, people: int) -> Settings:
    if people < 24:
        raise UsageError(f"--people {people}: expected 24 or more")
    return replace(
        settings,
        train=people,
        val=people // 4,
        test=people,
        boundaries_train=6,
        boundaries_test=people // 4,
        second_visit=people,
        decoy_train=people,
        decoy_val=8,
        decoy_test=people,
        decoy_ample=people,
        pretraining=2 * people,
    )


def _examine(given: argparse.Namespace, settings: Settings, results: Results, pages: Path) -> None:
    if given.page:
        write_page(results, pages)
        if pages == PAGES:  # a trial has no front page: its records are those of the package
            write_front_page(Records(RESULTS.parent), pages)
        return
    everything = not (given.cohorts or given.floors or given.ceilings or given.read)
    folder = make_cohorts(given.work, settings, EXAMINED)
    if given.cohorts:
        make_cohorts(given.work, settings, (PRETRAINING, *(f"{kind}_ample" for kind in DECOYS)))
        return
    results.check_cohorts(signature(folder, EXAMINED))
    exam = Exam(folder, results)
    plans = training.read_plans(only=given.only)
    about = {"measured": datetime.now(UTC).strftime("%Y-%m-%d"), **code()}
    if given.read:
        _read_pair(exam, given.read, about, given.without)
        write_page(results, pages)
    if given.floors or everything:
        _read_floors(exam, plans, about, given.without)
        _read_untrained(exam, plans, about, given.without)
        row = RowName("graders", NO_PATCH)
        if not results.has(row, "real_surfaces"):
            recipe = plans[0].recipe(0)
            results.add(row, "real_surfaces", real_tasks.read_surfaces(folder, None, recipe), about)
        write_page(results, pages)
    if given.ceilings or everything:
        _ceilings(exam, given.work, settings, about)
        write_page(results, pages)
    if everything:
        _unet(exam, given.work, settings, about)
        for plan in plans:
            for seed in plan.seeds:
                found = training.finished_run(given.work, plan, seed)
                if found is None:
                    _train(given.work, settings, plan, seed)
                    found = training.finished_run(given.work, plan, seed)
                assert found is not None
                encoder, run_about = found
                row = RowName(plan.name, encoder.recipe.tokens.patch_size, seed)
                without = set(given.without) | set(READINGS) - set(plan.tasks)
                real = plan.cohort == "real"
                exam.read(row, encoder, "encoder", {**about, **run_about}, sorted(without), real_eyes_seen=real)
                write_page(results, pages)


def _examine_sealed(given: argparse.Namespace) -> None:
    """The package's encoder, its untrained twin and the floors on the sealed cohort.

    Without tuning, which would look at its people once more, and real eyes, which are not of it.
    """
    out, plan = given.out / "sealed", training.plan_in_package()
    found = training.finished_run(given.work, plan, plan.seeds[0])
    assert found is not None  # it is in the package
    folder = make_cohorts(given.work, SEALED, EXAMINED)  # before the seal: nothing is looked at yet
    encoder, run_about = found
    open_seal(out, given.again, SEALED.seed, run_about["run"], run_about["weights"])
    results = _results(given, "sealed")
    results.check_cohorts(signature(folder, EXAMINED))
    exam, about = Exam(folder, results), {"measured": datetime.now(UTC).strftime("%Y-%m-%d"), **code()}
    _read_floors(exam, [plan], about, NOT_SEALED)
    _read_untrained(exam, [plan], about, NOT_SEALED)
    row = RowName(plan.name, encoder.recipe.tokens.patch_size, plan.seeds[0])
    exam.read(row, encoder, "encoder", {**about, **run_about}, NOT_SEALED)
    close_seal(out)
    write_page(_results(given), _pages(given))


def _read_floors(exam: Exam, plans: Sequence[training.Plan], about: dict[str, Any], without: Sequence[str]) -> None:
    for plan in plans:
        twin = training.untrained(plan, plan.seeds[0])
        patch = twin.recipe.tokens.patch_size
        for floor in ("intensity", "raw_patches", "context", "position", "tissue"):
            exam.read(RowName(floor, patch), twin, floor, about, without)
    exam.read_covariates(RowName("covariates", load_recipe(RECIPE).tokens.patch_size), about)  # they know no patches


def _read_untrained(exam: Exam, plans: Sequence[training.Plan], about: dict[str, Any], without: Sequence[str]) -> None:
    for plan in plans:
        for seed in plan.seeds:
            twin = training.untrained(plan, seed)
            row = RowName(training.twin_name(twin.recipe, plan.name), twin.recipe.tokens.patch_size, seed)
            exam.read(row, twin, "encoder", {**about, "overrides": list(plan.overrides)}, without)


def _train(work: Path, settings: Settings, plan: training.Plan, seed: int) -> Path:
    """The folder of a run, trained on the cohort that the plan names or its views need.

    Raises UsageError where the real eyes are not there.
    """
    for other in training.other_plans(plan).values():
        if training.weights_of(work, other, seed) is None:
            _train(work, settings, other, seed)
    print(f"training {plan.name}:{seed}, {plan.updates:,} updates: no finished run of it is there", file=sys.stderr)
    if plan.cohort == "real":
        data = data_folder()
        absent = why_absent(data)
        if absent is not None:
            raise UsageError(f"{plan.name} learns from real eyes: {absent}")
        return training.train(work, plan, seed, pretraining_store(work, data, plan.recipe(seed).preprocessing))
    return training.train(work, plan, seed, phantom_store(work, settings, plan.recipe(seed)))


def _ceilings(exam: Exam, work: Path, settings: Settings, about: dict[str, Any]) -> None:
    """Networks with ample labels and with few, of the tasks that have no figures of them yet."""
    row = RowName(SUPERVISED, NO_PATCH)
    missing = [task for task in ("eye_lesion", "decoys") if not exam.results.has(row, task)]
    if not missing:
        return
    folder = make_cohorts(work, settings, (PRETRAINING, *(f"{name}_ample" for name in DECOYS)))
    ample = [Cohort.open(folder, f"{name}_ample") for name in DECOYS]
    of_lesions, of_decoys = ceiling.ample_network(Cohort.open(folder, PRETRAINING), ample)
    if "eye_lesion" in missing:
        main = exam.cohort("main")
        pairs = ((of_lesions, None), (ceiling.few_lesions_network(main), ceiling.FEW_PEOPLE))
        found = [one for network, labels in pairs for one in ceiling.lesions_ceiling(main, network, labels)]
        exam.results.add(row, "eye_lesion", found, about)
    if "decoys" in missing:
        decoys = [exam.cohort(name) for name in DECOYS]
        pairs = ((of_decoys, None), (ceiling.few_decoys_network(decoys), ceiling.FEW_PEOPLE))
        found = [one for network, labels in pairs for one in ceiling.decoys_ceiling(decoys, network, labels)]
        exam.results.add(row, "decoys", found, about)


def _unet(exam: Exam, work: Path, settings: Settings, about: dict[str, Any]) -> None:
    """A U-Net on the real eyes, with the CPU-seconds that pretraining the first encoder takes on this machine."""
    row = RowName(SUPERVISED, NO_PATCH)
    if exam.results.has(row, "real_fluid"):
        return
    plan = training.read_plans()[0]
    store = Store.open(phantom_store(work, settings, plan.recipe(0)))
    seconds = training.cpu_seconds(work / "seconds_per_update.json", plan, store)
    found = real_tasks.read_unet(exam.folder, plan.recipe(0), seconds, 0)
    exam.results.add(row, "real_fluid", found, {**about, "cpu_seconds": round(seconds), "seconds_of": plan.name})


def _read_pair(exam: Exam, location: str, about: dict[str, Any], without: Sequence[str]) -> None:
    """An encoder that is none of the plans, with its baselines and its architecture with random weights.

    location: a run, or an encoder of the package. Raises UsageError for an encoder whose tokens have no place.
    """
    encoder = open_encoder(location, load_recipe(RECIPE).preprocessing)
    if not isinstance(encoder, GridEncoder):
        raise UsageError(f"{location}: the exam reads tokens of a grid; this encoder is {type(encoder).__name__}")
    patch, seed = encoder.recipe.tokens.patch_size, encoder.recipe.train.seed
    for floor in ("intensity", "raw_patches", "context", "position"):
        exam.read(RowName(floor, patch), encoder, floor, about, without)
    known = isinstance(encoder, PretrainedEncoder)
    twin = training.twin_name(encoder.recipe, encoder.name) if known else f"{UNTRAINED}:{encoder.name}"
    exam.read(RowName(twin, patch, seed), encoder.untrained(), "encoder", about, without)
    run_about = {**about, "run": Path(location).name, "trained": True}
    exam.read(RowName(encoder.name, patch, seed), encoder, "encoder", run_about, without)


def _list(given: argparse.Namespace) -> int:
    results = _results(given)
    for (name, patch), rows in row_names(results).items():
        tasks = sorted({entry.task for entry in results.entries if entry.name == name})
        print(f"{name:<28} {patch_text(patch):<8} seeds {[row.seed for row in rows]}  {', '.join(tasks)}")
    for plan in training.read_plans():
        for seed in plan.seeds:
            done = training.is_trained(training.run_folder(given.work, plan, seed))
            print(f"{plan.name:<28} seed {seed}: {'trained' if done else 'not trained yet'}, {plan.updates} updates")
    return 0


if __name__ == "__main__":
    with exit_with_message(lambda: None):
        sys.exit(main())
