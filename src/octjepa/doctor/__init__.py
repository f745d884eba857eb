"""Is this machine, and this installation, fit for a run? Checks that each take moments and need no network."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from octjepa.config import load_recipe

# Imported for their checks, which run in this order: the cheapest explanation of a failure comes first.
from octjepa.doctor import install, accelerator, machine, inputs  # isort: skip
from octjepa.doctor.checks import CHECKS, Check, Setup
from octjepa.errors import UsageError
from octjepa.progress import bar
from octjepa.record import Record
from octjepa.train.plan import plan

__all__ = ["accelerator", "examine", "inputs", "install", "machine"]


@dataclass(frozen=True)
class Examination(Record):
    """The outcome of every check; ok: none failed."""

    ok: bool
    checks: tuple[Check, ...]


def examine(store: str | None, out: Path, recipe: str | None) -> Examination:
    """Runs every check.

    `recipe` is a name or a path. Raises RecipeError: it cannot be read.
    """
    resolved = None if recipe is None else load_recipe(recipe)
    checks: list[Check] = []
    planned = None
    if resolved is not None:
        try:
            planned = plan(resolved)
        except UsageError as error:
            checks.append(Check("recipe", "failed", str(error), "a recipe that can be planned", "change it as it says"))
    setup = Setup(out, resolved, planned, store)
    with bar("doctor", len(CHECKS), "checks") as progress:
        for function in CHECKS:
            checks += function(setup)
            progress.advance()
    return Examination(all(check.state != "failed" for check in checks), tuple(checks))
