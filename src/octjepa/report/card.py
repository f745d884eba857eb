"""The data card: what a store holds, how it was made and what is not known of it, in Markdown.

It goes with data or weights that are passed on (Gebru et al. 2021, "Datasheets for Datasets"). Counts, medians and
ranges alone; of fewer than six people no ages or groups. What octjepa cannot know stands there as a gap to fill.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from octjepa.errors import UsageError
from octjepa.report.cohort import SPLITS, participant_facts, run_flow
from octjepa.report.every_file import meaning_of
from octjepa.store.cohort_flow import UNKNOWN, Counts, cohort_table, count_by, count_entries, source_flow, text_column
from octjepa.store.leaks import find_leaks

if TYPE_CHECKING:
    from pathlib import Path

    import pandas as pd

    from octjepa.report.gather import Contents
    from octjepa.store import Store

_GAPS = ("Source and its version", "Terms of use", "Consent and ethics approval", "Contact")
_SHAPES = {
    "none": "as scanned",
    "plane": "flattened: the tilt of Bruch's membrane is taken out, B-scan motion with it",
    "quadratic": "flattened: tilt and curvature of Bruch's membrane are taken out, B-scan motion with them",
}
_AXES = (("slice", "d", "z"), ("depth", "h", "y"), ("column", "w", "x"))


def card_of(contents: Contents, place: Path, page: Path) -> str:
    """The card of the store of a report. Raises UsageError: there is none, or `place` is no place to write to."""
    if place.is_dir():
        raise UsageError(f"{place} is a folder: give --card the name of a Markdown file")
    if place.resolve() == page.resolve():
        raise UsageError(f"--out and --card both name {page}: give each a file of its own")
    if contents.store is None:
        raise UsageError(
            f"{contents.root.name} has no store that can be opened, and a data card tells of one: give the store itself"
        )
    name = contents.store.location.rstrip("/").replace("\\", "/").rpartition("/")[2]
    return data_card(contents.store, name, None if contents.run is None else run_flow(contents.run.about))


def data_card(store: Store, name: str, flow: Mapping[str, Sequence[Mapping[str, Any]]] | None = None) -> str:
    """The card of `store` as Markdown, under the title `name`; `flow` is what a run chose of it, as run.json has it."""
    table = cohort_table(store)
    parts = [
        f"# Data card: {_plain(name)}",
        f"{_told(count_entries(table))}: retinal OCT, brought to one spacing, size and orientation by octjepa "
        f"{version('octjepa')}. For research; not a medical device. Counts, medians and ranges only; mind small "
        "numbers before this is made public.",
        "## To be filled in by whoever passes it on",
        _rows(("", ""), [(gap, "") for gap in _GAPS]),
        "## What it holds",
        _rows(("device", *_COUNTED, "slices x rows x columns", "spacing, mm", "quality"), _devices(table)),
        _rows(("split", *_COUNTED), _splits(table)),
        *_sites(table),
        *_chosen(flow or {}),
        _rows(("", "volumes"), _kinds(table)),
        "Size and spacing (median of slice, depth, column) are those of the scans as they came. Quality: median of a "
        "score from 0 to 1. An eye whose side no source names counts as one of its person.",
        "## People",
        *_people(store),
        "## How it was prepared",
        _rows(("", ""), _preparation(store)),
        "## What was left out",
        *_left_out(store),
        "## What is not certain, and what was noted",
        _rows(("", "volumes"), _doubts(table)),
        _leaks(table),
        "## Labels that came in the files",
        _labels(store),
        "## Personal data in the source",
        _personal(store),
        "## What it is not for",
        "Slices between those of the scan are interpolated and finer detail than the spacing is gone: measure small "
        "things in the scans as they came. Where volumes are flattened (see above) the shape of the eye is gone: no "
        "work on curvature, tilt or staphyloma. Left eyes may be mirrored. Devices differ in people, protocol "
        "and noise together, so a difference between devices here is not one between instruments alone. People without "
        "a scan that could be read are not in it; whom that leaves out stands above, by reason and not by person.",
    ]  # fmt: skip
    return "\n\n".join(parts) + "\n"


_COUNTED = ("people", "eyes", "volumes")
_FEWEST = 6


def _cells(found: Counts) -> tuple[str, ...]:
    return str(found.people), str(found.eyes), str(found.volumes)


def _told(found: Counts) -> str:
    return f"{found.volumes} volumes of {found.eyes} eyes of {found.people} people"


def _by(table: pd.DataFrame, column: str) -> list[tuple[str, pd.DataFrame]]:
    """The parts of the table by value; splits in their order, others by name."""
    values = text_column(table[column])
    order = [*SPLITS, ""] if column == "split" else sorted(set(values))
    parts = [(value, table[values == value]) for value in order]
    return [(value, part) for value, part in parts if len(part)]


def _devices(table: pd.DataFrame) -> list[tuple[str, ...]]:
    return [
        (
            device or "unknown",
            *_cells(count_entries(part)),
            _sizes(part),
            _spacing(part),
            f"{part['quality'].median():.2f}",
        )
        for device, part in _by(table, "device")
    ]


def _splits(table: pd.DataFrame) -> list[tuple[str, ...]]:
    return [(split or "unassigned", *_cells(count_entries(part))) for split, part in _by(table, "split")]


def _sizes(rows: pd.DataFrame) -> str:
    ends = [(int(rows[f"native_{axis}"].min()), int(rows[f"native_{axis}"].max())) for _, axis, _ in _AXES]
    return " x ".join(str(low) if low == high else f"{low} to {high}" for low, high in ends)


def _spacing(rows: pd.DataFrame) -> str:
    return ", ".join(f"{rows[f'spacing_{axis}_mm'].median():.4g}" for _, _, axis in _AXES)


def _sites(table: pd.DataFrame) -> list[str]:
    found = count_by(table, "site")
    if set(found) <= {UNKNOWN}:
        return []
    return [_rows(("site", *_COUNTED), [(site, *_cells(counts)) for site, counts in found.items()])]


def _kinds(table: pd.DataFrame) -> list[tuple[str, str]]:
    return [
        (f"{column}: {(value or 'unknown').replace('_', ' ')}", str(len(part)))
        for column in ("pattern", "region", "protocol", "format")
        for value, part in _by(table, column)
    ]


def _chosen(flow: Mapping[str, Sequence[Mapping[str, Any]]]) -> list[str]:
    """What a run trained on and judged itself by."""
    ends = [(split, stages[-1]["left"]) for split, stages in flow.items() if stages]
    if not ends:
        return []
    rows = [(f"the run's {split}", *(str(left[counted]) for counted in _COUNTED)) for split, left in ends]
    return ["Of these the run chose by its recipe (its report says by which rules):", _rows(("", *_COUNTED), rows)]


def _people(store: Store) -> list[str]:
    if store.table["person_id"].nunique() < _FEWEST:
        return [f"Fewer than {_FEWEST} people: their ages and groups are not told."]
    facts = participant_facts(store)
    if not facts:
        return ["No table of participants came with the files: age, group and site of the people are not known."]
    return [_rows(("", ""), list(facts.items()))]


def _preparation(store: Store) -> list[tuple[str, str]]:
    asked = store.preprocessing
    return [
        ("Voxels of a volume", " x ".join(map(str, store.preprocessing.stored_size)) + " (slices, rows, columns)"),
        ("Spacing", " x ".join(map(str, asked.target_spacing_mm)) + " mm"),
        ("Orientation", "left eyes mirrored to look like right ones" if asked.orientation == "OD" else "as scanned"),
        ("Shape", _SHAPES[asked.flatten]),
        (
            "Grey levels",
            "stretched volume by volume, from percentile {:g} to {:g}, to 8 bit: they do not compare between "
            "scans; mean and spread of the tissue are kept beside them".format(*asked.clip_percentiles),
        ),
        ("Left out of a volume", "blank B-scans; text painted beside the retina is blanked"),
        ("Preprocessing contract", f"{store.contract_hash}, canonicalisation {store.canonical_version}"),
    ]


def _left_out(store: Store) -> list[str]:
    sources = source_flow(store)
    told = f"{sources.scans} files were read or listed as scans, {sources.accepted.files} of them are in it."
    if sources.ignored:
        told += f" {sum(sources.ignored.values())} side files (tables, pictures) were not read."
    if not sources.refused:
        return [f"{told} Nothing was refused."]
    rows = [
        (
            one.reason,
            str(one.files),
            "lost" if one.lost else "rightly",
            meaning_of(one.reason)[0],
            _listed(one.by_device),
        )
        for one in sources.refused
    ]
    return [told, _rows(("reason", "files", "left out", "meaning", "by device, as far as the path tells"), rows)]


def _doubts(table: pd.DataFrame) -> list[tuple[str, str]]:
    uncertain = Counter(axis for text in text_column(table["uncertain"]) for axis in text.split(";") if axis)
    notes = Counter(note.partition("=")[0] for text in text_column(table["notes"]) for note in text.split(";") if note)
    unsided = int((~text_column(table["eye"]).isin(["OD", "OS"])).sum())
    rows = [(f"spacing uncertain: {axis}", str(uncertain[axis])) for axis, _, _ in _AXES]
    rows += [("side of the eye unknown", str(unsided))]
    return rows + [(f"note: {note.replace('_', ' ')}", str(number)) for note, number in sorted(notes.items())]


def _leaks(table: pd.DataFrame) -> str:
    if (text_column(table["split"]) == "").all():
        return "Nobody has a split yet."
    kinds = Counter(str(leak["kind"]).replace("_", " ") for leak in find_leaks(table))
    if not kinds:
        told = "No person, content or SOP instance UID stands in two splits"
        if (text_column(table["enface_hash"]) != "").any():
            return f"{told}, and no near-duplicate."
        return f"{told}. Near-duplicates were not looked for: this store has no hashes of the images."
    return f"**In two splits:** {_listed(kinds)}. What is measured on test people is too good."


def _labels(store: Store) -> str:
    from octjepa.store.labels import labels_of

    named = Counter(name for row in store.entries() for name in labels_of(row))
    rows = [(name, str(number)) for name, number in sorted(named.items())]
    return _rows(("label", "volumes"), rows) if rows else "None."


def _personal(store: Store) -> str:
    if store.table["personal"].isna().all():
        return "Not recorded: this store is older than the search for it. `octjepa inspect FOLDER` looks at the source."
    found = store.describe()["personal_data"]
    if not found:
        return "No field of personal data was found in the files that are in it."
    rows = [(field, str(one["kind"]), str(one["files"])) for field, one in found.items()]
    told = "The source files hold these; their values are not in the store. The study's own ids of people are its keys."
    return f"{told}\n\n" + _rows(("field", "kind", "files"), rows)


def _listed(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {number}" for name, number in sorted(counts.items()))


def _rows(head: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    head = list(head)
    lines = [head, ["---"] * len(head), *([_plain(cell) for cell in row] for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _plain(text: str) -> str:
    """Names from tables of others, kept from being read as Markdown or HTML."""
    return (
        re.sub(r"([\\|\[\]()!*`#~])", r"\\\1", " ".join(str(text).split())).replace("&", "&amp;").replace("<", "&lt;")
    )
