"""Links in a folder from another person: one that leads out of the folder would name a file of the user's.

A link that the user names on the command line is the user's own choice. A link that lies in a folder, or next to a scan
as its voxels, its JSON file or its pictures, came with the folder; it is followed only within that folder.
"""

from __future__ import annotations

from pathlib import Path

from octjepa.reasons import rejection
from octjepa.remote.cache import cache_root


def leads_out(path: Path, folder: Path) -> bool:
    """Whether `path` is, or passes through, a link that leads out of `folder`."""
    return not path.resolve().is_relative_to(folder.resolve())


def check_inside(path: Path, folder: Path) -> None:
    """Raises VolumeRejected path_escapes if `path`, a file that belongs to a scan, leads out of `folder`.

    Scans from a bucket are a folder of links into the cache of verified copies, which are followed.
    """
    if leads_out(path, folder) and leads_out(path, cache_root()):
        raise rejection(
            "path_escapes", f"{path.suffix.lower() or 'a file'} of the scan is a link that leads out of its folder"
        )


def check_beside(path: Path, scan: Path) -> None:
    """As `check_inside`, of a file next to `scan`: a scan that the user names by a link may have linked companions."""
    if leads_out(path, scan.resolve().parent):
        check_inside(path, scan.parent)


def text_beside(scan: Path) -> Path | None:
    """The text file of the same name next to a scan, whose suffix may be in capitals, or None."""
    return next((path for suffix in (".txt", ".TXT") if (path := scan.with_suffix(suffix)).is_file()), None)
