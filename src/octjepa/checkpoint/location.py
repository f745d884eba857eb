"""Where checkpoints lie: a folder on a disk or a place in a bucket, with the few things that are done to either."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from octjepa import remote
from octjepa.errors import CheckpointError, OctjepaError, UsageError

Place = Path | str  # a str is a url


def place_of(text: str | Path, within: Path | None = None) -> Place:
    """A url as it is; a path as `Path`, a relative one below `within`."""
    if remote.is_remote(text):
        return remote.join(str(text))
    return Path(text) if within is None else within / text


def below(place: Place, name: str) -> Place:
    return remote.join(place, name) if isinstance(place, str) else place / name


def name_of(place: Place) -> str:
    return place.rpartition("/")[2] if isinstance(place, str) else place.name


def holds(place: Place, name: str) -> bool:
    """Whether there is a file `name` in `place`."""
    return remote.info(remote.join(place, name)) is not None if isinstance(place, str) else (place / name).is_file()


@contextmanager
def opened(place: Place, name: str) -> Iterator[Path]:
    """The file `name` of `place` on this disk; what lies in a bucket is a verified copy, held meanwhile."""
    if isinstance(place, Path):
        yield place / name
        return
    with remote.local_copy(remote.join(place, name)) as path:
        yield path


def folders(place: Place, marker: str, pattern: str) -> tuple[list[Place], list[Place]]:
    """Folders called `pattern`* in `place` that hold a file `marker`, and those that do not; each sorted by name."""
    if isinstance(place, Path):
        found = sorted(path for path in place.glob(f"{pattern}*") if path.is_dir())
        return [p for p in found if (p / marker).is_file()], [p for p in found if not (p / marker).is_file()]
    depth = len(place.split("/"))
    parts = [one.url.split("/") for one in remote.list_objects(place)]
    parts = [part for part in parts if len(part) == depth + 2 and part[depth].startswith(pattern)]
    whole = {part[depth] for part in parts if part[-1] == marker}
    rest = {part[depth] for part in parts} - whole
    return [remote.join(place, name) for name in sorted(whole)], [remote.join(place, name) for name in sorted(rest)]


@contextmanager
def local_folder() -> Iterator[Path]:
    """A folder in the cache for what is about to go up; /tmp may be too small for it. Raises CheckpointError."""
    try:
        made = tempfile.mkdtemp(prefix=".new-", dir=remote.cache_folder())
    except (OSError, OctjepaError) as error:
        raise CheckpointError(f"the checkpoint cannot be prepared for its upload: {error}") from None
    try:
        yield Path(made)
    finally:
        shutil.rmtree(made, ignore_errors=True)


def upload(folder: Path, place: str, last: str) -> None:
    """All files of `folder` as objects of `place`, `last` after the others. Raises CheckpointError."""
    try:
        remote.remove(remote.join(place, last))  # of the same update before a kill: it must not vouch for new files
        for path in sorted(folder.iterdir(), key=lambda path: path.name == last):
            remote.put(path, remote.join(place, path.name))
    except OctjepaError as error:
        raise CheckpointError(
            f"could not write checkpoint {place}: {error}. Earlier checkpoints are untouched; go on with --resume."
        ) from None


def remove(folder: Place, marker: str) -> None:
    """Removes a folder and what it holds; `marker` first, so that a kill leaves nothing that looks whole."""
    if isinstance(folder, Path):
        shutil.rmtree(folder)
        return
    remote.remove(remote.join(folder, marker))
    for one in remote.list_objects(folder):
        remote.remove(one.url)


def refuse_unreachable(place: Place) -> None:
    """Finds out before a run, not at its first checkpoint, that a bucket cannot be written. Raises UsageError."""
    if isinstance(place, Path):
        return
    probe = remote.join(place, ".octjepa-write-test")
    try:
        remote.put_bytes(b"", probe)
        remote.remove(probe)
    except UsageError as error:
        raise UsageError(f"checkpoint.dir {place} cannot be used: {error}") from None
