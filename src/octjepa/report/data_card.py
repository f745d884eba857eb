"""The data card: what a store holds, how it was made and what is not known of it, in Markdown.

It accompanies data or weights that are passed on (Gebru et al. 2021, "Datasheets for Datasets"). It holds only counts,
medians and ranges, and no ages, groups or sites of fewer than six people. What octjepa cannot know is a gap to fill in.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import version
from typing import TYPE_CHECKING

from octjepa.cohort.flow import UNKNOWN, Counts, Stage, cohort_table, count_by, count_entries
from octjepa.cohort.leaks import find_leaks
from octjepa.errors import UsageError, counted
from octjepa.ingest.source_flow import source_flow
from octjepa.notes import count_codes, read_codes, read_notes
from octjepa.report.cohort import FEWEST_PEOPLE, SPLITS, participant_facts, reason_meaning, run_flow
from octjepa.report.figures.eyes import AXES
from octjepa.report.markdown import escape_markdown
from octjepa.store.index import text_column

if TYPE_CHECKING:
    from pathlib import Path

    import pandas as pd

    from octjepa.report.contents import Contents
    from octjepa.store import Store

_GAPS = ("Source and its version", "Terms of use", "Consent and ethics approval", "Contact")
_SHAPES = {
    "none": "as scanned",
    "plane": "flattened: the tilt of Bruch's membrane is taken out, B-scan motion with it",
    "quadratic": "flattened: tilt and curvature of Bruch's membrane are taken out, B-scan motion with them",
}
_COUNTED = ("people", "eyes", "volumes")


def card_text(contents: Contents, path: Path, page: Path) -> str:
    """The card of the store of a report. Raises UsageError: there is no store, or `path` cannot be written to."""
    if path.is_dir():
        raise UsageError(f"{path} is a folder: give --card the name of a Markdown file")
    if path.resolve() == page.resolve():
        raise UsageError(f"--out and --card both name {page}: give each a separate file")
    if contents.store is None:
        raise UsageError(
            f"{contents.root.name} has no store to open, and a data card describes one: give the store itself"
        )
    name = contents.store.location.rstrip("/").replace("\\", "/").rpartition("/")[2]
    return data_card(contents.store, name, None if contents.run is None else run_flow(contents.run.about))


def data_card(store: Store, name: str, flow: Mapping[str, Sequence[Stage]] | None = None) -> str:
    """The card of `store` as Markdown, under the title `name`; `flow` is a run's selection of it."""
    table = cohort_table(store)
    counts = count_entries(table)
    parts = [
        f"# Data card: {escape_markdown(name)}",
        f"{counted(counts.volumes, 'volume')} of {counted(counts.eyes, 'eye')} of {counted(counts.people, 'person')}: "
        f"retinal OCT, brought to one spacing, size and orientation by octjepa {version('octjepa')}. For research; "
        "not a medical device. Counts, medians and ranges only; mind small numbers before this is made public.",
        "## To be filled in by whoever passes it on",
        _table(("", ""), [(gap, "") for gap in _GAPS]),
        "## What it holds",
        _table(("device", *_COUNTED, "slices x depth x columns", "spacing, mm", "quality"), _devices(table)),
        _table(
            ("split", *_COUNTED),
            [(split or "unassigned", *_cells(count_entries(p))) for split, p in _by(table, "split")],
        ),
        *_sites(table),
        *_selection(flow or {}),
        _table(("", "volumes"), _kinds(table)),
        "Size and spacing (median of slice, depth, column) are those of the native scans. Quality: median of a score "
        "from 0 to 1. An eye whose side no source names counts as one of its person.",
        "## People",
        *_people(store),
        "## How it was prepared",
        _table(("", ""), _preparation(store)),
        "## What was left out",
        *_left_out(store),
        "## What is not certain, and what was noted",
        _table(("", "volumes"), _doubts(table)),
        _leaks(table),
        "## Labels that came in the files",
        _labels(store),
        "## Personal data in the source",
        _personal(store),
        "## What it is not for",
        "Slices between those of the scan are interpolated and finer detail than the spacing is gone: measure small "
        "things in the native scans. Where volumes are flattened (see above) the shape of the eye is gone: no "
        "work on curvature, tilt or staphyloma. Left eyes may be mirrored. Devices differ in people, protocol "
        "and noise together, so a difference between devices here is not only between instruments. People without "
        "a scan that could be read are not in it; whom that leaves out is listed above, by reason and not by person.",
    ]
    return "\n\n".join(parts) + "\n"


def _cells(counts: Counts) -> tuple[str, ...]:
    return str(counts.people), str(counts.eyes), str(counts.volumes)


def _by(table: pd.DataFrame, column: str) -> list[tuple[str, pd.DataFrame]]:
    """The parts of the table by value; splits in their order, others by name."""
    values = text_column(table[column])
    order = [*SPLITS, ""] if column == "split" else sorted(set(values))
    parts = [(value, table[values == value]) for value in order]
    return [(value, part) for value, part in parts if len(part)]


def _devices(table: pd.DataFrame) -> list[tuple[str, ...]]:
    rows = []
    for device, part in _by(table, "device"):
        sizes = []
        for _, _, letter, _ in AXES:
            low, high = int(part[f"native_{letter}"].min()), int(part[f"native_{letter}"].max())
            sizes.append(str(low) if low == high else f"{low} to {high}")
        spacing = ", ".join(f"{part[f'spacing_{letter}_mm'].median():.4g}" for *_, letter in AXES)
        quality = f"{part['quality'].median():.2f}"
        rows.append((device or "unknown", *_cells(count_entries(part)), " x ".join(sizes), spacing, quality))
    return rows


def _sites(table: pd.DataFrame) -> list[str]:
    sites = count_by(table, "site")
    if set(sites) <= {UNKNOWN}:
        return []
    rows = [(site, *_cells(counts)) for site, counts in sites.items() if counts.people >= FEWEST_PEOPLE]
    if len(rows) < len(sites):
        rows.append((f"{len(sites) - len(rows)} of fewer than {FEWEST_PEOPLE} people", "", "", ""))
    return [_table(("site", *_COUNTED), rows)]


def _kinds(table: pd.DataFrame) -> list[tuple[str, str]]:
    return [
        (f"{column}: {(value or 'unknown').replace('_', ' ')}", str(len(part)))
        for column in ("pattern", "region", "protocol", "format")
        for value, part in _by(table, column)
    ]


def _selection(flow: Mapping[str, Sequence[Stage]]) -> list[str]:
    """The volumes a run trained and validated on."""
    ends = [(split, stages[-1].left) for split, stages in flow.items() if stages]
    if not ends:
        return []
    rows = [(f"the run's {split}", *_cells(left)) for split, left in ends]
    return ["Of these the run chose by its recipe (its report lists the rules):", _table(("", *_COUNTED), rows)]


def _people(store: Store) -> list[str]:
    if store.table["person_id"].nunique() < FEWEST_PEOPLE:
        return [f"Fewer than {FEWEST_PEOPLE} people: their ages and groups are not given."]
    facts = participant_facts(store)
    if not facts:
        return ["No table of participants came with the files: age, group and site of the people are not known."]
    return [_table(("", ""), list(facts.items()))]


def _preparation(store: Store) -> list[tuple[str, str]]:
    recipe = store.preprocessing
    return [
        ("Voxels of a volume", " x ".join(map(str, recipe.stored_size)) + " (slices, depth, columns)"),
        ("Spacing", " x ".join(map(str, recipe.target_spacing_mm)) + " mm"),
        ("Orientation", "left eyes mirrored to look like right eyes" if recipe.orientation == "OD" else "as scanned"),
        ("Shape", _SHAPES[recipe.flatten]),
        (
            "Intensity",
            "stretched volume by volume, from percentile {:g} to {:g}, to 8 bit: not comparable between scans; mean "
            "and spread of the tissue are stored next to it".format(*recipe.clip_percentiles),
        ),
        ("Left out of a volume", "blank B-scans; text painted next to the retina is blanked"),
        ("Preprocessing contract", f"{store.contract_hash}, canonicalisation {store.canonical_version}"),
    ]


def _left_out(store: Store) -> list[str]:
    sources = source_flow(store)
    text = f"{sources.scans} files were read or listed as scans, {sources.accepted.files} of them are in it."
    if sources.ignored:
        text += f" {sum(sources.ignored.values())} side files (tables, pictures) were not read."
    if not sources.refused:
        return [f"{text} Nothing was refused."]
    rows = [
        (
            refusal.reason,
            str(refusal.files),
            "lost" if refusal.lost else "rightly",
            reason_meaning(refusal.reason)[0],
            _listed(refusal.by_device),
        )
        for refusal in sources.refused
    ]
    return [text, _table(("reason", "files", "left out", "meaning", "by device, as far as the path shows"), rows)]


def _doubts(table: pd.DataFrame) -> list[tuple[str, str]]:
    uncertain = Counter(axis for cell in table["uncertain"] for axis in read_codes(cell))
    notes = count_codes(map(read_notes, table["notes"]))
    without_side = int((~text_column(table["eye"]).isin(["OD", "OS"])).sum())
    rows = [(f"spacing uncertain: {axis}", str(uncertain[axis])) for axis, *_ in AXES]
    rows += [("side of the eye unknown", str(without_side))]
    return rows + [(f"note: {note.replace('_', ' ')}", str(number)) for note, number in sorted(notes.items())]


def _leaks(table: pd.DataFrame) -> str:
    if (text_column(table["split"]) == "").all():
        return "No person has a split yet."
    kinds = Counter(leak.kind.replace("_", " ") for leak in find_leaks(table))
    if kinds:
        return f"**In two splits:** {_listed(kinds)}. What is measured on test people is too good."
    text = "No person, content or SOP instance UID is in two splits"
    if (text_column(table["enface_hash"]) != "").any():
        return f"{text}, and no near-duplicate."
    return f"{text}. Near-duplicates were not searched for: this store has no hashes of the images."


def _labels(store: Store) -> str:
    from octjepa.store.index import decode_labels

    counts = Counter(name for entry in store.entries() for name in decode_labels(entry.labels))
    rows = [(name, str(number)) for name, number in sorted(counts.items())]
    return _table(("label", "volumes"), rows) if rows else "None."


def _personal(store: Store) -> str:
    fields = store.describe().personal_data
    if not fields:
        return "No field of personal data was found in the files that are in it."
    rows = [(name, str(counts["kind"]), str(counts["files"])) for name, counts in fields.items()]
    text = "The source files hold these; their values are not in the store. The study's own ids of people are its keys."
    return f"{text}\n\n" + _table(("field", "kind", "files"), rows)


def _listed(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {number}" for name, number in sorted(counts.items()))


def _table(head: Sequence[str], rows: Iterable[Iterable[str]]) -> str:
    lines = [head, ["---"] * len(head), *([escape_markdown(cell) for cell in row] for row in rows)]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
