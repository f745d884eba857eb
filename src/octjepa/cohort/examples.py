"""Chooses the eyes that a page shows. An eye is chosen by its id and never by its looks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas as pd

MOST_SHOWN = 20
_SPLIT_ORDER = {"test": 0, "val": 1, "train": 2}


def records(table: pd.DataFrame) -> list[dict[str, Any]]:
    """The rows of a store's table, keyed by column."""
    return [{str(name): value for name, value in row.items()} for row in table.to_dict("records")]


def one_per_device(table: pd.DataFrame, splits: tuple[str, ...] = ("test", "val", "train", "")) -> list[dict[str, Any]]:
    """The first raster volume by id of each device, from the first of `splits` in which the device has one."""
    rows = [row for row in records(table) if row["pattern"] == "raster" and row["split"] in splits]
    rows.sort(key=lambda row: (row["device"], _SPLIT_ORDER.get(row["split"], 3), row["volume_id"]))
    chosen: dict[str, dict[str, Any]] = {}
    for row in rows:
        chosen.setdefault(row["device"], row)
    return list(chosen.values())


def all_if_few(table: pd.DataFrame) -> list[dict[str, Any]]:
    """Every raster volume of a store that has at most `MOST_SHOWN` of them; otherwise one per device."""
    rows = [row for row in records(table) if row["pattern"] == "raster"]
    if len(rows) > MOST_SHOWN:
        return one_per_device(table)
    return sorted(rows, key=lambda row: (row["device"], row["volume_id"]))
