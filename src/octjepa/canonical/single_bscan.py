"""Canonicalisation of a single B-scan: the B-scan fills one position of the token grid along the slice axis.

In: an `OCTVolume` of one slice. Out: the same result as for a volume. The steps of volumes are applied to a few copies
of the B-scan. A copy then fills as many stored slices as a patch of the encoder spans, so that no patch is partly
empty. All other slices are empty and have no tissue band: an encoder of octjepa reads only this position.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

import numpy as np

from octjepa.canonical.pipeline import CanonicalisationResult, canonicalise
from octjepa.reasons import rejection
from octjepa.recipe import Preprocessing
from octjepa.volume import OCTVolume, volume_id

_COPIES: Final = 4  # B-scans of the smallest volume


def bscan_range(preprocessing: Preprocessing, slices: int) -> slice:
    """The stored slices that a single B-scan fills: the patch of `slices` slices that holds the middle one."""
    depth, margin = preprocessing.image_size[0], preprocessing.margin[0]
    start = margin + depth // 2 // slices * slices
    return slice(start, start + slices)


def canonicalise_bscan(volume: OCTVolume, preprocessing: Preprocessing, slices: int) -> CanonicalisationResult:
    """Brings a B-scan, `[1, H, W]`, to the form of the contract; it fills `slices` stored slices.

    The result has no en face hash, because a B-scan has no en face image. Raises VolumeRejected as `canonicalise`.
    """
    copies = replace(volume, pixels=np.repeat(volume.pixels, _COPIES, axis=0), content_hash=volume.content_hash)
    result = canonicalise(copies, preprocessing)
    canonical = result.volume
    filled = np.flatnonzero((canonical.band[0] >= 0).any(axis=1))
    if not len(filled):
        raise rejection("no_tissue", "the tissue mask is outside the stored size")
    slots = bscan_range(preprocessing, slices)
    pixels, shifts = np.zeros_like(canonical.pixels), np.zeros_like(canonical.shifts)
    band = np.full_like(canonical.band, -1)
    pixels[slots], shifts[slots] = canonical.pixels[filled[0]], canonical.shifts[filled[0]]
    band[:, slots] = canonical.band[:, filled[:1]]
    assert canonical.frame_shifts is not None
    middle = ((slots.start + slots.stop - 1) - (preprocessing.stored_size[0] - 1)) / 2
    placed = replace(
        canonical,
        volume_id=volume_id(volume.content_hash),
        pixels=pixels,
        band=band,
        shifts=shifts,
        frame_shifts=canonical.frame_shifts[:1],
        frame_mm=np.array([middle * preprocessing.target_spacing_mm[0]]),
    )
    share = result.tissue_share * slices / len(filled)
    return replace(result, volume=placed, tissue_share=share, enface_hash="")
