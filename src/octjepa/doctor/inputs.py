"""Checks the inputs of a run: the recipe, its trackers and the store."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator

from octjepa.doctor.checks import Check, Setup, register
from octjepa.errors import counted, install_command
from octjepa.store import Store
from octjepa.store.contract import contract_differences
from octjepa.train.tracking.base import NEEDS

_STORE = "a store that opens, a volume that reads, the recipe's preprocessing, people in split train"


@register("recipe", "a recipe that can be planned")
def recipe_check(setup: Setup) -> Iterator[Check]:
    """The result of `octjepa plan`: if it succeeds, rates, batch and masks are valid."""
    if setup.planned is None:
        return
    planned = setup.planned
    batch, lr = planned.batch, planned.lr
    finding = (
        f"{planned.recipe}: batch {planned.effective_batch} = {batch.devices} (devices) x {batch.micro} (micro-batch) "
        f"x {batch.accumulation} (accumulation), {planned.updates} updates, rate {lr.first:.2g} to {lr.peak:.2g} to "
        f"{lr.last:.2g}, precision {planned.precision}"
    )
    yield Check("recipe", "ok", finding, "a batch that divides evenly, a rate that is positive and falls after warm-up")


@register("trackers", "installed")
def tracker_checks(setup: Setup) -> Iterator[Check]:
    """A run leaves out a tracker that is configured but not installed, which few would notice in time."""
    for backend in setup.recipe.tracking.backends if setup.recipe is not None else ():
        module, extra = NEEDS.get(backend, (None, ""))  # another package's tracker brings what it needs
        if module is None or importlib.util.find_spec(module) is not None:
            yield Check(f"tracker {backend}", "ok", "installed", "installed")
        else:
            yield Check(f"tracker {backend}", "warning", "not installed", "installed", install_command(extra))


@register("store", "a store that can be read", "name a store that octjepa ingest made, and that you may read")
def store_check(setup: Setup) -> Iterator[Check]:
    """Opens the store and reads one volume. Raises what the store raises."""
    if setup.store is None:
        return
    store = Store.open(setup.store)
    described = store.describe()
    splits = ", ".join(f"{name or 'no split'} {count}" for name, count in described.by_split.items())
    finding, to_do = f"{counted(described.volumes, 'volume')} ({splits})", ""
    if not len(store.table):
        to_do = "octjepa ingest scans into it; its quarantine says why none are in"
        yield Check("store", "failed", finding, _STORE, to_do)
        return
    store.read(str(store.table["volume_id"].iloc[0]))
    differences = [] if setup.recipe is None else contract_differences(store.preprocessing, setup.recipe.preprocessing)
    if differences:
        finding = f"{finding}; made otherwise: {'; '.join(differences)}"
        to_do = "ingest into a new store with --recipe, or choose one that fits"
        yield Check("store", "failed", finding, _STORE, to_do)
    elif not described.by_split.get("train"):
        yield Check("store", "warning", finding, _STORE, "octjepa split assigns people to train, val and test")
    else:
        yield Check("store", "ok", f"{finding}; one was read", _STORE)
