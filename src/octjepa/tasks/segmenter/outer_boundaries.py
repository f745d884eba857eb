"""Decide which ILM and which Bruch's membrane are shown and measured: the only place that chooses between two methods.

In: an `OCTVolume` and the network's eight boundaries. Out: the same boundaries with the ILM and Bruch's membrane of the
surface finder (`octjepa.canonical.surfaces`), which is run on the scan's own samples. `Segmenter.segment` calls it.

Reason: the surface finder is closer to the graders. On five real eyes with macular oedema its mean absolute error is
4.3 um (ILM) and 4.7 um (Bruch's membrane), that of the network 4.9 and 5.2 um, and the graders differ by 5.5 and
5.3 um (docs/real). The mean of both methods is worse than the finder. Over drusen the finder follows the raised RPE
instead of Bruch's membrane: in one eye with drusen the thickness of a sector was 39 um below that of the device.
The network's Bruch's membrane is therefore taken where the finder's is over 25 um above it. Then no sector of the two
eyes with a device's grid differs by more than 5.6 um, and the error on the eyes with oedema stays 4.7 um; limits of 12
to 40 um give nearly the same. The network also keeps a B-scan in which the finder sees no tissue, and an A-scan
whose retina is cut off at the edge. The result depends neither on a recipe nor on a store, so thickness is the same in
every program that calls this module.

The finder fits one surface through all B-scans, to recognise those whose path followed a wrong layer. It does so only
if the B-scans are known to be close together. With an uncertain slice spacing every B-scan is searched alone.
"""

from __future__ import annotations

from typing import Final

import numpy as np
from jaxtyping import Float, Int

from octjepa.canonical.fill import remove_fill
from octjepa.canonical.surfaces import find_surfaces
from octjepa.errors import VolumeRejected
from octjepa.volume import OCTVolume

_MOST_VOXELS: Final = 30 << 20  # that are searched together: the search needs some 8 bytes per voxel
_EDGE_ROWS: Final = 2.0
_RAISED_UM: Final = 25.0  # of the finder's Bruch's membrane above the network's: it follows the RPE over drusen
_BLANK_STD: Final = 3.0  # intensity levels


def with_outer_boundaries(
    network_px: Float[np.ndarray, "8 D W"],
    error_um: Float[np.ndarray, "8 D W"],
    volume: OCTVolume,
    near: Int[np.ndarray, "D 3"],
) -> tuple[Float[np.ndarray, "8 D W"], Float[np.ndarray, "8 D W"]]:
    """(rows, expected error in um) with the ILM and Bruch's membrane that are shown; the others stay between them.

    `near` is the result of `near_bscans`. The expected error of an A-scan is at least half of the distance between the
    two methods.
    """
    outer = outer_boundaries(volume, near)
    network = network_px[[0, 7]]
    last = volume.shape[1] - 1 - _EDGE_ROWS
    cut_off = (network < _EDGE_ROWS) | (network > last)
    row_um = np.float32(1000 * volume.spacing_mm[1])
    raised = (network[1] - outer[1]) * row_um > _RAISED_UM  # False where the finder has no value
    shown = np.where(np.isfinite(outer) & ~cut_off, outer, network)
    shown[1] = np.where(raised, network[1], shown[1])
    rows, error_um = network_px.copy(), error_um.copy()
    rows[0], rows[7] = shown[0], np.maximum(shown[1], shown[0])
    rows[1:7] = np.clip(rows[1:7], rows[0], rows[7])
    apart_um = np.abs(np.where(np.isfinite(outer), outer, shown) - network) * row_um
    error_um[[0, 7]] = np.maximum(error_um[[0, 7]], apart_um / 2)
    return rows, error_um


def outer_boundaries(volume: OCTVolume, near: Int[np.ndarray, "D 3"]) -> Float[np.ndarray, "2 D W"]:
    """Rows of the ILM and of Bruch's membrane by the surface finder; NaN in B-scans in which it finds no tissue."""
    pixels, _ = remove_fill(volume.pixels)
    slices, height, width = pixels.shape
    rows = np.full((2, slices, width), np.nan, np.float32)
    usable = np.array([bscan[::4, ::4].std() >= _BLANK_STD for bscan in pixels])
    for group in _groups(near, max(1, _MOST_VOXELS // (height * width))):
        group = group[usable[group]]
        if not len(group):
            continue
        try:
            surfaces = find_surfaces(pixels[group].astype(np.float32), *volume.spacing_mm[1:])
        except VolumeRejected:  # no tissue
            continue
        rows[0, group], rows[1, group] = surfaces.ilm, surfaces.bm
    return rows


def _groups(near: Int[np.ndarray, "D 3"], most: int) -> list[np.ndarray]:
    """Indices of B-scans that are searched together: runs of near neighbours of at most `most` B-scans."""
    groups: list[list[int]] = []
    for index, before in enumerate(near[:, 0]):
        if before < 0 or len(groups[-1]) == most:
            groups.append([])
        groups[-1].append(index)
    return [np.array(group) for group in groups]
