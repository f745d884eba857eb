"""Thickness per ETDRS sector and fluid volumes of a segmented scan, with notes if they should not be trusted.

In: an `OCTVolume`, its `Segmentation`, and the notes and quality that preparation of the scan gives. Out: a
`Measurement`. Every B-scan stands for half of the gap to each neighbour, so uneven rasters are weighted by area. A
sector of which less than half is covered has no value. Radial, circle and line scans have neither sectors nor volumes,
because their B-scans do not sample an area evenly.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
from jaxtyping import Bool, Float, UInt8

from octjepa.canonical.pipeline import SPARSE_FRAMES, SPARSE_GAP_MM
from octjepa.canonical.plausibility import DOUBTFUL_NOTE
from octjepa.errors import counted_are
from octjepa.layers import CLASSES, LAYERS
from octjepa.model.bscan_inference import NEIGHBOUR_MM
from octjepa.notes import SPARSE_NOTE, Note, read_notes
from octjepa.read.orientation import has_slice_direction
from octjepa.store.index import IndexEntry
from octjepa.tasks.segmenter.fovea import ScanCentre, find_centre
from octjepa.tasks.segmenter.inference import Segmentation
from octjepa.tasks.segmenter.retained_layers import RetainedLayers
from octjepa.tasks.thickness import (
    MIN_AREA_SHARE,
    NO_SECTORS_OF_VERTICAL,
    SECTORS,
    Lines,
    ScanOrientation,
    lines_of,
    sector_means,
    slice_positions_mm,
    slice_widths_mm,
)
from octjepa.volume import OCTVolume

LAYER_NAMES: Final = tuple(name for name, _, _ in LAYERS[1:])  # of the codes 1, 2, ... of `layer_codes`
# Of 450 training scenes (`draw_scene(424242, k, ranges, 3)`, ranges as is, moderate, strong in turn): 0.5 and 99.5 %
# of the thinnest and thickest 1 mm of a B-scan, and 99 % of the area of each class in a B-scan per mm of its width.
PHANTOM_THICKNESS_UM: Final = (140.0, 715.0)
PHANTOM_FLUID_UM: Final = {"intraretinal_fluid": 110.0, "subretinal_fluid": 49.0, "sub_rpe": 12.0}
_UNKNOWN_UM: Final = 60.0  # an A-scan whose ILM or Bruch's membrane is expected to be this far off is not measured
_UNSURE_UM: Final = 15.0  # of the mean over eight boundaries
_UNSURE_SHARE: Final = 0.2
# Expected error of half of the A-scans. 18 phantom eyes of the calibration, in the display in which they are formed,
# have at most 12.4 um (lab/2026-11.md). The limit is 1.5 times that.
_UNRECOGNISED_UM: Final = 18.6
_CUT_ROWS: Final = 2.0
_CUT_SHARE: Final = 0.02
_LOW_QUALITY: Final = 0.25
_NERVE_UM: Final = 110.0  # the nerve fibre layer is this thick only near the optic disc, or under a membrane
_NERVE_SHARE: Final = 0.02
_PARTLY: Final = 0.95
_DISC_WORDS: Final = frozenset({"disc", "disk", "onh", "optic"})


def layer_codes(found: Segmentation) -> UInt8[np.ndarray, "D H W"]:
    """Code k for the voxels of the layer `LAYER_NAMES[k - 1]`, 0 above, below and where a boundary has no value.

    A voxel belongs to a layer if its centre lies between the boundaries of the layer.
    """
    row = np.arange(found.classes.shape[1], dtype=np.float32)[None, :, None]
    codes = np.zeros(found.classes.shape, np.uint8)
    for code, (_, upper, lower) in enumerate(LAYERS[1:], 1):
        top, bottom = found.boundaries_px[upper][:, None], found.boundaries_px[lower][:, None]
        codes[(row >= top) & (row < bottom)] = code
    return codes


def is_unrecognised(expected_error_um: Float[np.ndarray, "8 D W"]) -> bool:
    """Whether the network recognises the layers of a retina in less than half of the A-scans."""
    return float(np.median(expected_error_um.mean(0))) > _UNRECOGNISED_UM


@dataclass(frozen=True, eq=False)
class Measurement:
    """The measurement of one scan.

    `layers_um` `[layer, slice, column]` in the order of `LAYERS`, NaN where an A-scan is not measured. `etdrs_um`
    `[layer, sector]` is NaN without a value; `coverage` is the share of each sector that was measured, and
    `sector_notes` says why a sector has no value or a doubtful one. `fluid_mm3` is None for patterns without volumes.
    """

    layers_um: Float[np.ndarray, "L D W"]
    etdrs_um: Float[np.ndarray, "L 9"]
    coverage: Float[np.ndarray, " 9"]
    sector_notes: tuple[str, ...]
    fluid_mm3: dict[str, float | None]
    centre: ScanCentre
    orientation: ScanOrientation
    slice_mm: Float[np.ndarray, " D"]
    column_mm: Float[np.ndarray, " W"]
    has_area: bool
    notes: tuple[str, ...]


@dataclass(frozen=True)
class Preparation:
    """Quality 0..1 and notes of the preparation of a scan (`octjepa.canonical`); `quality` is None if it failed."""

    quality: float | None = None
    notes: tuple[Note, ...] = ()

    @classmethod
    def of_entry(cls, entry: IndexEntry) -> Preparation:
        """The preparation of a volume, as its entry in a store's index holds it."""
        return cls(entry.quality if math.isfinite(entry.quality) else None, read_notes(entry.notes))


def measure(
    volume: OCTVolume,
    found: Segmentation | RetainedLayers,
    preparation: Preparation,
    chosen_mm: tuple[float, float] | None = None,
) -> Measurement:
    """Measures `found` in the geometry of `volume`.

    The ETDRS grid is centred on `chosen_mm` (slice, column) from the first voxel, by default on the fovea that
    `find_centre` finds.
    """
    columns = volume.shape[2]
    slice_mm = slice_positions_mm(volume)
    column_mm = np.arange(columns) * volume.spacing_mm[2]
    has_area = volume.pattern in ("raster", "unknown")
    seen = _seen(volume)
    cut = cut_off(found.boundaries_px, volume.shape[1]) & seen  # boundaries in blank A-scans have no meaning
    known = ~cut & seen & (found.expected_error_um[[0, 7]].max(0) < _UNKNOWN_UM)
    um = found.boundaries_um
    layers = np.stack([np.where(known, um[low] - um[high], np.nan) for _, high, low in LAYERS]).astype(np.float32)
    centre = ScanCentre(float(slice_mm[[0, -1]].mean()), float(column_mm[[0, -1]].mean()), "scan", 0.0)
    if chosen_mm is not None:
        centre = ScanCentre(*chosen_mm, "chosen", 1.0)
    elif has_area and not _is_of_disc(volume):  # the excavation of a disc looks like a foveal pit
        retina, inner = (np.where(known, um[index] - um[0], np.nan) for index in (6, 4))
        centre = find_centre(retina, inner, slice_mm, column_mm)
    lines = lines_of(volume.pattern, volume.notes) if has_area else "not parallel"
    orientation = ScanOrientation(volume.laterality or "", (centre.slice_mm, centre.column_mm), "inferior", lines)
    etdrs, coverage = sector_means(layers, slice_mm, column_mm, orientation)
    notes = _pattern_notes(volume, slice_mm) + _centre_notes(volume, centre, lines)
    notes += _trust_notes(volume, found, layers, cut, preparation)
    return Measurement(
        layers_um=layers,
        etdrs_um=etdrs,
        coverage=coverage,
        sector_notes=_sector_notes(coverage, orientation),
        fluid_mm3=_fluid_mm3(found, slice_mm, volume.spacing_mm, known | cut, has_area),
        centre=centre,
        orientation=orientation,
        slice_mm=slice_mm,
        column_mm=column_mm,
        has_area=has_area,
        notes=tuple(notes),
    )


def cut_off(boundaries_px: Float[np.ndarray, "8 ... W"], height: int) -> Bool[np.ndarray, "... W"]:
    """A-scans whose ILM or Bruch's membrane is at an end of the depth axis, which has `height` rows."""
    return (boundaries_px[0] < _CUT_ROWS) | (boundaries_px[7] > height - 1 - _CUT_ROWS)


def _protocol_words(volume: OCTVolume) -> set[str]:
    return set(re.findall(r"[a-z]+", f"{volume.protocol} {volume.region}".lower()))


def _is_of_disc(volume: OCTVolume) -> bool:
    """Whether protocol and region name the optic disc and not the macula."""
    words = _protocol_words(volume)
    return bool(_DISC_WORDS & words) and not {"macula", "macular", "mac", "fovea"} & words


def _seen(volume: OCTVolume) -> Bool[np.ndarray, "D W"]:
    """A-scans that are not constant, as blank B-scans and registration fill are."""
    return np.stack([np.ptp(bscan, axis=0) > 0 for bscan in volume.pixels])


def _sector_notes(coverage: Float[np.ndarray, " 9"], scan: ScanOrientation) -> tuple[str, ...]:
    notes = []
    for name, share in zip(SECTORS, coverage, strict=True):
        if scan.lines == "not parallel":
            notes.append("this scan pattern has no ETDRS sectors")
        elif scan.lines == "vertical" and name != "central":
            notes.append("B-scans run up or down: it is not known which end is superior")
        elif not scan.eye and name.endswith(("nasal", "temporal")):
            notes.append("right or left eye is not known")
        elif share < MIN_AREA_SHARE:
            notes.append(f"no value: {share:.0%} of the sector is measured, at least {MIN_AREA_SHARE:.0%} is needed")
        else:
            notes.append("" if share >= _PARTLY else f"from {share:.0%} of the sector")
    return tuple(notes)


def _fluid_mm3(
    found: Segmentation | RetainedLayers,
    slice_mm: Float[np.ndarray, " D"],
    spacing_mm: tuple[float, float, float],
    counted: Bool[np.ndarray, "D W"],
    has_area: bool,
) -> dict[str, float | None]:
    """Volume of each class in the A-scans that are `counted`: neither blank nor too uncertain."""
    if not has_area:
        return dict.fromkeys(CLASSES[1:])
    width = slice_widths_mm(slice_mm, spacing_mm[0])
    face = spacing_mm[1] * spacing_mm[2]
    volumes: dict[str, float | None] = {}
    for code, name in enumerate(CLASSES[1:], start=1):
        counts = np.array([np.count_nonzero((b == code) & c) for b, c in zip(found.classes, counted, strict=True)])
        volumes[name] = float((counts * width).sum() * face)
    return volumes


def _pattern_notes(volume: OCTVolume, slice_mm: Float[np.ndarray, " D"]) -> list[str]:
    """Notes about how the B-scans lie on the retina."""
    notes = []
    if volume.pattern not in ("raster", "unknown"):
        notes.append(
            f"{volume.pattern} scan: no thickness map, sectors or volumes, because B-scans do not sample an area evenly"
        )
        return notes
    if volume.pattern == "unknown":
        notes.append("the scan pattern is not known: map, sectors and volumes assume parallel B-scans")
    axes = [axis for axis in volume.uncertain if axis in ("slice", "depth", "column")]
    if axes:
        what = {
            "slice": "areas, sectors and volumes",
            "depth": "every thickness and volume",
            "column": "areas, sectors and volumes",
        }
        notes += [
            f"the {axis} spacing is uncertain ({_mm(volume, axis)} mm): {what[axis]} may be wrong" for axis in axes
        ]
    gap = float(np.median(np.diff(slice_mm))) if len(slice_mm) > 1 else 0.0
    if len(slice_mm) < SPARSE_FRAMES or gap > SPARSE_GAP_MM:
        notes.append(
            f"sparse raster ({len(slice_mm)} B-scans, {gap:.2f} mm apart): map, sectors and volumes are interpolated "
            "between distant B-scans"
        )
    elif gap > NEIGHBOUR_MM:
        notes.append(f"B-scans are {gap:.2f} mm apart: small lesions between them are missed in volumes")
    return notes


def _mm(volume: OCTVolume, axis: str) -> str:
    return f"{volume.spacing_mm[('slice', 'depth', 'column').index(axis)]:.4g}"


def _centre_notes(volume: OCTVolume, centre: ScanCentre, lines: Lines) -> list[str]:
    if lines == "not parallel":
        return []
    notes = []
    if centre.kind == "scan" and _is_of_disc(volume):
        notes.append("a scan of the optic disc has no fovea: the ETDRS grid is centred on the middle of the scan")
    elif centre.kind == "scan":
        notes.append(
            f"no foveal pit was found (certainty {centre.certainty:.2f}): the ETDRS grid is centred on the middle of "
            "the scan"
        )
    if lines == "vertical":
        notes.append(NO_SECTORS_OF_VERTICAL)
        return notes
    if not volume.laterality:
        notes.append("right or left eye is not known: nasal and temporal sectors are empty")
    if not has_slice_direction(volume):
        notes.append(
            "the file does not state the direction of the B-scans: the first one is assumed to be the inferior one"
        )
    return notes


def _trust_notes(
    volume: OCTVolume,
    found: Segmentation | RetainedLayers,
    layers: Float[np.ndarray, "L D W"],
    cut: Bool[np.ndarray, "D W"],
    preparation: Preparation,
) -> list[str]:
    """Notes about image, anatomy and network."""
    notes = []
    if (share := float(cut.mean())) > _CUT_SHARE:
        notes.append(
            f"the retina is cut off at the upper or lower edge in {share:.0%} of the A-scans: not measured there"
        )
    unknown = float((~np.isfinite(layers[0]) & ~cut).mean())
    if unknown > _CUT_SHARE:
        notes.append(
            f"{unknown:.0%} of the A-scans are blank or too uncertain: neither thickness nor fluid is counted there"
        )
    unsure = float((found.expected_error_um.mean(0) > _UNSURE_UM).mean())
    if unsure > _UNSURE_SHARE:
        notes.append(
            f"low confidence: boundaries are expected to be over {_UNSURE_UM:.0f} um off in {unsure:.0%} of the A-scans"
        )
    if preparation.quality is not None and preparation.quality < _LOW_QUALITY:
        notes.append(f"low image quality ({preparation.quality:.2f} of 1)")
    if DOUBTFUL_NOTE in preparation.notes or is_unrecognised(found.expected_error_um):
        notes.append("the layers of a retina are hardly recognised: severe disease, or not a macular scan")
    if any(note.code == SPARSE_NOTE for note in preparation.notes) and not any("sparse" in n for n in notes):
        notes.append("sparse raster: most of the field lies between distant B-scans")
    for code, text in (("blank_frames", "blank"), ("damaged_frames", "damaged")):
        counts = [note.detail for note in preparation.notes if note.code == code]
        notes += [f"{counted_are(int(count), 'B-scan')} {text}" for count in counts]
    notes += _range_notes(volume, found, layers)
    nerve = float(np.mean(np.nan_to_num(layers[1]) > _NERVE_UM))
    if {*_DISC_WORDS, "rnfl", "glaucoma"} & _protocol_words(volume):
        notes.append("by its protocol this is a scan of the optic disc: boundaries inside the disc have no meaning")
    elif nerve > _NERVE_SHARE:
        notes.append(
            f"the nerve fibre layer is thicker than {_NERVE_UM:.0f} um in {nerve:.0%} of the field: near the disc, "
            "or under a membrane, boundaries are not reliable"
        )
    return notes


def _range_notes(
    volume: OCTVolume, found: Segmentation | RetainedLayers, layers: Float[np.ndarray, "L D W"]
) -> list[str]:
    """Notes where thickness or fluid is outside of what the network was trained on."""
    notes = []
    size = max(1, round(1.0 / volume.spacing_mm[2]))
    means = [mean for bscan in layers[0] for mean in _running_means(bscan, size)]
    low, high = PHANTOM_THICKNESS_UM
    if means and (max(means) > high or min(means) < low):
        notes.append(
            f"the retina is {min(means):.0f} to {max(means):.0f} um thick (means of 1 mm), the training phantoms "
            f"{low:.0f} to {high:.0f}: outside the training range"
        )
    depth_um = 1000 * volume.spacing_mm[1]
    for code, name in enumerate(CLASSES[1:], start=1):
        most = max(float((bscan == code).sum()) for bscan in found.classes) / volume.shape[2] * depth_um
        if most > PHANTOM_FLUID_UM[name]:
            notes.append(
                f"more {name.replace('_', ' ')} in a B-scan than in the training phantoms: outside the training range"
            )
    return notes


def _running_means(values: Float[np.ndarray, " W"], size: int) -> Sequence[float]:
    """Means of neighbouring windows of `size` values of which at least half are known."""
    windows = [values[start : start + size] for start in range(0, max(len(values) - size, 0) + 1, max(size // 2, 1))]
    return [float(np.nanmean(window)) for window in windows if np.isfinite(window).mean() > 0.5]
