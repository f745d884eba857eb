"""Is this machine, and this installation, fit for a run? Checks that each take moments and need no network."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from octjepa.config import load_recipe

# Imported for their checks, which run in this order: the cheapest explanation of a failure comes first.
from octjepa.doctor import install, accelerator, machine, inputs  # isort: skip
from octjepa.doctor.checks import CHECKS, Check, Setup
from octjepa.errors import UsageError
from octjepa.progress import bar
from octjepa.train.plan import plan

__all__ = ["accelerator", "examine", "inputs", "install", "machine"]


def examine(store: str | None, out: Path, recipe: str | None) -> dict[str, Any]:
    """Runs every check: {ok, checks: [{name, state, found, expected, to_do}]}; `ok` unless one failed.

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
    return {"ok": all(check.state != "failed" for check in checks), "checks": [asdict(check) for check in checks]}
