"""The clock is set forwards and back by hours and weeks while octjepa works: nothing waits, and no result differs.

Whole programs run with a clock that jumps five times a second. What compares dates of files with the clock is tested
with dates that a jump leaves behind.
"""

from __future__ import annotations

import os
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from command_line import Outcome, run
from jumping_clock import jumping_clock
from oct_dicom import make_dataset, retina, save
from octjepa.errors import OctjepaError, UsageError
from octjepa.ingest import build_store
from octjepa.locks import writer_lock
from octjepa.progress import Lines
from octjepa.remote import RemoteObject, cache, clear_unfinished, lock, temporary_folder
from octjepa.remote.retry import user_error
from octjepa.store import Store
from octjepa.store.index import read_people
from ranks import BEGIN, assert_same, finish, run_alone, start_ranks, weights_of
from synthetic import small_recipe

HOURS, DAYS = 3600.0, 86400.0


@pytest.fixture(scope="module")
def clock(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return jumping_clock(tmp_path_factory.mktemp("clock"))


# -- whole programs --


def ingest(clock: dict[str, str], scans: Path, store: Path) -> Outcome:
    return run("ingest", scans, "--store", store, "--recipe", "tiny_cpu", "--workers", 2, "--json", **clock)


@pytest.mark.slow
def test_an_ingest_goes_on_and_reads_each_file_once(tmp_path: Path, clock: dict[str, str]) -> None:
    scans = tmp_path / "scans"
    for number in range(2):
        save(make_dataset(retina(seed=number)), scans / f"{number}.dcm")
    assert ingest(clock, scans, tmp_path / "store").json["accepted"] == 2
    save(make_dataset(retina(seed=2)), scans / "2.dcm")
    again = ingest(clock, scans, tmp_path / "store").json
    assert (again["accepted"], again["skipped"]) == (1, 2)
    assert 0 < again["seconds"] < 600
    build_store([scans], tmp_path / "other", Store.open(tmp_path / "store").preprocessing)
    stores = [Store.open(tmp_path / name).table for name in ("store", "other")]
    assert stores[0].drop(columns="split").equals(stores[1].drop(columns="split"))


TRAIN = (
    BEGIN
    + """
resume = len(sys.argv) > 2
recipe = recipe_of(4)
if not resume:
    honest = loop.accumulate
    def stop_at_third(*arguments, count=[0]):
        count[0] += 1
        if count[0] == 3:
            signal.raise_signal(signal.SIGTERM)
        return honest(*arguments)
    loop.accumulate = stop_at_third
pretrain(recipe, MemoryStore(recipe.preprocessing), out / "run", resume=resume)
"""
)


@pytest.mark.slow
def test_two_ranks_train_stop_and_resume(
    tmp_path: Path, clock: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run_alone(tmp_path / "alone", 4)
    monkeypatch.setenv("LD_PRELOAD", clock["LD_PRELOAD"])
    stopped = finish(start_ranks(TRAIN, tmp_path))
    assert all("stopped" in err or "stopped" in out for _, out, err in stopped), stopped
    ended = finish(start_ranks(TRAIN, tmp_path, "resume"))
    assert [code for code, _, _ in ended] == [0, 0], ended[0][2] + ended[1][2]
    assert_same(weights_of(tmp_path / "alone"), weights_of(tmp_path / "run"))


WAIT = """
import time
from datetime import timedelta
from octjepa.distributed import runtime
runtime.TIMEOUT, runtime.HEARTBEAT_SECONDS = timedelta(seconds=5), 0.5
with runtime.distributed_context() as here:
    here.run_on_rank_zero(lambda: time.sleep(6))
    print("together", flush=True)
"""


@pytest.mark.slow
def test_ranks_wait_for_one_that_works_longer_than_their_limit(
    clock: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LD_PRELOAD", clock["LD_PRELOAD"])
    ended = finish(start_ranks(WAIT), seconds=120)
    assert [(code, out) for code, out, _ in ended] == [(0, "together\n")] * 2, ended


@pytest.mark.slow
def test_a_lock_holds_whatever_the_clock_says(tmp_path: Path, clock: dict[str, str]) -> None:
    save(make_dataset(retina(seed=1)), tmp_path / "scans" / "eye.dcm")
    with writer_lock(tmp_path / "store"):
        refused = ingest(clock, tmp_path / "scans", tmp_path / "store")
    assert refused.code == 2
    assert "another process is writing to" in refused.err


# -- progress --


def test_a_rate_is_of_the_seconds_that_passed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    steady = [100.0, 140.0]
    monkeypatch.setattr(time, "monotonic", lambda: steady[0])
    monkeypatch.setattr(time, "time", lambda: pytest.fail("the time of day was asked for"))
    lines = Lines("ingest", 100, "files", 0)
    steady.pop(0)
    lines.advance(20)
    assert "ingest: 20 of 100 (0.5 files/s, about 160 s left)" in capsys.readouterr().err


# -- the cache of remote objects --


@pytest.fixture
def cached(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("OCTJEPA_CACHE", str(tmp_path / "cache"))
    return cache.cache_folder()


def put_copy(name: str) -> RemoteObject:
    """A copy of an object in the cache, as a download leaves it."""
    obj = RemoteObject(f"gs://eyes/{name}", 1000, "1")
    body = cache.cache_folder("bodies") / name
    body.write_bytes(name.encode().ljust(1000))
    cache._move(body, cache._folder(obj) / cache.checksum_of(body, "blake2b"))
    return obj


def names_left() -> set[str]:
    return {path.name for path in (cache.cache_root() / "objects").glob("*/*/*/*")}


@pytest.mark.parametrize("hours", [-5.0, 5.0])
def test_copies_used_after_the_clock_was_set_are_the_last_to_go(
    cached: Path, monkeypatch: pytest.MonkeyPatch, hours: float
) -> None:
    monkeypatch.setenv("OCTJEPA_CACHE_GB", "0.000004")
    objects = [put_copy(f"eye-{number}") for number in range(4)]
    for number in (3, 2):
        with cache.local_copy(objects[number]):
            pass
    true_ns = time.time_ns
    monkeypatch.setattr(time, "time_ns", lambda: true_ns() + int(hours * HOURS * 1e9))
    for number in (1, 0):
        with cache.local_copy(objects[number]):
            pass
    monkeypatch.setattr(time, "time_ns", true_ns)
    with cache.local_copy(objects[2]):
        pass
    cache._make_room(1900)  # and a fiftieth of the limit ahead: two copies go
    assert names_left() == {"eye-0", "eye-2"}


@pytest.mark.parametrize("days", [-40.0, 40.0])
def test_a_download_that_runs_survives_a_jump_and_one_that_was_killed_is_removed(cached: Path, days: float) -> None:
    killed = cached / ".new-killed"
    killed.mkdir()
    young = cached / ".new-young"
    young.mkdir()
    with temporary_folder(cached) as running:
        (running / "body").write_bytes(b"half")
        for folder in (running, killed):
            os.utime(folder, (time.time() + days * DAYS,) * 2)
        clear_unfinished(cached)
        assert (running / "body").is_file()
        assert not killed.exists()
        assert young.exists()  # perhaps of a process that has not locked it yet
    assert not running.exists()


# -- messages --


@pytest.mark.parametrize(
    ("ahead", "text"),
    [(-3 * HOURS, "for 3 hours"), (-120.0, "for 2 minutes"), (5 * HOURS, "by its clock, which is ahead of this one")],
)
def test_a_lock_dated_in_the_future_is_not_held_for_negative_minutes(ahead: float, text: str) -> None:
    since = (datetime.now(UTC) + timedelta(seconds=ahead)).isoformat(timespec="seconds")
    assert text in lock._age(since)
    assert "-" not in lock._age(since).replace(since[:10], "")


def test_a_store_that_refuses_the_clock_is_not_about_credentials() -> None:
    refusal = OSError("refused")
    refusal.response = {  # type: ignore[attr-defined]
        "Error": {"Code": "RequestTimeTooSkewed"},
        "ResponseMetadata": {"HTTPStatusCode": 403},
    }
    error = user_error(refusal, "read", "s3://eyes/1.dcm")
    assert isinstance(error, UsageError)
    assert "clock of this machine is wrong: set it" in str(error)
    assert "credentials" not in str(error)


def test_an_index_that_was_removed_is_not_an_empty_one(tmp_path: Path) -> None:
    recipe = small_recipe()
    Store.create(tmp_path / "store", recipe.preprocessing)
    assert read_people(tmp_path / "store", "here").empty
    with pytest.raises(OctjepaError, match=r"was removed from .*: run the command again"):
        read_people(tmp_path / "gone", "gs://eyes/store")
