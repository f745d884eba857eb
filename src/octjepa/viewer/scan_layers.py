"""Layers, fluid and thickness of the scan that is shown, segmented in the background when the page asks for them.

In: an `OCTVolume` and the notes of its index entry. Out: its state (running, ready, failed), and then the boundaries,
classes and measurement. One scan is segmented at a time. A scan that the page has not requested for some seconds is
given up, because another eye was opened; the next request starts it again. So does the first request after a failure
and as long a pause, because the cause may be gone. Results are retained by `LayerCache`.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Final, Literal

import numpy as np

from octjepa.errors import OctjepaError, UsageError
from octjepa.layers import LAYERS
from octjepa.record import Record
from octjepa.store.index import IndexEntry
from octjepa.tasks.segmenter.measurement import Measurement, Preparation, measure
from octjepa.tasks.segmenter.retained_layers import LayerCache, RetainedLayers
from octjepa.tasks.thickness import SECTORS
from octjepa.volume import OCTVolume

_GIVEN_UP_SECONDS: Final = 5.0
_HELD_BYTES: Final = 256 << 20  # of layers in memory; those of the last scan are held in any case
THICKNESS_UM: Final = (150.0, 550.0)  # of the first and last colour, as in the pictures of `octjepa segment`
LAYER_NAMES: Final = tuple(name for name, _, _ in LAYERS)


@dataclass(frozen=True)
class LayerState(Record):
    """How far a scan is: `done` of `total` B-scans; `reason` says why it failed."""

    state: Literal["running", "ready", "failed"]
    done: int
    total: int
    reason: str = ""


@dataclass(frozen=True)
class SectorMeans(Record):
    """The ETDRS means of one layer and the volumes of fluid of a scan, as the page shows them.

    By sector name: `sectors` are the means in um, None without a value, `measured` the shares of the sectors that were
    measured, `sector_notes` why a value is absent or doubtful. `centre` is (slice, column) of the grid in voxels and
    `centre_from` how it was found. `superior` is 1 if later B-scans are superior, `nasal` 1 if higher columns are
    nasal, else -1; `nasal` is 0 of an unknown eye. `has_rings` is false if only the central
    sector exists. `low_um` and `high_um` are the first and last colour of the map.
    `corrected` counts the B-scans that were corrected by hand.
    """

    layer: str
    sectors: dict[str, float | None]
    measured: dict[str, float]
    sector_notes: dict[str, str]
    fluid_mm3: dict[str, float | None]
    notes: tuple[str, ...]
    has_area: bool
    centre: tuple[float, float]
    centre_from: str
    certainty: float
    superior: int
    nasal: int
    has_rings: bool
    low_um: int
    high_um: int
    corrected: int = 0


class _GivenUpError(Exception):
    """Ends the segmentation of a scan that no request waits for."""


@dataclass(eq=False)
class _Job:
    """A segmentation. It does not hold its scan, because jobs that failed stay in memory."""

    finished: threading.Event = field(default_factory=threading.Event)
    done: int = 0
    reason: str = ""
    requested: float = field(default_factory=time.monotonic)
    waiting: int = 0  # callers that wait for the result


class ScanLayers:
    """Segments scans with `cache`. Its methods may be called from threads."""

    def __init__(self, cache: LayerCache | None = None) -> None:
        self._cache = cache or LayerCache()
        self._lock, self._turn = threading.Lock(), threading.Lock()
        self._jobs: dict[str, _Job] = {}
        self._held: OrderedDict[str, RetainedLayers] = OrderedDict()

    @property
    def is_adapted(self) -> bool:
        """Whether another network than the packaged one finds the layers."""
        return self._cache.is_adapted

    def state(self, volume: OCTVolume) -> LayerState:
        """How far `volume` is. Starts its segmentation if nothing is known of it; does not wait."""
        total = len(volume.pixels)
        with self._lock:
            if volume.content_hash in self._held:
                return LayerState("ready", total, total)
            job = self._job(volume)
            if job.reason:
                return LayerState("failed", job.done, total, job.reason)
            return LayerState("running", job.done, total)

    def layers(self, volume: OCTVolume) -> RetainedLayers:
        """The layers of `volume`; waits until they are found. Raises UsageError that says why there are none."""
        while True:
            with self._lock:
                if (retained := self._held.get(volume.content_hash)) is not None:
                    self._held.move_to_end(volume.content_hash)
                    return retained
                job = self._job(volume)
                if job.reason:
                    raise UsageError(job.reason)
                job.waiting += 1
            try:
                job.finished.wait()
            finally:
                with self._lock:
                    job.waiting -= 1

    def _job(self, volume: OCTVolume) -> _Job:
        """The job of `volume`, requested now; started if there is none, or an old failure. The lock is held."""
        job = self._jobs.get(volume.content_hash)
        if job is None or (job.reason and time.monotonic() - job.requested > _GIVEN_UP_SECONDS):
            job = self._jobs[volume.content_hash] = _Job()
            threading.Thread(target=self._work, args=(job, volume), daemon=True).start()
        job.requested = time.monotonic()
        return job

    def _work(self, job: _Job, volume: OCTVolume) -> None:
        def advance(done: int) -> None:
            job.done = done
            if not job.waiting and time.monotonic() - job.requested > _GIVEN_UP_SECONDS:
                raise _GivenUpError

        key = volume.content_hash
        try:
            with self._turn:
                advance(0)
                retained = self._cache.layers(volume, advance)
            with self._lock:
                self._held[key] = retained
                while len(self._held) > 1 and sum(map(_bytes, self._held.values())) > _HELD_BYTES:
                    self._held.popitem(last=False)
                del self._jobs[key]
        except _GivenUpError:
            with self._lock:
                del self._jobs[key]
        except OctjepaError as error:
            job.reason = str(error)
        except MemoryError:
            job.reason = "the scan is too large for the memory of this machine"
        except Exception as error:  # the page tells it; a thread that ends silently would leave the page waiting
            job.reason = f"the network failed ({type(error).__name__})"
            raise
        finally:
            job.requested = time.monotonic()  # those who wait for it get the reason, not another try
            job.finished.set()


def _bytes(retained: RetainedLayers) -> int:
    return retained.boundaries_px.nbytes + retained.expected_error_um.nbytes + retained.classes.nbytes


def measured(
    volume: OCTVolume, retained: RetainedLayers, entry: IndexEntry, chosen_mm: tuple[float, float] | None = None
) -> Measurement:
    """The measurement of a scan; `entry` is its entry in the store's index, which holds quality and notes."""
    return measure(volume, retained, Preparation.of_entry(entry), chosen_mm)


def sectors(measured: Measurement, layer: str = "retina") -> SectorMeans:
    """The ETDRS means of `layer`. Raises KeyError: no such layer."""
    if layer not in LAYER_NAMES:
        raise KeyError(layer)
    up, nasal = measured.orientation.signs
    means = measured.etdrs_um[LAYER_NAMES.index(layer)]
    low, high = map_range(measured, layer)
    slice_index = np.interp(measured.centre.slice_mm, measured.slice_mm, np.arange(len(measured.slice_mm)))
    column_index = np.interp(measured.centre.column_mm, measured.column_mm, np.arange(len(measured.column_mm)))
    return SectorMeans(
        layer=layer,
        sectors={
            name: round(float(value), 1) if np.isfinite(value) else None
            for name, value in zip(SECTORS, means, strict=True)
        },
        measured={name: round(float(share), 3) for name, share in zip(SECTORS, measured.coverage, strict=True)},
        sector_notes=dict(zip(SECTORS, measured.sector_notes, strict=True)),
        fluid_mm3={name: None if v is None else round(v, 4) for name, v in measured.fluid_mm3.items()},
        notes=measured.notes,
        has_area=measured.has_area,
        centre=(float(slice_index), float(column_index)),
        centre_from=measured.centre.kind,
        certainty=measured.centre.certainty,
        superior=up,
        nasal=nasal if measured.orientation.eye else 0,
        has_rings=measured.orientation.lines == "horizontal",
        low_um=round(low),
        high_um=round(high),
    )


def map_range(measured: Measurement, layer: str) -> tuple[float, float]:
    """Thickness in um of the first and last colour: always the same for the retina, so that eyes can be compared."""
    if layer == "retina":
        return THICKNESS_UM
    values = measured.layers_um[LAYER_NAMES.index(layer)]
    finite = values[np.isfinite(values)]
    low, high = (float(value) for value in np.percentile(finite, [2, 98])) if finite.size else (0.0, 1.0)
    return low, max(high, low + 1)
