"""A check: what it found, what it expected, what to do. Checks are functions registered in one list."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Literal

from octjepa.recipe import Recipe
from octjepa.record import Record
from octjepa.train.plan import Plan

State = Literal["ok", "warning", "failed"]


@dataclass(frozen=True)
class Check(Record):
    """The outcome of one check; `to_do` is empty if nothing needs doing."""

    name: str
    state: State
    found: str
    expected: str
    to_do: str = ""


@dataclass(frozen=True)
class Setup:
    """The inputs of the checks. `planned` is what `octjepa plan` prints for `recipe`; `store` is a path or URL."""

    out: Path
    recipe: Recipe | None = None
    planned: Plan | None = None
    store: str | None = None


CheckFunction = Callable[[Setup], Iterable[Check]]
CHECKS: list[CheckFunction] = []


def attempt(name: str, expected: str, to_do: str, function: Callable[[], Iterable[Check]]) -> list[Check]:
    """The checks of `function`; whatever it raises becomes a failed check, for finding that out is its purpose."""
    try:
        return list(function())
    except Exception as error:
        message = " ".join(str(error).split())[:300]
        finding = f"{type(error).__name__}: {message}" if message else type(error).__name__
        return [Check(name, "failed", finding, expected, to_do)]


def register(name: str, expected: str, to_do: str = "") -> Callable[[CheckFunction], CheckFunction]:
    """Decorator that adds a check to `CHECKS`; whatever the function raises becomes a failed check of this `name`."""

    def decorate(function: CheckFunction) -> CheckFunction:
        @wraps(function)
        def guarded(setup: Setup) -> list[Check]:
            return attempt(name, expected, to_do, lambda: function(setup))

        CHECKS.append(guarded)
        return guarded

    return decorate


def gigabytes(size: float) -> str:
    """Bytes as "1.5 GB"."""
    return f"{size / 1e9:.1f} GB"
