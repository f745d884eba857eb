"""Recognise the results of octjepa among the files of a folder, so that no search reads them as scans.

In: the names of the files in a folder. Out: the names that `octjepa segment` wrote, or whether `octjepa convert
--layers` wrote the whole folder. Names are enough, because the files that belong together are recognised together; so
a bucket needs no request, and results of versions without a record of results are recognised too.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path
from typing import Final

# Records of `octjepa.ingest.results_record` in the folders that hold converted scans, their layers, and segmentations.
CONVERTED: Final = "octjepa_converted.jsonl"
LAYERS: Final = "octjepa_layers.jsonl"
SEGMENTED: Final = "octjepa_segmented.jsonl"
CLASSES: Final = "classes.json"
PAGE: Final = "index.html"  # of scans
TABLE: Final = "images.csv"  # of single B-scans
BOUNDARY_FILE: Final = "_boundaries.npz"
CLASS_FILES: Final = "_classes"
CLASS_PICTURE: Final = f"{CLASS_FILES}.png"
THICKNESS: Final = "_thickness.csv"
FLUID: Final = "_fluid.csv"
_PICTURE: Final = ".png"
_ENDINGS: Final = (
    BOUNDARY_FILE,
    f"{CLASS_FILES}.nii.gz",
    f"{CLASS_FILES}.dcm",
    CLASS_PICTURE,
    THICKNESS,
    FLUID,
)
_PICTURE_OF_HEAD: Final = re.compile(r"([0-9a-f]{16})_classes\.png")  # named after the volume id
_SHARED: Final = frozenset({CLASSES, PAGE, TABLE, SEGMENTED})
SCAN_ENDINGS: Final = (*_ENDINGS[:3], *_ENDINGS[4:], _PICTURE)  # of the results of a scan
HEAD_ENDINGS: Final = (".nii.gz", ".dcm", ".svg", ".etdrs.tsv")  # of the results of a head for a scan
BSCAN_ENDINGS: Final = (BOUNDARY_FILE, CLASS_PICTURE, _PICTURE)  # of the results of a single B-scan


def is_segmentation_folder(folder: Path) -> bool:
    """Whether `folder` holds results of `octjepa segment` for scans or single B-scans."""
    return (folder / CLASSES).is_file() and any(folder.glob(f"*{BOUNDARY_FILE}"))


def result_files(names: Collection[str]) -> frozenset[str]:
    """Those of the files called `names` in one folder that `octjepa segment` wrote; other files may lie next to them.

    NAME_boundaries.npz without other results may be a label of the user. NAME.png is a result only if the classes or
    the thickness of NAME lie next to it: otherwise it may be a picture with corrected boundaries.
    """
    present = frozenset(names)
    if CLASSES not in present:
        return frozenset()
    results: set[str] = set()
    for name in present:
        if name.endswith(BOUNDARY_FILE):
            stem = name.removesuffix(BOUNDARY_FILE)
            is_scan = f"{stem}{THICKNESS}" in present
            is_bscan = f"{stem}{CLASS_PICTURE}" in present and not present.isdisjoint({TABLE, SEGMENTED})
            if is_scan or is_bscan or SEGMENTED in present:
                results.update(f"{stem}{ending}" for ending in _ENDINGS)
            if is_scan or is_bscan:
                results.add(f"{stem}{_PICTURE}")
        elif name.endswith(".etdrs.tsv"):
            results.update(name.removesuffix(".etdrs.tsv") + ending for ending in HEAD_ENDINGS)
        elif match := _PICTURE_OF_HEAD.fullmatch(name):
            results.update((name, f"{match[1]}{_PICTURE}"))
    return present & (results | _SHARED) if results else frozenset()
