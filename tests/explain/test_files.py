"""Occlusion and token similarity as files in the geometry of the scan as it came."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from octjepa import load_encoder
from octjepa.errors import UsageError
from octjepa.evaluate.attention import VolumeAttention
from octjepa.explain import native as native_maps
from octjepa.explain.attention import write_attention
from octjepa.explain.eyes import OccludedVolume, occluded_eyes
from octjepa.explain.occlusion import strongest_token
from octjepa.explain.similarity import similarity_grid
from octjepa.read.formats.nifti import read_nifti_volume
from octjepa.report.contents import read_contents
from octjepa.report.saliency import write_saliency
from octjepa.store import Store

pytestmark = pytest.mark.slow  # occlusion of whole eyes


@pytest.fixture(scope="module")
def eye(made: Path) -> OccludedVolume:
    return occluded_eyes(Store.open(made / "store"), load_encoder(made / "run"))[0]


@pytest.mark.slow
def test_files_have_the_scans_geometry_and_the_maps_values(
    made: Path, eye: OccludedVolume, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("octjepa.explain.eyes.occluded_eyes", lambda store, encoder: [eye])
    paths = [Path(path) for path in write_saliency(read_contents(made), tmp_path / "maps")]
    name = eye.row.volume_id
    assert [path.name for path in paths] == [f"{name}.occlusion.nii.gz", f"{name}.similarity.nii.gz", f"{name}.png"]
    native = Store.open(made / "store").native_map(name)
    changes, similar = (read_nifti_volume(path) for path in paths[:2])
    np.testing.assert_allclose(changes.spacing_mm, native.spacing_mm)
    changes, similar = np.nan_to_num(changes.values), np.nan_to_num(similar.values)
    assert changes.shape == similar.shape == native.shape
    assert not changes[similar == 0].any()  # NaN, 0 here: no tissue
    recipe = load_encoder(made / "run").recipe
    token = strongest_token(eye.occlusion)
    corner, patch = np.array(recipe.preprocessing.margin), np.array(recipe.tokens.patch_size)
    at = native.to_native((corner + (np.array(token) + 0.5) * patch - 0.5)[None])[0]
    number, depth, column = np.rint(at).astype(int)
    assert similar[number, depth, column] == pytest.approx(1, abs=1e-5)
    assert np.nanmax(similar) == pytest.approx(1, abs=1e-5)
    assert not similar[:, 0].any()  # vitreous
    assert not changes[:, 0].any()
    assert changes[number, depth, column] == pytest.approx(eye.occlusion.en_face[token[0], token[2]], rel=1e-5)
    assert np.asarray(Image.open(paths[2])).std() > 20


def test_pixels_of_the_store_are_laid_back_on_the_scan(made: Path, eye: OccludedVolume) -> None:
    native = Store.open(made / "store").native_map(eye.row.volume_id)
    pixels = np.asarray(eye.volume.pixels)
    shown = native_maps.pixels_to_native(pixels, native, 12)
    assert shown.shape == native.shape[1:]
    stored = np.rint(native.to_canonical(np.array([[12.0, 90.0, 80.0]]))[0]).astype(int)
    assert shown[90, 80] == pixels[tuple(stored)]


def test_a_position_without_tissue_and_a_store_without_a_run_are_refused(
    made: Path, eye: OccludedVolume, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match="no token of tissue"):
        similarity_grid(load_encoder(made / "run"), eye.volume, (0, 0, 0))
    shutil.copytree(made / "store", tmp_path / "store")
    with pytest.raises(UsageError, match="no network to explain"):
        write_saliency(read_contents(tmp_path / "store"), tmp_path / "maps")


def stand_in(monkeypatch: pytest.MonkeyPatch, *eyes: OccludedVolume) -> None:
    monkeypatch.setattr("octjepa.explain.eyes.occluded_eyes", lambda store, encoder: list(eyes))


def rows_of(eye: OccludedVolume, made: Path) -> list[VolumeAttention]:
    """All attention of the trained encoder on one token of tissue, that of its twin even over all tokens."""
    selected = load_encoder(made / "run").select_tokens(eye.volume)
    token = int(np.flatnonzero(selected.tissue > 0.5)[3])
    count = len(selected.grid_index)
    shares = {False: np.eye(count, dtype=np.float32)[token], True: np.full(count, 1 / count, np.float32)}
    name = str(eye.row.volume_id)
    return [
        VolumeAttention(
            "untrained" if twin else "tiny", twin, "drusen/any", name, selected.grid, selected.grid_index, share
        )
        for twin, share in shares.items()
    ]


def test_the_attention_of_a_probe_lies_where_its_tokens_do(
    made: Path, eye: OccludedVolume, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in(monkeypatch, eye)
    rows = rows_of(eye, made)
    write_attention(tmp_path / "attention.parquet", rows)
    paths = write_saliency(read_contents(made), tmp_path / "maps", tmp_path / "attention.parquet")
    name = eye.row.volume_id
    assert [Path(path).name for path in paths[3:]] == [
        f"{name}.attention.drusen_any.nii.gz",
        f"{name}.attention.drusen_any.png",
    ]
    values = np.nan_to_num(read_nifti_volume(Path(paths[3])).values)
    count = len(rows[0].attention)
    assert values.max() == pytest.approx(count)  # in even shares: one token has them all
    native, recipe = Store.open(made / "store").native_map(name), load_encoder(made / "run").recipe
    token = int(rows[0].grid_index[rows[0].attention.argmax()])
    middle = (np.stack(np.unravel_index(token, recipe.grid)) + 0.5) * recipe.tokens.patch_size - 0.5
    at = native.to_native((middle + recipe.preprocessing.margin)[None])[0]
    assert values[tuple(np.rint(at).astype(int))] == pytest.approx(count)
    assert np.asarray(Image.open(paths[4])).std() > 20


def test_attention_of_other_eyes_or_another_grid_is_refused(
    made: Path, eye: OccludedVolume, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stand_in(monkeypatch, eye)
    rows, file = rows_of(eye, made), tmp_path / "attention.parquet"
    with pytest.raises(UsageError, match="no table of attention"):
        write_saliency(read_contents(made), tmp_path / "maps", file)
    write_attention(file, [replace(row, volume_id="another") for row in rows])
    with pytest.raises(UsageError, match="none of the 1 eyes that are mapped"):
        write_saliency(read_contents(made), tmp_path / "maps", file)
    write_attention(file, [replace(row, grid=(1, 1, 9999)) for row in rows])
    with pytest.raises(UsageError, match="attention of a token grid"):
        write_saliency(read_contents(made), tmp_path / "maps", file)


def test_a_scan_whose_frames_ingest_reversed_is_written_in_the_order_of_its_file(
    made: Path, eye: OccludedVolume, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    maps = {}
    for notes in ("", "frames_reversed"):
        stand_in(monkeypatch, replace(eye, row=replace(eye.row, notes=notes)))
        path = write_saliency(read_contents(made), tmp_path / f"maps {notes}")[1]
        maps[notes] = np.nan_to_num(read_nifti_volume(Path(path)).values)
    assert (maps["frames_reversed"] == maps[""][::-1]).all()
    assert (maps["frames_reversed"] != maps[""]).any()


def test_a_scan_whose_voxels_ingest_turned_is_left_out_and_the_others_are_written(
    made: Path, eye: OccludedVolume, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    turned = replace(eye, row=replace(eye.row, notes="turned_upright"))
    stand_in(monkeypatch, turned)
    with pytest.raises(UsageError, match=r"ingest turned, sorted or dropped frames of this scan \(turned_upright\)"):
        write_saliency(read_contents(made), tmp_path / "maps")
    stand_in(monkeypatch, turned, eye)
    assert len(write_saliency(read_contents(made), tmp_path / "maps")) == 3
    assert "turned_upright" in caplog.text


def test_a_fine_tuning_is_mapped_with_the_attention_of_its_head(
    demo: Path, as_tuned: Callable[[Path], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """End to end: the tuned network is read from its folder, and a test case is mapped."""
    monkeypatch.setattr("octjepa.explain.eyes.MAX_CASES", 1)
    tuning = demo / "tuning"
    tuning.mkdir()
    (tuning / "run.json").write_text(json.dumps({"kind": "fine-tuning", "name": "drusen", "store": "../store"}))
    for name in ("metrics.jsonl", "recipe.yaml"):
        shutil.copy(demo / "run" / name, tuning)
    as_tuned(tuning)
    paths = [Path(path) for path in write_saliency(read_contents(tuning), tmp_path / "maps")]
    assert [".".join(path.name.split(".")[1:]) for path in paths] == [
        "occlusion.nii.gz",
        "similarity.nii.gz",
        "png",
        "attention.drusen.nii.gz",
        "attention.drusen.png",
    ]
    attention = np.nan_to_num(read_nifti_volume(paths[3]).values)
    assert attention.max() >= 1 > attention[attention > 0].min()
    with pytest.raises(UsageError, match="has its attention"):
        write_saliency(read_contents(tuning), tmp_path / "maps", tmp_path / "attention.parquet")
