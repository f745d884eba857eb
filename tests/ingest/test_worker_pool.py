"""Worker processes that crash or hang: one file is lost, all others are not."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from command_line import call
from octjepa.errors import OctjepaError, UsageError
from octjepa.ingest import SourceFile
from octjepa.ingest.worker_pool import worker_count
from octjepa.recipe import Preprocessing
from worker_tasks import obey, poisoned

PREPROCESSING = Preprocessing(
    image_size=(8, 64, 64), margin=(0, 8, 8), target_spacing_mm=(0.7, 0.0156, 0.094), axial_anchor=0.65
)


def sources(folder: Path, *names: str) -> list[SourceFile]:
    return [SourceFile(folder / name, name) for name in names]


def reasons(files: list[SourceFile], workers: int = 2, seconds: float = 60) -> dict[str, tuple[str, str]]:
    from octjepa.ingest.worker_pool import WorkerPool

    with WorkerPool(obey, workers, seconds) as pool:
        refusals = list(pool.results(files))
    assert [file for file, _ in refusals] == files
    return {file.name: (row.entry["reason"], row.entry.get("detail", "")) for file, row in refusals}


@pytest.mark.slow
def test_a_file_that_ends_its_process_is_named_and_the_rest_goes_on(tmp_path: Path) -> None:
    names = ["a", "segfault.dcm", "b", "slow.1", "killed.dcm", "c", "once.dcm", "d", "e", "f"]
    refusals = reasons(sources(tmp_path, *names))
    assert refusals.pop("segfault.dcm") == ("worker_died", "the process ended with SIGSEGV, twice")
    assert refusals.pop("killed.dcm") == ("worker_died", "the process ended with SIGKILL (out of memory?), twice")
    assert {reason for reason, _ in refusals.values()} == {"read"}
    assert len(refusals) == 8


@pytest.mark.slow
def test_a_file_that_hangs_is_given_up_after_its_time(tmp_path: Path) -> None:
    refusals = reasons(sources(tmp_path, "a", "hang.dcm", "b", "slow.1", "c", "d"), seconds=1.0)
    assert refusals.pop("hang.dcm") == ("timed_out", "not done after 1 s")
    assert {reason for reason, _ in refusals.values()} == {"read"}


@pytest.mark.slow
def test_workers_divide_the_memory_among_them(tmp_path: Path) -> None:
    assert reasons(sources(tmp_path, "workers", "workers.1"), workers=2) == {
        "workers": ("read", "2"),
        "workers.1": ("read", "2"),
    }


@pytest.mark.slow
def test_a_suspect_has_the_machine_to_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from octjepa.ingest import worker_pool as module

    at_once: dict[str, int] = {}
    assign = module.Worker.assign

    def watched(worker: module.Worker, number: int, files: list[SourceFile], seconds: float) -> None:
        assign(worker, number, files, seconds)
        busy = [other for other in pool.workers if other.number is not None]
        at_once[f"{files[number].name} {pool.suspects}"] = len(busy)

    monkeypatch.setattr(module.Worker, "assign", watched)
    with module.WorkerPool(obey, 2, 60) as pool:
        list(pool.results(sources(tmp_path, "pair.1", "pair.2", "once.dcm", "slow.1", "slow.2", "slow.3")))
    assert at_once["once.dcm {2}"] == 1
    assert max(at_once.values()) == 2


@pytest.mark.slow
def test_what_is_no_file_s_fault_ends_the_work(tmp_path: Path) -> None:
    with pytest.raises(OctjepaError, match="the disk is full"):
        reasons(sources(tmp_path, "a", "full", "b"))


@pytest.mark.parametrize(("requested", "started", "warnings"), [(None, 3, 0), (1, 1, 0), (3, 3, 0), (16, 16, 1)])
def test_a_process_a_core_and_a_warning_for_more(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    requested: int | None,
    started: int,
    warnings: int,
) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda process: {0, 2, 5}, raising=False)
    monkeypatch.setattr("os.cpu_count", lambda: 64)
    assert worker_count(requested) == started
    assert len(caplog.messages) == warnings
    assert all("16 worker processes on 3 cores" in text and "--workers 3" in text for text in caplog.messages)


@pytest.mark.parametrize("requested", [None, 7])
def test_ingest_starts_them(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, requested: int | None) -> None:
    from octjepa.ingest import build

    started = []
    monkeypatch.setattr("octjepa.ingest.worker_pool.cores", lambda: 3)
    monkeypatch.setattr(
        build, "run_files", lambda files, work, engine, workers, *_: started.append(workers) or (_ for _ in ())
    )
    monkeypatch.setattr(build, "_check_lost", lambda *_: None)
    (tmp_path / "scans").mkdir()
    (tmp_path / "scans" / "a.dcm").write_bytes(bytes(128) + b"DICM")
    build.build_store([tmp_path / "scans"], tmp_path / "store", PREPROCESSING, requested)
    assert started == [requested or 3]


@pytest.mark.parametrize("words", [("phantom", "cohort", "--people", "1"), ("demo", "--out", "demo")])
def test_phantoms_are_drawn_by_a_process_a_core(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, words: tuple[str, ...]
) -> None:
    started = []

    def write_cohort(*arguments: object, workers: int | None = None, **options: object) -> None:
        started.append(arguments[6] if workers is None else workers)
        raise OctjepaError("that is enough")

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("octjepa.machine.cores", lambda: 3)  # what the demo asks
    monkeypatch.setattr("octjepa.ingest.worker_pool.cores", lambda: 3)
    monkeypatch.setattr("octjepa.phantom.write_cohort", write_cohort)
    assert call(*words).code == 1
    assert started == [3]


@pytest.mark.slow
def test_no_process_is_left_behind(tmp_path: Path) -> None:
    from octjepa.ingest.worker_pool import WorkerPool

    with WorkerPool(obey, 2, 60) as pool:
        results = pool.results(sources(tmp_path, "a", "hang", "b"))
        next(results)
        processes = [worker._process.pid for worker in pool.workers]
        results.close()
    assert len(processes) == 2
    for process in processes:
        assert not Path(f"/proc/{process}").exists()
    assert threading.active_count() < 20


@pytest.mark.slow
def test_few_results_wait_for_a_slow_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from octjepa.ingest import worker_pool as module

    given: list[int] = []
    assign = module.Worker.assign

    def counted(worker: module.Worker, number: int, *rest: object) -> None:
        given.append(number)
        assign(worker, number, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(module.Worker, "assign", counted)
    with module.WorkerPool(obey, 2, 60) as pool:
        results = pool.results(sources(tmp_path, "gate", *(f"fast.{number}" for number in range(40))))
        next(results)
        results.close()
    assert given == list(range(2 * module.AHEAD))


@pytest.mark.slow
def test_a_poisonous_file_is_quarantined(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from octjepa.ingest import build, build_store
    from octjepa.store import Store

    monkeypatch.setattr(build, "ingest_one", poisoned)
    summary = build_store([tiny], tmp_path / "store", PREPROCESSING, workers=2)
    assert (summary.accepted, summary.by_reason) == (9, {"worker_died": 1})
    (row,) = Store.open(tmp_path / "store").quarantine
    assert (row["file"].rpartition("/")[2], row["stage"], row["reason"]) == ("eye3.dcm", "read", "worker_died")


def test_wrong_settings_are_refused(tiny: Path, tmp_path: Path) -> None:
    from octjepa.ingest import IngestOptions, build_store

    with pytest.raises(UsageError, match="above 0"):
        build_store([tiny], tmp_path / "store", PREPROCESSING, options=IngestOptions(seconds_per_file=0))
