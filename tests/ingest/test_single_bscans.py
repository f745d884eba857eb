"""Single B-scans from pictures and one-frame DICOM files: in the store, in encoders, in labels and predictions."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from oct_dicom import make_dataset, save
from octjepa.canonical.single_bscan import bscan_range
from octjepa.embed.embedding import embed_store, select_volumes
from octjepa.encoders import load_encoder
from octjepa.errors import ContractError, UsageError
from octjepa.evaluate.labels import read_labels
from octjepa.ingest import IngestOptions, build_store
from octjepa.notes import read_notes
from octjepa.read.single_bscan import parse_image_spacing
from octjepa.recipe import Preprocessing
from octjepa.store import Store
from shaped_eye import shaped_eye

SLICES = 4
IMAGES = IngestOptions(bscan_slices=SLICES)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three people: a PNG and a JPEG of one eye, a 16-bit TIFF, and a DICOM file of one frame, with a manifest."""
    made = tmp_path_factory.mktemp("bscans")
    volumes = [shaped_eye("topcon_maestro2", seed=seed).volume for seed in range(3)]
    for name, volume, index in (("a/scan_1.png", 0, 10), ("a/scan_2.jpg", 0, 14), ("b/scan_1.tif", 1, 12)):
        pixels = volumes[volume].pixels[index]
        (made / name).parent.mkdir(exist_ok=True)
        values = pixels.astype(np.uint16) * 200 if name.endswith("tif") else pixels
        Image.fromarray(values).save(made / name)
    Image.fromarray((volumes[0].pixels[10] > 99).astype(np.uint8)).save(made / "a" / "scan_1_mask.png")
    ds = make_dataset(volumes[2].pixels[12:13], 0.1)
    ds.PatientID = "doctor-3"
    save(ds, made / "line.dcm")
    (made / "notes.txt").write_text("not a scan")
    rows = ["person_id\tfilepath", "p1\ta/scan_1.png", "p1\ta/scan_2.jpg", "p2\tb/scan_1.tif"]
    (made / "manifest.tsv").write_text("\n".join(rows) + "\n")
    return made


@pytest.fixture(scope="module")
def store(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Store:
    path = tmp_path_factory.mktemp("made") / "store"
    summary = build_store([folder], path, Preprocessing(), options=IMAGES)
    assert (summary.accepted, summary.quarantined, summary.people) == (4, 0, 3)
    assert summary.notes["spacing_assumed"] == 3
    assert summary.ignored[".png"] == 1  # the mask
    return Store.open(path)


def test_every_picture_is_an_entry_of_one_slice(store: Store) -> None:
    table = store.table.set_index("file")
    assert sorted(table.index) == ["a/scan_1.png", "a/scan_2.jpg", "b/scan_1.tif", "line.dcm"]
    assert set(table["pattern"]) == {"line"}
    assert set(table["native_d"]) == {1}
    assert list(table["person_id"]) == [{"a": "p1", "b": "p2"}.get(name[0], "doctor-3") for name in table.index]
    assert table.loc["line.dcm", "provenance_depth"] == "header"
    picture = table.loc["a/scan_1.png"]
    assert (picture["provenance_depth"], picture["uncertain"]) == ("assumed", "slice;depth;column")
    assert picture["native_h"] * picture["spacing_y_mm"] == pytest.approx(2.0)
    assert "spacing_assumed" in read_notes(picture["notes"])
    assert (table["enface_hash"] == "").all()
    slots = bscan_range(store.preprocessing, SLICES)
    assert slots == slice(8, 12)
    for volume_id in table["volume_id"]:
        volume = store.read(volume_id)
        assert volume.bscan_slices == SLICES
        filled = np.flatnonzero(volume.pixels.any(axis=(1, 2)))
        assert filled.tolist() == list(range(slots.start, slots.stop))
        assert (volume.pixels[filled] == volume.pixels[filled[0]]).all()
        assert np.flatnonzero((volume.band[0] >= 0).any(axis=1)).tolist() == filled.tolist()
        native = store.native_map(volume_id)
        there = native.to_canonical(np.array([[0.0, 40.0, 60.0]]))
        assert slots.start <= there[0, 0] < slots.stop
        assert np.allclose(native.to_native(there), [[0.0, 40.0, 60.0]])
        rows = np.array([[index, 40.0, 60.0] for index in range(store.preprocessing.stored_size[0])])
        is_inside = np.rint(native.to_native(rows)[:, 0]) == 0
        assert np.flatnonzero(is_inside).tolist() == filled.tolist()  # every slice that it fills is the B-scan


def test_a_bscan_has_the_pixels_of_its_volume_if_its_spacing_is_stated(folder: Path, tmp_path: Path) -> None:
    scan = shaped_eye("topcon_maestro2", seed=0).volume
    spacing = (0.1, *scan.spacing_mm[1:])
    build_store([folder / "a"], tmp_path / "store", Preprocessing(), spacing_mm=spacing, options=IMAGES)
    table = Store.open(tmp_path / "store").table.set_index("file")
    assert list(table.index) == ["scan_1.png", "scan_2.jpg"]
    assert set(table["provenance_column"]) == {"option"}
    assert table["spacing_x_mm"].iloc[0] == pytest.approx(spacing[2])
    pixels = Store.open(tmp_path / "store").read(table["volume_id"].iloc[0]).pixels[8].astype(float)
    whole = build_whole(scan, tmp_path)
    near = max(np.corrcoef(pixels.ravel(), plane.ravel())[0, 1] for plane in whole.astype(float))
    assert near > 0.8


def build_whole(scan: object, folder: Path) -> np.ndarray:
    """The canonical pixels of the whole volume."""
    from octjepa.canonical.pipeline import canonicalise

    return canonicalise(scan, Preprocessing()).volume.pixels  # type: ignore[arg-type]


def test_encoders_read_only_the_position_of_the_bscan(store: Store, tmp_path: Path) -> None:
    encoder = load_encoder("phantom-tiny")
    assert len(select_volumes(encoder, store)) == 4
    for volume_id in store.table["volume_id"]:
        tokens = encoder.encode_volumes([store.read(volume_id)])[0]
        slices = np.unravel_index(tokens.grid_index, tokens.grid)[0]
        assert set(slices.tolist()) == {2}
        assert len(slices) > 20
    made = embed_store("phantom-tiny", store, tmp_path / "out.parquet")
    assert made.rows == 4
    assert made.tokens_per_volume["most"] <= 16 * 16


def test_a_store_holds_either_volumes_or_bscans(store: Store, folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ContractError, match=r"holds single B-scans in 4 slices .* name another --store"):
        build_store([folder], store.path, Preprocessing())
    other = build_store([folder / "a"], tmp_path / "thin", Preprocessing(), options=IngestOptions(bscan_slices=2))
    assert other.accepted == 2
    with pytest.raises(ContractError, match="fill 2 slices each, and a patch of phantom-tiny spans 4"):
        select_volumes(load_encoder("phantom-tiny"), Store.open(tmp_path / "thin"))
    with pytest.raises(UsageError, match="read only from disks"):
        build_store(["gs://bucket/pictures"], tmp_path / "bucket", Preprocessing(), options=IMAGES)
    marker = tmp_path / "thin" / "store.json"
    content = json.loads(marker.read_text())
    marker.write_text(json.dumps({**content, "bscan_slices": 999}))
    with pytest.raises(UsageError, match="cannot be read as a store's contract"):
        Store.open(tmp_path / "thin")


def test_labels_name_each_picture(store: Store, tmp_path: Path) -> None:
    (tmp_path / "labels.tsv").write_text(
        "person_id\timage\tgrade\np1\tscan_1.png\tearly\np1\tscan_2.jpg\tlate\np2\tscan_1\tnone\n"
    )
    labels = read_labels(tmp_path / "labels.tsv", ["grade"])
    visits = dict(zip(store.table["file"], store.table["visit"], strict=True))
    found = {(person, visit): text for (person, _, visit), text in labels.visits["grade"].items()}
    assert found["p1", visits["a/scan_1.png"]] == "early"
    assert found["p1", visits["a/scan_2.jpg"]] == "late"
    assert found["p2", visits["b/scan_1.tif"]] == "none"


def test_what_is_not_a_bscan_has_its_reason(tmp_path: Path) -> None:
    volume = shaped_eye("topcon_maestro2", seed=1).volume
    save(make_dataset(volume.pixels, 0.1), tmp_path / "volume.dcm")
    (tmp_path / "cut.png").write_bytes(b"\x89PNG\r\n\x1a\n" + b"\0" * 40)
    Image.fromarray(np.random.default_rng(0).integers(0, 255, (200, 200), np.uint8)).save(tmp_path / "noise.png")
    Image.fromarray(volume.pixels[12]).save(tmp_path / "eye.png")
    summary = build_store([tmp_path], tmp_path / "store", Preprocessing(), max_lost=1.0, options=IMAGES)
    assert summary.accepted == 1
    reasons = {entry["file"]: entry["reason"] for entry in Store.open(tmp_path / "store").quarantine}
    assert reasons["volume.dcm"] == "unsupported_pixels"
    assert reasons["cut.png"] in ("frames_broken", "broken_header", "unsupported_pixels")
    assert reasons["noise.png"] in ("no_tissue", "not_retina")


def test_spacing_of_pictures_is_two_numbers() -> None:
    assert parse_image_spacing("0.004,0.012")[1:] == (0.004, 0.012)
    assert parse_image_spacing("file") == "file"
    with pytest.raises(UsageError, match="expected depth,column"):
        parse_image_spacing("0.1,0.004,0.012")
