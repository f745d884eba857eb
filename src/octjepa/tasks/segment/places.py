"""Labels from the scan's voxels to the stored volume's, scores back, and what ingest did to the order of the file's."""

from __future__ import annotations

import numpy as np
from jaxtyping import Float, UInt8

from octjepa.errors import UsageError
from octjepa.recipe import Preprocessing
from octjepa.store.native_mapping import NativeMap
from octjepa.tasks.segment.label_files import UNSEEN
from octjepa.volume import OCTVolume

_TURNED = ("axes_transposed", "turned_upright", "depth_flipped", "axes_stored=", "circle_frames_dropped=")


def reversed_frames(notes: str) -> bool:
    """Whether ingest turned the order of the B-scans round. Raises UsageError: it moved voxels in another way."""
    codes = [note for note in notes.split(";") if note]
    moved = [code for code in codes if code.startswith(_TURNED)]
    if "frames_unordered" in codes and "order_by_correlation" not in codes:
        moved.append("frames_unordered")
    if moved:
        raise UsageError(
            f"ingest turned or sorted its voxels ({', '.join(moved)}): labels cannot be laid on the file's"
        )
    return "frames_reversed" in codes


def labels_to_stored(codes: UInt8[np.ndarray, "N R C"], native: NativeMap) -> UInt8[np.ndarray, "D H W"]:
    """The nearest native voxel of each stored one, 255 outside the scan. B-scans of `codes` in spatial order."""
    depth, height, width = native.preprocessing.stored_size
    plane = np.stack(np.meshgrid(np.arange(height), np.arange(width), indexing="ij"), axis=-1).reshape(-1, 2)
    made = np.full((depth, height, width), UNSEEN, np.uint8)
    size = np.array(codes.shape)
    for index in range(depth):
        place = np.rint(native.to_native(np.insert(plane.astype(float), 0, index, axis=1))).astype(np.int64)
        inside = ((place >= 0) & (place < size)).all(axis=1)
        made[index].reshape(-1)[inside] = codes[tuple(place[inside].T)]
    return made


def scores_to_scan(scores: Float[np.ndarray, "classes D H W"], native: NativeMap) -> UInt8[np.ndarray, "N R C"]:
    """The class of highest score at every native voxel, 255 beyond the stored volume; B-scans in spatial order.

    Between stored slices, which are far apart, scores are interpolated; rows and columns are the nearest.
    """
    _, depth, height, width = scores.shape
    frames, rows, columns = native.shape
    grid = np.stack(np.meshgrid(np.arange(rows), np.arange(columns), indexing="ij"), axis=-1).reshape(-1, 2)
    found = np.full(native.shape, UNSEEN, np.uint8)
    for frame in range(frames):
        place = native.to_canonical(np.insert(grid.astype(float), 0, frame, axis=1))
        at = float(place[0, 0])  # the same for a whole B-scan
        if not -0.5 <= at <= depth - 0.5:
            continue
        low = int(np.clip(np.floor(at), 0, max(depth - 2, 0)))
        share = np.float32(np.clip(at - low, 0, 1))
        plane = ((1 - share) * scores[:, low] + share * scores[:, min(low + 1, depth - 1)]).argmax(axis=0)
        near = np.rint(place[:, 1:]).astype(np.int64)
        inside = ((near >= 0) & (near < (height, width))).all(axis=1)
        found[frame].reshape(-1)[inside] = plane[near[inside, 0], near[inside, 1]]
    return found


def grown(preprocessing: Preprocessing, volume: OCTVolume) -> Preprocessing:
    """The contract with an image that holds all whole slices and columns of `volume`; rows as they are."""
    (tz, _, tx), (dz, _, dx) = preprocessing.target_spacing_mm, volume.spacing_mm
    stored, (depth, height, width) = preprocessing.stored_size, preprocessing.image_size
    extent = volume.shape[0] * dz / tz, volume.shape[2] * dx / tx
    more = [2 * max(0, int((wanted - have) // 2)) for wanted, have in zip(extent, stored[::2], strict=True)]
    return preprocessing.model_copy(update={"image_size": (depth + more[0], height, width + more[1])})
