"""One thing looked at: its state, what was found, what was expected, and what to do about it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

State = Literal["ok", "warning", "failed"]


@dataclass(frozen=True)
class Check:
    """`to_do` is empty where nothing is."""

    name: str
    state: State
    found: str
    expected: str
    to_do: str = ""


def tried(name: str, expected: str, to_do: str, look: Callable[[], Check]) -> Check:
    """What `look` says; whatever it raises is a failed check, since finding that out is what it is for."""
    try:
        return look()
    except Exception as error:
        said = " ".join(str(error).split())[:300]
        return Check(
            name, "failed", f"{type(error).__name__}: {said}" if said else type(error).__name__, expected, to_do
        )


def gigabytes(size: float) -> str:
    return f"{size / 1e9:.1f} GB"
