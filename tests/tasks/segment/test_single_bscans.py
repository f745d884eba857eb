"""A head on pictures of single B-scans: masks with the names of the pictures, and files in the picture's geometry."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from command_line import call
from octjepa.errors import UsageError
from octjepa.phantom import SURFACES, make_eye
from octjepa.tasks.labels.label_files import LabelFolder, ScanNames

pytestmark = pytest.mark.timeout(400)
DEVICE = "heidelberg_spectralis"


def write_labelled_pictures(folder: Path, people: int) -> Path:
    """`pictures/P3/middle.png` of each person, and a mask of the same name in `masks`: above the OPL 1, below it 2."""
    rows = ["person_id\tfilepath"]
    for person in range(people):
        eye = make_eye(300 + person, person, "OD", DEVICE)
        middle = eye.pixels.shape[0] // 2
        row = np.arange(eye.pixels.shape[1])[:, None]
        ilm, opl, bm = (eye.truth.surfaces_px[SURFACES.index(name), middle] for name in ("ilm", "opl_onl", "bm"))
        codes = np.select([(row >= ilm) & (row < opl), (row >= opl) & (row < bm)], [1, 2], 0).astype(np.uint8)
        for kind, pixels in (("pictures", eye.pixels[middle]), ("masks", codes)):
            path = folder / kind / f"P{person}"
            path.mkdir(parents=True)
            Image.fromarray(pixels).save(path / "middle.png")
        rows.append(f"P{person}\tP{person}/middle.png")
    (folder / "pictures" / "manifest.tsv").write_text("\n".join(rows))
    (folder / "masks" / "classes.json").write_text(json.dumps({"1": "inner", "2": "outer"}))
    return folder


@pytest.fixture(scope="module")
def labelled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Labelled pictures, their store, and a head on the packaged encoder."""
    folder = write_labelled_pictures(tmp_path_factory.mktemp("bscans"), 8)
    words = ("ingest", folder / "pictures", "--images", "--store", folder / "store", "--recipe", "tiny_cpu")
    for command in (
        (*words, "--workers", 1),
        ("split", folder / "store", "--by", "stratified", "--shares", "0.5,0.25,0.25"),
        (
            "segment",
            "segment_linear",
            "resamples=50",
            "--from",
            "phantom-tiny",
            "--store",
            folder / "store",
            "--labels",
            folder / "masks",
            "--out",
            folder / "head",
        ),
    ):
        outcome = call(*command, "--json")
        assert outcome.code == 0, outcome.err
    return folder


@pytest.mark.slow
def test_a_head_learned_from_pictures_segments_pictures(labelled: Path, tmp_path: Path) -> None:
    """Classes of the picture's size that agree with the mask, by --scan, and by predict on a folder."""
    metrics = json.loads((labelled / "head" / "results.json").read_text())["metrics"]
    assert metrics["dice_inner"]["value"] > 0.7
    picture = labelled / "pictures" / "P2" / "middle.png"
    applied = call(
        "segment", labelled / "head", "--from", "phantom-tiny", "--scan", picture, "--out", tmp_path / "a", "--json"
    )
    assert applied.code == 0, applied.err
    (picture_files,) = applied.json["scans"]
    truth = np.asarray(Image.open(labelled / "masks" / "P2" / "middle.png"))
    with Image.open(picture_files["classes"]) as classes:
        assert classes.mode == "P"
        codes = np.asarray(classes)
    assert codes.shape == truth.shape
    stored = codes != 255
    dice = 2 * ((codes == 2) & (truth == 2)).sum() / ((codes == 2).sum() + ((truth == 2) & stored).sum())
    assert dice > 0.7
    assert picture_files["unit"] == "px"
    assert picture_files["area"]["outer"] == (codes == 2).sum()
    assert any("spacing unknown" in note for note in picture_files["notes"])
    folder = call(
        "predict",
        labelled / "head",
        picture.parent,
        "--images",
        "--spacing",
        "0.0078,0.04",
        "--from",
        "phantom-tiny",
        "--out",
        tmp_path / "b",
        "--json",
    )
    assert folder.code == 0, folder.err
    assert folder.json["scans"][0]["volume_id"] == picture_files["volume_id"]
    assert folder.json["scans"][0]["unit"] == "um"
    assert folder.json["scans"][0]["notes"] == []


@pytest.mark.slow
def test_classes_of_an_upside_down_picture_lie_on_the_picture(labelled: Path, tmp_path: Path) -> None:
    pixels = np.asarray(Image.open(labelled / "pictures" / "P2" / "middle.png"))
    codes = []
    for name, picture in (("plain", pixels), ("turned", pixels[::-1])):
        Image.fromarray(picture).save(tmp_path / f"{name}.png")
        words = ("segment", labelled / "head", "--from", "phantom-tiny", "--scan", tmp_path / f"{name}.png")
        outcome = call(*words, "--out", tmp_path / name, "--json")
        assert outcome.code == 0, outcome.err
        codes.append(np.asarray(Image.open(outcome.json["scans"][0]["classes"])))
    assert (codes[0] == 1).any()
    assert np.array_equal(codes[0], codes[1][::-1])


def test_masks_belong_to_pictures_in_folders_of_the_same_names(tmp_path: Path) -> None:
    for name in ("a/1.png", "b/1.png", "b/deep/2_mask.png"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.ones((4, 5), np.uint8)).save(tmp_path / name)
    (tmp_path / "classes.json").write_text('{"1": "fluid"}')
    shutil.copy(tmp_path / "a" / "1.png", tmp_path / "a" / "1_mask.png")
    (tmp_path / "a" / "1.png").unlink()
    (tmp_path / "b" / "1.png").rename(tmp_path / "b" / "1_mask.png")
    Image.fromarray(np.zeros((4, 5), np.uint8)).save(tmp_path / "a" / "1.png")  # the picture next to its mask

    def mask(picture: str) -> str | None:
        file = LabelFolder(tmp_path, of_bscans=True).file_for(ScanNames("", picture, ""))
        return None if file is None else file.relative_to(tmp_path).as_posix()

    assert mask("/data/pictures/a/1.png") == "a/1_mask.png"
    assert mask("b/1.png") == "b/1_mask.png"
    assert mask("2.png") == "b/deep/2_mask.png"  # no other label file has this name
    assert mask("1.png") is None
    assert mask("c/3.png") is None
    labels = LabelFolder(tmp_path, of_bscans=True)
    assert labels.label_count == 3
    file = tmp_path / "b" / "deep" / "2_mask.png"
    assert labels.names(file) == ("fluid",)  # classes.json lies two folders above
    assert (labels.read(file, ("fluid",), (1, 4, 5)).codes == 1).all()
    with pytest.raises(UsageError, match="4 x 5 pixels, its scan 6 x 5"):
        labels.read(file, ("fluid",), (1, 6, 5))
