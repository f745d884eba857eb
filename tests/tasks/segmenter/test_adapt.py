"""Adaptation to labelled B-scans: what is learned from, what is held out, and the folder that is written."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

import octjepa
from command_line import call
from oct_dicom import make_dataset, retina, save
from octjepa.cli.output import print_adapted
from octjepa.errors import OctjepaError, UsageError, VolumeRejected
from octjepa.ingest.output_names import ShownNames
from octjepa.ingest.sources import discover
from octjepa.layers import BOUNDARIES
from octjepa.notes import Note
from octjepa.phantom import make_eye
from octjepa.phantom.dicom import write_eye
from octjepa.phantom.random_scene import BOUNDARY_SURFACES
from octjepa.tasks.labels.label_files import LabelFolder, LabelVolume
from octjepa.tasks.labels.layer_names import ANY_CLASS, FLUID
from octjepa.tasks.segmenter import adapt_scans
from octjepa.tasks.segmenter.adapt import (
    Adaptation,
    AdaptSettings,
    HeldOut,
    LabelledScan,
    adapt,
    allowed_loss,
    draw_crops,
    labelled_samples,
    split_samples,
    train,
)
from octjepa.tasks.segmenter.adapt_scans import AdaptedFolder, allowed_classes, labelled_scan
from octjepa.tasks.segmenter.image_formation import Draws
from octjepa.tasks.segmenter.inference import load_segmenter, with_calibration
from octjepa.volume import OCTVolume, volume_id

SPACING_MM = (0.06, 0.0078, 0.0234)
SHAPE = (5, 192, 160)
NOT_FLUID = ANY_CLASS & ~FLUID


def drawn_scan(bscans: int = SHAPE[0], notes: tuple[Note, ...] = ()) -> LabelledScan:
    """A retina of two grey levels on a dark background, with fluid that is darker than the retina."""
    rng = np.random.default_rng(3)
    shape = (bscans, *SHAPE[1:])
    column = np.arange(SHAPE[2])
    top = 60 + 8 * np.sin(column / 40) + np.arange(bscans)[:, None]
    rows = np.stack([top + offset for offset in (0, 4, 10, 15, 20, 32, 36, 40)]).astype(np.float32)
    depth = np.arange(SHAPE[1])[None, :, None]
    retina = (depth >= rows[0][:, None]) & (depth < rows[7][:, None])
    fluid = (depth >= rows[3][:, None] + 2) & (depth < rows[5][:, None] - 2) & (np.abs(column - 80) < 20)
    bright = (depth >= rows[5][:, None]) & (depth < rows[7][:, None])
    pixels = 30 + 90 * retina + 80 * bright - 80 * fluid + rng.normal(0, 6, shape)
    volume = OCTVolume(
        pixels.clip(1, 250).astype(np.uint8), SPACING_MM, {"slice": "header"}, "someone", "device", notes=notes
    )
    return LabelledScan("drawn", volume, rows, np.where(fluid, FLUID, NOT_FLUID).astype(np.uint8))


def test_unlabelled_voxels_teach_nothing_and_a_set_of_classes_is_one_class() -> None:
    logits = torch.randn(1, 4, 3, 2, requires_grad=True)
    allowed = torch.tensor([[[1, 2], [FLUID, ANY_CLASS], [NOT_FLUID, 8]]])
    allowed_loss(logits, allowed).backward()
    assert logits.grad is not None
    assert (logits.grad[0, :, 1, 1] == 0).all()
    voxel = logits.grad[0, :, 1, 0]
    assert (voxel[[1, 2]] < 0).all()  # either kind of fluid may grow
    assert (voxel[[0, 3]] > 0).all()
    alone = allowed_loss(logits.detach()[..., :1, :1], torch.tensor([[[1]]]))
    expected = -torch.log_softmax(logits.detach()[0, :, 0, 0], 0)[0]
    fluid = torch.softmax(logits.detach()[0, :, 0, 0], 0)
    dice = 0.25 * (1 - 1 / (fluid[1] + fluid[2] + 1)) + 0.25 * (1 - 1 / (fluid[3] + 1))
    assert float(alone) == pytest.approx(float(expected + dice), rel=1e-5)


def test_crops_move_labels_with_the_image() -> None:
    samples = labelled_samples(drawn_scan())
    assert len(samples) == 5
    assert [sample.present for sample in samples][:2] == [(False, True, True), (True, True, True)]
    images, boundaries, allowed = draw_crops(samples, np.random.default_rng(0), Draws(0, torch.device("cpu")), 8)
    hits = checked = 0
    for image, rows, classes in zip(images[:, 1], boundaries, allowed, strict=True):
        for column in torch.nonzero((rows[0] > 12) & (rows[7] < 230))[::7, 0]:
            top, bottom = int(rows[0, column].round()), int(rows[7, column].round())
            hits += int(image[top + 1 : top + 4, column].mean() > image[top - 6 : top - 2, column].mean() + 0.3)
            hits += int(
                image[bottom - 4 : bottom - 1, column].mean() > image[bottom + 2 : bottom + 6, column].mean() + 0.3
            )
            checked += 2
        fluid, other = image[classes == FLUID], image[classes == NOT_FLUID]
        if len(fluid) > 200:
            retina = image[(classes == NOT_FLUID) & (image > 0.7 * other.max())]
            assert fluid.mean() < retina.mean()
    assert checked > 100
    assert hits / checked > 0.97


def test_what_is_held_out() -> None:
    samples = labelled_samples(drawn_scan(11))
    training, held_out = split_samples(samples)
    assert (len(training), len(held_out)) == (9, 2)
    assert not {id(one) for one in training} & {id(one) for one in held_out}
    assert [len(part) for part in split_samples(samples[:2])] == [2, 0]
    assert [len(part) for part in split_samples(samples[:3])] == [2, 1]
    people = [replace(one, group=str(k % 4)) for k, one in enumerate(samples)]
    training, held_out = split_samples(people)
    assert not {one.group for one in training} & {one.group for one in held_out}
    assert held_out


@pytest.mark.slow
def test_adaptation_learns_the_labels_and_ends_at_the_best_validation() -> None:
    scan = drawn_scan()
    start = load_segmenter()
    weights = {name: value.clone() for name, value in start.network.state_dict().items()}
    settings = AdaptSettings(most_steps=8, batch=2, validate_every=4)
    made = adapt([scan], settings, start, baseline=False)
    assert [one.name for one in made.candidates] == ["packaged", "adapted"]
    before, after = (one.score for one in made.candidates)
    assert before is not None
    assert after is not None
    assert after.mean_um < before.mean_um
    training, held_out = split_samples(labelled_samples(scan))
    scored = HeldOut.of(held_out, training)
    assert scored.loss(made.segmenter.network, 0.5) < scored.loss(start.network, 0.5)
    assert made.candidates[1].step in (4, 8)
    assert all(torch.equal(value, weights[name]) for name, value in start.network.state_dict().items())
    assert made.segmenter.calibration.fluid_threshold == 0.5


@pytest.mark.slow
def test_an_adaptation_that_only_gets_worse_is_not_taken() -> None:
    settings = AdaptSettings(most_steps=4, batch=2, validate_every=2, learning_rate=10.0)
    made = adapt([drawn_scan()], settings, baseline=False)
    assert made.candidates[1].step == 0
    assert made.segmenter.calibration == load_segmenter().calibration
    packaged = load_segmenter().network.state_dict()
    assert all(torch.equal(value, packaged[name]) for name, value in made.segmenter.network.state_dict().items())


@pytest.mark.parametrize("share", [0.0, 0.5])
def test_held_out_bscans_are_scored_as_the_scan_is_segmented(share: float) -> None:
    """The statistics of the whole scan enter batch normalisation in the score, as they do in the prediction."""
    scan = drawn_scan()
    segmenter = with_calibration(load_segmenter(), adapt=share, boundary_temperature=(1.0,) * 8)
    training, held_out = split_samples(labelled_samples(scan))
    score = HeldOut.of(held_out, training).score(segmenter)
    found = segmenter.predict(scan.volume.pixels, SPACING_MM)
    error_um = np.abs(found.boundaries_px - scan.boundaries_px)[:, 2].mean(1) * 1000 * SPACING_MM[1]
    assert score.boundary_um == pytest.approx(error_um, abs=0.2)
    assert len(held_out) == 1  # the third of five


def test_the_training_ends_when_the_cpu_time_is_used() -> None:
    training, held_out = split_samples(labelled_samples(drawn_scan()))
    settings = AdaptSettings(cpu_seconds=1e-6, batch=1)
    trained = train(load_segmenter().network, training, held_out, settings)
    assert trained.steps == 1
    assert len(trained.losses) == 2  # before the first step and after the last one


def test_the_same_seed_gives_the_same_weights() -> None:
    training, held_out = split_samples(labelled_samples(drawn_scan()))
    settings = AdaptSettings(most_steps=2, batch=1, learning_rate=1e-4)
    first, second = (train(load_segmenter().network, training, held_out, settings) for _ in range(2))
    pairs = zip(first.network.parameters(), second.network.parameters(), strict=True)
    assert all(torch.equal(one, other) for one, other in pairs)


def test_the_result_is_the_mean_of_learned_and_starting_weights() -> None:
    samples = labelled_samples(drawn_scan())[:2]
    settings = AdaptSettings(most_steps=1, batch=1, learning_rate=1e-4)
    start = load_segmenter().network
    learned, half = (
        train(start, samples, [], replace(settings, adapted_share=share)).network.state_dict() for share in (1.0, 0.5)
    )
    for name, before in start.state_dict().items():
        if before.is_floating_point():
            assert torch.allclose(half[name], (learned[name] + before) / 2, atol=1e-6)
    assert not torch.equal(learned["head.weight"], start.state_dict()["head.weight"])


def test_classes_that_nobody_graded_are_not_background() -> None:
    codes = np.array([[[0, 1, 2, 255]]], np.uint8)
    assert allowed_classes(LabelVolume(codes, ("fluid", "vessel"))).ravel().tolist() == [9, 6, 9, 15]
    assert allowed_classes(LabelVolume(codes, ("SRF", "IRF"))).ravel().tolist() == [9, 4, 2, 15]
    assert allowed_classes(LabelVolume(codes, ("rnfl", "PED"))).ravel().tolist() == [7, 7, 8, 15]
    assert allowed_classes(LabelVolume(codes, ("rnfl", "inl"))).ravel().tolist() == [15, 15, 15, 15]


def test_labels_are_turned_with_the_scan() -> None:
    scan = drawn_scan(notes=(Note("frames_reversed"),))
    codes = np.zeros(SHAPE, np.uint8)
    codes[0, 3, 4] = 1
    rows = np.full((8, SHAPE[0], SHAPE[2]), np.nan, np.float32)
    rows[0, 0] = 7
    turned = labelled_scan(scan.volume, LabelVolume(codes, ("fluid",), boundaries_px=rows), "x")
    assert turned.allowed[-1, 3, 4] == FLUID
    assert (turned.boundaries_px[0, -1] == 7).all()
    with pytest.raises(UsageError, match="the labels are called vessel: expected boundaries ilm"):
        labelled_scan(scan.volume, LabelVolume(codes, ("vessel",)), "x")


def test_shapes_that_do_not_fit() -> None:
    scan = drawn_scan()
    with pytest.raises(OctjepaError, match="do not fit a scan of 5 x 192 x 160"):
        labelled_samples(LabelledScan("x", scan.volume, scan.boundaries_px[:, 1:], scan.allowed[1:]))
    nothing = LabelledScan("x", scan.volume, np.full_like(scan.boundaries_px, np.nan), np.full_like(scan.allowed, 15))
    with pytest.raises(UsageError, match="no B-scan has labels"):
        adapt([nothing])


@pytest.mark.slow
def test_the_command_writes_a_network_that_segment_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From a scan to its boundaries, from three corrected B-scans to a network, from the network to boundaries."""
    monkeypatch.setattr(adapt_scans, "AdaptSettings", lambda: AdaptSettings(most_steps=2, batch=1, validate_every=1))
    scan = tmp_path / "eye.dcm"
    write_eye(scan, make_eye(11, 41, "OD", "heidelberg_spectralis"), 11)
    assert call("segment", scan, "--out", tmp_path / "first", "--format", "nifti").code == 0
    with np.load(tmp_path / "first" / "eye_boundaries.npz") as made:
        rows, names = made["rows"], made["names"]
    labelled = [2, 4, 8]
    corrected = np.full_like(rows, np.nan)
    corrected[:, labelled] = rows[:, labelled] + 3
    (tmp_path / "labels").mkdir()
    np.savez(tmp_path / "labels" / "eye_boundaries.npz", rows=corrected, names=names)
    out = tmp_path / "network"
    outcome = call("segment", "adapt", scan, "--labels", tmp_path / "labels", "--out", out, "--json")
    assert outcome.code == 0, outcome.err
    message = outcome.json
    assert (message["training_bscans"], message["held_out_bscans"], message["scans"]) == (2, 1, 1)
    assert [one["name"] for one in message["networks"]] == ["packaged", "adapted", "random weights"]
    spacing_um = octjepa.read_volume(scan).spacing_mm[1] * 1000
    assert message["networks"][0]["score"]["mean_um"] == pytest.approx(3 * spacing_um, abs=4)
    assert any("no label of fluid" in note for note in message["notes"])
    record = (out / "segmenter.json").read_text()
    assert "eye" not in record
    assert json.loads(record)["adapted_from"]["network"] == "packaged"
    loaded = octjepa.load_segmenter(out)
    assert loaded.calibration == octjepa.load_segmenter().calibration  # no fluid was labelled
    outcome = call("segment", scan, "--model", out, "--out", tmp_path / "second", "--format", "nifti", "--json")
    assert outcome.code == 0, outcome.err
    made_by = f"made automatically by octjepa {version('octjepa')}"
    for name, source in (("first", made_by), ("second", f"{made_by}, adapted network")):
        labels = LabelFolder(tmp_path / name)
        assert labels.source(tmp_path / name / "eye_boundaries.npz") == source
        assert labels.source(tmp_path / name / "eye_classes.nii.gz") == source
    found = loaded.segment(scan)
    with np.load(tmp_path / "second" / "eye_boundaries.npz") as made:
        step = -1 if "frames_reversed" in octjepa.read_volume(scan).notes else 1
        assert np.allclose(made["rows"], found.boundaries_px[:, ::step], atol=1e-3)


def write_pictures(folder: Path, people: int) -> Path:
    """`pictures/P0/middle.png` of each person, masks of two layers in `masks`, and a manifest."""
    rows = ["person_id\tfilepath"]
    for person in range(people):
        eye = make_eye(400 + person, person, "OD", "heidelberg_spectralis")
        middle = eye.pixels.shape[0] // 2
        surfaces = eye.truth.surfaces_px[list(BOUNDARY_SURFACES)][:, middle]
        row = np.arange(eye.pixels.shape[1])[:, None]
        codes = np.select([(row >= surfaces[k]) & (row < surfaces[k + 1]) for k in (0, 1)], [1, 2], 0)
        for kind, pixels in (("pictures", eye.pixels[middle]), ("pictures/masks", codes.astype(np.uint8))):
            path = folder / kind / f"P{person}"
            path.mkdir(parents=True)
            Image.fromarray(pixels).save(path / "middle.png")
        rows.append(f"P{person}\tP{person}/middle.png")
    (folder / "pictures" / "manifest.tsv").write_text("\n".join(rows))
    (folder / "pictures" / "masks" / "classes.json").write_text('{"1": "rnfl", "2": "gcl_ipl"}')
    return folder / "pictures"


def test_a_folder_of_pictures_with_masks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Masks of the same names in a folder below the pictures; people of the manifest are held out whole."""
    monkeypatch.setattr(adapt_scans, "AdaptSettings", lambda: AdaptSettings(most_steps=1, batch=1, validate_every=1))
    pictures = write_pictures(tmp_path, 4)
    masks = pictures / "masks"
    (pictures / "P3" / "broken.png").write_bytes(b"no picture")
    for name in ("P3/broken.png", "P9.png"):
        Image.fromarray(np.zeros((8, 8), np.uint8)).save(masks / name)
    out = tmp_path / "network"
    words = ("segment", "adapt", pictures, "--images", "--labels", masks, "--no-baseline", "--json")
    outcome = call(*words, "--out", out)
    assert outcome.code == 0, outcome.err
    message = outcome.json
    assert (message["scans"], message["training_bscans"], message["held_out_bscans"]) == (4, 3, 1)
    assert message["networks"][0]["score"]["mean_um"] < 40
    notes = "\n".join(message["notes"])
    assert "not used, because unreadable: 1 labelled picture: P3/broken.png: " in notes
    assert "not used: 1 label file without a picture of that name" in notes
    assert "spacing unknown: pictures are taken to be 2 x 6 mm" in notes
    stated = call(*words, "--spacing", "0.0078,0.04", "--out", tmp_path / "stated")
    assert stated.code == 0, stated.err
    assert "spacing unknown" not in "\n".join(stated.json["notes"])
    one = call("segment", "adapt", pictures / "P1" / "middle.png", "--labels", masks, "--out", out, "--json")
    assert one.code == 0, one.err
    assert (one.json["scans"], one.json["training_bscans"]) == (1, 1)
    shutil.copy(masks / "P0" / "middle.png", masks / "middle.png")
    for person in range(4):  # one mask for the pictures of all people
        shutil.rmtree(masks / f"P{person}")
    refused = call(*words, "--out", out)
    assert refused.code == 2
    assert "middle.png belongs to P0/middle.png and P1/middle.png: put label files into folders" in refused.err


def test_a_picture_with_the_sclera_on_top_is_learned(tmp_path: Path) -> None:
    pictures = write_pictures(tmp_path, 2)
    masks = pictures / "masks"

    def scans() -> list[LabelledScan]:
        found = discover([pictures], True)
        return adapt_scans._labelled_bscans(found.files, [LabelFolder(masks, True)], None, ShownNames(found.files), [])

    before = scans()
    for path in (pictures / "P1" / "middle.png", masks / "P1" / "middle.png"):
        Image.fromarray(np.asarray(Image.open(path))[::-1]).save(path)
    after = scans()
    assert ["turned_upright" in scan.volume.notes for scan in after] == [False, True]
    for old, new in zip(before, after, strict=True):
        assert np.isfinite(new.boundaries_px[:3]).any(2).all()
        assert np.array_equal(new.boundaries_px, old.boundaries_px, equal_nan=True)
        assert np.array_equal(new.volume.pixels, old.volume.pixels)


def test_a_scan_whose_voxels_were_moved_is_left_out_and_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    labels = tmp_path / "labels"
    labels.mkdir()
    for person in range(2):
        save(make_dataset(retina(6, seed=person)), tmp_path / "scans" / f"P{person}.dcm")
        np.savez(labels / f"P{person}.npz", rows=np.full((8, 6, 80), 40, np.float32), names=np.array(BOUNDARIES))

    def read_volume(path: Path, *arguments: object, **options: object) -> OCTVolume:
        volume = octjepa.read_volume(path, *arguments, **options)  # type: ignore[arg-type]
        return replace(volume, notes=(Note("axes_transposed"),)) if path.name in moved else volume

    monkeypatch.setattr(adapt_scans, "read_volume", read_volume)
    found = discover([tmp_path / "scans"])
    moved, made = ["P1.dcm"], list[str]()
    names = ShownNames(found.files)
    (scan,) = adapt_scans._labelled_volumes(found, [LabelFolder(labels)], None, names, made)
    assert scan.name == "P0.dcm"
    (note,) = made
    assert note.startswith("not used: 1 labelled scan: P1.dcm: ingest turned, sorted or dropped frames of this scan (")
    moved.append("P0.dcm")
    with pytest.raises(UsageError, match=r"^P0\.dcm: ingest turned"):
        adapt_scans._labelled_volumes(found, [LabelFolder(labels)], None, names, made)


def test_labels_of_the_same_classes_under_another_key_are_named(tmp_path: Path) -> None:
    labels = tmp_path / "labels"
    labels.mkdir()
    for person in range(2):
        save(make_dataset(retina(6, seed=person)), tmp_path / "scans" / f"P{person}.dcm")
    uid = octjepa.read_volume(tmp_path / "scans" / "P0.dcm").sop_instance_uid
    for name in ("P0_boundaries", uid, "P7"):
        np.savez(labels / f"{name}.npz", rows=np.full((8, 6, 80), 40, np.float32), names=np.array(BOUNDARIES))
    found = discover([tmp_path / "scans"])
    made: list[str] = []
    adapt_scans._labelled_volumes(found, [LabelFolder(labels)], None, ShownNames(found.files), made)
    assert made == [
        "1 of 2 scans have no labels and are not used",
        "not used: 1 label file without a scan of that name",
        "not used, because another label file of the scan holds the same classes: P0_boundaries.npz",
    ]


def test_only_scans_with_labels_are_read_and_a_refused_scan_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, labels = tmp_path / "scans", tmp_path / "labels"
    folder.mkdir()
    labels.mkdir()
    write_eye(folder / "eye.dcm", make_eye(11, 41, "OD", "heidelberg_spectralis"), 11)
    write_eye(tmp_path / "another.dcm", make_eye(12, 41, "OS", "heidelberg_spectralis"), 12)
    content = (tmp_path / "another.dcm").read_bytes()
    for name in ("cut.dcm", "other.dcm"):
        (folder / name).write_bytes(content[: len(content) // 2])
    (folder / "more.zip").write_bytes(b"PK\x03\x04")
    volume = octjepa.read_volume(folder / "eye.dcm")
    rows = np.full((8, volume.shape[0], volume.shape[2]), 60, np.float32)
    np.savez(labels / "eye_boundaries.npz", rows=rows, names=np.array(BOUNDARIES))
    read: list[str] = []

    def read_volume(path: Path, *arguments: object, **options: object) -> OCTVolume:
        read.append(path.name)
        return octjepa.read_volume(path, *arguments, **options)  # type: ignore[arg-type]

    def notes() -> str:
        read.clear()
        made: list[str] = []
        found = discover([folder])
        scans = adapt_scans._labelled_volumes(found, [LabelFolder(labels)], None, ShownNames(found.files), made)
        assert [scan.name for scan in scans] == ["eye.dcm"]
        return "\n".join(made)

    monkeypatch.setattr(adapt_scans, "read_volume", read_volume)
    assert "2 of 3 scans have no labels and are not used" in notes()
    assert read == ["eye.dcm"]
    (labels / "eye_boundaries.npz").rename(labels / f"{volume.sop_instance_uid}.npz")
    assert "cut.dcm" not in notes()
    assert read == ["eye.dcm"]
    (labels / f"{volume.sop_instance_uid}.npz").rename(labels / f"{volume_id(volume.content_hash)}.npz")
    assert "not read: cut.dcm: " in notes()  # only a scan that is read tells this id
    (labels / f"{volume_id(volume.content_hash)}.npz").rename(labels / "eye.npz")
    shutil.copy(labels / "eye.npz", labels / "cut.npz")
    assert "not used, because unreadable: 1 labelled scan: cut.dcm: " in notes()
    (labels / "eye.npz").unlink()
    request = adapt_scans.AdaptRequest([str(folder)], [labels])
    with pytest.raises(VolumeRejected, match=r"truncated: cut\.dcm: "):
        adapt_scans.adapt_sources(request, tmp_path / "network")


def test_the_labels_of_one_scan_are_not_learned_for_scans_of_its_name(tmp_path: Path) -> None:
    """Scans of several people are often called alike; which of them was labelled is then unknown."""
    for person in range(2):
        pixels = retina(6, seed=person)
        (tmp_path / "scans" / f"P{person}").mkdir(parents=True)
        save(make_dataset(pixels), tmp_path / "scans" / f"P{person}" / "oct.dcm")
    labels = tmp_path / "labels"
    labels.mkdir()
    np.savez(labels / "oct.npz", rows=np.full((8, 6, 80), 40, np.float32), names=np.array(BOUNDARIES))
    request = adapt_scans.AdaptRequest([str(tmp_path / "scans")], [labels])
    expected = r"oct\.npz belongs to P0/oct\.dcm and P1/oct\.dcm: name label files by SOP instance UID or volume id"
    with pytest.raises(UsageError, match=expected):
        adapt_scans.adapt_sources(request, tmp_path / "network")
    broken = tmp_path / "scans" / "P0" / "oct.dcm"
    broken.write_bytes(broken.read_bytes()[:-5000])  # the labels may be those of the scan that cannot be read
    with pytest.raises(UsageError, match=expected):
        adapt_scans.adapt_sources(request, tmp_path / "network")
    volume = octjepa.read_volume(tmp_path / "scans" / "P1" / "oct.dcm")
    (labels / "oct.npz").rename(labels / f"{volume.sop_instance_uid}.npz")
    made: list[str] = []
    folders = [LabelFolder(labels), LabelFolder(labels)]  # named twice
    found = discover([tmp_path / "scans"])
    (scan,) = adapt_scans._labelled_volumes(found, folders, None, ShownNames(found.files), made)
    assert scan.name == "P1/oct.dcm"


def test_masked_names_have_the_position_of_the_file(tmp_path: Path) -> None:
    for number in range(2):
        save(make_dataset(retina(6, seed=number)), tmp_path / "scans" / f"Doe_{number}" / "oct.dcm")
    (tmp_path / "labels").mkdir()
    np.savez(tmp_path / "labels" / "oct.npz", rows=np.full((8, 6, 80), 40, np.float32), names=np.array(BOUNDARIES))
    request = adapt_scans.AdaptRequest([str(tmp_path / "scans")], [tmp_path / "labels"])
    expected = r"belongs to \*\*\*/oct\.dcm \(file 1 of 2\) and \*\*\*/oct\.dcm \(file 2 of 2\): "
    with pytest.raises(UsageError, match=expected):
        adapt_scans.adapt_sources(request, tmp_path / "network")


def test_an_archive_among_the_sources_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "eye.npz").write_bytes(b"PK\x03\x04")
    (tmp_path / "more.zip").write_bytes(b"PK\x03\x04")
    (tmp_path / "labels").mkdir()
    np.savez(tmp_path / "labels" / "eye.npz", layers=np.zeros((8, 3, 3)))
    monkeypatch.setattr(adapt_scans, "_labelled_volumes", lambda *_: [drawn_scan()])
    monkeypatch.setattr(adapt_scans, "adapt", lambda *_: Adaptation(load_segmenter(), (), 1, 0, ()))
    sources = [str(tmp_path / "eye.npz"), str(tmp_path / "more.zip")]
    request = adapt_scans.AdaptRequest(sources, [tmp_path / "labels"])
    made = adapt_scans.adapt_sources(request, tmp_path / "network")
    assert any(note.startswith("not read: more.zip: ") and "octjepa expand" in note for note in made.notes)


def test_wrong_requests_of_the_command(tmp_path: Path) -> None:
    scan = tmp_path / "eye.dcm"
    write_eye(scan, make_eye(11, 41, "OD", "heidelberg_spectralis"), 11)
    labels = tmp_path / "labels"
    labels.mkdir()
    np.savez(labels / "a.npz", layers=np.zeros((8, 3, 3)))
    np.savez(labels / "b.npz", layers=np.zeros((8, 3, 3)))

    def message(*arguments: object) -> str:
        outcome = call("segment", *arguments)
        assert outcome.code == 2, outcome.err
        return outcome.err

    out = ("--out", tmp_path / "network")
    assert "name labelled scans and their labels" in message("adapt", scan, *out)
    assert "and none has a name that begins with" in message("adapt", scan, "--labels", labels, *out)
    (labels / "b.npz").unlink()
    assert "a.npz holds boundaries of 3 B-scans" in message("adapt", scan, "--labels", labels, *out)
    assert "--store is for a recipe, not for adapt" in message("adapt", scan, "--store", labels, *out)
    assert "holds no segmentation network" in message(scan, "--model", labels, *out)
    assert not (tmp_path / "network").exists() or not list((tmp_path / "network").glob("*.safetensors"))


@pytest.mark.parametrize(
    ("images", "words"), [(False, "segment SCAN... --model"), (True, "segment PICTURES --images --model")]
)
def test_the_next_command_fits_what_was_learned_from(
    images: bool, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    print_adapted(AdaptedFolder(Path("network"), 1, 2, 1, (), ()), False, images)
    assert f"octjepa {words} network --out DIR" in capsys.readouterr().out
