"""Ten times the files cost ten times the work, and no more: counted in operations, not in seconds.

What is counted are lines run in octjepa, calls of any Python function, and files opened, all in the process
that holds the store. A loop over all rows for each row would show as the square of their number.
"""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

from octjepa.recipe import Preprocessing

PREPROCESSING = Preprocessing(
    image_size=(8, 64, 64), margin=(0, 8, 8), target_spacing_mm=(0.7, 0.0156, 0.094), axial_anchor=0.65
)


@pytest.fixture
def scale(root: Path, monkeypatch: pytest.MonkeyPatch):  # type: ignore[no-untyped-def]
    monkeypatch.syspath_prepend(str(root / "benchmarks"))
    import ingest_scale

    yield ingest_scale
    sys.modules.pop("ingest_scale", None)


_watched: Counter[str] | None = None


def _opened(event: str, _: tuple[Any, ...]) -> None:
    if _watched is not None and event == "open":
        _watched["files opened"] += 1


sys.addaudithook(_opened)  # cannot be taken away again, so that it looks at a variable


def operations(work: Any) -> Counter[str]:
    global _watched
    counts: Counter[str] = Counter()

    def line(frame: FrameType, event: str, _: Any) -> Any:
        counts["lines"] += event == "line"
        return line

    def call(frame: FrameType, event: str, _: Any) -> Any:
        counts["calls"] += 1
        return line if "octjepa" in frame.f_code.co_filename else None

    _watched = counts
    sys.settrace(call)
    try:
        work()
    finally:
        sys.settrace(None)
        _watched = None
    return counts


@pytest.mark.slow
def test_the_cost_of_a_volume_does_not_grow_with_their_number(
    scale,  # type: ignore[no-untyped-def]
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from octjepa.ingest import build, build_store

    monkeypatch.setattr(build, "ingest_one", scale.tiny_volume)
    first: dict[int, Counter[str]] = {}
    again: dict[int, Counter[str]] = {}
    for count in (4, 40, 80, 160):  # the four load what is imported late
        source, store = tmp_path / f"set {count}", tmp_path / f"store {count}"
        scale.write_headers(source, count)
        first[count] = operations(lambda: build_store([source], store, PREPROCESSING))  # noqa: B023
        again[count] = operations(lambda: build_store([source], store, PREPROCESSING))  # noqa: B023
    for result in (first, again):
        for what in ("lines", "calls", "files opened"):
            early, late = (result[80][what] - result[40][what]) / 40, (result[160][what] - result[80][what]) / 80
            # One step for every pair of files would add 60 to `late`, which is a few hundred.
            assert late <= 1.03 * early, f"{what} per file: {early} up to 80 files, {late} from there to 160"
