"""Single B-scans: pictures with and without a spacing, one-frame DICOM files, a table row for each, refusals."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import octjepa
from command_line import call
from oct_dicom import make_dataset, save
from octjepa.errors import UsageError, VolumeRejected
from octjepa.phantom import make_eye
from octjepa.phantom.random_scene import BOUNDARY_SURFACES
from octjepa.read.single_bscan import find_bscans, is_picture, parse_bscan_spacing, read_bscan

pytestmark = pytest.mark.timeout(400)
EYE = make_eye(11, 41, "OD", "heidelberg_spectralis")
MIDDLE = EYE.pixels.shape[0] // 2
TRUE_PX = EYE.truth.surfaces_px[list(BOUNDARY_SURFACES)][:, MIDDLE]


def write_pictures(folder: Path) -> Path:
    """Two B-scans, one of them upside down, noise, a mask, and a text that is not a picture."""
    folder.mkdir(parents=True)
    Image.fromarray(EYE.pixels[MIDDLE]).save(folder / "middle.png")
    Image.fromarray(EYE.pixels[3, ::-1]).convert("RGB").save(folder / "turned.jpg", quality=95)
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (300, 400), np.uint8)).save(folder / "noise.png")
    Image.fromarray(np.zeros((300, 400), np.uint8)).save(folder / "middle_mask.png")
    (folder / "notes.txt").write_text("no picture")
    return folder


@pytest.fixture(scope="module")
def segmented(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A folder of pictures without a spacing through the command: (results, JSON)."""
    folder = write_pictures(tmp_path_factory.mktemp("data") / "pictures")
    out = tmp_path_factory.mktemp("made") / "results"
    outcome = call("segment", folder, "--images", "--out", out, "--max-lost", 0.5, "--json")
    assert outcome.code == 0, outcome.err
    return out, outcome.json


def test_every_picture_has_a_row_in_pixels(segmented: tuple[Path, dict[str, Any]]) -> None:
    out, made = segmented
    assert [one["image"] for one in made["images"]] == ["middle", "turned"]
    assert [one["scan"] for one in made["refused"]] == ["noise.png"]
    assert made["refused"][0]["reason"] in ("no_tissue", "burned_in_text", "not_retina")
    with (out / "images.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["image"] for row in rows] == ["middle", "turned"]
    for row, one in zip(rows, made["images"], strict=True):
        assert (row["unit"], row["depth_um"]) == ("px", "")
        assert float(row["retina_thickness"]) == one["thickness"]["retina"]
        assert "spacing unknown" in row["notes"]
    true_px = float((TRUE_PX[7] - TRUE_PX[0]).mean())
    assert made["images"][0]["thickness"]["retina"] == pytest.approx(true_px, rel=0.05)
    assert any("sclera was on top" in note for note in made["images"][1]["notes"])


def test_files_of_a_picture(segmented: tuple[Path, dict[str, Any]]) -> None:
    _, made = segmented
    files = made["images"][0]["files"]
    with np.load(files["boundaries"]) as found:
        assert found["rows"].shape == (8, 1, EYE.pixels.shape[2])
        assert np.abs(found["rows"][:, 0] - TRUE_PX).mean() < 3
    with Image.open(files["classes"]) as classes:
        assert (classes.mode, classes.size) == ("P", EYE.pixels.shape[:0:-1])
        assert np.asarray(classes).max() <= 3
    with Image.open(files["picture"]) as picture:
        assert (picture.mode, picture.size) == ("RGB", EYE.pixels.shape[:0:-1])


def test_with_a_spacing_results_are_in_um(tmp_path: Path) -> None:
    """Pictures that are named are B-scans without --images."""
    folder = write_pictures(tmp_path / "pictures")
    depth_mm, column_mm = EYE.spacing_mm[1:]
    outcome = call(
        "segment", folder / "middle.png", "--out", tmp_path / "out", "--spacing", f"{depth_mm},{column_mm}", "--json"
    )
    assert outcome.code == 0, outcome.err
    (one,) = outcome.json["images"]
    assert one["unit"] == "um"
    assert one["spacing_um"] == pytest.approx([1000 * depth_mm, 1000 * column_mm], rel=1e-3)
    true_um = float((TRUE_PX[7] - TRUE_PX[0]).mean()) * 1000 * depth_mm
    assert one["thickness"]["retina"] == pytest.approx(true_um, rel=0.03)
    assert not any("spacing unknown" in note for note in one["notes"])


def test_a_dicom_file_of_one_frame(tmp_path: Path) -> None:
    dataset = make_dataset(EYE.pixels[MIDDLE : MIDDLE + 1])
    save(dataset, tmp_path / "line.dcm")
    bscan = read_bscan(tmp_path / "line.dcm")
    assert np.array_equal(bscan.pixels, EYE.pixels[MIDDLE])
    assert bscan.spacing_mm is not None
    with pytest.raises(VolumeRejected, match="too_few_frames"):
        octjepa.read_volume(tmp_path / "line.dcm")  # never a volume
    save(make_dataset(EYE.pixels[:5]), tmp_path / "volume.dcm")
    with pytest.raises(VolumeRejected, match="5 frames: a volume"):
        read_bscan(tmp_path / "volume.dcm")


def test_what_is_no_single_bscan(tmp_path: Path) -> None:
    pages = [Image.fromarray(bscan) for bscan in EYE.pixels[:4]]
    pages[0].save(tmp_path / "stack.tif", save_all=True, append_images=pages[1:])
    pages[0].save(tmp_path / "one.tif")
    assert is_picture(tmp_path / "one.tif")
    assert not is_picture(tmp_path / "stack.tif")
    with pytest.raises(VolumeRejected, match="4 pages: a stack"):
        read_bscan(tmp_path / "stack.tif")
    (tmp_path / "cut.png").write_bytes(b"\x89PNG\r\n\x1a\n cut off")
    with pytest.raises(VolumeRejected, match="frames_broken"):
        read_bscan(tmp_path / "cut.png")
    Image.fromarray(np.full((200, 300), 7, np.uint8)).save(tmp_path / "blank.bmp")
    with pytest.raises(VolumeRejected, match="every voxel has the same value"):
        read_bscan(tmp_path / "blank.bmp")
    (tmp_path / "empty").mkdir()
    with pytest.raises(UsageError, match=r"no B-scan in .*empty: expected files"):
        find_bscans(tmp_path / "empty")


def test_links_out_of_a_folder_and_masks_are_not_read(tmp_path: Path) -> None:
    folder = write_pictures(tmp_path / "pictures")
    (tmp_path / "secret.png").write_bytes((folder / "middle.png").read_bytes())
    (folder / "linked.png").symlink_to(tmp_path / "secret.png")
    assert [file.name for file in find_bscans(folder)] == ["middle.png", "noise.png", "turned.jpg"]


def test_spacing_of_single_bscans() -> None:
    assert parse_bscan_spacing("0.0039,0.0117") == (0.0039, 0.0117)
    for text in ("0.12,0.0039,0.0117", "a,b", "3.9,11.7"):
        with pytest.raises(UsageError, match="expected depth,column in mm"):
            parse_bscan_spacing(text)


@pytest.mark.slow
def test_real_pictures_are_read_and_other_things_refused(real_scans: Path, tmp_path: Path) -> None:
    """A Duke eye against its grader, without the spacing; anterior segments and a slice of an orange."""
    volume = octjepa.read_volume(real_scans / "duke_dme_eye01_11x496x768.dcm")
    graded = np.load(real_scans.parent / "labels" / "duke_dme_eye01_layers.npz")["layers"][1]
    folder = tmp_path / "pictures"
    folder.mkdir()
    Image.fromarray(volume.pixels[1]).save(folder / "duke.png")
    others = real_scans.parent / "real" / "not_retina"
    shown = {"asoct_pourzand": (0, 31, 34), "wyzhn_4_orange_slice": (0,)} if others.is_dir() else {}
    names = [f"{name}_{number}" for name, numbers in shown.items() for number in numbers]
    for name, numbers in shown.items():
        for number in numbers:
            Image.fromarray(np.load(others / f"{name}.npz")["volume"][number]).save(folder / f"{name}_{number}.png")
    outcome = call("segment", folder, "--images", "--out", tmp_path / "out", "--max-lost", 0.9, "--json")
    assert outcome.code == 0, outcome.err
    made = {one["image"]: one for one in outcome.json["images"]}
    with np.load(made["duke"]["files"]["boundaries"]) as found:
        assert np.nanmean(np.abs(found["rows"][[0, 7], 0] - graded[[0, 7]])) < 4.5
    refused = {one["scan"] for one in outcome.json["refused"]}
    assert not any("may not be a human retina" in note for note in made["duke"]["notes"])
    for name in names:
        doubted = name in made and any("may not be a human retina" in note for note in made[name]["notes"])
        assert f"{name}.png" in refused or doubted
