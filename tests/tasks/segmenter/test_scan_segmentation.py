"""`octjepa segment SCAN...`: files, JSON, notes and refusals, on phantoms of four vendors and on a real eye."""

from __future__ import annotations

import csv
import errno
import os
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import pytest

from command_line import call, run
from index_entries import index_entry
from oct_dicom import make_dataset, retina, save
from octjepa.errors import UsageError
from octjepa.ingest.source_file import SourceFile
from octjepa.ingest.sources import discover
from octjepa.layers import CLASSES
from octjepa.notes import unique_notes
from octjepa.phantom import DEVICES, make_eye
from octjepa.phantom.dicom import write_eye
from octjepa.phantom.random_scene import BOUNDARY_SURFACES
from octjepa.read.orientation import VERTICAL_NOTE
from octjepa.read.reader import read_volume
from octjepa.report.segmented_scans import write_page
from octjepa.store.index import IndexEntry
from octjepa.tasks.labels.class_files import Forms, write_classes
from octjepa.tasks.labels.dicom_seg import read_segmentation, segment_property, write_segmentation
from octjepa.tasks.labels.label_files import LabelFolder, ScanNames, made_automatically
from octjepa.tasks.segmenter.fovea import find_centre
from octjepa.tasks.segmenter.inference import Segmentation
from octjepa.tasks.segmenter.measurement import Measurement, Preparation, measure
from octjepa.tasks.segmenter.scan_picture import scan_figure
from octjepa.tasks.segmenter.scan_segmentation import SegmentedScan, SegmentedScans, write_fluid, write_thickness
from octjepa.tasks.thickness import SECTORS
from octjepa.volume import OCTVolume

pytestmark = pytest.mark.timeout(400)


@pytest.fixture(scope="module")
def segmented(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, dict[str, Any]]:
    """Phantoms of four vendors and a damaged file through the command: (scans, results, JSON)."""
    scans, out = tmp_path_factory.mktemp("scans"), tmp_path_factory.mktemp("made") / "results"
    for number, device in enumerate(DEVICES):
        write_eye(scans / f"{device} {number}.dcm", make_eye(11, 41, "OD", device), 11)
    (scans / "broken.dcm").write_bytes(b"no scan")
    outcome = call("segment", scans, "--out", out, "--max-lost", 0.3, "--json", "--quiet")
    assert outcome.code == 0, outcome.err
    return scans, out, outcome.json


@pytest.mark.slow
def test_every_scan_gets_files_that_are_named_after_it(segmented: tuple[Path, Path, dict[str, Any]]) -> None:
    _, out, made = segmented
    names = [f"{device}_{number}" for number, device in enumerate(DEVICES)]
    assert sorted(one["scan"] for one in made["scans"]) == sorted(names)
    for one in made["scans"]:
        assert {"boundaries", "classes", "thickness", "fluid", "picture"} <= one["files"].keys()
        for path in one["files"].values():
            assert Path(path).name.startswith(one["scan"])
            assert Path(path).parent == out
            assert Path(path).stat().st_size > 0
        assert Path(one["files"]["picture"]).read_bytes().startswith(b"\x89PNG")
    assert [(one["scan"], one["reason"]) for one in made["refused"]] == [("broken.dcm", "not_dicom")]


@pytest.mark.slow
def test_thickness_is_that_of_the_phantom(segmented: tuple[Path, Path, dict[str, Any]]) -> None:
    _, _, made = segmented
    for one in made["scans"]:
        device = one["scan"].rsplit("_", 1)[0]
        eye = make_eye(11, 41, "OD", device)
        surfaces = eye.truth.surfaces_px[list(BOUNDARY_SURFACES)]
        true_um = (surfaces[7] - surfaces[0]) * eye.spacing_mm[1] * 1000
        values = [value for value in one["thickness_um"].values() if value is not None]
        assert set(one["thickness_um"]) == set(SECTORS)
        assert values
        assert np.mean(values) == pytest.approx(true_um.mean(), abs=40)
        with Path(one["files"]["thickness"]).open() as file:
            rows = [row for row in csv.DictReader(file) if row["layer"] == "retina"]
        assert {row["sector"]: float(row["thickness_um"]) if row["thickness_um"] else None for row in rows} == one[
            "thickness_um"
        ]
        assert all(row["thickness_um"] or row["note"] for row in rows)


@pytest.mark.slow
def test_labels_are_in_the_order_of_the_file(segmented: tuple[Path, Path, dict[str, Any]]) -> None:
    scans, _, made = segmented
    for one in made["scans"]:
        scan = next(path for path in scans.iterdir() if path.stem.replace(" ", "_") == one["scan"])
        volume = read_volume(scan)
        labels = np.asarray(nibabel.load(one["files"]["classes"]).dataobj).transpose(2, 1, 0)
        assert labels.shape == volume.shape
        boundaries = np.load(one["files"]["boundaries"])
        assert boundaries["rows"].shape == (8, volume.shape[0], volume.shape[2])
        assert boundaries["um"] == pytest.approx(boundaries["rows"] * 1000 * volume.spacing_mm[1], rel=1e-4)
        # The bright layers between EZ and Bruch's membrane, in the pixels as the file orders them.
        pixels = volume.pixels[::-1] if "frames_reversed" in volume.notes else volume.pixels
        depth = np.clip(boundaries["rows"][[6, 7]].mean(0).round().astype(int), 0, volume.shape[1] - 1)
        bright = np.take_along_axis(pixels, depth[:, None], 1)[:, 0].mean((1,))
        assert (bright > pixels.mean((1, 2))).all()
        if "dicom_seg" in one["files"]:
            assert np.array_equal(read_segmentation(Path(one["files"]["dicom_seg"]), volume.shape[0]).codes, labels)
        else:
            assert any("DICOM Segmentation" in note for note in one["notes"])


@pytest.mark.slow
def test_the_page_is_self_contained_and_lists_all(segmented: tuple[Path, Path, dict[str, Any]]) -> None:
    _, out, made = segmented
    page = Path(made["page"]).read_text()
    assert made["page"] == str(out / "index.html")
    assert page.count("data:image/png;base64,") == len(DEVICES)
    assert "http:" not in page  # base64 of a picture may hold the four letters
    assert "https:" not in page
    assert "<script" not in page
    for one in made["scans"]:
        assert f'alt="B-scan with layer boundaries and fluid, and thickness map, of {one["scan"]}"' in page
        for note in one["notes"]:
            assert note.replace("'", "&#39;") in page
    assert "not dicom" in page


def test_nothing_personal_is_written(tmp_path: Path) -> None:
    eye = make_eye(11, 41, "OS", "topcon_maestro2")
    ds = make_dataset(eye.pixels[::4], 0.3)
    assert str(ds.PatientName) == "Doe^Jane"
    save(ds, tmp_path / "in" / "jane_doe.dcm")
    outcome = call("segment", tmp_path / "in", "--out", tmp_path / "out", "--json", "--quiet")
    assert outcome.code == 0, outcome.err
    assert "doe" not in outcome.out.lower().replace("does", "")
    for path in (tmp_path / "out").iterdir():
        assert "doe" not in path.name.lower()
        content = path.read_bytes().lower()
        assert b"doe^jane" not in content
        assert b"jane_doe" not in content


def test_scans_with_masked_names_keep_their_results_if_others_are_added(tmp_path: Path) -> None:
    pixels = make_eye(11, 41, "OS", "topcon_maestro2").pixels[::4]
    crops = {"Aalto_Ida": 4, "Mueller_Anna": 8, "Schmidt_Karl": 12}
    for names, expected in ((("Schmidt_Karl",), ["xxx"]), (("Aalto_Ida", "Mueller_Anna"), ["xxx_2", "xxx_3", "xxx"])):
        for name in names:
            dataset = make_dataset(np.ascontiguousarray(pixels[:, :, crops[name] :]), 0.3)
            dataset.PatientName = name.replace("_", "^")
            save(dataset, tmp_path / "in" / f"{name}.dcm")
        outcome = call("segment", tmp_path / "in", "--out", tmp_path / "out", "--json", "--quiet")
        assert outcome.code == 0, outcome.err
        assert [one["scan"] for one in outcome.json["scans"]] == expected
    assert [one["position"] for one in outcome.json["scans"]] == ["file 1 of 3", "file 2 of 3", "file 3 of 3"]
    page = (tmp_path / "out" / "index.html").read_text()
    assert page.count("data:image/png;base64,") == 3
    assert "xxx (file 3 of 3)</h2>" in page.replace("<wbr>", "")


def test_results_of_another_scan_stay_and_results_are_not_read_as_scans(tmp_path: Path) -> None:
    scans, pixels = tmp_path / "my scans", make_eye(11, 41, "OS", "topcon_maestro2").pixels[::4]
    save(make_dataset(pixels, 0.3), scans / "patA" / "eye.dcm")
    save(make_dataset(np.ascontiguousarray(pixels[:, :, ::-1]), 0.3), tmp_path / "patB" / "eye.dcm")
    save(make_dataset(np.ascontiguousarray(pixels[::-1]), 0.3), tmp_path / "patC" / "third.dcm")
    for _ in range(2):  # the same command again
        outcome = call("segment", scans, "--out", scans, "--json", "--quiet")
        assert outcome.code == 0, outcome.err
        assert [one["scan"] for one in outcome.json["scans"]] == ["eye"]
    found = discover([scans])
    assert [file.name for file in found.files] == ["patA/eye.dcm"]
    assert found.ignored["folder with results of octjepa"] == 1
    boundaries = (scans / "eye_boundaries.npz").read_bytes()
    outcome = call(
        "segment", tmp_path / "patB", tmp_path / "patC", "--out", scans, "--json", "--quiet", "--max-lost", 0.6
    )
    assert outcome.code == 0, outcome.err
    assert [one["scan"] for one in outcome.json["scans"]] == ["third"]
    assert [one["reason"] for one in outcome.json["refused"]] == ["output_exists"]
    assert "results of another scan called eye" in outcome.json["refused"][0]["detail"]
    assert (scans / "eye_boundaries.npz").read_bytes() == boundaries
    page = (scans / "index.html").read_text()
    assert all(f"thickness map, of {name}" in page for name in ("third", "eye"))
    (tmp_path / "site").mkdir()
    (tmp_path / "site" / "index.html").write_text("the user's page")
    refused = call("segment", tmp_path / "patB", "--out", tmp_path / "site", "--quiet")
    assert refused.code == 2
    assert "site holds index.html, and octjepa has no record of writing it: choose another --out" in refused.err


@pytest.mark.parametrize(("forms", "expected"), [(("nifti",), ["x.nii.gz"]), (("dicom",), ["x.dcm"]), ((), [])])
def test_class_files_of_an_earlier_call_do_not_stay(forms: Forms, expected: list[str], tmp_path: Path) -> None:
    dataset = make_dataset(retina(6))
    dataset.StudyInstanceUID, dataset.SeriesInstanceUID, dataset.FrameOfReferenceUID = "1.2.3", "1.2.4", "1.2.5"
    (tmp_path / "out").mkdir()
    source = SourceFile(save(dataset, tmp_path / "scan.dcm"), "scan.dcm")
    volume = read_volume(source.path)
    codes = np.ones(volume.shape, np.uint8)
    assert write_classes(tmp_path / "out" / "x", codes, ("fluid",), volume, source, ("nifti", "dicom")).notes == ()
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["x.dcm", "x.nii.gz"]
    write_classes(tmp_path / "out" / "x", codes, ("fluid",), volume, source, forms)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == expected


@pytest.mark.skipif(find_spec("highdicom") is None, reason="needs highdicom")
def test_a_dicom_segmentation_of_a_scan_with_a_localizer_is_refused_as_labels(tmp_path: Path) -> None:
    dataset = make_dataset(retina(7))
    dataset.StudyInstanceUID, dataset.SeriesInstanceUID = "1.2.3", "1.2.4"
    dataset.PerFrameFunctionalGroupsSequence[0].FrameType = ["ORIGINAL", "PRIMARY", "LOCALIZER"]
    scan = save(dataset, tmp_path / "scan.dcm")
    volume = read_volume(scan)
    codes = np.zeros((7, *volume.shape[1:]), np.uint8)  # by the frames of the file
    codes[3] = 1
    labels = tmp_path / "labels"
    labels.mkdir()
    write_segmentation(labels / "seg.dcm", codes, ("fluid",), volume.spacing_mm, scan)
    folder = LabelFolder(labels)
    file = folder.file_for(ScanNames(volume.sop_instance_uid, "scan.dcm", ""))
    assert file is not None
    folder.check_frames(file, ())
    with pytest.raises(UsageError, match=r"seg\.dcm references frames .* one of these is a localizer"):
        folder.check_frames(file, volume.notes)


def test_classes_of_a_scan_with_a_localizer_are_written_in_the_order_of_the_reader(tmp_path: Path) -> None:
    dataset = make_dataset(retina(7))
    dataset.PerFrameFunctionalGroupsSequence[0].FrameType = ["ORIGINAL", "PRIMARY", "LOCALIZER"]
    source = SourceFile(save(dataset, tmp_path / "scan.dcm"), "scan.dcm")
    volume = read_volume(source.path)
    codes = np.zeros(volume.shape, np.uint8)
    codes[1] = 1
    made = write_classes(tmp_path / "x", codes, ("fluid",), volume, source, ("nifti", "dicom"))
    assert made.dicom is None
    assert len(made.notes) == 1
    assert "its frames cannot be referenced (frames were left out" in made.notes[0]
    written = np.asarray(nibabel.load(tmp_path / "x.nii.gz").dataobj).transpose(2, 1, 0)
    assert (written == codes).all()


@pytest.mark.parametrize(
    "notes", [(), ("frames_reversed",), ("columns_mirrored=6",), ("frames_reversed", "columns_mirrored=6")]
)
def test_a_voxel_has_one_position_in_space_in_every_order_of_the_file(notes: tuple[str, ...], tmp_path: Path) -> None:
    volume = replace(read_volume(save(make_dataset(retina(6)), tmp_path / "scan.dcm")), notes=unique_notes(notes))
    codes = np.zeros(volume.shape, np.uint8)
    codes[1, 2, 3] = 1
    source = SourceFile(tmp_path / "scan.dcm", "scan.dcm")
    write_classes(tmp_path / "x", codes, ("fluid",), volume, source, ("nifti",))
    image = nibabel.load(tmp_path / "x.nii.gz")
    (voxel,) = np.argwhere(np.asarray(image.dataobj) == 1)
    dz, dy, dx = volume.spacing_mm
    assert (image.affine @ [*voxel, 1])[:3] == pytest.approx([-3 * dx, -2 * dy, 1 * dz], abs=1e-5)


def test_a_folder_without_permission_is_refused_as_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tests may run as root, whom no mode of a folder stops, so the system calls are replaced."""
    locked = tmp_path / "locked"
    locked.mkdir()
    stat, scandir = os.stat, os.scandir

    def refuse(call: Callable[..., Any], inside: bool) -> Callable[..., Any]:
        def wrapped(path: Any = ".", *arguments: Any, **options: Any) -> Any:
            if not isinstance(path, int) and (locked in Path(path).parents or (not inside and Path(path) == locked)):
                raise PermissionError(errno.EACCES, "Permission denied", str(path))
            return call(path, *arguments, **options)

        return wrapped

    monkeypatch.setattr(os, "stat", refuse(stat, inside=True))
    monkeypatch.setattr(os, "scandir", refuse(scandir, inside=False))
    outcome = call("segment", locked, "--out", tmp_path / "out")
    assert outcome.code == 2
    assert f"no OCT scan in {locked}" in outcome.err
    assert "1 unreadable_folder" in outcome.err
    assert "locked/" not in outcome.err


@pytest.mark.slow
def test_what_is_neither_scan_nor_recipe_is_named(tmp_path: Path) -> None:
    nothing = run("segment", tmp_path / "none.dcm", "--out", tmp_path / "out")
    assert nothing.code == 2
    assert "no file or folder at" in nothing.err
    assert "segment_linear" in nothing.err
    (tmp_path / "only.dcm").write_bytes(b"no scan")
    refused = call("segment", tmp_path / "only.dcm", "--out", tmp_path / "out", "--json", "--quiet")
    assert refused.code == 2
    assert refused.json["scans"] == []
    assert refused.json["refused"][0]["reason"] == "not_dicom"
    beside = call("segment", tmp_path / "only.dcm", "--out", tmp_path)
    assert beside.code == 2
    assert not (tmp_path / "index.html").exists()


@pytest.mark.slow
def test_noise_is_refused_and_too_many_refused_scans_are_an_exit_code(tmp_path: Path) -> None:
    eye = make_eye(11, 41, "OD", "zeiss_cirrus")
    write_eye(tmp_path / "in.dcm", eye, 11)
    noise = np.random.default_rng(3).integers(0, 255, (8, 200, 120), np.uint8)
    save(make_dataset(noise, 0.1), tmp_path / "noise.dcm")
    outcome = call(
        "segment", tmp_path / "in.dcm", tmp_path / "noise.dcm", "--out", tmp_path / "out", "--json", "--quiet"
    )
    assert outcome.code == 3
    assert [one["scan"] for one in outcome.json["scans"]] == ["in"]
    assert outcome.json["refused"][0]["scan"] == "noise.dcm"


def _flat(slices: int, pitch_mm: float, **changes: Any) -> tuple[OCTVolume, Segmentation]:
    """A scan with a pit 1 mm right of its middle, on which no network is needed."""
    columns, spacing = 300, (pitch_mm, 0.004, 0.02)
    v = (np.arange(slices) - (slices - 1) / 2) * pitch_mm
    u = (np.arange(columns) - (columns - 1) / 2) * 0.02
    radius = np.hypot(v[:, None], u[None] - 1.0)
    thickness_px = (300 - 120 * np.exp(-((radius / 0.5) ** 2))) / 4
    shares = np.linspace(0, 1, 8)[:, None, None]
    boundaries = (100 + (1 - thickness_px / 75) * 75 + shares * thickness_px).astype(np.float32)
    shape = (slices, 250, columns)
    pixels = np.random.default_rng(1).integers(0, 255, shape, np.uint8)
    fields: dict[str, Any] = {
        "pixels": pixels,
        "spacing_mm": spacing,
        "provenance": {"slice": "positions"},
        "person_id": "p",
        "device": "zeiss_cirrus",
        "laterality": "OD",
    }
    classes = np.zeros(shape, np.uint8)
    classes[:, 120:130, 100:110] = 1
    found = Segmentation(
        boundaries,
        np.full(boundaries.shape, 4, np.float32),
        classes,
        np.zeros(shape, np.float16),
        np.ones(shape, np.float16),
        spacing,
    )
    return OCTVolume(**(fields | changes)), found


def _measured(slices: int, pitch_mm: float, **changes: Any) -> Measurement:
    return measure(*_flat(slices, pitch_mm, **changes), Preparation(0.8))


def test_the_grid_is_centred_on_the_pit() -> None:
    made = _measured(61, 0.1)
    assert made.centre.kind == "fovea"
    assert made.centre.certainty > 0.9
    assert made.centre.column_mm == pytest.approx(149.5 * 0.02 + 1.0, abs=0.1)
    assert made.centre.slice_mm == pytest.approx(3.0, abs=0.1)
    assert made.etdrs_um[0, 0] < 245
    assert not made.notes
    nasal = SECTORS.index("outer_nasal")  # the pit is 1 mm nasal of the middle of a field of 6 mm
    assert "of the sector" in made.sector_notes[nasal]
    flat = np.full((61, 300), 300.0)
    without = find_centre(flat, flat, made.slice_mm, made.column_mm)
    assert (without.kind, without.certainty) == ("scan", 0.0)
    # Above subretinal fluid the whole retina has no pit, and the inner layers have one.
    raised = find_centre(flat, made.layers_um[0].astype(float), made.slice_mm, made.column_mm)
    assert (raised.kind, raised.column_mm) == ("fovea", made.centre.column_mm)


@pytest.mark.parametrize(("shift_mm", "kind"), [(0.5, "fovea"), (0.8, "scan"), (1.1, "scan")])
def test_a_fovea_beyond_the_search_is_not_placed_on_its_border(shift_mm: float, kind: str) -> None:
    """The pit lies 1 mm right of the middle; the scan is cropped so that it lies further right."""
    made = _measured(61, 0.1)
    retina, crop = made.layers_um[0].astype(float), round(2 * shift_mm / 0.02)
    cropped, column_mm = retina[:, : retina.shape[1] - crop], made.column_mm[: len(made.column_mm) - crop]
    assert find_centre(cropped, cropped, made.slice_mm, column_mm).kind == kind
    # The edge of the field runs past the pit, which is not in the scan.
    outside = made.column_mm < made.centre.column_mm - 0.3
    beyond = find_centre(retina[:, outside], retina[:, outside], made.slice_mm, made.column_mm[outside])
    assert beyond.kind == "scan"


@pytest.mark.parametrize(
    ("protocol", "region", "kind"),
    [
        ("cirrus disc oct", "Optic Disc", "scan"),
        ("", "Optic Disc, 6 x 6", "scan"),
        ("macula and disc", "", "fovea"),
        ("", "Macula", "fovea"),
    ],
)
def test_a_scan_of_the_optic_disc_has_no_fovea(protocol: str, region: str, kind: str) -> None:
    """The excavation of a disc is thinner than its rim, as the fovea is thinner than the retina around it."""
    made = _measured(61, 0.1, protocol=protocol, region=region)
    assert made.centre.kind == kind
    assert any("optic disc has no fovea" in note for note in made.notes) == (kind == "scan")
    assert not any("no foveal pit" in note for note in made.notes)


def test_volumes_are_the_areas_of_a_class_times_the_width_of_its_b_scans() -> None:
    made = _measured(61, 0.1)
    assert made.fluid_mm3["intraretinal_fluid"] == pytest.approx(61 * 0.1 * 10 * 0.004 * 10 * 0.02, rel=1e-5)
    uneven = _measured(4, 0.1, slice_positions_mm=np.array([0.0, 0.1, 0.2, 0.5]))
    assert uneven.fluid_mm3["intraretinal_fluid"] == pytest.approx((0.1 + 0.1 + 0.2 + 0.3) * 0.008, rel=1e-5)


@pytest.mark.parametrize(
    ("slices", "pitch_mm", "changes", "words"),
    [
        (7, 0.8, {}, "sparse raster"),
        (61, 0.1, {"uncertain": ("slice",)}, "slice spacing is uncertain"),
        (61, 0.1, {"laterality": None}, "right or left eye is not known"),
        (61, 0.1, {"provenance": {"slice": "header"}}, "does not state the direction"),
        (24, 0.1, {"pattern": "radial"}, "radial scan"),
        (61, 0.1, {"pattern": "unknown"}, "pattern is not known"),
        (61, 0.1, {"protocol": "optic disc cube"}, "optic disc"),
        (20, 0.4, {}, "0.40 mm apart"),
    ],
)
def test_notes_about_the_scan(slices: int, pitch_mm: float, changes: dict[str, Any], words: str) -> None:
    assert any(words in note for note in _measured(slices, pitch_mm, **changes).notes)


def test_a_blank_part_is_not_called_cut_off() -> None:
    """The network's boundaries in blank A-scans lie anywhere, also at the edge."""
    volume, found = _flat(61, 0.1)
    pixels, rows = volume.pixels.copy(), found.boundaries_px.copy()
    pixels[:, :, :90], rows[0, :, :90] = 0, 0
    made = measure(replace(volume, pixels=pixels), replace(found, boundaries_px=rows), Preparation(0.8))
    assert any("30% of the A-scans are blank" in note for note in made.notes)
    assert not any("cut off" in note for note in made.notes)


def test_the_page_names_the_network_of_each_scan(tmp_path: Path) -> None:
    volume, found = _flat(61, 0.1)
    picture = tmp_path / "eye.png"
    picture.write_bytes(b"")
    scan = SegmentedScan.of("eye", volume, measure(volume, found, Preparation(0.8)), {"picture": str(picture)})
    scan = replace(scan, made_by=made_automatically(is_adapted=True))
    page = write_page(SegmentedScans([scan]), tmp_path).read_text()
    assert f"Segmentation {made_automatically(is_adapted=True)}" in page
    assert "The packaged network was trained on synthetic eyes only" in page


def test_tables_hold_the_notes_that_concern_their_values(tmp_path: Path) -> None:
    volume, found = _flat(61, 0.1, provenance={"slice": "header"}, uncertain=("depth",))
    blind = found.expected_error_um.copy()
    blind[7, :, :150] = 90
    made = measure(volume, replace(found, expected_error_um=blind), Preparation(0.8, unique_notes(["blank_frames=1"])))
    scan = SegmentedScan.of("eye", volume, made, {}, ["no DICOM Segmentation: no class was found"])
    tables = (write_thickness(tmp_path / "thickness.csv", scan, made), write_fluid(tmp_path / "fluid.csv", scan))
    common = ("depth spacing", "50% of the A-scans", "1 B-scan is blank")
    for path, words in zip(tables, ((*common, "inferior one"), common), strict=True):
        with path.open() as file:
            notes = [row["note"] for row in csv.DictReader(file)]
        assert notes
        assert all(word in note for note in notes for word in words)
        assert not any("DICOM" in note for note in notes)
    assert not any("inferior" in note for note in notes)  # of the fluid, whose volume needs no direction


def test_a_radial_scan_has_neither_sectors_nor_volumes() -> None:
    made = _measured(24, 0.1, pattern="radial")
    assert np.isnan(made.etdrs_um).all()
    assert set(made.fluid_mm3.values()) == {None}


def test_the_picture_of_a_vertical_scan_names_no_side() -> None:
    """Its columns run up or down, so neither superior nor nasal is a side of the map."""

    def labels(**changes: Any) -> str:
        volume, found = _flat(61, 0.1, **changes)
        figure = scan_figure("eye", volume, found, measure(volume, found, Preparation(0.8)))
        return " ".join(f"{panel.get_title()} {panel.get_ylabel()}" for panel in figure.axes)

    assert "right eye, nasal is right" in labels()
    assert "superior up" in labels()
    vertical = labels(notes=unique_notes([VERTICAL_NOTE]))
    assert "B-scans run up or down" in vertical
    assert "nasal" not in vertical
    assert "superior" not in vertical


def test_the_picture_names_the_b_scan_in_the_file_if_the_reader_reversed_them() -> None:
    def title(*notes: str) -> str:
        volume, found = _flat(60, 0.1, notes=unique_notes(notes))
        return str(scan_figure("eye", volume, found, measure(volume, found, Preparation(0.8))).axes[0].get_title())

    number = int(title().removeprefix("B-scan ").partition(" ")[0])
    assert title() == f"B-scan {number} of 60, through the fovea"
    assert title("frames_reversed") == f"B-scan {number} of 60 (number {61 - number} in the file), through the fovea"


def test_material_below_the_rpe_is_not_coded_as_retina_in_a_dicom_segmentation() -> None:
    meanings = {name: tuple(code[2] for code in segment_property(name)) for name in (*CLASSES[1:], "rpe")}
    assert meanings == {
        "intraretinal_fluid": ("Body Substance", "Body fluid"),
        "subretinal_fluid": ("Body Substance", "Body fluid"),
        "sub_rpe": ("Morphologically Abnormal Structure", "Morphologically Abnormal Structure"),
        "rpe": ("Anatomical Structure", "Retina"),
    }


def test_notes_about_the_result() -> None:
    volume, found = _flat(61, 0.1)

    def notes(preparation: Preparation = Preparation(0.8), **changes: Any) -> str:  # noqa: B008
        return " ".join(measure(volume, replace(found, **changes), preparation).notes)

    assert "low image quality" in notes(Preparation(0.1))
    of_store = [IndexEntry(**index_entry(0, quality=quality)) for quality in (0.0, np.nan)]
    assert "low image quality (0.00 of 1)" in notes(Preparation.of_entry(of_store[0]))
    assert "quality" not in notes(Preparation.of_entry(of_store[1]))
    assert "hardly recognised" in notes(Preparation(0.8, unique_notes(["retina_doubtful"])))
    assert "low confidence" in notes(expected_error_um=np.full_like(found.expected_error_um, 20))
    assert "hardly recognised" in notes(expected_error_um=np.full_like(found.expected_error_um, 20))
    assert "hardly recognised" not in notes(expected_error_um=np.full_like(found.expected_error_um, 18))
    assert "cut off" in notes(boundaries_px=found.boundaries_px - 110)
    thick = found.boundaries_px.copy()
    thick[0] = 5
    thick[1:] += 70
    assert "outside the training range" in notes(boundaries_px=thick)
    lake = found.classes.copy()
    lake[30, 110:170] = 1
    assert "more intraretinal fluid" in notes(classes=lake)
    nerve = found.boundaries_px.copy()
    nerve[1:7, :, :40] = nerve[0, :, :40] + 40
    assert "nerve fibre layer is thicker" in notes(boundaries_px=nerve)
    blind = found.expected_error_um.copy()
    blind[7, :, :150] = 90
    made = measure(volume, replace(found, expected_error_um=blind), Preparation(0.8))
    assert made.fluid_mm3["intraretinal_fluid"] == 0  # it lies in A-scans that are not measured
    assert any("neither thickness nor fluid" in note for note in made.notes)


@pytest.mark.slow
def test_a_real_eye(real_scans: Path, tmp_path: Path) -> None:
    scan = real_scans / "duke_dme_eye04_11x496x768.dcm"
    if not scan.is_file():
        pytest.skip("the eye is not there")
    outcome = call("segment", scan, "--out", tmp_path / "out", "--json", "--quiet")
    assert outcome.code == 0, outcome.err
    (one,) = outcome.json["scans"]
    assert 420 < one["thickness_um"]["central"] < 510  # graders' layers: 473
    assert one["fluid_mm3"]["intraretinal_fluid"] > 0.1
    assert any("slice spacing is uncertain" in note for note in one["notes"])
    assert one["thickness_um"]["outer_superior"] is None
