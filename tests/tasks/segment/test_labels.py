"""Labels of every form, and what is said of those that fit no scan."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np
import pytest
from PIL import Image

from eye_files import write_voxels
from octjepa.canonical.native_mapping import NativeMap
from octjepa.canonical.pipeline import canonicalise
from octjepa.errors import UsageError
from octjepa.recipe import Preprocessing
from octjepa.store import Store
from octjepa.store.index import IndexEntry, entries_of
from octjepa.tasks.labels.label_files import PHANTOM_LAYERS, LabelFolder, LabelVolume, ScanNames
from octjepa.tasks.nifti import write_nifti
from octjepa.tasks.segment.labelled_volumes import LabelledVolumes, labels_to_stored, scores_to_scan
from octjepa.tasks.segment.recipe import RECIPES, load_recipe
from shaped_eye import shaped_eye

from .conftest import RECIPE, Line

pytestmark = pytest.mark.timeout(400)  # the first one makes the cohort and imports MONAI


@pytest.fixture
def some(line: Line, tmp_path: Path) -> Path:
    """Labels of every scan, in a folder that a test may change."""
    shutil.copytree(line.labels, tmp_path / "labels")
    return tmp_path / "labels"


def write_npz(path: Path, labels: np.ndarray, names: list[str], **more: object) -> None:
    np.savez_compressed(path, labels=labels, names=np.array(names), **more)


def first(line: Line, split: str = "train") -> IndexEntry:
    return entries_of(line.store.table[line.store.table["split"] == split])[0]


def refused(store: Store, folder: Path, *classes: str) -> str:
    with pytest.raises(UsageError) as error:
        LabelledVolumes(store, folder, RECIPE, classes)
    return str(error.value)


def test_a_label_file_that_several_scans_are_called_like_is_refused(line: Line, tmp_path: Path) -> None:
    store = Store.open(line.store.path)
    files = [f"{number}/oct.dcm" for number in range(len(store))]  # each person's scan in a folder of its own
    store._table = store.table.assign(file=files)
    shutil.copy(next(line.labels.glob("*.npz")), tmp_path / "oct.npz")
    assert f"oct.npz to {len(store)} of that file name" in refused(store, tmp_path)


def test_metaimages_are_labels_by_the_name_of_their_scan_or_in_its_folder(tmp_path: Path) -> None:
    codes = np.zeros((4, 6, 5), np.uint8)
    codes[1:3, 2:4] = 2
    spacing = (0.25, 0.01, 0.06)
    (tmp_path / "classes.json").write_text('{"1": "irf", "2": "srf"}')
    write_voxels(tmp_path / "eye.mha", codes, spacing)
    plain = LabelFolder(tmp_path)
    scan = ScanNames("", "TRAIN001/eye.dcm", "v")
    read = plain.read(tmp_path / "eye.mha", ["srf"], codes.shape)
    assert plain.file_for(scan) == tmp_path / "eye.mha"
    assert np.array_equal(read.codes, codes)
    assert (read.names, read.spacing_mm) == (("irf", "srf"), spacing)
    (tmp_path / "eye.mha").unlink()
    for name in ("TRAIN001", "TRAIN002", "TEST001"):  # RETOUCH: the same names in every folder
        (tmp_path / name).mkdir()
        write_voxels(tmp_path / name / "oct.mhd", codes, spacing)
        if name != "TEST001":
            write_voxels(tmp_path / name / "reference.mhd", codes, spacing)
    folder = LabelFolder(tmp_path)
    assert len(folder.files) == 2
    for name in ("TRAIN001", "TRAIN002"):
        scan = replace(scan, file=f"RETOUCH-TrainingSet-Cirrus/{name}/oct.mhd")
        assert folder.files_for(scan) == [tmp_path / name / "reference.mhd"]
    assert folder.file_for(replace(scan, file="TEST001/oct.mhd")) is None
    (tmp_path / "TRAIN001" / "reference.raw").write_bytes(b"")
    with pytest.raises(UsageError, match=r"reference\.mhd cannot be read as a label volume"):
        folder.read(tmp_path / "TRAIN001" / "reference.mhd", ["srf"], codes.shape)


def test_one_label_volume_through_every_form_and_key_is_the_same(line: Line, tmp_path: Path) -> None:
    row = first(line)
    known = LabelFolder(line.labels).file_for(row)
    assert known is not None
    truth = LabelFolder(line.labels).read(known, tuple(PHANTOM_LAYERS), row.shape)
    names = list(truth.names)
    uid, stem = row.sop_instance_uid, Path(row.file).stem
    write_npz(tmp_path / f"{uid}.npz", truth.codes, names, fovea_mm=truth.fovea_mm)
    (tmp_path / "nifti").mkdir()
    write_nifti(tmp_path / "nifti" / f"{stem}.nii.gz", truth.codes, row.spacing_mm)
    (tmp_path / "nifti" / "classes.json").write_text(json.dumps({k + 1: name for k, name in enumerate(names)}))
    (tmp_path / "id").mkdir()
    write_npz(tmp_path / "id" / f"{row.volume_id}.npz", truth.codes, names)
    (tmp_path / "npz").mkdir()
    (tmp_path / f"{uid}.npz").rename(tmp_path / "npz" / f"{uid}.npz")
    for kind in ("npz", "nifti", "id"):
        folder = LabelFolder(tmp_path / kind)
        file = folder.file_for(row)
        assert file is not None, kind
        assert folder.names(file) == tuple(names)
        read = folder.read(file, names, row.shape)
        read.check(row.shape, truth.spacing_mm or (1, 1, 1), kind)
        assert np.array_equal(read.as_classes(names), truth.codes), kind
    turned = truth.as_classes(["onl"])
    assert np.array_equal(turned == 1, truth.codes == names.index("onl") + 1)


@pytest.mark.parametrize("eye", ["OD", "OS"])
def test_true_labels_survive_the_way_to_the_stored_volume_and_back(eye: Literal["OD", "OS"]) -> None:
    made = shaped_eye("topcon_triton", "drusen", seed=3, eye=eye)
    row = np.arange(made.volume.shape[1])[None, :, None]
    codes = ((row >= made.ilm[:, None]) & (row < made.bm[:, None])).astype(np.uint8)
    preprocessing = Preprocessing()
    canonical = canonicalise(made.volume, preprocessing)
    shifts, frames = canonical.volume.frame_shifts, canonical.volume.frame_mm
    assert shifts is not None
    assert frames is not None
    native = NativeMap(made.volume.shape, made.volume.spacing_mm, preprocessing, shifts, frames, canonical.mirrored)
    stored = labels_to_stored(codes, native)
    known = np.where(stored == 255, 0, stored)
    back = scores_to_scan(np.stack([known == 0, known == 1]).astype(np.float32), native)
    seen = back != 255
    assert seen.mean() > 0.6  # rows above and below the stored height have no voxel there
    assert (back[seen] == codes[seen]).mean() > 0.99
    whole = seen.any(axis=1)
    error = np.abs((back == 1).sum(axis=1) - codes.sum(axis=1, dtype=int))[whole] * made.volume.spacing_mm[1] * 1000
    assert error.mean() < 8  # um, one row: what the geometry alone costs a single A-scan
    assert abs((back == 1).sum(axis=1)[whole].mean() - codes.sum(axis=1)[whole].mean()) < 0.25  # rows, on average


def test_lesions_lie_on_layers_and_classes_can_be_named(line: Line) -> None:
    cohort = LabelledVolumes(line.store, line.labels, RECIPE, ["onl", "drusen"])
    assert cohort.classes == ("onl", "drusen")
    assert {int(code) for one in cohort.stored.values() for code in np.unique(one)} == {0, 1, 2, 255}


def test_labels_without_scans_and_scans_without_labels_are_counted(line: Line, some: Path) -> None:
    row = first(line)
    (some / f"{row.sop_instance_uid}.npz").rename(some / "1.2.3.npz")
    cohort = LabelledVolumes(line.store, some, RECIPE)
    assert cohort.notes == ["label files without a scan: 1", "scans without labels: 1"]
    for file in some.glob("*.npz"):
        file.rename(some / f"x{file.name}")
    assert "none of the 24 label files" in refused(line.store, some)
    assert "no folder of labels" in refused(line.store, some / "nowhere")
    (some / "empty").mkdir()
    assert "holds no label volume" in refused(line.store, some / "empty")


def test_a_label_file_without_marks_among_others_is_named(line: Line, some: Path, tmp_path: Path) -> None:
    row = first(line)
    name = f"{row.sop_instance_uid}.npz"
    write_npz(some / name, np.zeros(row.shape, np.uint8), ["onl"])
    (note,) = (note for note in LabelledVolumes(line.store, some, RECIPE).notes if "marked voxel" in note)
    assert f"({name})" in note
    assert note.endswith(": 1")
    unlabelled = LabelVolume(np.full((2, 4, 4), 255, np.uint8), ("onl",))
    assert unlabelled.is_empty
    assert not replace(unlabelled, boundaries_px=np.ones((8, 2, 4), np.float32)).is_empty


def test_what_was_assumed_of_masks_is_noted_and_masks_of_images_need_their_names(line: Line, some: Path) -> None:
    row = first(line)
    (some / f"{row.sop_instance_uid}.npz").unlink()
    folder = some / row.volume_id
    folder.mkdir()
    for number in (2, 5):
        Image.fromarray(np.ones(row.shape[1:], np.uint8)).save(folder / f"b_{number}.png")
    (folder / "classes.json").write_text('{"1": "onl"}')
    notes = LabelledVolumes(line.store, some, RECIPE).notes
    assert [note for note in notes if f"count from 1 ({row.volume_id})" in note]
    store = Store.open(line.store.path)
    store._table = store.table.assign(format="images")
    assert f"2 masks for {row.shape[0]} B-scans that are images" in refused(store, some)
    write_npz(some / f"{row.sop_instance_uid}.npz", np.ones(row.shape, np.uint8), ["onl"])
    notes = LabelledVolumes(line.store, some, RECIPE).notes
    assert [note for note in notes if f"holds the same classes ({row.volume_id}): 1" in note]
    assert not [note for note in notes if "without a scan" in note]


Spoil = Callable[[Path, tuple[int, int, int]], None]


@pytest.mark.parametrize(
    ("spoil", "message_text"),
    [
        (lambda path, s: write_npz(path, np.ones((s[0] - 1, *s[1:]), np.uint8), ["onl"]), "its scan 28 x 188 x 168"),
        (
            lambda path, s: write_npz(path, np.ones(s, np.uint8), ["onl"], spacing_mm=(0.5, 0.008, 0.036)),
            "between slices",
        ),
        (lambda path, s: write_npz(path, np.full(s, 7, np.uint8), ["onl"]), "unknown classes 7: named are 1 onl"),
        (lambda path, s: write_npz(path, np.full(s, 0.5, np.float32), ["onl"]), "not whole numbers"),
        (lambda path, s: write_npz(path, np.ones(s[1:], np.uint8), ["onl"]), "has 2 axes"),
        (lambda path, s: np.savez(path, other=np.ones(3)), "expected the arrays `labels` and `names`"),
        (lambda path, s: path.write_bytes(b"PK\x03\x04 no archive"), "cannot be read as .npz"),
    ],
)
def test_a_label_file_that_fits_no_scan_is_named_with_what_is_wrong(
    line: Line, some: Path, spoil: Spoil, message_text: str
) -> None:
    row = line.store.table[(line.store.table["split"] == "train") & (line.store.table["native_d"] == 28)].iloc[0]
    spoil(some / f"{row.sop_instance_uid}.npz", (28, 188, 168))
    message = refused(line.store, some)
    assert message_text in message
    assert str(row.sop_instance_uid) in message


def test_nifti_without_names_of_its_numbers_is_refused(line: Line, tmp_path: Path) -> None:
    row = first(line)
    codes = np.ones(row.shape, np.uint8)
    write_nifti(tmp_path / f"{row.sop_instance_uid}.nii.gz", codes, (1.0, 1.0, 1.0))
    assert "no classes.json" in refused(line.store, tmp_path)
    (tmp_path / "classes.json").write_text('["onl"]')
    assert "is not a mapping" in refused(line.store, tmp_path)


def test_classes_that_cannot_be_learned_are_refused(line: Line, some: Path) -> None:
    assert "no label file names the class 'retina'" in refused(line.store, some, "retina")
    table = line.store.table
    for row in entries_of(table[table["split"] == "train"]):
        write_npz(some / f"{row.sop_instance_uid}.npz", np.zeros(row.shape, np.uint8), ["onl", "inner"])
    assert "fewer than two classes" in refused(line.store, some, "onl")
    row = first(line)
    some_onl = np.zeros(row.shape, np.uint8)
    some_onl[:, 80:120] = 1
    write_npz(some / f"{row.sop_instance_uid}.npz", some_onl, ["onl", "inner"])
    assert "no voxel of inner" in refused(line.store, some, "onl", "inner")


def test_nobody_in_test_or_train_and_a_person_in_both_are_refused(line: Line, some: Path) -> None:
    table = line.store.table
    for row in entries_of(table[table["split"] == "test"]):
        (some / f"{row.sop_instance_uid}.npz").unlink()
    assert "no labelled scan of a person of test" in refused(line.store, some)
    for row in entries_of(table[table["split"] == "val"]):
        (some / f"{row.sop_instance_uid}.npz").unlink()
    assert "now train 4, val 0, test 0" in refused(line.store, some)


def test_recipes_load_and_wrong_keys_are_refused() -> None:
    assert RECIPES.names() == ["segment_decoder", "segment_linear", "segment_tuned"]
    assert [load_recipe(name).head for name in RECIPES.names()] == ["decoder", "linear", "decoder, tuned"]
    made = load_recipe("segment_decoder", ["decoder.updates=7", "centre=scan"])
    assert made.decoder is not None
    assert (made.decoder.updates, made.decoder.lr, made.centre) == (7, 3e-3, "scan")
    for wrong, message_text in (
        ("head=linear", "segmentation recipe segment_linear is refused:\n  head: unknown key; known here: name"),
        ("decoder.update=7", "decoder.update: unknown key; did you mean 'updates'?"),
        ("columns=0", "columns: Input should be greater than 0 (found 0)"),
        ("columns", "'columns' is not of the form key=value, such as decoder.updates=100"),
        ("columns.width=1", "'columns' is a value, not a section"),
    ):
        with pytest.raises(UsageError, match=re.escape(message_text)):
            load_recipe("segment_linear", [wrong])
    with pytest.raises(UsageError, match="a head's folder to apply, or one of segment_decoder, segment_linear"):
        load_recipe("nothing")
