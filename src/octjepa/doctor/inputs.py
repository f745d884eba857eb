"""What the run is to be made of: the recipe, and the store it would read."""

from __future__ import annotations

from typing import Any

from octjepa.doctor.check import Check
from octjepa.recipe import Recipe
from octjepa.store import Store
from octjepa.store.contract import contract_differences

_STORE = "a store that opens, a volume that reads, the recipe's preprocessing, people in split train"


def recipe_check(planned: dict[str, Any]) -> Check:
    """`planned`: `octjepa plan` went through, so rates, batch and masks are sound."""
    batch, lr = planned["batch"], planned["lr"]
    found = (
        f"{planned['recipe']}: batch {planned['effective_batch']} = {batch['devices']} devices x {batch['micro']} x "
        f"{batch['accumulation']}, {planned['updates']} updates, rate {lr['first']:.2g} to {lr['peak']:.2g} to "
        f"{lr['last']:.2g}"
    )
    return Check("recipe", "ok", found, "a batch that deals evenly, a rate that is positive and falls after warm-up")


def store_check(location: str, recipe: Recipe | None) -> Check:
    """Opens the store and reads one volume. Raises what the store raises."""
    store = Store.open(location)
    about = store.describe()
    splits = ", ".join(f"{name or 'no split'} {count}" for name, count in about["by_split"].items())
    found = f"{about['volumes']} volumes ({splits})"
    if not len(store.table):
        return Check(
            "store", "failed", found, _STORE, "octjepa ingest scans into it; its quarantine says why none are in"
        )
    store.read(str(store.table["volume_id"].iloc[0]))
    differing = [] if recipe is None else contract_differences(store.preprocessing, recipe)
    if differing:
        found = f"{found}; made otherwise: {'; '.join(differing)}"
        return Check("store", "failed", found, _STORE, "ingest into a new store with --recipe, or choose one that fits")
    if not about["by_split"].get("train"):
        return Check("store", "warning", found, _STORE, "octjepa split deals people into train, val and test")
    return Check("store", "ok", f"{found}; one was read", _STORE)
