"""Single B-scans: pictures with and without a spacing, one-frame DICOM files, a table row for each, refusals."""

from __future__ import annotations

import csv
import errno
import os
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import octjepa
from command_line import call
from oct_dicom import make_dataset, save
from octjepa.cli.output import print_segmented_bscans
from octjepa.errors import UsageError, VolumeRejected
from octjepa.ingest.sources import discover
from octjepa.phantom import make_eye
from octjepa.phantom.random_scene import BOUNDARY_SURFACES
from octjepa.read.single_bscan import find_bscans, is_picture, parse_bscan_spacing, read_bscan
from octjepa.tasks.labels.label_files import LabelFolder
from octjepa.tasks.segmenter import single_bscans
from octjepa.tasks.segmenter.inference import Segmentation, Segmenter

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
        assert row["made_by"] == f"made automatically by octjepa {version('octjepa')}"
    true_px = float((TRUE_PX[7] - TRUE_PX[0]).mean())
    assert made["images"][0]["thickness"]["retina"] == pytest.approx(true_px, rel=0.05)
    assert any("sclera was on top" in note for note in made["images"][1]["notes"])


def test_files_of_a_picture(segmented: tuple[Path, dict[str, Any]]) -> None:
    out, made = segmented
    files = made["images"][0]["files"]
    labels = LabelFolder(out, of_bscans=True)
    made_by = f"made automatically by octjepa {version('octjepa')}"
    assert [labels.source(Path(files[kind])) for kind in ("boundaries", "classes")] == [made_by, made_by]
    with np.load(files["boundaries"]) as found:
        assert found["rows"].shape == (8, 1, EYE.pixels.shape[2])
        assert np.abs(found["rows"][:, 0] - TRUE_PX).mean() < 3
    with Image.open(files["classes"]) as classes:
        assert (classes.mode, classes.size) == ("P", EYE.pixels.shape[:0:-1])
        assert np.asarray(classes).max() <= 3
    with Image.open(files["picture"]) as picture:
        assert (picture.mode, picture.size) == ("RGB", EYE.pixels.shape[:0:-1])


def test_results_of_another_picture_are_not_replaced_and_the_table_lists_all(tmp_path: Path) -> None:
    for person, bscan in (("patA", MIDDLE), ("patB", MIDDLE + 1)):
        (tmp_path / person).mkdir()
        Image.fromarray(EYE.pixels[bscan]).save(tmp_path / person / "eye.png")
        Image.fromarray(EYE.pixels[bscan]).save(tmp_path / person / f"{person}.png")
    out = tmp_path / "out"
    for _ in range(2):  # the same command again
        assert call("segment", tmp_path / "patA" / "eye.png", "--out", out, "--json").code == 0
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    refused = call("segment", tmp_path / "patB" / "eye.png", "--out", out, "--json")
    assert refused.code == 2
    assert [one["reason"] for one in refused.json["refused"]] == ["output_exists"]
    assert "results of another scan called eye" in refused.json["refused"][0]["detail"]
    assert {path.name: path.read_bytes() for path in out.iterdir() if path.suffix != ".jsonl"} == {
        name: content for name, content in before.items() if not name.endswith(".jsonl")
    }
    outcome = call("segment", tmp_path / "patB" / "patB.png", "--out", out, "--json")
    assert [one["image"] for one in outcome.json["images"]] == ["patB"]
    with (out / "images.csv").open() as file:
        assert [row["image"] for row in csv.DictReader(file)] == ["patB", "eye"]
    own = call("segment", tmp_path / "patA" / "eye.png", "--out", tmp_path / "patB", "--json")
    assert [one["reason"] for one in own.json["refused"]] == ["output_exists"]
    (tmp_path / "labels").mkdir()
    (tmp_path / "labels" / "classes.json").write_text("{}")
    labels = call("segment", tmp_path / "patA" / "eye.png", "--out", tmp_path / "labels")
    assert labels.code == 2
    assert "labels holds classes.json, and octjepa has no record of writing it: choose another --out" in labels.err


def test_pictures_with_the_same_file_name_keep_their_results_if_others_are_added(tmp_path: Path) -> None:
    for person, expected in (("b", ["oct"]), ("a", ["a_oct", "oct"])):
        (tmp_path / "in" / person).mkdir(parents=True)
        Image.fromarray(EYE.pixels[MIDDLE + (person == "a")]).save(tmp_path / "in" / person / "oct.png")
        outcome = call("segment", tmp_path / "in", "--images", "--out", tmp_path / "out", "--json")
        assert outcome.code == 0, outcome.err
        assert [one["image"] for one in outcome.json["images"]] == expected
    with (tmp_path / "out" / "images.csv").open() as file:
        assert [row["image"] for row in csv.DictReader(file)] == ["a_oct", "oct"]


def test_masked_names_in_the_table_have_the_position_of_the_file(tmp_path: Path) -> None:
    for number in range(2):
        made = make_dataset(EYE.pixels[MIDDLE + number][None])
        save(made, tmp_path / "in" / f"Doe_{number}.dcm")
    outcome = call("segment", tmp_path / "in", "--images", "--out", tmp_path / "out", "--json")
    assert outcome.code == 0, outcome.err
    with (tmp_path / "out" / "images.csv").open() as file:
        positions = [row["position"] for row in csv.DictReader(file)]
    assert positions == [one["position"] for one in outcome.json["images"]] == ["file 1 of 2", "file 2 of 2"]


def test_results_below_the_pictures_are_not_read_as_pictures(tmp_path: Path) -> None:
    (tmp_path / "pics").mkdir()
    Image.fromarray(EYE.pixels[MIDDLE]).save(tmp_path / "pics" / "eye.png")
    for _ in range(2):
        outcome = call("segment", tmp_path / "pics", "--images", "--out", tmp_path / "pics" / "results", "--json")
        assert outcome.code == 0, outcome.err
        assert [one["image"] for one in outcome.json["images"]] == ["eye"]
    assert [file.name for file in discover([tmp_path / "pics"], single_bscans=True).files] == ["eye.png"]
    (tmp_path / "pics" / "results" / "octjepa_segmented.jsonl").unlink()  # as an earlier version wrote them
    assert [file.name for file in find_bscans(tmp_path / "pics")] == ["eye.png"]


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


def test_a_folder_that_cannot_be_listed_is_refused_and_the_others_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "pictures"
    for name in ("a", "locked"):
        (folder / name).mkdir(parents=True)
        Image.fromarray(EYE.pixels[MIDDLE]).save(folder / name / "eye.png")
    really = {name: getattr(os, name) for name in ("scandir", "listdir")}

    def refuse(name: str) -> Callable[[Any], Any]:
        def wrapped(path: Any = ".") -> Any:
            if str(path).endswith("locked"):
                raise PermissionError(errno.EACCES, "Permission denied", str(path))
            return really[name](path)

        return wrapped

    for name in really:  # root, who runs many tests, may list everything
        monkeypatch.setattr(os, name, refuse(name))
    assert find_bscans(folder) == [folder / "a" / "eye.png", folder / "locked"]
    outcome = call("segment", folder, "--images", "--out", tmp_path / "out", "--json", "--max-lost", "0.5")
    assert outcome.code == 0, outcome.err
    assert [one["image"] for one in outcome.json["images"]] == ["eye"]
    assert [(one["scan"], one["reason"], one["detail"]) for one in outcome.json["refused"]] == [
        ("locked", "unreadable_folder", "Permission denied")
    ]
    with pytest.raises(UsageError, match=r"no B-scan in .*; 1 folder cannot be listed"):
        find_bscans(folder / "locked")


def test_spacing_of_single_bscans() -> None:
    assert parse_bscan_spacing("0.0039,0.0117") == (0.0039, 0.0117)
    for text in ("0.12,0.0039,0.0117", "a,b", "3.9,11.7"):
        with pytest.raises(UsageError, match="expected depth,column in mm"):
            parse_bscan_spacing(text)


def predict_half(
    self: Segmenter, pixels: np.ndarray, spacing_mm: tuple[float, float, float], sparse: bool
) -> Segmentation:
    """A flat retina of 40 rows with fluid in all columns. The boundaries of the left half are unsure."""
    _, height, width = pixels.shape
    rows = np.repeat(np.linspace(100, 140, 8, dtype=np.float32)[:, None, None], width, -1)
    classes = np.zeros((1, height, width), np.uint8)
    classes[0, 110:120] = 1
    error = np.full((8, 1, width), 5, np.float32)
    error[:, :, : width // 2] = 100
    shares = np.ones(classes.shape, np.float32)
    return Segmentation(rows, error, classes, shares, shares, spacing_mm)


def test_fluid_is_counted_only_in_measured_ascans(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Image.fromarray(EYE.pixels[MIDDLE]).save(tmp_path / "middle.png")
    monkeypatch.setattr(Segmenter, "predict", predict_half)
    (made,) = single_bscans.segment_bscans([str(tmp_path / "middle.png")], tmp_path / "out").images
    width = EYE.pixels.shape[2]
    assert made.measured_share == 0.5
    assert made.fluid_share == pytest.approx(10 / 40)
    assert made.area["intraretinal_fluid"] == 10 * (width - width // 2)


@pytest.mark.parametrize(("cut_columns", "retina"), [(40, 40.0), (None, None)])
def test_the_retina_is_not_measured_where_it_is_cut_off(
    cut_columns: int | None, retina: float | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The ILM is at the upper edge in `cut_columns` of the right half, in all of them if None."""

    def predict(
        self: Segmenter, pixels: np.ndarray, spacing_mm: tuple[float, float, float], sparse: bool
    ) -> Segmentation:
        found = predict_half(self, pixels, spacing_mm, sparse)
        found.boundaries_px[0, :, -cut_columns if cut_columns else 0 :] = 0
        return found

    Image.fromarray(EYE.pixels[MIDDLE]).save(tmp_path / "middle.png")
    monkeypatch.setattr(Segmenter, "predict", predict)
    segmented = single_bscans.segment_bscans([str(tmp_path / "middle.png")], tmp_path / "out")
    (made,) = segmented.images
    assert made.thickness["retina"] == retina
    assert made.fluid_share == (None if retina is None else 0.25)
    assert (made.expected_error is None) == (retina is None)
    assert "the retina is cut off above or below" in made.notes
    assert made.area["intraretinal_fluid"] > 0  # fluid is not measured from edge to edge, so it counts
    with Path(segmented.table).open() as file:
        (row,) = csv.DictReader(file)
    assert row["retina_thickness"] == ("" if retina is None else "40.0")
    print_segmented_bscans(segmented)


def test_notes_on_bscans_keep_their_advice(capsys: pytest.CaptureFixture[str]) -> None:
    unknown = "spacing unknown: results in pixels (--spacing states it)"
    images = [
        single_bscans.SegmentedBScan("x", {}, (9, 9), None, "px", {"retina": 4.0}, {}, 0.0, 1.0, 1.0, (unknown, note))
        for note in ("low confidence: in 30% of the A-scans", "low confidence: in 40% of the A-scans")
    ]
    print_segmented_bscans(single_bscans.SegmentedBScans("images.csv", images))
    printed = capsys.readouterr().out.splitlines()
    assert f"note on 2 of 2: {unknown}" in printed
    assert "note on 2 of 2: low confidence" in printed  # with another number in each


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
