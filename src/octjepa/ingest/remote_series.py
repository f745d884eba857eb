"""Scans of which a folder in a bucket holds one DICOM file per B-scan: found by headers, as on a disk.

A header is read from a copy of its file in the cache, which reading the scan needs anyway. Folders of volumes cost
nothing, for their files are larger than a B-scan; the answer is remembered for as long as the objects stay the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

from octjepa import remote
from octjepa.errors import OctjepaError, ResourceError
from octjepa.read.dicom_series import Series, find_series, series_facts
from octjepa.read.formats.sequence import MIN_FRAMES

if TYPE_CHECKING:
    from pydicom.dataset import Dataset

_BYTES = (1 << 10, 2 << 20)  # of a file with one B-scan: 1536 x 1024 pixels of 8 bits, 992 x 1024 of 16
_PEEKED = 3  # files of a folder: a localizer may be among the smallest
_CONCURRENT_FETCHES = 8


def series_of_objects(objects: Mapping[str, remote.RemoteObject]) -> list[Series]:
    """The scans among the objects of one folder, by their names. Raises ResourceError: no room for a copy."""
    small = {name: entry for name, entry in objects.items() if _BYTES[0] <= entry.size <= _BYTES[1]}
    if len(small) < MIN_FRAMES:
        return []
    absent: list[str] = []

    def facts(name: str) -> Dataset | None:
        try:
            with remote.local_copy(small[name]) as path:
                return series_facts(path)
        except ResourceError:
            raise
        except OctjepaError:  # reading it raises the same, for the quarantine
            absent.append(name)
            return None

    def find() -> tuple[list[Series], bool]:
        with ThreadPoolExecutor(_CONCURRENT_FETCHES) as pool:
            sizes = {name: entry.size for name, entry in small.items()}
            return find_series(sizes, lambda names: list(pool.map(facts, names)), _PEEKED), not absent

    series = remote.remembered("series", small.values(), find)
    return [Series(member, tuple(names), tuple(beside)) for member, names, beside in series]
