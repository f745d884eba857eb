"""The study goes on where it stopped: between runs, within a run, and never runs anything twice."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from benchmarks.study import __main__ as study
from benchmarks.study import pretrain as budget
from benchmarks.study import supervised
from benchmarks.study.cohort import Eyes
from benchmarks.study.frozen import Bench
from benchmarks.study.lanes import Lanes
from benchmarks.study.one import FIGURES, entry_of, figures_of, job_of, measuring_hash
from benchmarks.study.plan import RECIPE, Chosen, Entry, Settings, all_entries, main_entries
from benchmarks.study.results import Results, row

from invented_eyes import Said
from octjepa.distributed.signals import Interrupted, StopRequest

_SMALL = supervised.SmallNet


class Line(Lanes):
    """In place of processes: `stops` names the run at which a signal comes. The last one started ends first."""

    stops = "never"
    ran: ClassVar[list[str]] = []
    beside: ClassVar[list[int]] = []  # runs in hand when one was started

    def start(self, name: str, command: Sequence[str], environment: Mapping[str, str]) -> None:
        type(self).beside.append(len(self.running))
        self.running[name] = command  # type: ignore[assignment]
        type(self).ran.append(name)

    def wait(self) -> tuple[str, int]:
        name, command = self.running.popitem()
        if name.startswith("calibrate "):
            assert not self.running
            job = json.loads(Path(command[-2]).read_text())
            measured(entry_of(job), Path(job["work"]))
            return name, 0
        if self.stops in name:
            type(self).stops = "never"
            self.running.clear()
            return name, 143
        entry = entry_of(json.loads(Path(command[-1]).read_text()))
        metrics = ("lesion_auroc_macro", "lesion_auroc_macro_val", "vendor_accuracy")
        value = 0.9 if entry.arm == "mae" else 0.5
        rows = [row(entry.arm, entry.seed, metric, value, None, None, 9, entry.run) for metric in metrics]
        about = {"ended": "2026-01-01T00:00:00+00:00", "measured_by": measuring_hash()}
        made = {"about": about, "rows": rows}
        Path(command[-1]).with_name(FIGURES).write_text(json.dumps(made))
        return name, 0

    def __exit__(self, *_: object) -> None:
        pass


def measured(entry: Entry, work: Path) -> None:
    """An update's cost, as if it had been measured."""
    kept = work / "calibration.json"
    key = supervised.key_of(1) if entry.kind == "supervised" else budget.calibration_key(RECIPE, entry.overrides, 1)
    kept.write_text(json.dumps({**budget.calibrations(kept), key: {"cpu_seconds_per_update": 1.0}}))


@pytest.fixture
def line(monkeypatch: pytest.MonkeyPatch) -> type[Line]:
    monkeypatch.setattr(study, "Lanes", Line)
    for name, value in (("stops", "never"), ("ran", []), ("beside", [])):
        monkeypatch.setattr(Line, name, value)
    return Line


@pytest.fixture
def arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setattr(study, "make_cohort", lambda work, cohort, recipe: work / "cohort")
    monkeypatch.delenv("OCTJEPA_DATA", raising=False)
    return ["--work", str(tmp_path / "work"), "--out", str(tmp_path / "out"), "--budget", "9", "--seeds", "0,1"]


@pytest.mark.slow
def test_a_stopped_study_goes_on_where_it_was(
    arguments: list[str], tmp_path: Path, line: type[Line], capsys: pytest.CaptureFixture[str]
) -> None:
    line.stops = "main-mae-seed1"
    assert study.main([*arguments, "--at-once", "1"]) == 143
    before = list(line.ran)
    assert study.main([*arguments, "--list"]) == 0
    shown = capsys.readouterr().out
    assert shown.count("done ") == len([name for name in before if not name.startswith("calibrate ")]) - 1
    assert "come after the main rows" in shown
    assert study.main([*arguments, "--at-once", "1"]) == 0
    settings = Settings(budget=9.0, seeds=(0, 1))
    wanted = [entry.run for entry in all_entries(settings, Chosen("mae", "vjepa"), real=False)]
    runs = [name for name in line.ran[: len(before) - 1] + line.ran[len(before) :] if not name.startswith("calib")]
    assert runs == wanted  # the stopped one again, no other twice
    assert Results(tmp_path / "out").done() == set(wanted)
    shown = (tmp_path / "out" / "README.md").read_text()
    assert "## Compute: mae" in shown
    assert "## Ablations: vjepa" in shown
    count = len(line.ran)
    assert study.main(arguments) == 0
    assert len(line.ran) == count


@pytest.mark.slow
def test_runs_go_side_by_side_and_what_an_update_costs_is_measured_alone(
    arguments: list[str], tmp_path: Path, line: type[Line]
) -> None:
    assert study.main([*arguments, "--at-once", "3"]) == 0
    assert max(line.beside) == 2
    alone = [beside for name, beside in zip(line.ran, line.beside, strict=True) if name.startswith("calibrate ")]
    assert len(alone) > 4
    assert not any(alone)
    wanted = all_entries(Settings(budget=9.0, seeds=(0, 1)), Chosen("mae", "vjepa"), real=False)
    assert Results(tmp_path / "out").done() == {entry.run for entry in wanted}


def test_figures_of_other_measuring_code_are_not_taken_over(tmp_path: Path) -> None:
    assert figures_of(tmp_path) is None
    for code, kept in ((measuring_hash(), True), ("other", False)):
        (tmp_path / FIGURES).write_text(json.dumps({"about": {"measured_by": code}, "rows": []}))
        assert (figures_of(tmp_path) is not None) == kept


def test_what_other_code_measured_is_measured_again_where_its_run_is_kept(
    arguments: list[str], tmp_path: Path, line: type[Line]
) -> None:
    given = [*arguments, "--only", "main-majority-*"]
    assert study.main(given) == 0
    (run,) = line.ran
    kept = tmp_path / "work" / "runs" / run
    for path in (tmp_path / "out" / "runs.json", kept / FIGURES):
        path.write_text(path.read_text().replace(measuring_hash(), "other"))
    assert study.main(given) == 0
    assert line.ran == [run, run]
    known = tmp_path / "out" / "runs.json"
    known.write_text(known.read_text().replace(measuring_hash(), "other"))
    shutil.rmtree(kept)
    assert study.main(given) == 0
    assert line.ran == [run, run], "a run that would have to be trained again keeps its figures"


def test_a_failed_run_ends_the_study_with_its_code_and_leaves_no_figure(
    arguments: list[str], tmp_path: Path, line: type[Line], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(line, "wait", lambda self: (self.running.popitem()[0], 1))
    assert study.main(arguments) == 1
    assert not (tmp_path / "out").exists()


def test_trials_never_reach_the_committed_results(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert study.main(["--budget", "5", "--work", str(tmp_path)]) == 2
    assert "--out" in capsys.readouterr().err
    assert study.main(["--arms", "vjepa,unknown", "--out", str(tmp_path)]) == 2
    assert "no arm unknown" in capsys.readouterr().err


def test_a_signal_reaches_the_run_in_hand_and_its_end_is_awaited(tmp_path: Path) -> None:
    code = (
        "import os, signal, sys, time, pathlib\n"
        f"signal.signal(signal.SIGTERM, lambda *_: (pathlib.Path({str(tmp_path / 'told')!r}).touch(), sys.exit(143)))\n"
        f"os.kill({os.getpid()}, signal.SIGTERM)\ntime.sleep(30)\n"
    )
    with Lanes(2, tmp_path) as lanes:
        lanes.start("one", [sys.executable, "-c", code], {})
        assert lanes.wait() == ("one", 143)
        assert lanes.told == signal.SIGTERM
        assert not lanes.free
    assert (tmp_path / "told").exists()


def test_a_job_survives_json() -> None:
    for entry in all_entries(Settings(), Chosen("vjepa", "vjepa"), real=True):
        job = json.loads(json.dumps(job_of(entry, Path("w"), Path("c"), None, 10, 1)))
        assert entry_of(job) == entry
        assert entry_of(job).run == entry.run


def test_a_stopped_pretraining_resumes_with_the_updates_it_was_given(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[tuple[int, bool]] = []

    def pretrain(recipe: Any, store: Any, out: Path, resume: bool) -> dict[str, Any]:
        told.append((recipe.train.max_updates, resume))
        out.mkdir(parents=True, exist_ok=True)
        known = dict.fromkeys(("science_hash", "data_hash", "code_hash", "versions", "devices"), "x")
        (out / "run.json").write_text(json.dumps(known))
        if len(told) == 1:
            raise Interrupted("stopped", 15)
        return dict.fromkeys(("cosine", "baseline_cosine", "loss", "rankme", "alarms"))

    monkeypatch.setattr(budget, "pretrain", pretrain)
    monkeypatch.setattr(budget, "seconds_per_update", lambda recipe, store, seconds: (0.5, 7))
    given = (tmp_path / "run", None, RECIPE, ("objective.name=mae",), 3, 50.0, tmp_path / "calibration.json")
    with pytest.raises(Interrupted):
        budget.run(*given)
    monkeypatch.setattr(budget, "seconds_per_update", lambda recipe, store, seconds: (0.1, 7))
    (tmp_path / "calibration.json").unlink()
    about = budget.run(*given)
    assert told == [(100, False), (100, True)]
    assert about["updates"] == 100
    assert len(list((tmp_path / "run" / "cpu").glob("*.txt"))) == 2


def test_an_arm_is_calibrated_once(tmp_path: Path) -> None:
    asked: list[float] = []

    def measure(seconds: float) -> tuple[float, int]:
        asked.append(seconds)
        return 0.25, 4

    kept = tmp_path / "calibration.json"
    assert budget.calibrated(kept, "a", 1200.0, measure) == 0.25
    assert budget.calibrated(kept, "a", 1200.0, measure) == 0.25
    assert budget.calibrated(kept, "b", 10.0, measure) == 0.25
    assert asked == [30.0, 0.5]


def test_the_cpu_clock_counts_work_not_waiting_and_adds_up_tries(tmp_path: Path) -> None:
    import time

    for _ in range(2):
        with budget.cpu_clock(tmp_path, every_seconds=0.01):
            start = time.process_time()
            while time.process_time() - start < 0.1:
                pass
            time.sleep(0.15)
    assert 0.2 <= budget.cpu_used(tmp_path) < 0.3


@pytest.mark.slow
def test_calibration_measures_the_real_loop(cohort: Path) -> None:
    from octjepa.config import load_recipe

    recipe = load_recipe(RECIPE, ["train.global_batch=2", "tokens.budget=32", "machine.compile=false"])
    seconds, updates = budget.seconds_per_update(recipe, Eyes.open(cohort).store, 0.01)
    assert seconds > 0
    assert updates >= 3


def test_a_stopped_supervised_run_ends_as_an_unbroken_one(
    cohort: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from octjepa.config import load_recipe

    monkeypatch.setattr(supervised, "_BATCH", 2)
    monkeypatch.setattr(supervised, "SmallNet", lambda: _SMALL(2))
    bench = Bench(Eyes.open(cohort), Said(), 10)
    recipe = load_recipe(RECIPE)

    def ended(stop_at: int | None, kept: Path) -> dict[str, torch.Tensor]:
        request = StopRequest()
        training = supervised._Training(bench, recipe, 0, bench.train)
        if stop_at is not None:
            step = training.step

            def stopping(update: int, rate: float) -> None:
                step(update, rate)
                request.signal_number = 15 if update == stop_at else 0

            training.step = stopping  # type: ignore[method-assign]
            with pytest.raises(Interrupted):
                supervised._train(training, kept, 4, request)
            training = supervised._Training(bench, recipe, 0, bench.train)
        supervised._train(training, kept, 4, StopRequest())
        return training.net.state_dict()

    whole, broken = ended(None, tmp_path / "a.pt"), ended(1, tmp_path / "b.pt")
    assert all(torch.equal(whole[name], broken[name]) for name in whole)


def test_a_supervised_run_of_few_people_says_that_figure_alone(
    cohort: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervised, "_BATCH", 2)
    monkeypatch.setattr(supervised, "SmallNet", lambda: _SMALL(2))
    said = Said()
    bench = Bench(Eyes.open(cohort), said, 10)
    about = supervised.run(tmp_path / "run", bench, RECIPE, 0, 0.2, 2, tmp_path / "calibration.json")
    assert about["training_volumes"] == 4
    assert set(said) == {"few_label_auroc_2"}
    assert np.isfinite(about["cpu_seconds"])


def test_settings_say_which_runs_are_the_studys_own() -> None:
    assert len(main_entries(Settings())) == 4 * 3 + 3 + 1 + 1 + 3
