"""The errors of octjepa, each shown to the user as one clear message.

Every foreseeable mistake of a user ends in one of these, never in a traceback. A message names what was found,
where, what was expected and what to do. It never contains a person's name or birth date.
"""

from __future__ import annotations

import difflib
import importlib.metadata
import json
import re
from collections.abc import Iterable, Mapping
from typing import Any


class OctjepaError(Exception):
    """A failure shown to the user as one clear message; `exit_code` is the command's."""

    exit_code = 1


class UsageError(OctjepaError):
    """The user's input is wrong: a path, a recipe, an option."""

    exit_code = 2


class RecipeError(UsageError):
    """A recipe holds an unknown, unused or ill-typed key."""


class ContractError(UsageError):
    """Two things made with different preprocessing or model shapes were brought together."""


class CheckpointError(OctjepaError):
    """A checkpoint is missing, damaged or could not be written."""


class WrongCheckpointError(CheckpointError):
    """The path given holds no checkpoint, or one of another run: nothing is damaged, another path is needed."""

    exit_code = 2


class ResourceError(OctjepaError):
    """The machine has no memory, open files, permissions or disk space left: the input is not at fault and is kept."""


LINK = "is a link, and octjepa writes through none: remove it and run this again"
MORE_FILES = "raise the limit of open files (ulimit -n), or use fewer processes"  # what to do without a free one


class TooManyLostError(OctjepaError):
    """The work is finished, but more was lost than the allowed share. `summary` holds the results."""

    exit_code = 3

    def __init__(self, message: str, summary: Mapping[str, Any]) -> None:
        super().__init__(message)
        self.summary = summary


class NothingReadError(TooManyLostError, UsageError):
    """The work is finished without any result: every file is in the quarantine."""

    exit_code = 2


class VolumeRejected(OctjepaError):
    """One file cannot be read correctly. `reason` is a code of the closed list in `octjepa.reasons`."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason
        self.detail = detail

    def __reduce__(self) -> tuple[type[VolumeRejected], tuple[str, str]]:
        # Worker processes send this exception home; Exception's own pickling loses the two arguments.
        return (VolumeRejected, (self.reason, self.detail))


_OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "not enough memory", "alloc_cpu")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether `error` says that memory ran out: MemoryError, or a RuntimeError of torch.

    On an accelerator torch raises OutOfMemoryError. On a CPU it raises RuntimeError, and only the message tells why.
    """
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error).lower() for sign in _OUT_OF_MEMORY)


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """`; did you mean 'dme'?` if one of `names` is close to `name`, upper and lower case being equal; otherwise ""."""
    by_lower = {candidate.lower(): candidate for candidate in names}
    close = difflib.get_close_matches(name.lower(), by_lower, n=1, cutoff=0.7)
    return f"; did you mean {by_lower[close[0]]!r}?" if close else ""


def counted(count: int, noun: str) -> str:
    """The count with its noun in the right number: `1 volume`, `2 volumes`, `3 test people`."""
    if count == 1:
        return f"1 {noun}"
    if noun.endswith("person"):
        return f"{count:,} {noun.removesuffix('person')}people"
    if noun.endswith("y") and noun[-2:-1] not in "aeiou":
        return f"{count:,} {noun[:-1]}ies"
    return f"{count:,} {noun}s"


def counted_are(count: int, noun: str) -> str:
    """The count with its noun and verb: `1 volume is`, `2 volumes are`."""
    return f"{counted(count, noun)} {'is' if count == 1 else 'are'}"


def install_command(extra: str) -> str:
    """The command that adds `extra` to this installation of octjepa, for messages about a library that is missing.

    In a checkout it installs from the checkout, with pinned versions. What was installed from a wheel or a folder gets
    the extra's libraries by their names: an index may hold another package that is called octjepa.
    """
    try:
        installed = importlib.metadata.distribution("octjepa")
    except importlib.metadata.PackageNotFoundError:  # run from its sources, not installed
        return f'pip install -c constraints.txt -e ".[{extra}]", in the checkout'
    origin = installed.read_text("direct_url.json")
    if origin is None:
        return f'pip install "octjepa[{extra}]"'
    if json.loads(origin).get("dir_info", {}).get("editable"):
        return f'pip install -c constraints.txt -e ".[{extra}]", in the checkout'
    mark = re.compile(rf"^(.*?)\s*;\s*extra\s*==\s*['\"]{re.escape(extra)}['\"]$")
    libraries = [match[1] for require in installed.requires or () if (match := mark.match(require))]
    return "pip install " + " ".join(f'"{library}"' for library in libraries)
