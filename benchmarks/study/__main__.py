"""`make study`: runs what is not done yet, some runs at once, and writes the page from the results.

    python -m benchmarks.study [--list] [--only PATTERN] [--work DIR] [--out DIR] ...

Ctrl-C or SIGTERM ends the runs in hand with a checkpoint each; the same command goes on there.
"""

from __future__ import annotations

import argparse
import fnmatch
import os
import sys
from dataclasses import replace
from functools import cached_property
from pathlib import Path

from octjepa.errors import OctjepaError, UsageError
from octjepa.files import write_json, writer_lock

from .cohort import Eyes, make_cohort
from .fluid import are_there
from .lanes import Lanes
from .one import COPIES, FIGURES, figures_of, is_calibrated, job_of, measuring_hash
from .page import write_page
from .pairs import pairs, write_pairs
from .plan import ARMS, LATENT, RECIPE, SIMPLE, SUPERVISED, Chosen, Entry, Settings, all_entries
from .results import Results, chosen

ROOT = Path(__file__).resolve().parents[2]
# CPU-seconds that measuring a run takes beside its budget on 600 people; twice what it took on 300 (runs.json tells).
_MEASURING = {
    "pretrain": 200,
    "untrained": 200,
    "shipped": 200,
    "histogram": 90,
    "majority": 60,
    "supervised": 120,
    "fluid": 30,
}


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
    add("--only", action="append", help="runs whose name fits, such as 'main-vjepa-*'; may be given again")
    add("--work", type=Path, default=ROOT / "study", help="cohort, stores and runs (default: study/)")
    add("--out", type=Path, default=None, help="results and page (default: docs/study, of the study as it is defined)")
    add("--data", type=Path, default=os.environ.get("OCTJEPA_DATA"), help="folder with the two real eyes")
    add("--best", choices=ARMS, help="the arm of the curve, before the main rows are complete")
    add("--ablate", choices=LATENT, help="the arm of the ablations, before the main rows are complete")
    add("--people", type=int, default=known.people)
    add("--difficulty", choices=("plain", "realistic"), default=known.difficulty)
    add("--budget", type=float, default=known.budget, help="CPU-seconds of a main run")
    add("--ablation-budget", type=float, default=known.ablation_budget)
    add("--unet-budget", type=float, default=known.unet_budget)
    add("--further-budget", type=float, default=known.further_budget)
    add("--seeds", default=",".join(map(str, known.seeds)))
    add("--ablation-seeds", default=",".join(map(str, known.ablation_seeds)))
    add("--arms", default=",".join(known.arms), help="main rows to run")
    add("--threads", type=int, default=known.threads, help="of each run; at most the number of cores")
    add("--at-once", type=int, default=2, help="runs at a time; with --threads at most the number of cores")
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
    budgets = given.budget, given.ablation_budget, given.unet_budget, given.further_budget
    if min(*budgets, given.people, given.threads, given.at_once) <= 0:
        raise UsageError("people, budgets, threads and runs at once must be above 0")
    return Settings(
        people=given.people, difficulty=given.difficulty, budget=given.budget, ablation_budget=given.ablation_budget,
        unet_budget=given.unet_budget, further_budget=given.further_budget, seeds=seeds, ablation_seeds=later,
        arms=arms, threads=given.threads, bootstrap=given.bootstrap, overrides=tuple(given.overrides),
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
    with writer_lock(given.work):
        cohort = make_cohort(given.work, dict(settings.cohort), RECIPE)
        with Lanes(given.at_once, ROOT) as lanes:
            code = _Work(settings, given, cohort, out, real, lanes).all()
    if code == 0:
        write_page(Results(out), settings, out)
    return code


class _Work:
    """What is to be done, and the lanes it runs in."""

    def __init__(
        self, settings: Settings, given: argparse.Namespace, cohort: Path, out: Path, real: bool, lanes: Lanes
    ) -> None:
        self.settings, self.given, self.cohort, self.out, self.real = settings, given, cohort, out, real
        self.lanes = lanes

    def all(self) -> int:
        """Runs until nothing is left; 0, or the exit code of the first run that failed or was stopped."""
        self._compare(Results(self.out))
        while True:
            ready = self._ready()
            unmeasured = [entry for entry in ready if not is_calibrated(entry, self.calibration, self.settings.threads)]
            if ready and self.lanes.free and not unmeasured:
                self._start(ready[0], calibrate=False)
            elif unmeasured and not self.lanes.running and self.lanes.free:
                self._start(unmeasured[0], calibrate=True)  # alone: beside other work an update would seem dearer
            elif self.lanes.running:
                name, code = self.lanes.wait()
                if code or self.lanes.told:
                    return 128 + self.lanes.told if self.lanes.told else code
                self._take(name)
            else:
                return 128 + self.lanes.told if self.lanes.told else 0

    @property
    def calibration(self) -> Path:
        return self.given.work.resolve() / "calibration.json"

    def _folder(self, run: str) -> Path:
        folder: Path = self.given.work.resolve() / "runs" / run
        return folder

    def _ready(self) -> list[Entry]:
        """What may start now, in order; figures that are there already are taken over."""
        waiting = []
        every = _todo(self.settings, Results(self.out), self.given, self.real)
        to_come = {entry.run for entry, done in every if not done}
        for entry, done in every:
            if done or entry.run in self.lanes.running:
                continue
            if entry.group == "real" and any(name.startswith("real-") for name in self.lanes.running):
                continue  # they write to one store, one at a time
            if figures_of(self._folder(entry.run)) is not None:
                self._take(entry.run)
                return self._ready()
            if entry.of and entry.arm != "untrained" and not (self._folder(entry.of) / FIGURES).is_file():
                if entry.of not in to_come:
                    raise UsageError(
                        f"{entry.run} needs the encoder of {entry.of}, which is not in {self.given.work}/runs: run it "
                        "first"
                    )
                continue
            waiting.append(entry)
        return waiting

    def _start(self, entry: Entry, calibrate: bool) -> None:
        folder = self._folder(entry.run)
        folder.mkdir(parents=True, exist_ok=True)
        data = None if self.given.data is None else Path(self.given.data).resolve()
        job = job_of(
            entry, self.given.work.resolve(), self.cohort.resolve(), data, self.settings.bootstrap,
            self.settings.threads,
        )  # fmt: skip
        write_json(folder / "job.json", job)
        command = [sys.executable, "-m", "benchmarks.study.one", str(folder / "job.json")]
        if calibrate:
            command.append("--calibrate")
        print(f"study: {entry.run}{' (its cost an update)' if calibrate else ''}", file=sys.stderr, flush=True)
        self.lanes.start(
            f"calibrate {entry.run}" if calibrate else entry.run,
            command,
            {"OMP_NUM_THREADS": str(self.settings.threads)},
        )

    def _compare(self, results: Results) -> None:
        """Means over seeds and differences, of the runs whose bootstrap copies are kept."""
        if any((self._folder(run) / COPIES).is_file() for run in results.runs):
            known = chosen(results, self.settings)
            write_pairs(self.out, pairs(results, self._folder(""), self.settings, known, self.people))

    @cached_property
    def people(self) -> int:
        """In the test set."""
        eyes = Eyes.open(self.cohort)
        return len(set(eyes.people[eyes.rows("test")]))

    def _take(self, run: str) -> None:
        """The figures of an ended run enter the results."""
        if run.startswith("calibrate "):
            return
        made = figures_of(self._folder(run))
        if made is None:
            raise OctjepaError(f"{run} ended without figures in {self._folder(run)}")
        results = Results(self.out)
        results.add(run, made["about"], made["rows"])
        self._compare(results)
        write_page(results, self.settings, self.out)


def _todo(settings: Settings, results: Results, given: argparse.Namespace, real: bool) -> list[tuple[Entry, bool]]:
    """Entries that fit `--only`, each with whether it is done. The arms chosen as of today decide the later ones.

    A run whose figures other code measured is not done while its folder is there: it is measured again, not trained.
    """
    done = {
        run
        for run in results.done()
        if results.runs[run].get("measured_by") == measuring_hash() or not (given.work / "runs" / run).is_dir()
    }
    every = all_entries(settings, _chosen(settings, results, given), real)
    fits = [entry for entry in every if any(fnmatch.fnmatch(entry.run, one) for one in given.only or ["*"])]
    return [(entry, entry.run in done) for entry in fits]


def _chosen(settings: Settings, results: Results, given: argparse.Namespace) -> Chosen:
    """What the user names goes before what the results say."""
    known = chosen(results, settings)
    ablated = given.ablate or known.ablated
    further = known.finalists if ablated == known.ablated else ()
    return Chosen(given.best or known.best, ablated, further)


def _list(settings: Settings, results: Results, given: argparse.Namespace, real: bool) -> None:
    """What is done and what remains, with CPU-minutes by budget and measuring."""
    rest = 0.0
    for entry, done in _todo(settings, results, given, real):
        cost = entry.budget * (2 if entry.arm == "unet" else 1)
        seconds = cost + _MEASURING[entry.kind] * settings.people / 600
        rest += 0 if done else seconds
        print(f"{'done' if done else 'to do':6} {seconds / 60:6.1f} CPU min  {entry.run}")
    if None in _chosen(settings, results, given):
        print("ablations and curve come after the main rows, for the arms that are best on validation people")
    if not real:
        print("rows of the real eyes are left out: give --data or OCTJEPA_DATA")
    print(
        f"remaining: {rest / 3600:.1f} CPU hours, {rest / 3600 / settings.threads / given.at_once:.1f} of them with "
        f"{given.at_once} runs at once"
    )


if __name__ == "__main__":
    sys.exit(main())
