"""The objects that `octjepa view SOURCE` opens: a store or run as it is, or scans, which are read into a store for the
moment.

In: SOURCE as the user names it. Out: the store or run that the viewer shows, and the folders of its scans. A scan, a
folder of scans, or a folder that `octjepa segment` wrote has no store. Its scans are then read into a temporary store,
which is deleted when the viewer ends, so that no copy of a scan stays behind.
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from octjepa.config import load_recipe
from octjepa.errors import UsageError
from octjepa.ingest.build import build_store
from octjepa.ingest.remembered_sources import sources_of
from octjepa.ingest.sources import discover
from octjepa.remote import is_remote
from octjepa.report.contents import holds_contents

_ANSWERS = "classes.json"  # next to *_boundaries.npz: a folder that `octjepa segment` wrote


@contextmanager
def opened_source(source: str | Path, scans: Sequence[str] = ()) -> Iterator[tuple[str | Path, Sequence[str]]]:
    """(what the viewer shows, its folders of scans), valid while the context is open.

    Raises UsageError: none of the scans of `source` can be read, with the reasons, or their place is unknown.
    """
    named = scans_without_store(source, scans)
    if not named:
        yield source, scans or ([] if is_remote(source) else sources_of(source))
        return
    with tempfile.TemporaryDirectory(prefix="octjepa-view-") as folder:
        store = Path(folder) / "store"
        with _without_warnings():
            build_store(named, store, load_recipe("tiny_cpu").preprocessing, max_lost=1.0)
        yield store, named


@contextmanager
def _without_warnings() -> Iterator[None]:
    """Leaves out warnings of ingest about splits, grids and ids: nothing is trained on a temporary store."""
    logger = logging.getLogger("octjepa.ingest")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


def scans_without_store(source: str | Path, scans: Sequence[str] = ()) -> list[str]:
    """The scans that `source` stands for if it is a scan, a folder of scans or of answers; [] for anything else.

    Raises UsageError: nothing is at `source`, or it holds answers, and neither `scans` nor this machine's notes say
    where the scans are.
    """
    if is_remote(source):
        return []
    path = Path(source)
    if path.is_file():
        return [str(path)]
    if not path.exists():
        raise UsageError(
            f"no file or folder at {source}: name a scan, a folder of scans, the result of segment, a store or a run"
        )
    if not path.is_dir() or holds_contents(path):
        return []
    if (path / _ANSWERS).is_file() and any(path.glob("*_boundaries.npz")):
        if named := list(scans) or sources_of(path):
            return named
        raise UsageError(
            f"{source} holds segmentations, and it is not known where their scans are: name their folder with --scans, "
            f"or open {path / 'index.html'}"
        )
    return [str(path)] if discover([str(path)]).files else []
