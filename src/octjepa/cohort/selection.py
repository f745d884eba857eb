"""The volumes of a store that a recipe takes, and the flow that says how many each criterion left out.

Plan, training and validation use the same function. Criteria apply in the order of the recipe's data section; the
random sample of `max_samples` is a function of the seed and the ids, not of the order of files.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from octjepa import keys
from octjepa.cohort.flow import UNKNOWN, CohortFlow, cohort_table, stage
from octjepa.errors import UsageError
from octjepa.notes import HALVES_NOTE, read_notes
from octjepa.recipe import DataRecipe
from octjepa.store.index import text_column
from octjepa.volume import AXES

if TYPE_CHECKING:
    import pandas as pd

    from octjepa.store.folder import Store

_ONE_PER = {
    "eye": ("person_id", "eye"),
    "eye_and_visit": ("person_id", "eye", "visit"),
    "eye_and_device": ("person_id", "eye", "device"),
}
_BALANCE = {"none": (), "device": ("device",), "site": ("site",), "device_and_site": ("device", "site")}
_SPACING = ("spacing_z_mm", "spacing_y_mm", "spacing_x_mm")


@dataclass(frozen=True)
class Selection:
    """`volume_ids` sorted; `domains` names the domain of each by the recipe's `data.balance`, "all" for none."""

    volume_ids: list[str]
    domains: dict[str, str]
    flow: CohortFlow


def select(store: Store, data: DataRecipe, split: str, seed: int = 0, halves: bool = False) -> Selection:
    """The volumes of `split` that meet every criterion of `data`, and have `halves`; empty if none does."""
    table = cohort_table(store)
    entries = table[table["split"] == split]
    stages = [stage("store", "in the store", None, table), stage("split", f"split {split}", table, entries)]

    def narrow(name: str, rule: str, left: pd.DataFrame) -> pd.DataFrame:
        stages.append(stage(name, rule, entries, left))
        return left

    for name, rule, mask in _criteria(data, table):
        entries = narrow(name, rule, entries[mask[entries.index]])
    if halves:
        dense = _has_code(entries["notes"], (HALVES_NOTE,))
        entries = narrow("halves", "B-scans dense enough for two halves", entries[dense])
    if data.one_per is not None:
        best_first = entries.sort_values(["quality", "volume_id"], ascending=[False, True])
        best = best_first.drop_duplicates(list(_ONE_PER[data.one_per]))
        entries = narrow("one_per", f"one per {data.one_per.replace('_', ' ')}, the best quality", best)
    if data.max_samples is not None:
        sample = _sample(entries, data.max_samples, seed, split)
        entries = narrow("max_samples", f"{data.max_samples} at most, drawn with seed {seed}", sample)
    return Selection(sorted(entries["volume_id"]), _domains(entries, data), CohortFlow(tuple(stages)))


def check_not_empty(selection: Selection, store: Store, split: str) -> None:
    """Raises UsageError with the flow if nothing is left."""
    if selection.volume_ids:
        return
    if store.table.empty:
        refused = len(store.quarantine)
        why = (
            f"; refused files: {refused} (`octjepa report {shlex.quote(store.location)}` lists why)" if refused else ""
        )
        raise UsageError(f"the store {store.location} holds no volume{why}")
    stages = selection.flow.stages
    emptied = next((stage for stage in stages if not stage.left.volumes), stages[-1])
    raise UsageError(
        f"no volume of split {split!r} is left of store {store.location}: {emptied.why} took out the last "
        f"{emptied.lost.volumes}.\n"
        + "\n".join(selection.flow.lines())
        + "\nLoosen that criterion of the recipe's data section, split the store again, or ingest more."
    )


def _criteria(data: DataRecipe, table: pd.DataFrame) -> Iterator[tuple[str, str, pd.Series]]:
    """(name, rule, mask over `table`) of every criterion that is given."""
    devices = (str(data.device),) if data.strategy == "single_domain" else data.devices
    _check_devices(devices or (), table)
    for name, column, values in (
        ("patterns", "pattern", data.patterns),
        ("devices", "device", devices),
        ("sites", "site", data.sites),
        ("regions", "region", data.regions),
        ("lateralities", "eye", data.lateralities),
        ("formats", "format", data.formats),
    ):
        if values is not None:
            yield name, *_one_of(table, column, values)
    bounds: list[tuple[str, str, str, float | None, float | None]]
    bounds = [("frames", "native_d", "{:g} B-scans", data.min_frames, data.max_frames)]
    for i, (axis, column) in enumerate(zip(AXES, _SPACING, strict=True)):
        low, high = (limits and limits[i] for limits in (data.min_spacing_mm, data.max_spacing_mm))
        bounds.append(("spacing_mm", column, f"{axis} spacing {{:g}} mm", low, high))
    bounds.append(("quality", "quality", "quality {:g}", data.min_quality, None))
    for name, column, rule, low, high in bounds:
        if low is not None:
            large_enough = table[column] >= low
            # a default is listed only if it leaves something out
            if not large_enough.all() or name != "quality" or low != DataRecipe.model_fields["min_quality"].default:
                yield f"min_{name}", f"{rule.format(low)} at least", large_enough
        if high is not None:
            yield f"max_{name}", f"{rule.format(high)} at most", table[column] <= high
    for name, column, rule, codes in (
        ("exclude_notes", "notes", "note", data.exclude_notes),
        ("exclude_uncertain", "uncertain", "uncertain spacing of", data.exclude_uncertain),
    ):
        left_out = _has_code(table[column], codes)
        # a default is listed only if it leaves something out
        if codes and (left_out.any() or codes != DataRecipe.model_fields[name].default):
            yield name, f"without {rule} {' or '.join(codes)}", ~left_out


def _check_devices(devices: tuple[str, ...], table: pd.DataFrame) -> None:
    """Raises UsageError where the store holds no scan of a device: a filter must not narrow by a typing error."""
    counts = text_column(table["device"]).replace("", UNKNOWN).value_counts()
    if absent := sorted(set(devices) - set(counts.index)):
        held = ", ".join(f"{device} ({counts[device]})" for device in sorted(counts.index))
        raise UsageError(f"the store has no device {' or '.join(absent)}; it holds {held or 'no volume'}")


def _one_of(table: pd.DataFrame, column: str, values: tuple[str, ...]) -> tuple[str, pd.Series]:
    """Rule and mask: `column` is one of `values`, ignoring case; "unknown" also matches an empty cell."""
    cells = text_column(table[column]).str.casefold()
    folded = {value.casefold() for value in values}
    mask = cells.isin(folded) | ((cells == "") & (UNKNOWN in folded))
    absent = [value for value in values if not cells.eq("" if value.casefold() == UNKNOWN else value.casefold()).any()]
    rule = f"{column} {' or '.join(values)}"
    # A value that no volume has may be a typing error, so the rule points it out.
    return rule + (f" (the store has no {' or '.join(absent)})" if absent else ""), mask


def _has_code(column: pd.Series, codes: tuple[str, ...]) -> pd.Series:
    """True where a cell such as "person_unknown;blank_frames=3" holds one of `codes`; what follows "=" is detail."""
    return column.map(lambda cell: any(note.code in codes for note in read_notes(cell)))


def _sample(entries: pd.DataFrame, limit: int, seed: int, split: str) -> pd.DataFrame:
    """At most `limit` entries, a function of the seed and the ids."""
    if len(entries) <= limit:
        return entries
    chosen = keys.generator(seed, "max_samples", split).permutation(len(entries))[:limit]
    return entries.sort_values("volume_id").iloc[sorted(chosen)]


def _domains(entries: pd.DataFrame, data: DataRecipe) -> dict[str, str]:
    """{volume id: the name of its domain}."""
    columns = [text_column(entries[column]).replace("", UNKNOWN) for column in _BALANCE[data.balance]]
    names = map(" at ".join, zip(*columns, strict=True)) if columns else ["all"] * len(entries)
    return dict(zip(entries["volume_id"], names, strict=True))
