"""The objects that `octjepa view SOURCE` opens: a store or run as it is, or scans, which are read into a store for the
moment.

In: SOURCE as the user names it. Out: the store or run that the viewer shows, the folders of its scans, and a note on
files that were refused. A scan, a folder of scans, or a folder that `octjepa segment` wrote has no store. Its scans
are then read into a temporary store, which is deleted when the viewer ends, so that no copy of a scan stays behind.
"""

from __future__ import annotations

import logging
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from octjepa.config import load_recipe
from octjepa.errors import NothingReadError, UsageError, counted
from octjepa.ingest.build import build_store
from octjepa.ingest.remembered_sources import sources_of, spacings_of
from octjepa.ingest.sources import discover
from octjepa.read.reader import SpacingOption
from octjepa.read.written_results import PAGE, TABLE, is_segmentation_folder
from octjepa.reasons import with_action
from octjepa.remote import is_remote
from octjepa.report.contents import holds_contents
from octjepa.store import Store

_MOST_WARNED: Final = 20  # refused files that are listed on stderr
_MOST_NOTED: Final = 5  # refused files that the page names
_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class OpenedSource:
    """The store or run that the viewer shows, the folders of its scans, and notes for the page."""

    shown: str | Path
    folders: Sequence[str]
    notes: tuple[str, ...] = ()


@contextmanager
def opened_source(
    source: str | Path, scans: Sequence[str] = (), spacing_mm: SpacingOption = None
) -> Iterator[OpenedSource]:
    """The source as the viewer shows it, valid while the context is open.

    `spacing_mm` (slice, depth, column) takes precedence over the files, and over the spacing that `octjepa segment` was
    given for the scans of its results. Files that are refused are listed on stderr, and the notes name them for the
    page. Raises UsageError: none of the scans of `source` can be read, with the reasons, or their place is unknown, or
    `spacing_mm` is given for a store or run.
    """
    named = scans_without_store(source, scans)
    if not named:
        if spacing_mm is not None:
            raise UsageError(
                f"--spacing is for scans that are read: {source} is not a scan, and scans in a store have their spacing"
            )
        yield OpenedSource(source, scans or ([] if is_remote(source) else sources_of(source)))
        return
    with tempfile.TemporaryDirectory(prefix="octjepa-view-") as folder:
        store = Path(folder) / "store"
        groups = [(spacing_mm, named)] if spacing_mm is not None else _by_spacing(source, named)
        with _without_warnings():
            _read_scans(groups, store)
        yield OpenedSource(store, named, _report_refused(Store.open(store).quarantine))


def _read_scans(groups: Sequence[tuple[SpacingOption, Sequence[str]]], store: Path) -> None:
    """Reads scans with their spacing into `store`. Raises NothingReadError if none of them can be read."""
    for number, (spacing_mm, scans) in enumerate(groups, start=1):
        try:
            build_store(scans, store, load_recipe("tiny_cpu").preprocessing, spacing_mm=spacing_mm, max_lost=1.0)
        except NothingReadError:  # the store is empty so far
            if number == len(groups):
                raise


def _by_spacing(source: str | Path, named: Sequence[str]) -> list[tuple[SpacingOption, list[str]]]:
    """The scans `named`, by the spacing that `octjepa segment` was given for them, so that both measure the same.

    Scans in another place than the remembered scans have the spacing of these, if all of these have the same.
    """
    remembered = spacings_of(source) if is_segmentation_folder(Path(source)) else {}
    shared = set(remembered.values())
    elsewhere = shared.pop() if len(shared) == 1 else None
    groups: dict[SpacingOption, list[str]] = {}
    for text in named:
        location = text if is_remote(text) else str(Path(text).resolve())
        groups.setdefault(remembered.get(location, elsewhere), []).append(text)
    if len(groups) == 1:
        return list(groups.items())
    return [(mm or "file", texts) for mm, texts in groups.items()]  # None would keep the spacing of an earlier group


def _report_refused(quarantine: Sequence[Mapping[str, str]]) -> tuple[str, ...]:
    """Warns of the refused files with the reasons, and returns the note for the page. Names in paths are masked."""
    if not quarantine:
        return ()
    count = f"{counted(len(quarantine), 'file')} not shown"
    lines = [
        f"  {entry['file']}: {entry['reason']}: {with_action(entry['reason'], entry['detail'])}"
        for entry in quarantine[:_MOST_WARNED]
    ]
    if (more := len(quarantine) - _MOST_WARNED) > 0:
        lines.append(f"  and {more} more")
    _log.warning("%s:\n%s", count, "\n".join(lines))
    named = [f"{entry['file']} ({entry['reason']})" for entry in quarantine[:_MOST_NOTED]]
    if (more := len(quarantine) - _MOST_NOTED) > 0:
        named.append(f"and {more} more")
    return (f"{count}: {', '.join(named)}",)


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
    where the scans are. Also for the answers about pictures, which the viewer does not show, and if `scans` has no
    effect, because `source` is a scan or a folder of scans.
    """
    if is_remote(source):
        return []
    path = Path(source)
    if path.is_file():
        if scans:
            raise UsageError(
                f"--scans is for a store, a run or a result of segment, and {source} is a scan: leave the option out"
            )
        return [str(path)]
    if not path.exists():
        raise UsageError(
            f"no file or folder at {source}: name a scan, a folder of scans, the result of segment, a store or a run"
        )
    if not path.is_dir() or holds_contents(path):
        return []
    if is_segmentation_folder(path):
        has_page = (path / PAGE).is_file()
        if (path / TABLE).is_file() and not has_page:
            raise UsageError(
                f"{source} holds the results of single B-scans, which the viewer does not show: open the table "
                f"{path / TABLE} and the picture NAME.png of each B-scan next to it"
            )
        if named := list(scans) or sources_of(path):
            return named
        page = f", or open {path / PAGE}" if has_page else ""
        raise UsageError(
            f"{source} holds segmentations, and it is not known where their scans are: name their folder with "
            f"--scans{page}"
        )
    if not discover([str(path)]).files:
        return []
    if scans:
        raise UsageError(
            f"--scans is for a store, a run or a result of segment, and {source} is a folder of scans: leave the "
            "option out"
        )
    return [str(path)]
