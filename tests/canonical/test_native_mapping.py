"""What is drawn in the canonical volume comes to lie where it belongs in the native scan."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from layered_eye import BRUCH_ROW, COLUMNS, FRAMES, PREPROCESSING, ROWS, eye
from octjepa.canonical.native_mapping import NativeMap
from octjepa.canonical.pipeline import canonicalise
from octjepa.errors import OctjepaError, UsageError
from octjepa.recipe import Preprocessing
from octjepa.volume import OCTVolume
from shaped_eye import shaped_eye


def map_of(volume: OCTVolume, preprocessing: Preprocessing = PREPROCESSING) -> tuple[NativeMap, np.ndarray]:
    made = canonicalise(volume, preprocessing)
    shifts, frames = made.volume.frame_shifts, made.volume.frame_mm
    assert shifts is not None
    assert frames is not None
    native = NativeMap(volume.shape, volume.spacing_mm, preprocessing, shifts, frames, made.mirrored)
    return native, made.volume.pixels


@pytest.mark.parametrize("laterality", ["OD", "OS"])
def test_there_and_back_is_the_same_position(laterality: str) -> None:
    uneven = np.cumsum(np.r_[0, 0.15 + 0.05 * np.sin(np.arange(FRAMES - 1))])
    native, _ = map_of(eye(laterality, tilt=12, motion=3, slice_positions_mm=uneven))
    rng = np.random.default_rng(0)
    positions = rng.uniform((0, 0, 10), (FRAMES - 1, ROWS - 1, COLUMNS - 10), (2000, 3))
    assert np.abs(native.to_native(native.to_canonical(positions)) - positions).max() < 1e-6
    stored = rng.uniform((0.5, 0, 6), (7.5, 96, 70), (2000, 3))
    assert np.abs(native.to_canonical(native.to_native(stored)) - stored).max() < 1e-6


@pytest.mark.parametrize(
    ("laterality", "preprocessing"),
    [
        ("OD", PREPROCESSING),
        ("OS", PREPROCESSING),
        ("OS", PREPROCESSING.model_copy(update={"orientation": "native"})),
        ("OS", PREPROCESSING.model_copy(update={"flatten": "none"})),
        ("OD", PREPROCESSING.model_copy(update={"target_spacing_mm": (0.3, 0.0117, 0.06)})),
    ],
)
def test_a_marked_surface_comes_back_within_a_native_row(laterality: str, preprocessing: Preprocessing) -> None:
    from dataclasses import replace

    volume = eye(laterality, tilt=12, motion=2)
    jump = np.rint(2 * np.random.default_rng(1).normal(0, 1, FRAMES))  # as `eye` draws it
    x = np.linspace(-1, 1, COLUMNS)
    surface = BRUCH_ROW + 12 * x[None, :] + jump[:, None] + 0.3 * np.arange(FRAMES)[:, None] - 50
    marked = volume.pixels.copy()
    y = np.arange(ROWS)[None, :, None]
    marked[np.abs(y - surface[:, None, :]) <= 1.0] = 120  # a line in the vitreous
    native, pixels = map_of(replace(volume, pixels=marked, content_hash=""), preprocessing)
    slices, columns = np.nonzero(pixels.max(axis=1) > 0)
    slices, columns = slices[::7], columns[::7]
    anchor = round(0.65 * (preprocessing.stored_size[1] - 1))
    lines = pixels[slices, :, columns].astype(float)
    if preprocessing.flatten == "quadratic":
        ty = preprocessing.target_spacing_mm[1]
        middle = anchor - round(50 * 0.0078 / ty)
        near = np.arange(middle - 4, middle + 5)
        rows = (lines[:, near] * near).sum(axis=1) / lines[:, near].sum(axis=1)
        location = native.to_native(np.stack([slices, rows, columns], axis=1).astype(float))
        frame, column = np.clip(np.rint(location[:, [0, 2]]).astype(int).T, 0, [[FRAMES - 1], [COLUMNS - 1]])
        error = location[:, 1] - surface[frame, column]
        assert np.abs(error).mean() < 0.75
        assert np.percentile(np.abs(error), 95) < 1.5
    back = native.to_canonical(np.stack([np.zeros(COLUMNS), surface[0], np.arange(COLUMNS)], axis=1))
    again = native.to_native(back)
    assert np.abs(again[:, 1] - surface[0]).max() < 1e-6
    assert np.sign(np.diff(back[:, 2]).mean()) == (-1 if native.mirrored else 1)


def test_a_segmentation_is_brought_to_the_native_voxels() -> None:
    made = shaped_eye("topcon_triton", "drusen", seed=3, eye="OS")
    preprocessing = Preprocessing()
    native, pixels = map_of(made.volume, preprocessing)
    stored = canonicalise(made.volume, preprocessing).volume
    rows = np.arange(pixels.shape[1])[None, :, None]
    below = round(0.15 / 0.0078)
    labels = ((rows >= stored.band[0][:, None]) & (rows <= stored.band[1][:, None] - below)).astype(np.uint8)
    voxels = np.indices(made.volume.shape).reshape(3, -1).T  # every native voxel: (slice, depth, column)
    nearest = np.rint(native.to_canonical(voxels.astype(float))).astype(np.int64)
    inside = ((nearest >= 0) & (nearest < labels.shape)).all(axis=1)
    found = np.zeros(made.volume.shape, bool)
    found[tuple(voxels[inside].T)] = labels[tuple(nearest[inside].T)] > 0
    y = np.arange(made.volume.shape[1])[None, :, None]
    true = (y >= made.ilm[:, None]) & (y <= made.bm[:, None])
    frames = slice(3, -3)  # the stored volume ends before the native one does
    shared = found[frames] & true[frames]
    assert 2 * shared.sum() / (found[frames].sum() + true[frames].sum()) > 0.93


def test_a_store_keeps_what_the_way_back_needs(tiny: Path, tmp_path: Path) -> None:
    from octjepa.ingest import build_store
    from octjepa.store import Store

    build_store([tiny], tmp_path / "store", PREPROCESSING)
    store = Store.open(tmp_path / "store")
    for row in store.table.to_dict("records")[:2]:
        native = store.native_map(row["volume_id"])
        assert native.mirrored == (row["eye"] == "OS")
        positions = np.array([[2.0, 40.0, 30.0], [7.0, 20.0, 60.0]])
        assert np.abs(native.to_native(native.to_canonical(positions)) - positions).max() < 1e-6
    with pytest.raises(UsageError, match="has no volume"):
        store.native_map("0" * 16)
    (store.chunk_folder(row["volume_id"]) / "geometry.npz").write_bytes(b"PK")
    with pytest.raises(OctjepaError, match="damaged"):
        store.native_map(row["volume_id"])
