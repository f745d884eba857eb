"""`make study`: runs what is not done yet, one run at a time, and writes the page from the results.

    python -m benchmarks.study [--list] [--only PATTERN] [--work DIR] [--out DIR] ...

Ctrl-C or SIGTERM ends the run in hand with a checkpoint; the same command goes on there.
"""

from __future__ import annotations

import argparse
import fnmatch
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

from octjepa.errors import OctjepaError, UsageError
from octjepa.store.disk import only_writer, write_json

from .cohort import make_cohort
from .fluid import are_there
from .one import FIGURES, figures_of, job_of
from .page import write_page
from .plan import ARMS, RECIPE, SIMPLE, SUPERVISED, Entry, Settings, all_entries
from .results import Results, best_arm

ROOT = Path(__file__).resolve().parents[2]
# CPU-seconds that measuring a run takes beside its budget on 600 people; twice what it took on 300 (runs.json tells).
_MEASURING = {"pretrain": 200, "untrained": 200, "histogram": 90, "majority": 60, "supervised": 120, "fluid": 30}


def main(arguments: list[str] | None = None) -> int:
    """Runs the study; the exit code."""
    given = _parser().parse_args(arguments)
    try:
        return _study(given)
    except OctjepaError as error:
        print(f"study: {error}", file=sys.stderr)
        return error.exit_code


def _parser() -> argparse.ArgumentParser:
    known = Settings()
    parser = argparse.ArgumentParser(prog="make study", description="The comparison of objectives; see docs/study.")
    add = parser.add_argument
    add("--list", action="store_true", help="what is done, what remains and how long it takes; runs nothing")
    add("--page", action="store_true", help="only write the page from the results")
    add("--only", default="*", help="runs whose name fits, such as 'main-vjepa-*'")
    add("--work", type=Path, default=ROOT / "study", help="cohort, stores and runs (default: study/)")
    add("--out", type=Path, default=None, help="results and page (default: docs/study, of the study as it is defined)")
    add("--data", type=Path, default=os.environ.get("OCTJEPA_DATA"), help="folder with the two real eyes")
    add("--best", choices=ARMS, help="take this arm for ablations and curve, before the main rows are complete")
    add("--people", type=int, default=known.people)
    add("--difficulty", choices=("plain", "realistic"), default=known.difficulty)
    add("--budget", type=float, default=known.budget, help="CPU-seconds of a main run")
    add("--ablation-budget", type=float, default=known.ablation_budget)
    add("--fluid-budget", type=float, default=known.fluid_budget)
    add("--seeds", default=",".join(map(str, known.seeds)))
    add("--ablation-seeds", default=",".join(map(str, known.ablation_seeds)))
    add("--arms", default=",".join(known.arms), help="main rows to run")
    add("--threads", type=int, default=known.threads, help="of each run; at most the number of cores")
    add("--bootstrap", type=int, default=known.bootstrap)
    add("--set", dest="overrides", action="append", default=[], help="a recipe override of every pretraining run")
    return parser


def _settings(given: argparse.Namespace) -> Settings:
    arms = tuple(given.arms.split(","))
    unknown = sorted(set(arms) - {*ARMS, *SIMPLE, SUPERVISED})
    if unknown:
        raise UsageError(f"no arm {', '.join(unknown)}: known are {', '.join((*ARMS, *SIMPLE, SUPERVISED))}")
    try:
        seeds, later = (tuple(int(one) for one in text.split(",")) for text in (given.seeds, given.ablation_seeds))
    except ValueError:
        raise UsageError(f"seeds {given.seeds!r}, {given.ablation_seeds!r}: expected numbers such as 0,1,2") from None
    if min(given.people, given.budget, given.ablation_budget, given.fluid_budget, given.threads) <= 0:
        raise UsageError("people, budgets and threads must be above 0")
    return Settings(
        people=given.people, difficulty=given.difficulty, budget=given.budget, ablation_budget=given.ablation_budget,
        fluid_budget=given.fluid_budget, seeds=seeds, ablation_seeds=later, arms=arms, threads=given.threads,
        bootstrap=given.bootstrap, overrides=tuple(given.overrides),
    )  # fmt: skip


def _study(given: argparse.Namespace) -> int:
    settings = _settings(given)
    out = given.out
    if out is None:
        shown = replace(settings, arms=Settings().arms, ablation_seeds=Settings().ablation_seeds)
        if shown != Settings():
            raise UsageError("docs/study holds the study as it is defined: give a trial with other settings an --out")
        out = ROOT / "docs" / "study"
    real = are_there(given.data)
    if given.page:
        write_page(Results(out), settings, out)
        return 0
    if given.list:
        _list(settings, Results(out), given, real)
        return 0
    if not real:
        print("the two real eyes are not there (--data or OCTJEPA_DATA): their rows stay missing", file=sys.stderr)
    given.work.mkdir(parents=True, exist_ok=True)
    with only_writer(given.work):
        cohort = make_cohort(given.work, dict(settings.cohort), RECIPE)
        while (entry := _next(settings, Results(out), given, real)) is not None:
            code = _run(entry, settings, given, cohort, out)
            if code:
                return code
    write_page(Results(out), settings, out)
    return 0


def _todo(settings: Settings, results: Results, given: argparse.Namespace, real: bool) -> list[tuple[Entry, bool]]:
    """Entries that fit `--only`, each with whether it is done. The best arm of today decides the later ones."""
    objectives = [arm for arm in settings.arms if arm in ARMS]
    best = given.best or best_arm(results, objectives, settings.seeds)
    done = results.done()
    every = all_entries(settings, best, real)
    return [(entry, entry.run in done) for entry in every if fnmatch.fnmatch(entry.run, given.only)]


def _next(settings: Settings, results: Results, given: argparse.Namespace, real: bool) -> Entry | None:
    return next((entry for entry, done in _todo(settings, results, given, real) if not done), None)


def _run(entry: Entry, settings: Settings, given: argparse.Namespace, cohort: Path, out: Path) -> int:
    """One run in a process of its own; its figures enter the results. The exit code, 0 when they did."""
    folder = given.work.resolve() / "runs" / entry.run
    if entry.of and entry.arm != "untrained" and not (given.work / "runs" / entry.of / FIGURES).is_file():
        raise UsageError(
            f"{entry.run} needs the encoder of {entry.of}, which is not in {given.work}/runs: run it first"
        )
    folder.mkdir(parents=True, exist_ok=True)
    made = figures_of(folder)
    if made is None:
        job = job_of(entry, given.work.resolve(), cohort.resolve(), given.data, settings.bootstrap, settings.threads)
        write_json(folder / "job.json", job)
        print(f"study: {entry.run}", file=sys.stderr, flush=True)
        threads = {"OMP_NUM_THREADS": str(settings.threads)}
        code = _child([sys.executable, "-m", "benchmarks.study.one", str(folder / "job.json")], threads)
        if code:
            return code
        made = figures_of(folder)
        if made is None:
            raise OctjepaError(f"{entry.run} ended without figures in {folder}")
    results = Results(out)
    results.add(entry.run, made["about"], made["rows"])
    write_page(results, settings, out)
    return 0


def _child(command: list[str], environment: dict[str, str]) -> int:
    """Runs `command`; a signal to this process is passed on, and the child's orderly end awaited."""
    child = subprocess.Popen(command, cwd=ROOT, env={**os.environ, **environment}, start_new_session=True)
    told: list[int] = []

    def pass_on(number: int, frame: object) -> None:
        told.append(number)
        child.send_signal(signal.SIGTERM)

    before = {number: signal.signal(number, pass_on) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        code = child.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if told:
        return 128 + told[0]
    return code if code >= 0 else 128 - code


def _list(settings: Settings, results: Results, given: argparse.Namespace, real: bool) -> None:
    """What is done and what remains, with CPU-minutes by budget and measuring."""
    rest = 0.0
    for entry, done in _todo(settings, results, given, real):
        cost = entry.budget * (2 if entry.arm == "unet" else 1)
        seconds = cost + _MEASURING[entry.kind] * settings.people / 600
        rest += 0 if done else seconds
        print(f"{'done' if done else 'to do':6} {seconds / 60:6.1f} CPU min  {entry.run}")
    objectives = [arm for arm in settings.arms if arm in ARMS]
    if not (given.best or best_arm(results, objectives, settings.seeds)):
        print("the ablations and the curve come after the main rows, for the arm that is best on validation people")
    if not real:
        print("rows of the real eyes are left out: give --data or OCTJEPA_DATA")
    print(f"remaining: {rest / 3600:.1f} CPU hours, {rest / 3600 / settings.threads:.1f} on {settings.threads} cores")


if __name__ == "__main__":
    sys.exit(main())
