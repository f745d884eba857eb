"""A checkpoint's location, a folder on disk or a prefix in a bucket, and the operations that work on both."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from octjepa import remote
from octjepa.errors import CheckpointError, OctjepaError, UsageError

Location = Path | str  # a str is a url
MANIFEST = "manifest.json"  # the file that makes a checkpoint folder complete
_STEP = re.compile(r"step-\d{8,}")


def parse_location(text: str | Path, within: Path | None = None) -> Location:
    """A url as it is; a path as a `Path`, a relative one resolved against `within`."""
    if remote.is_remote(text):
        return remote.join(str(text))
    return Path(text) if within is None else within / text


def child(location: Location, name: str) -> Location:
    """The entry `name` in `location`."""
    return remote.join(location, name) if isinstance(location, str) else location / name


def location_name(location: Location) -> str:
    """The last part of the path or url."""
    return location.rpartition("/")[2] if isinstance(location, str) else location.name


def has_file(location: Location, name: str) -> bool:
    """Whether there is a file `name` in `location`."""
    return (
        remote.info(remote.join(location, name)) is not None
        if isinstance(location, str)
        else (location / name).is_file()
    )


@contextmanager
def local_file(location: Location, name: str) -> Iterator[Path]:
    """The file `name` of `location` on this disk; for a bucket a verified copy, kept during the block."""
    if isinstance(location, Path):
        yield location / name
        return
    with remote.local_copy(remote.join(location, name)) as path:
        yield path


def split_folders(location: Location) -> tuple[list[Location], list[Location]]:
    """(complete, incomplete) folders called step-NUMBER in `location`, sorted: with and without a manifest.

    Any other name, such as that of a copy, belongs to the user: such a folder is neither loaded nor removed.
    """
    if isinstance(location, Path):
        paths = sorted(path for path in location.glob("step-*") if _STEP.fullmatch(path.name) and path.is_dir())
        return [p for p in paths if (p / MANIFEST).is_file()], [p for p in paths if not (p / MANIFEST).is_file()]
    depth = len(location.split("/"))
    parts = [obj.url.split("/") for obj in remote.list_objects(location)]
    parts = [part for part in parts if len(part) == depth + 2 and _STEP.fullmatch(part[depth])]
    complete = {part[depth] for part in parts if part[-1] == MANIFEST}
    incomplete = {part[depth] for part in parts} - complete
    return [remote.join(location, name) for name in sorted(complete)], [
        remote.join(location, name) for name in sorted(incomplete)
    ]


@contextmanager
def staging_folder() -> Iterator[Path]:
    """A temporary folder in the cache for an upload; /tmp may be too small for it. Raises CheckpointError."""
    with ExitStack() as stack:
        try:
            folder = stack.enter_context(remote.temporary_folder(remote.cache_folder()))
        except (OSError, OctjepaError) as error:
            raise CheckpointError(f"the checkpoint cannot be prepared for its upload: {error}") from None
        yield folder


def upload(folder: Path, location: str) -> None:
    """Uploads all files of `folder` to `location`, the manifest after the others. Raises CheckpointError."""
    try:
        # A manifest that a killed upload of the same update left must not make new files look complete.
        remote.remove(remote.join(location, MANIFEST))
        for path in sorted(folder.iterdir(), key=lambda path: path.name == MANIFEST):
            remote.put(path, remote.join(location, path.name))
    except OctjepaError as error:
        raise CheckpointError(
            f"could not write checkpoint {location}: {error}. Earlier checkpoints are untouched; continue with "
            "--resume."
        ) from None


def remove(folder: Location) -> None:
    """Removes a folder with its contents, the manifest first, so that a kill leaves nothing that looks complete."""
    if isinstance(folder, Path):
        (folder / MANIFEST).unlink(missing_ok=True)
        shutil.rmtree(folder)
        return
    remote.remove(remote.join(folder, MANIFEST))
    for obj in remote.list_objects(folder):
        remote.remove(obj.url)


def check_writable(location: Location, out: Path | None = None, setting: str = "") -> None:
    """Checks before a run starts that checkpoints can be written; into a bucket a test object is written.

    out: the folder that the user named, which may be a link itself. setting: the recipe key of `location`, if
    there is one. Raises UsageError: the bucket or folder cannot be written, or the folder, one between it and `out`, or
    a checkpoint in it is a link, which would lead what is written anywhere.
    """
    if isinstance(location, Path):
        _check_folder(location, out, setting)
        return
    probe = remote.join(location, ".octjepa-write-test")
    try:
        remote.put_bytes(b"", probe)
        remote.remove(probe)
    except UsageError as error:
        raise UsageError(f"checkpoint.dir {location} cannot be used: {error}") from None


def _check_folder(folder: Path, out: Path | None, setting: str) -> None:
    """Raises UsageError as `check_writable`. Creates nothing, because a run that is refused leaves nothing."""
    between = [path for path in folder.parents if out in path.parents] if out is not None else []
    for path in (folder, *between, *folder.glob("step-*")):
        if path.is_symlink():
            way_out = f", or name its target as {setting}" if setting else ""
            raise UsageError(
                f"{path} is a link to {os.readlink(path)}, and no checkpoint is written through it: replace it by a "
                f"folder{way_out}"
            )
    there = next((path for path in (folder, *folder.absolute().parents) if path.exists()), Path("/"))
    if not there.is_dir():
        raise UsageError(f"no checkpoint can be written to {folder}: {there} is a file")
    if not os.access(there, os.W_OK | os.X_OK):
        raise UsageError(f"no checkpoint can be written to {folder}: {there} may not be written")
