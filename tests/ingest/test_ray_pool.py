"""The ingest on a Ray cluster that the test starts and stops: the same store, and the same answer to a crash."""

from __future__ import annotations

import re
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from octjepa.errors import OctjepaError, UsageError, install_command
from octjepa.ingest import SourceFile
from octjepa.recipe import Preprocessing
from worker_tasks import die_on_bad, obey

PREPROCESSING = Preprocessing(
    image_size=(8, 64, 64), margin=(0, 8, 8), target_spacing_mm=(0.7, 0.0156, 0.094), axial_anchor=0.65
)


def test_an_absent_ray_names_its_extra(tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from octjepa.ingest import IngestOptions, build_store

    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UsageError, match=re.escape(install_command("ray"))):
        build_store([tiny], tmp_path / "store", PREPROCESSING, options=IngestOptions(engine="ray"))


@pytest.fixture(scope="module")
def cluster(root: Path) -> Iterator[None]:
    """A Ray of two CPUs whose workers can import what tests import; ended with everything that belongs to it."""
    pytest.importorskip("ray")
    from octjepa.ingest.ray_pool import cluster

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", f"{root / 'src'}:{root / 'tests' / 'support'}")
        patch.delenv("RAY_ADDRESS", raising=False)
        with cluster(2):
            yield


@pytest.mark.slow
def test_the_store_is_that_of_one_process(cluster: None, tiny: Path, tmp_path: Path) -> None:
    from octjepa.ingest import IngestOptions, build_store
    from octjepa.store import Store

    summary = build_store([tiny], tmp_path / "ray", PREPROCESSING, workers=2, options=IngestOptions(engine="ray"))
    assert (summary.accepted, summary.quarantined) == (10, 0)
    build_store([tiny], tmp_path / "here", PREPROCESSING)
    ours, theirs = Store.open(tmp_path / "ray"), Store.open(tmp_path / "here")
    assert ours.table.equals(theirs.table)
    for name in ours.table["volume_id"]:
        assert (ours.chunk_folder(name) / "pixels.npy").read_bytes() == (
            theirs.chunk_folder(name) / "pixels.npy"
        ).read_bytes()
    assert not list((tmp_path / "ray" / "chunks").glob("*/.*"))
    assert (
        build_store([tiny], tmp_path / "ray", PREPROCESSING, workers=None, options=IngestOptions(engine="ray")).skipped
        == 10
    )


def reasons(files: list[SourceFile], store: Path, seconds: float = 60) -> dict[str, str]:
    from octjepa.ingest.ray_pool import ray_results

    results = list(ray_results(files, obey, 2, seconds, store))
    assert [file for file, _ in results] == files
    return {file.name: row.entry["reason"] for file, row in results}


@pytest.mark.slow
def test_files_that_crash_or_hang_are_named_there_too(cluster: None, tmp_path: Path) -> None:
    names = ["a", "segfault.dcm", "b", "hang.dcm", "once.dcm", "c"]
    files = []
    for name in names:
        (tmp_path / name).touch()
        files.append(SourceFile(tmp_path / name, name))
    results = reasons(files, tmp_path / "store", seconds=1.0)
    assert results == {
        **dict.fromkeys(("a", "b", "c", "once.dcm"), "read"),
        "segfault.dcm": "worker_died",
        "hang.dcm": "timed_out",
    }
    (tmp_path / "full").touch()
    with pytest.raises(OctjepaError, match="the disk is full"):
        reasons([SourceFile(tmp_path / "full", "full")], tmp_path / "store")


@pytest.mark.slow
def test_a_machine_that_does_not_see_the_store_or_a_source_is_named(
    cluster: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from octjepa.ingest import ray_pool as module

    (tmp_path / "a").touch()
    here = SourceFile(tmp_path / "a", "a")
    with monkeypatch.context() as patch:
        patch.setattr(module, "write_new_folder", lambda *_: Path("/not/shared"))
        with pytest.raises(UsageError, match=rf"machine {socket.gethostname()} .* does not see the store"):
            reasons([here], tmp_path / "store")
    with monkeypatch.context() as patch:
        patch.setattr(SourceFile, "state", lambda _: (1, 1))
        with pytest.raises(UsageError, match=r"does not see b\.dcm"):
            reasons([SourceFile(tmp_path / "b.dcm", "b.dcm")], tmp_path / "store")
    gone = SourceFile(tmp_path / "gone.dcm", "gone.dcm")
    assert reasons([gone], tmp_path / "store") == {"gone.dcm": "unreadable_file"}


@pytest.mark.slow
def test_a_lost_ray_worker_costs_its_file_in_the_end(
    cluster: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from octjepa.ingest import ray_pool as module

    monkeypatch.setattr(module, "RETRIES", 1)
    monkeypatch.setattr(module, "work_on_machine", die_on_bad)
    files = [SourceFile(tmp_path / name, name) for name in ("a", "bad", "c")]
    assert reasons(files, tmp_path / "store") == {"a": "read", "bad": "worker_died", "c": "read"}


@pytest.mark.slow
def test_an_absent_cluster_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("ray")
    from octjepa.ingest import ray_pool as module

    if sys.modules["ray"].is_initialized():
        monkeypatch.setattr("ray.is_initialized", lambda: False)
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    with pytest.raises(UsageError, match=r"no Ray cluster at RAY_ADDRESS=127\.0\.0\.1:1"), module.cluster(2):
        pass
