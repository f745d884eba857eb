"""Occlusion and token similarity as files in the geometry of the scan as it came."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from octjepa import load_encoder
from octjepa.errors import UsageError
from octjepa.report.contents import read_contents
from octjepa.report.occlusion import OccludedVolume, occluded_eyes
from octjepa.report.saliency import write_saliency
from octjepa.store import Store
from octjepa.store.native_mapping import NativeMap
from octjepa.tasks import native_maps

itk = pytest.importorskip("SimpleITK")


@pytest.fixture(scope="module")
def eye(made: Path) -> OccludedVolume:
    return occluded_eyes(Store.open(made / "store"), load_encoder(made / "run"))[0]


@pytest.mark.slow
def test_files_have_the_scans_geometry_and_the_maps_values(
    made: Path, eye: OccludedVolume, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("octjepa.report.saliency.occluded_eyes", lambda store, encoder: [eye])
    paths = [Path(path) for path in write_saliency(read_contents(made), tmp_path / "maps")]
    name = eye.row["volume_id"]
    assert [path.name for path in paths] == [f"{name}.occlusion.nii.gz", f"{name}.similarity.nii.gz", f"{name}.png"]
    native = NativeMap.from_store(Store.open(made / "store"), name)
    changes, similar = (itk.ReadImage(str(path)) for path in paths[:2])
    np.testing.assert_allclose(changes.GetSpacing(), native.spacing_mm[::-1])
    changes, similar = (itk.GetArrayFromImage(image) for image in (changes, similar))
    assert changes.shape == similar.shape == native.shape
    assert not changes[similar == 0].any()  # ITK reads NaN as 0: no tissue
    recipe = load_encoder(made / "run").recipe
    token = native_maps.strongest_token(eye.occlusion)
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
    native = NativeMap.from_store(Store.open(made / "store"), eye.row["volume_id"])
    pixels = np.asarray(eye.volume.pixels)
    shown = native_maps.pixels_to_native(pixels, native, 12)
    assert shown.shape == native.shape[1:]
    stored = np.rint(native.to_canonical(np.array([[12.0, 90.0, 80.0]]))[0]).astype(int)
    assert shown[90, 80] == pixels[tuple(stored)]


def test_a_position_without_tissue_and_a_store_without_a_run_are_refused(
    made: Path, eye: OccludedVolume, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match="no token of tissue"):
        native_maps.similarity_grid(load_encoder(made / "run"), eye.volume, (0, 0, 0))
    shutil.copytree(made / "store", tmp_path / "store")
    with pytest.raises(UsageError, match="no network to explain"):
        write_saliency(read_contents(tmp_path / "store"), tmp_path / "maps")
