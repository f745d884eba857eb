"""A zoo of broken files with known fate: every defect that a reader must survive, as data.

In goes a good eye and a kind of `KINDS`, out come files on disk, and what must become of them: accepted with the true
geometry, refused with a reason, or ignored. `docs/zoo.md` prints the table. What can fail is the disk (OSError).
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from octjepa.phantom.eye import Eye
from octjepa.phantom.zoo import compressed, files, geometry, headers, identities, pixels
from octjepa.phantom.zoo.specimen import Kind, Specimen

_LEVELS: Final = {
    "file": (*files.FIRST, files.FORK, *files.KINDS),
    "frames": compressed.KINDS,
    "header": (headers.NO_PIXEL_DATA, *headers.KINDS),
    "geometry": (geometry.ONE_MILLIMETRE, *geometry.KINDS),
    "identity": identities.KINDS,
    "pixels": pixels.KINDS,
}
# The kinds that a few broken files begin with, then all others.
_BEGIN: Final = ("truncated", "zero_bytes", "html_page", "no_pixel_data", "resource_fork", "wrong_spacing")
_ALL: Final = {kind.name: replace(kind, level=level) for level, kinds in _LEVELS.items() for kind in kinds}
KINDS: Final = {name: _ALL[name] for name in (*_BEGIN, *(name for name in _ALL if name not in _BEGIN))}


def kinds_for(devices: tuple[str, ...]) -> list[Kind]:
    """The kinds that make sense for one of `devices`, in the order in which a cohort takes them."""
    return [kind for kind in KINDS.values() if set(kind.devices) & set(devices)]


def write_broken(path: Path, eye: Eye, seed: int, kind: Kind, row: dict[str, Any]) -> tuple[list[Path], dict[str, Any]]:
    """Writes `eye`, broken as `kind` says, to `path` or beside it.

    `row` is the good file's line of manifest.tsv. Returns (the files written, the broken one last, none where the
    defect is an absent file; the line that the manifest then holds, {} for none).
    """
    specimen = Specimen(eye, seed, path, dict(row))
    written = kind.spoil(specimen)
    if written is None:
        written = {path: specimen.content()}
    for place, content in written.items():
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(content)
    return list(written), specimen.row or {}


def table() -> str:
    """The Markdown table of `docs/zoo.md`: kind, what is wrong, what must become of it."""
    lines = ["| kind | level | what is wrong | must be |", "|---|---|---|---|"]
    for kind in sorted(KINDS.values(), key=lambda kind: list(_LEVELS).index(kind.level)):
        lines.append(f"| `{kind.name}` | {kind.level} | {kind.what} | {_fate(kind)} |")
    return "\n".join(lines)


def _fate(kind: Kind) -> str:
    if kind.fate == "ignored":
        return "left out and counted"
    if kind.fate == "refused":
        return "refused: " + " or ".join(f"`{reason}`" for reason in kind.reasons)
    told = [f"noted `{note}`" for note in kind.notes]
    told += [f"{axis} from {source}" for axis, source in kind.provenance]
    told += [f"{', '.join(kind.doubtful)} uncertain where it is not the true one"] if kind.doubtful else []
    told += [f"pattern {kind.pattern}"] if kind.pattern != "raster" else []
    return "accepted" + (": " if told else "") + "; ".join(told)
