"""All checks in order, cheapest explanation first: installation, codecs, devices, machine, recipe, store."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

from octjepa.config import load_recipe
from octjepa.doctor import codecs, devices, install, machine
from octjepa.doctor.check import Check, tried
from octjepa.doctor.inputs import recipe_check, store_check
from octjepa.errors import UsageError
from octjepa.extras import to_install
from octjepa.progress import bar
from octjepa.recipe import Recipe
from octjepa.train.plan import plan
from octjepa.train.tracking.backends import NEEDS


def examine(store: str | None, out: Path, recipe: str | None) -> dict[str, Any]:
    """`ok` unless a check failed; `checks` as {name, state, found, expected, to_do}. Raises RecipeError."""
    resolved = None if recipe is None else load_recipe(recipe)
    parts: list[Callable[[], Iterable[Check]]] = [install.checks, codecs.checks, devices.checks]
    parts.append(partial(_planned, out, resolved))
    if store is not None:
        parts.append(partial(_store, store, resolved))
    found: list[Check] = []
    with bar("doctor", len(parts), "part") as progress:
        for part in parts:
            found += part()
            progress.advance()
    return {"ok": all(check.state != "failed" for check in found), "checks": [asdict(check) for check in found]}


def _planned(out: Path, recipe: Recipe | None) -> Iterator[Check]:
    """The recipe, and the machine against what it plans."""
    planned = None
    if recipe is not None:
        try:
            planned = plan(recipe)
            yield recipe_check(planned)
        except UsageError as error:
            yield Check("recipe", "failed", str(error), "a recipe that can be planned", "change it as it says")
        yield from _trackers(recipe)
    yield from machine.checks(out, recipe, planned)


def _store(location: str, recipe: Recipe | None) -> list[Check]:
    to_do = "name a store that octjepa ingest made, and that you may read"
    return [tried("store", "a store that can be read", to_do, lambda: store_check(location, recipe))]


def _trackers(recipe: Recipe) -> Iterator[Check]:
    """A tracker that is asked for but not installed is left out by the run, which few would notice in time."""
    for backend in recipe.tracking.backends:
        module, extra = NEEDS[backend]
        there = importlib.util.find_spec(module) is not None
        if there:
            yield Check(f"tracker {backend}", "ok", "installed", "installed")
        else:
            yield Check(f"tracker {backend}", "warning", "not installed", "installed", to_install(extra))
