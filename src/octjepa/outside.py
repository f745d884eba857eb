"""Places outside a folder that the folder itself names: used only where the user named them, or allowed them.

A run names its store and its checkpoints. In a run that another person made they may be gs:// or s3:// addresses, which
would be contacted in the user's name and with the user's credentials, or absolute paths of the user's own disk. Neither
is opened unless it is on the command line or `--allow-outside` does; in Python within `allow_outside`. A path
relative to the folder, as octjepa writes it for a store next to a run, is followed: it is read, and never leaves the
machine. The same rule holds for Python code that a recipe names as `module:Class` (`octjepa.registry`).
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from octjepa.errors import UsageError
from octjepa.registry import decide_imports
from octjepa.remote import is_remote, join

_everything = False
_named: tuple[str, ...] = ()


class OutsideError(UsageError):
    """A folder names a place outside itself, which the user did not name."""


def set_named(words: Sequence[str]) -> None:
    """From now on the places among `words` of a command line (also behind a "key=") are named, and no other one is."""
    global _everything, _named
    parts = [part for word in words for part in {word, word.partition("=")[2]} if part and not part.startswith("-")]
    _everything, _named = False, tuple(map(_absolute, parts))


def _absolute(word: str) -> str:
    try:
        return join(word) if is_remote(word) else os.path.abspath(word)
    except UsageError:  # no address: whoever uses the word says so
        return word


def set_allowed(allowed: bool) -> None:
    """Whether every place that a folder names may be opened."""
    global _everything
    _everything = allowed


def is_named(word: str) -> bool:
    """Whether exactly this word is on the command line (also behind a "key="), or everything is allowed."""
    return _everything or _absolute(word) in _named


decide_imports(is_named)


@contextmanager
def allow_outside(*locations: str | Path) -> Iterator[None]:
    """Within it, folders may name places at or below `locations`; without any, all places."""
    global _everything, _named
    before = _everything, _named
    try:
        set_named([*_named, *map(str, locations)])
        _everything = before[0] or not locations
        yield
    finally:
        _everything, _named = before


def named_by(folder: Path, file: str, text: str) -> Path | str:
    """The place that `file` of `folder` names by `text`: a url, or a path, a relative one from `folder` on.

    Raises OutsideError: an address or an absolute path outside `folder` that is not allowed.
    """
    try:
        url = is_remote(text)
    except UsageError as error:
        raise OutsideError(f"{folder / file} names {text!r}: {error}") from None
    if not url and not os.path.isabs(text):
        return folder / text
    location = join(text) if url else os.path.abspath(text)
    below = [*_named, *([] if url else [os.path.abspath(folder)])]
    if not _everything and not any(
        location == folder or location.startswith(folder.rstrip("/") + "/") for folder in below
    ):
        raise OutsideError(
            f"{folder / file} names {text}, which is outside that folder and was not opened: if you trust who made the "
            "folder, name that place in the command or add --allow-outside"
        )
    return location if url else Path(location)
