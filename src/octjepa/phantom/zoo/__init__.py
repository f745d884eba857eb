"""A zoo of broken files: every defect that a reader must survive, as data.

A good eye and one of `DEFECTS` give files on disk and what must become of them: accepted with the true geometry,
refused with a reason, or ignored. `docs/zoo.md` has the table, which a test compares with these data.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from octjepa.phantom.eye import Eye
from octjepa.phantom.zoo import files, frames, geometry, headers
from octjepa.phantom.zoo.scan_file import Defect, ScanFile

_LEVELS: Final = {
    "file": files.DEFECTS,
    "frames": frames.DEFECTS,
    "header": headers.DEFECTS,
    "geometry": geometry.DEFECTS,
    "identity": headers.IDENTITY_DEFECTS,
    "pixels": frames.PIXEL_DEFECTS,
}
# A cohort with a few broken files has these.
_FIRST: Final = ("truncated", "zero_bytes", "html_page", "no_pixel_data", "resource_fork", "wrong_spacing")
_ALL: Final = {defect.name: replace(defect, level=level) for level, group in _LEVELS.items() for defect in group}
DEFECTS: Final[dict[str, Defect]] = {name: _ALL[name] for name in dict.fromkeys((*_FIRST, *_ALL))}


def defects_for(devices: tuple[str, ...]) -> list[Defect]:
    """The defects that one of `devices` can have, in the order in which a cohort takes them."""
    return [defect for defect in DEFECTS.values() if set(defect.devices) & set(devices)]


def write_broken(
    path: Path, eye: Eye, seed: int, defect: Defect, manifest_row: dict[str, Any]
) -> tuple[list[Path], dict[str, Any]]:
    """Writes `eye` with `defect` to `path` or beside it. Raises OSError where the disk refuses.

    `manifest_row` is the good file's line of manifest.tsv. Returns (the files written, the broken one last, none where
    the defect is an absent file; the line that the manifest then holds, {} for none).
    """
    scan = ScanFile(eye, seed, path, dict(manifest_row))
    written = defect.apply(scan)
    if written is None:
        written = {path: scan.content()}
    for target, content in written.items():
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(content)
    return list(written), scan.manifest_row or {}
