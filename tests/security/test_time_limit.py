"""A file that takes too long is given up, in worker processes and in the calling process alike."""

from __future__ import annotations

import math
import threading
import time
from pathlib import Path

import pytest

from oct_dicom import make_dataset, retina, save
from octjepa.errors import VolumeRejected
from octjepa.ingest.build import IngestOptions, build_store
from octjepa.read.reader import describe_file, read_volume
from octjepa.recipe import Preprocessing
from octjepa.time_limit import time_limit


def endless() -> None:
    while True:
        try:
            for _ in range(1000):
                math.sqrt(2)
        except Exception:  # as readers do that replace a damaged frame
            continue


def test_work_is_interrupted_in_any_thread_whatever_it_catches() -> None:
    found: list[str] = []

    def work() -> None:
        with pytest.raises(VolumeRejected) as caught, time_limit(0.1):
            endless()
        found.append(str(caught.value))

    work()
    thread = threading.Thread(target=work)
    thread.start()
    thread.join(20)
    assert found == ["timed_out: not done after 0.1 s"] * 2


@pytest.mark.parametrize(("outer", "inner"), [(0.1, 30.0), (30.0, 0.1)])
def test_the_shorter_of_two_nested_limits_counts(outer: float, inner: float) -> None:
    with pytest.raises(VolumeRejected, match=r"not done after 0\.1 s"), time_limit(outer), time_limit(inner):
        endless()


def test_work_that_ends_in_time_is_not_interrupted_later() -> None:
    for _ in range(20):
        with time_limit(0.02):
            time.sleep(0.001)
    time.sleep(0.05)
    before = threading.active_count()
    with time_limit(math.inf):
        assert threading.active_count() == before


@pytest.fixture
def slow_scan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A scan whose header is never read to its end."""
    from octjepa.read import dicom

    monkeypatch.setattr(dicom, "read_layout", lambda _: endless())
    return save(make_dataset(retina()), tmp_path / "scan.dcm")


def test_reading_and_inspecting_obey_the_limit(slow_scan: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(VolumeRejected, match="timed_out"):
        read_volume(slow_scan, seconds=0.2)
    monkeypatch.setattr(read_volume, "__defaults__", (*read_volume.__defaults__[:-1], 0.2))
    assert [reason["reason"] for reason in describe_file(slow_scan)["reasons"]] == ["timed_out"]


def test_an_ingest_with_one_worker_obeys_the_limit(slow_scan: Path, tmp_path: Path) -> None:
    from octjepa.errors import NothingReadError

    with pytest.raises(NothingReadError, match="timed_out"):
        build_store(
            [slow_scan], tmp_path / "store", Preprocessing(), workers=1, options=IngestOptions(seconds_per_file=0.2)
        )
