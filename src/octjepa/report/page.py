"""Writes the page about a folder: sections, headline results and faults, rendered in one piece."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

from octjepa.errors import UsageError
from octjepa.files import write_atomic
from octjepa.ingest.native_files import existing_scans
from octjepa.locks import file_lock
from octjepa.metrics.findings import FAULT_KINDS
from octjepa.remote import is_remote
from octjepa.report.cohort import Cohort
from octjepa.report.contents import Contents, read_contents, read_run
from octjepa.report.data_card import card_text
from octjepa.report.headlines import faults, headlines
from octjepa.report.html import render_template, without_paths
from octjepa.report.verdict import overall_verdict

_LONG_TABLE = 12  # rows beyond which a table starts folded


def write_report(
    source: str | Path,
    out: Path | None = None,
    card: Path | None = None,
    compare: Sequence[str | Path] = (),
    saliency: Path | None = None,
    attention: Path | None = None,
    scans: Sequence[str] = (),
) -> Path:
    """Writes the page about `source` to `out`, by default `report.html` in it, and returns its path.

    `source` is a run, a fine-tuning, a segmentation, a store or a demo folder. It may be a store in a bucket; the page
    is then written to the working folder by default. With `card` the data card of its store is written there as well,
    as Markdown. Of a run, the curves of the runs `compare` are drawn next to its own. With `saliency`, a folder, the
    maps of the page's eyes are saved there in native geometry, and with `attention`, a file of `octjepa probe
    --attention`, those of the probe. `scans` are the folders that the store was made from; by default those that this
    machine remembers. The page about a store shows the layers of these scans. Each file appears whole or not at all.

    Raises UsageError (no such folder, none of these, no folder of `scans`, `out` is a folder, `attention` without
    `saliency`) and OctjepaError (the disk refuses).
    """
    contents = read_contents(source)
    if scans:
        contents = replace(contents, scans=existing_scans(scans))
    if compare:
        if contents.run is None:
            raise UsageError(f"{source} is not a pretraining run: there is nothing to --compare with")
        contents = replace(contents, compared=tuple(read_run(path) for path in compare))
    out = (Path() if is_remote(source) else Path(source)) / "report.html" if out is None else Path(out)
    if out.is_dir():
        raise UsageError(f"{out} is a folder: give --out the name of an HTML file")
    if saliency is not None:
        from octjepa.report.saliency import write_saliency  # torch: not before the paths are known to be right

        write_saliency(contents, Path(saliency), attention)
    elif attention is not None:
        raise UsageError("the attention of a probe is saved with the other maps: give --saliency FOLDER as well")
    texts = {out: render(contents)}  # all texts are made before the first is written
    if card is not None:
        texts[card] = card_text(contents, card, out)
    for path, text in texts.items():
        with file_lock(path):
            write_atomic(path, lambda file, text=text: file.write(text.encode()))  # type: ignore[misc]
    return out


def render(contents: Contents) -> str:
    """The HTML text of the page about `contents`."""
    from octjepa.report.sections import build_sections  # loads torch: not before the paths are known to be right

    name = contents.training.about.get("name", "") if contents.training else ""
    sections = build_sections(contents)
    root = contents.root
    summary = (sections["cohort"].values or {}).get("summary")
    cohort = summary if isinstance(summary, Cohort) else None
    results = headlines(contents, cohort)
    shown_faults = [replace(fault, what=without_paths(fault.what, root)) for fault in faults(contents, cohort)]
    return render_template(
        "report.html.j2",
        contents=contents,
        title=str(name) or root.name,
        made=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        sections=sections,
        faults=shown_faults,
        headlines=results,
        verdict=overall_verdict(contents, results, shown_faults),
        kinds=FAULT_KINDS,
        long_table=_LONG_TABLE,
        scrub=lambda text: without_paths(str(text), root),
        version=version("octjepa"),
    )
