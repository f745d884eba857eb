"""What all tests share: one thread, shapes in signatures checked, where real scans lie, emulated buckets."""

from __future__ import annotations

import gc
import os
import re
import signal
import sys
import threading
from collections.abc import Generator, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from jaxtyping import install_import_hook

# Before anything imports NumPy's or torch's thread pools.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Tests compute on the CPU, also where there is a GPU, unless this variable names a device: docs/launch.md.
TEST_DEVICE = os.environ.setdefault("OCTJEPA_TEST_DEVICE", "cpu")
if TEST_DEVICE == "cpu":
    os.environ["CUDA_VISIBLE_DEVICES"] = ""

# A suite that a shell runs in the background ignores SIGINT, and so would the processes that it stops by it.
if threading.current_thread() is threading.main_thread():
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Every call into these packages is checked against the shapes and types of its signature. The hook has to be in
# place before octjepa is imported, which is why no test imports octjepa in this file's head.
CHECKED = [
    f"octjepa.{package}"
    for package in (
        "model",
        "objectives",
        "views",
        "store",
        "canonical",
        "cohort",
        "embed",
        "evaluate",
        "metrics",
        "tasks",
    )
]
install_import_hook(CHECKED, "shape_checker.check")

pytest_plugins = ["demo_folder", "invented_cohort", "small_cohorts", "user_package"]  # fixtures of tests/support

ROOT = Path(__file__).resolve().parents[1]


# Folders whose tests share a costly session fixture. One worker runs all of them, so that it is made once.
TOGETHER = ("tests/cli", "tests/reliability", "tests/tasks/finetune", "tests/tasks/segment")
# Files and folders of half a minute and more. They begin first, so that no worker is left alone with one at the end.
FIRST = (
    "tests/house/test_site.py",
    "tests/cli",
    "tests/tasks/finetune",
    "tests/gpu/test_campaign.py",
    "tests/reliability",
    "tests/tasks/segment",
    "tests/evaluate/test_study_group.py",
    "tests/evaluate/leaderboard/test_board.py",
    "tests/train/test_compile.py",
    "tests/resume/test_ranks.py",
    "tests/ingest/test_zoo.py",
    "tests/demo/test_demo.py",
    "tests/train/test_plan.py",
    "tests/exam/test_reading.py",
    "tests/resume/test_failing_store.py",
    "tests/encoders/test_graph.py",
    "tests/embed/test_embedding.py",
    "tests/bench/test_bench.py",
    "tests/train/test_waiting.py",
    "tests/pretext/test_pretext.py",
    "tests/notebooks/test_notebooks.py",
    "tests/launch",
)


def scheduling_group(nodeid: str) -> str:
    """The folder or file whose tests one worker runs: a file, or a folder of `TOGETHER`."""
    file = nodeid.partition("::")[0]
    return next((folder for folder in TOGETHER if file.startswith(f"{folder}/")), file)


def _rank_in_queue(nodeid: str) -> int:
    group = f"{scheduling_group(nodeid)}/"
    return next((rank for rank, name in enumerate(FIRST) if group.startswith(f"{name}/")), len(FIRST))


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """`--dist loadfile` with `scheduling_group` in place of the file."""
    from xdist.scheduler import LoadFileScheduling

    class GroupScheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return scheduling_group(nodeid)

    return GroupScheduling(config, log) if config.getvalue("dist") == "loadfile" else None


@pytest.hookimpl(tryfirst=True)  # before `-m` chooses
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Who asks for a whole pipeline is slow; what holds figures of a CPU is skipped on another device."""
    for item in items:
        if "line" in getattr(item, "fixturenames", ()):  # a cohort through every verb: whoever is first pays for it
            item.add_marker(pytest.mark.slow)
    if "PYTEST_XDIST_WORKER" in os.environ:
        items.sort(key=lambda item: _rank_in_queue(item.nodeid))
    if TEST_DEVICE != "cpu":
        for item in items:
            if item.get_closest_marker("cpu"):
                item.add_marker(pytest.mark.skip(reason=f"figures of a CPU; OCTJEPA_TEST_DEVICE is {TEST_DEVICE}"))


def _set_heap_aside() -> None:
    """Keep the garbage collector from visiting the objects that exist now.

    A full collection visits every object of the process. With all tests and their libraries loaded that takes two
    seconds, and tests that allocate much cause many collections.
    """
    gc.collect()
    gc.freeze()


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Without the garbage collector while tests are loaded: little of what that makes is garbage."""
    gc.disable()
    try:
        return (yield)
    finally:
        _set_heap_aside()
        gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item, nextitem: pytest.Item | None) -> Generator[None, object, object]:
    """After each file, set aside what it leaves behind: modules that it imported, fixtures of the session."""
    result = yield
    if nextitem is None or nextitem.path != item.path:
        _set_heap_aside()
    return result


@pytest.fixture(autouse=True)
def _one_random_stream() -> None:
    """A test that draws without a generator of its own draws the same in every run and in any order."""
    if "torch" in sys.modules:
        torch = sys.modules["torch"]
        # A seed that neither the package nor a test sets. torch.manual_seed takes a millisecond if no device is used.
        (torch.default_generator if TEST_DEVICE == "cpu" else torch).manual_seed(90210)


@pytest.fixture(autouse=True)
def _bars_as_at_start() -> None:
    """A test that called a verb with `--quiet` in this process silences no test after it."""
    if "octjepa.progress" in sys.modules:
        sys.modules["octjepa.progress"].set_quiet(False)


@pytest.fixture(scope="session")
def root() -> Path:
    """The checkout."""
    return ROOT


@pytest.fixture(scope="session")
def real_scans() -> Path:
    """Folder with real DICOM volumes; the test is skipped where there is none."""
    named = os.environ.get("OCTJEPA_DATA")
    folder = Path(named) if named else ROOT.parent / "shared" / "data"
    if not any(folder.glob("*.dcm")):
        pytest.skip(f"no real scans in {folder}: set OCTJEPA_DATA to a folder with .dcm files")
    return folder


@pytest.fixture
def without_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan whose peak of memory, which takes one to three seconds, is not computed; tests/train/test_plan.py does."""
    monkeypatch.setattr("octjepa.train.plan.peak_bytes", lambda *_: 1 << 30)


@pytest.fixture(scope="session")
def proxies() -> Iterator[dict[str, Any]]:
    """Scheme -> an emulated object store behind a proxy that can inject faults; started once."""
    from bucket_servers import SERVERS

    with ExitStack() as stack:
        yield {scheme: stack.enter_context(server()) for scheme, server in SERVERS.items()}


@pytest.fixture
def bucket_seconds() -> float:
    """How long a bucket may take to answer; tests of time-outs want less."""
    return 5.0


@pytest.fixture(params=["gs", "s3"])
def bucket(
    request: pytest.FixtureRequest, proxies: dict[str, Any], tmp_path: Path, bucket_seconds: float
) -> Iterator[Any]:
    """An empty bucket of either kind, a `bucket_servers.Bucket`."""
    from bucket_servers import bucket_of

    with bucket_of(request.param, proxies[request.param], tmp_path / "cache", bucket_seconds) as location:
        yield location


@pytest.fixture(scope="session")
def cli_commands() -> dict[str, Any]:
    """Verb -> its command, as the command line offers them."""
    import typer

    from octjepa.cli import app

    return dict(typer.main.get_command(app).commands)


@pytest.fixture(scope="session")
def make_targets() -> set[str]:
    """Targets of the Makefile."""
    return set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
