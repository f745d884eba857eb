"""The page of `octjepa segment SCAN...`: every scan with its picture, tables and notes in one self-contained file."""

from __future__ import annotations

import base64
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

from octjepa.files import write_atomic
from octjepa.read.written_results import PAGE
from octjepa.report.html import render_template
from octjepa.tasks.segmenter.scan_segmentation import SegmentedScans, recorded_scans
from octjepa.tasks.thickness import SECTORS


def write_page(segmented: SegmentedScans, out: Path) -> Path:
    """Writes `index.html` into `out`; the pictures are embedded, so the page needs no other file.

    Scans that earlier calls segmented into `out` follow those of this call, so that the page lists all results there.
    """
    segmented = replace(segmented, scans=recorded_scans(segmented.scans, out))
    pictures = {
        scan.scan: "data:image/png;base64," + base64.b64encode(Path(scan.files["picture"]).read_bytes()).decode()
        for scan in segmented.scans
    }
    page = render_template(
        "segmented_scans.html.j2",
        made=segmented,
        pictures=pictures,
        sectors=SECTORS,
        files={scan.scan: {kind: Path(path).name for kind, path in scan.files.items()} for scan in segmented.scans},
        version=version("octjepa"),
    )
    path = out / PAGE
    write_atomic(path, lambda file: file.write(page.encode()))
    return path
