"""What stands on the board: each entry named, and each run opened to its checkpoints.

An entry is `PATH` or `NAME=PATH`: a run (all its checkpoints are candidates), a checkpoint, exported weights, weights
of the package by name, a folder of another project's encoder, or a table that `octjepa embed` wrote. Several entries of
one given name are the seeds of one arm.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from octjepa.checkpoint.encoder import EXPORTED, newest
from octjepa.checkpoint.folder import list_folders
from octjepa.checkpoint.location import holds, name_of, place_of
from octjepa.errors import UsageError
from octjepa.leaderboard.adapters import is_foreign
from octjepa.metrics.findings import BASELINES
from octjepa.shipped import shipped

RESERVED = (*BASELINES, "macro")
TABLE = ".parquet"


@dataclass(frozen=True)
class Candidate:
    """One set of features to choose among. label: what tells it from the entry's other candidates, "" if none does."""

    source: str
    label: str


@dataclass(frozen=True)
class Entry:
    """One training. arm: its name in rows, shared by the seeds of an arm; seed counts them from 1."""

    arm: str
    seed: int
    candidates: tuple[Candidate, ...]

    @property
    def name(self) -> str:
        return self.arm if self.seed == 1 else f"{self.arm} (seed {self.seed})"


def read_entries(given: Sequence[str]) -> list[Entry]:
    """Entries in the order given.

    Raises UsageError: none, a name that is taken by a baseline, the same path twice; CheckpointError: no checkpoint.
    """
    if not given:
        raise UsageError("nothing to compare: give at least one run, checkpoint, weights folder or embedding table")
    entries: list[Entry] = []
    sources: set[str] = set()
    for text in given:
        name, path = _named(text)
        if path in sources:
            raise UsageError(f"{path} is given twice: a figure twice is not two trainings")
        sources.add(path)
        arm = name or _free(_name_of(path), [entry.arm for entry in entries])
        if arm in RESERVED or arm.partition(":")[0] in RESERVED:
            raise UsageError(f"{text}: the name {arm!r} is that of a baseline row; write NAME={path} with another name")
        seed = 1 + sum(entry.arm == arm for entry in entries)
        entries.append(Entry(arm, seed, _candidates(path)))
    return entries


def _named(text: str) -> tuple[str, str]:
    """(name or "", path). A path that exists is a path, whatever signs it holds."""
    name, sign, path = text.partition("=")
    if not sign or Path(text).exists() or "/" in name:
        return "", text
    if not name.strip() or not path:
        raise UsageError(f"{text!r} is no entry: expected PATH or NAME=PATH")
    return name.strip(), path


def _name_of(path: str) -> str:
    name = name_of(place_of(path)) or path
    if name.startswith("step-") and not path.endswith(TABLE):
        # a checkpoint is called after its run, two folders up
        name = f"{path.rstrip('/').split('/')[-3]}-{name}" if path.count("/") >= 2 else name
    return name.removesuffix(TABLE).removesuffix(".safetensors")


def _free(name: str, taken: list[str]) -> str:
    found, number = name, 2
    while found in taken or found in RESERVED:
        found, number = f"{name}#{number}", number + 1
    return found


def _candidates(path: str) -> tuple[Candidate, ...]:
    place = place_of(path)
    single = (Candidate(path, ""),)
    if path.endswith(TABLE) or shipped(path) is not None or is_foreign(place):
        return single
    if isinstance(place, Path) and not place.exists():
        raise UsageError(f"nothing at {path}: give a run, a checkpoint, weights, or a table of octjepa embed")
    if (isinstance(place, Path) and place.is_file()) or path.endswith(".safetensors") or holds(place, EXPORTED):
        return single
    last = newest(place)
    if last == place:
        return single
    saves = last.rpartition("/")[0] if isinstance(last, str) else last.parent
    return tuple(Candidate(str(one), name_of(one)) for one in list_folders(saves))
