"""Layers, thickness and fluid of the volumes of a store, for its page.

In: a store and the folders of its scans. Out: `StoreLayers`, with what `octjepa segment` shows of each scan: the ETDRS
table, fluid volumes, notes and a picture. Scans are measured as they came, because a thickness must not depend on
the recipe of a store. The cost is bounded: a store of many volumes shows one scan of each device, scans that were
segmented before are read from the cache, and after `SECONDS` no further scan is segmented. The page names each
volume that is left out, and why.
"""

from __future__ import annotations

import base64
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from octjepa.cohort import examples
from octjepa.errors import OctjepaError
from octjepa.ingest.native_files import NativeFiles, folders_near
from octjepa.ingest.remembered_sources import sources_of
from octjepa.progress import bar
from octjepa.remote import is_remote
from octjepa.store import Store
from octjepa.store.index import IndexEntry
from octjepa.tasks.segmenter.measurement import Preparation, measure
from octjepa.tasks.segmenter.retained_layers import LayerCache
from octjepa.tasks.segmenter.scan_picture import scan_jpeg
from octjepa.tasks.segmenter.scan_segmentation import SegmentedScan
from octjepa.tasks.thickness import SECTORS

SECONDS: Final = 240.0  # after which no further scan is segmented for a page; about 20 scans of 49 B-scans on two cores


@dataclass(frozen=True)
class LeftOutVolume:
    """A volume that the page does not show, and why."""

    volume_id: str
    reason: str


@dataclass
class StoreLayers:
    """The scans that are shown, with their pictures as data URIs, and those that are not.

    `rasters` and `others` count the raster volumes of the store and the volumes of other patterns. `chosen` of the
    rasters were to be shown.
    """

    rasters: int
    others: int
    chosen: int
    scans: list[SegmentedScan] = field(default_factory=list)
    pictures: dict[str, str] = field(default_factory=dict)
    left_out: list[LeftOutVolume] = field(default_factory=list)
    most: int = examples.MOST_SHOWN
    sectors: tuple[str, ...] = SECTORS


def layers_of_store(
    store: Store, scans: Sequence[str] = (), cache: LayerCache | None = None, seconds: float = SECONDS
) -> StoreLayers:
    """Segments the volumes that the page shows, or reads their layers from `cache`.

    `scans` are the folders that were ingested, by default those that this machine remembers.
    """
    cache = cache or LayerCache()
    near = () if is_remote(store.location) else folders_near(Path(store.location))
    files = NativeFiles(scans or sources_of(store.location), near)
    entries = examples.all_if_few(store.table)
    rasters = int((store.table["pattern"] == "raster").sum())
    shown = StoreLayers(rasters, len(store.table) - rasters, len(entries))
    end = time.monotonic() + seconds
    with bar("layers", len(entries), "scan") as progress:
        for entry in entries:
            try:
                _show(shown, entry, files, cache, end)
            except OctjepaError as error:
                shown.left_out.append(LeftOutVolume(entry.volume_id, str(error)))
            progress.advance()
    return shown


def _show(shown: StoreLayers, entry: IndexEntry, files: NativeFiles, cache: LayerCache, end: float) -> None:
    """Adds one volume. Raises OctjepaError: no file, no layers, or no time."""
    name = entry.volume_id
    volume = files.read(entry)
    retained = cache.retained(volume)
    if retained is None:
        if time.monotonic() >= end:
            raise OctjepaError("the time for layers was used up; the same command continues with this volume")
        retained = cache.layers(volume)
    measurement = measure(volume, retained, Preparation.of_entry(entry))
    scan = SegmentedScan.of(name, volume, measurement, {})
    title = f"{name}{', ' + scan.eye if scan.eye else ''}"
    picture = base64.b64encode(scan_jpeg(title, volume, retained, measurement)).decode()
    shown.scans.append(scan)
    shown.pictures[name] = f"data:image/jpeg;base64,{picture}"
