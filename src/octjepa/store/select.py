"""Which volumes of a store a recipe takes, and the flow that says how many each criterion left out.

One function chooses for plan, training and validation. The order of the criteria is that of the recipe's data section;
a choice that needs a draw (`max_samples`) is a function of the seed and the ids, not of the order of files.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from octjepa import keys
from octjepa.errors import UsageError
from octjepa.recipe import DataRecipe
from octjepa.store.cohort_flow import UNKNOWN, CohortFlow, cohort_table, stage, text_column
from octjepa.volume import AXES

if TYPE_CHECKING:
    import pandas as pd

    from octjepa.store.folder import Store

_ONE_PER = {"eye": ("person_id", "eye"), "eye_and_visit": ("person_id", "eye", "visit"),
            "eye_and_device": ("person_id", "eye", "device")}  # fmt: skip
_SPACING = dict(zip(AXES, ("spacing_z_mm", "spacing_y_mm", "spacing_x_mm"), strict=True))


@dataclass(frozen=True)
class Selection:
    """`volume_ids` sorted; `domains` names the domain of each by the recipe's `data.balance`, all alike with none."""

    volume_ids: list[str]
    domains: dict[str, str]
    flow: CohortFlow


def select(store: Store, data: DataRecipe, split: str, seed: int = 0) -> Selection:
    """The volumes of `split` that meet every criterion of `data`; empty where none does."""
    table = cohort_table(store)
    rows = table[table["split"] == split]
    stages = [stage("store", "in the store", None, table), stage("split", f"split {split}", table, rows)]
    for name, why, kept in _criteria(data, table):
        before, rows = rows, rows[kept[rows.index]]
        stages.append(stage(name, why, before, rows))
    if data.one_per is not None:
        before, rows = rows, _best(rows, _ONE_PER[data.one_per])
        stages.append(stage("one_per", f"one per {data.one_per.replace('_', ' ')}, the best quality", before, rows))
    limit = data.max_samples
    if limit is not None:
        before, rows = rows, _drawn(rows, limit, seed, split)
        stages.append(stage("max_samples", f"{limit} at most, drawn with seed {seed}", before, rows))
    ids = sorted(rows["volume_id"])
    return Selection(ids, _domains(rows, data), CohortFlow(tuple(stages)))


def check_not_empty(selection: Selection, store: Store, split: str) -> None:
    """Raises UsageError with the flow where nothing is left."""
    if selection.volume_ids:
        return
    stages = selection.flow.stages
    emptied = next((one for one in stages if not one.left.volumes), stages[-1])
    raise UsageError(
        f"no volume of split {split!r} is left of store {store.location}: {emptied.why} took out the last "
        f"{emptied.lost.volumes}.\n"
        + "\n".join(selection.flow.lines())
        + "\nLoosen that criterion of the recipe's data section, split the store anew, or ingest more."
    )


def _criteria(data: DataRecipe, table: pd.DataFrame) -> Iterator[tuple[str, str, pd.Series]]:
    """(name, rule, mask over `table`) of every criterion that is given."""
    yield "patterns", *_among(table, "pattern", data.patterns)
    devices = (str(data.device),) if data.strategy == "single_domain" else data.devices
    for name, column, asked in (
        ("devices", "device", devices),
        ("sites", "site", data.sites),
        ("regions", "region", data.regions),
        ("lateralities", "eye", data.lateralities),
        ("formats", "format", data.formats),
    ):
        if asked is not None:
            yield name, *_among(table, column, asked)
    frames = table["native_d"]
    if data.min_frames is not None:
        yield "min_frames", f"{data.min_frames} B-scans at least", frames >= data.min_frames
    if data.max_frames is not None:
        yield "max_frames", f"{data.max_frames} B-scans at most", frames <= data.max_frames
    for place, (axis, column) in enumerate(_SPACING.items()):
        low, high = (limits and limits[place] for limits in (data.min_spacing_mm, data.max_spacing_mm))
        if low is not None:
            yield "min_spacing_mm", f"{axis} spacing {low:g} mm at least", table[column] >= low
        if high is not None:
            yield "max_spacing_mm", f"{axis} spacing {high:g} mm at most", table[column] <= high
    if data.min_quality is not None:
        yield "min_quality", f"quality {data.min_quality:g} at least", table["quality"] >= data.min_quality
    for name, column, codes in (
        ("exclude_notes", "notes", data.exclude_notes),
        ("exclude_uncertain", "uncertain", data.exclude_uncertain),
    ):
        if codes:
            told = "uncertain spacing of " if column == "uncertain" else "note "
            yield name, f"without {told}{' or '.join(codes)}", ~_names_one(table[column], codes)


def _among(table: pd.DataFrame, column: str, asked: tuple[str, ...]) -> tuple[str, pd.Series]:
    """Rule and mask: `column` is one of `asked`, whatever their case; "unknown" also means that nothing is said."""
    found = text_column(table[column]).str.casefold()
    folded = {word.casefold() for word in asked}
    kept = found.isin(folded) | ((found == "") & (UNKNOWN in folded))
    absent = [word for word in asked if not found.eq("" if word.casefold() == UNKNOWN else word.casefold()).any()]
    told = f"{column} {' or '.join(asked)}"
    # A word that no volume has may be a slip of the pen, and is said rather than left to be found.
    return told + (f" (the store has no {' or '.join(absent)})" if absent else ""), kept


def _names_one(column: pd.Series, codes: tuple[str, ...]) -> pd.Series:
    """True where a cell such as "person_unknown;blank_frames=3" holds one of `codes`; what follows "=" is detail."""
    asked = set(codes)
    return text_column(column).map(lambda cell: any(c.partition("=")[0] in asked for c in cell.split(";")))


def _best(rows: pd.DataFrame, group: tuple[str, ...]) -> pd.DataFrame:
    """The row of highest quality of each group, the first id among equals."""
    ordered = rows.sort_values(["quality", "volume_id"], ascending=[False, True])
    return ordered.drop_duplicates(list(group))


def _drawn(rows: pd.DataFrame, limit: int, seed: int, split: str) -> pd.DataFrame:
    if len(rows) <= limit:
        return rows
    rows = rows.sort_values("volume_id")
    chosen = keys.generator(seed, "max_samples", split).permutation(len(rows))[:limit]
    return rows.iloc[sorted(chosen)]


def _domains(rows: pd.DataFrame, data: DataRecipe) -> dict[str, str]:
    columns = {"none": (), "device": ("device",), "site": ("site",), "device_and_site": ("device", "site")}
    named = [text_column(rows[column]).replace("", UNKNOWN) for column in columns[data.balance]]
    names = [" at ".join(parts) for parts in zip(*named, strict=True)] if named else ["all"] * len(rows)
    return dict(zip(rows["volume_id"], names, strict=True))
