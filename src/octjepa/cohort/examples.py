"""Chooses the eyes that a page shows. An eye is chosen by its id and never by its looks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from octjepa.store.index import IndexEntry, entries_of

if TYPE_CHECKING:
    import pandas as pd

MOST_SHOWN = 20
_SPLIT_ORDER = {"test": 0, "val": 1, "train": 2}


def one_per_device(table: pd.DataFrame, splits: tuple[str, ...] = ("test", "val", "train", "")) -> list[IndexEntry]:
    """The first raster volume by id of each device, from the first of `splits` in which the device has one."""
    rasters = table[(table["pattern"] == "raster") & table["split"].isin(splits)]
    ordered = rasters.assign(split_order=rasters["split"].map(_SPLIT_ORDER).fillna(len(_SPLIT_ORDER)))
    ordered = ordered.sort_values(["device", "split_order", "volume_id"], kind="stable")
    return entries_of(ordered.drop_duplicates("device"))


def all_if_few(table: pd.DataFrame) -> list[IndexEntry]:
    """Every raster volume of a store that has at most `MOST_SHOWN` of them; otherwise one per device."""
    rasters = table[table["pattern"] == "raster"]
    if len(rasters) > MOST_SHOWN:
        return one_per_device(table)
    return sorted(entries_of(rasters), key=lambda entry: (entry.device, entry.volume_id))
