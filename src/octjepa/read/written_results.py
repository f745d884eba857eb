"""Recognise the results of octjepa among the files of a folder, so that no search reads them as scans.

In: the names of the files in a folder. Out: the names that `octjepa segment` wrote, or whether `octjepa convert
--layers` wrote the whole folder. Names are enough, because the files that belong together are recognised together; so
a bucket needs no request, and results of versions without a record of results are recognised too.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Final

# Records of `octjepa.ingest.results_record` in the folders that hold converted scans, their layers, and segmentations.
CONVERTED: Final = "octjepa_converted.jsonl"
LAYERS: Final = "octjepa_layers.jsonl"
SEGMENTED: Final = "octjepa_segmented.jsonl"
CLASSES: Final = "classes.json"
_BOUNDARIES: Final = "_boundaries.npz"
_PICTURE: Final = ".png"
_ENDINGS: Final = (_BOUNDARIES, "_classes.nii.gz", "_classes.dcm", "_classes.png", "_thickness.csv", "_fluid.csv")
_PICTURE_OF_HEAD: Final = re.compile(r"([0-9a-f]{16})_classes\.png")  # named after the volume id
_SHARED: Final = frozenset({CLASSES, "index.html", "images.csv", SEGMENTED})
SCAN_ENDINGS: Final = (*_ENDINGS[:3], *_ENDINGS[4:], _PICTURE)  # of the results of a scan
HEAD_ENDINGS: Final = (".nii.gz", ".dcm", ".svg", ".etdrs.tsv")  # of the results of a head for a scan
BSCAN_ENDINGS: Final = (_BOUNDARIES, "_classes.png", _PICTURE)  # of the results of a single B-scan


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
        if name.endswith(_BOUNDARIES):
            stem = name.removesuffix(_BOUNDARIES)
            is_scan = f"{stem}_thickness.csv" in present
            is_bscan = f"{stem}_classes.png" in present and not present.isdisjoint({"images.csv", SEGMENTED})
            if is_scan or is_bscan or SEGMENTED in present:
                results.update(f"{stem}{ending}" for ending in _ENDINGS)
            if is_scan or is_bscan:
                results.add(f"{stem}{_PICTURE}")
        elif name.endswith(".etdrs.tsv"):
            results.update(name.removesuffix(".etdrs.tsv") + ending for ending in HEAD_ENDINGS)
        elif match := _PICTURE_OF_HEAD.fullmatch(name):
            results.update((name, f"{match[1]}{_PICTURE}"))
    return present & (results | _SHARED) if results else frozenset()
