"""`octjepa convert`: what is read back is what was converted, to the bit; what a format cannot hold is refused."""

from __future__ import annotations

import json
import sys
import zlib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pydicom
import pytest

from command_line import Outcome, call
from oct_dicom import make_dataset, retina, save
from octjepa.convert.arrays import write_zarr
from octjepa.convert.description import NotPreserved
from octjepa.convert.dicom import write_dicom
from octjepa.convert.scans import ENDINGS
from octjepa.errors import OctjepaError, VolumeRejected
from octjepa.ingest.sources import discover
from octjepa.phantom import DEVICES, make_eye
from octjepa.phantom.dicom import write_eye
from octjepa.read.orientation import has_slice_direction
from octjepa.read.reader import read_volume
from octjepa.tasks.nifti import write_nifti
from octjepa.volume import OCTVolume

FORMS = sorted(ENDINGS)


def convert(*words: object) -> Outcome:
    return call("convert", *words, "--quiet", "--json")


@pytest.fixture(scope="module")
def scans(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An eye of each of four devices, in the coding of its vendor."""
    folder = tmp_path_factory.mktemp("scans")
    for number, device in enumerate(DEVICES):
        write_eye(folder / f"{device}.dcm", make_eye(5, 40 + number, ("OD", "OS")[number % 2], device), 5)
    return folder


def assert_same(written: OCTVolume, source: OCTVolume) -> None:
    assert np.array_equal(written.pixels, source.pixels)
    assert written.content_hash == source.content_hash
    assert written.spacing_mm == pytest.approx(source.spacing_mm, rel=1e-5)
    for name in ("laterality", "pattern", "device", "person_id", "protocol"):
        assert getattr(written, name) == getattr(source, name), name


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_what_is_read_back_is_what_was_converted(form: str, scans: Path, tmp_path: Path) -> None:
    made = convert(scans, "--to", form, "--out", tmp_path)
    assert made.code == 0, made.err
    assert [one["scan"] for one in made.json["scans"]] == sorted(DEVICES)
    assert made.json["files"] == [one["file"] for one in made.json["scans"]]
    for one in made.json["scans"]:
        source = read_volume(scans / f"{one['scan']}.dcm")
        written = read_volume(one["file"])
        assert one["file"].endswith(ENDINGS[form])
        assert_same(written, source)
        if form != "dicom":  # a JSON file holds what these formats cannot
            assert (written.uncertain, written.region) == (source.uncertain, source.region)
            assert "sidecar_keys_left" not in " ".join(written.notes)


@pytest.mark.data
@pytest.mark.parametrize("form", FORMS)
def test_a_real_eye(form: str, real_scans: Path, tmp_path: Path) -> None:
    source = real_scans / "duke_dme_eye01_11x496x768.dcm"
    if not source.is_file():
        pytest.skip(f"no {source.name}")
    made = convert(source, "--to", form, "--out", tmp_path)
    assert made.code == 0, made.err
    assert_same(read_volume(made.json["scans"][0]["file"]), read_volume(source))


def test_uneven_positions_stay_in_dicom_and_are_noted_elsewhere(tmp_path: Path) -> None:
    dataset = make_dataset(retina(12))
    for number, group in enumerate(dataset.PerFrameFunctionalGroupsSequence):
        group.PlanePositionSequence[0].ImagePositionPatient = [0, 0.05 * number + 0.02 * (number > 6), 0]
    (tmp_path / "in").mkdir()
    path = save(dataset, tmp_path / "in" / "uneven.dcm")
    source = read_volume(path)
    assert source.slice_positions_mm is not None
    assert convert(path, "--to", "dicom", "--out", tmp_path / "dicom").code == 0
    written = read_volume(tmp_path / "dicom" / "uneven.dcm")
    assert written.slice_positions_mm == pytest.approx(source.slice_positions_mm)
    made = convert(path, "--to", "nifti", "--out", tmp_path / "nifti").json["scans"][0]
    assert any("not evenly spaced" in note for note in made["notes"])
    stated = json.loads((tmp_path / "nifti" / "uneven.json").read_text())
    assert stated["converted"]["slice_positions_mm"] == pytest.approx(list(source.slice_positions_mm))
    assert stated["converted"]["spacing_from"]["slice"] == "positions"


def test_an_unknown_direction_stays_unknown_in_dicom(tmp_path: Path) -> None:
    (tmp_path / "in").mkdir()
    write_nifti(tmp_path / "in" / "scan.nii.gz", retina(12), (0.05, 0.0026, 0.0117))
    assert convert(tmp_path / "in", "--to", "dicom", "--out", tmp_path / "out").code == 0
    (written,) = (tmp_path / "out").rglob("*.dcm")
    assert not has_slice_direction(read_volume(written))


@pytest.mark.parametrize("form", FORMS)
def test_nothing_personal_is_written(form: str, tmp_path: Path) -> None:
    dataset = make_dataset(retina())
    dataset.PatientID = "Doe Jane 19500101"
    dataset.InstitutionName, dataset.OperatorsName = "Hospital of Springfield", "Roe^Richard"
    (tmp_path / "in").mkdir()
    save(dataset, tmp_path / "in" / "Doe_Jane_OD.dcm")
    assert convert(tmp_path / "in", "--to", form, "--out", tmp_path / "out").code == 0
    files = sorted(path for path in (tmp_path / "out").rglob("*") if path.is_file() and path.suffix != ".lock")
    assert len(files) >= 2
    for path in files:
        text = f"{path} ".encode() + path.read_bytes()
        for secret in (b"Doe", b"Jane", b"19500101", b"Springfield", b"Roe", dataset.SOPInstanceUID.encode()):
            assert secret not in text, (path.name, secret)


def test_a_dicom_file_holds_no_patient_and_says_where_it_comes_from(scans: Path, tmp_path: Path) -> None:
    convert(scans / "topcon_triton.dcm", "--to", "dicom", "--out", tmp_path)
    written, source = (pydicom.dcmread(folder / "topcon_triton.dcm") for folder in (tmp_path, scans))
    assert not any(written[name].value for name in ("PatientName", "PatientBirthDate", "PatientSex", "StudyDate"))
    uids = ("SOPInstanceUID", "StudyInstanceUID", "SeriesInstanceUID", "FrameOfReferenceUID")
    assert not {written[name].value for name in uids} & {source[name].value for name in uids}
    assert "from dicom; spacing: slice from" in written.DerivationDescription
    assert "Topcon" in written.Manufacturer


def test_a_radial_scan_is_refused_for_dicom_only(scans: Path, tmp_path: Path) -> None:
    source = replace(read_volume(scans / "topcon_triton.dcm"), pattern="radial")
    with pytest.raises(NotPreserved, match="radial scan"):
        write_dicom(tmp_path / "radial.dcm", source)
    pixels = source.pixels
    np.save(tmp_path / "star.npy", pixels)
    (tmp_path / "star.json").write_text(
        json.dumps({"spacing_mm": source.spacing_mm, "pattern": "radial", "laterality": "OS"})
    )
    assert convert(tmp_path / "star.npy", "--to", "tiff", "--out", tmp_path / "tiff").code == 0
    assert read_volume(tmp_path / "tiff" / "star.tif").pattern == "radial"
    refused = convert(tmp_path / "star.npy", "--to", "dicom", "--out", tmp_path / "dicom")
    assert refused.code == 2
    assert refused.json["refused"][0]["reason"] == "not_preserved"
    assert "radial" in refused.json["refused"][0]["detail"]
    assert not list((tmp_path / "dicom").glob("star*"))


def test_a_file_that_reads_differently_is_deleted(scans: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from octjepa.convert import scans as module

    def with_a_wrong_voxel(path: Path, values: np.ndarray, spacing_mm: tuple[float, float, float]) -> None:
        values = values.copy()
        values[3, 7, 5] ^= 1
        write_tiff(path, values, spacing_mm)

    write_tiff = module.write_tiff
    monkeypatch.setattr(module, "write_tiff", with_a_wrong_voxel)
    made = convert(scans / "zeiss_cirrus.dcm", "--to", "tiff", "--out", tmp_path)
    assert made.code == 2
    assert "other pixels" in made.json["refused"][0]["detail"]
    assert not list(tmp_path.glob("zeiss*"))


def test_an_unknown_eye_and_a_stated_spacing_stay_so(tmp_path: Path) -> None:
    np.save(tmp_path / "cube.npy", retina(16, 96, 80))
    made = convert(tmp_path / "cube.npy", "--to", "nifti", "--out", tmp_path / "out", "--spacing", "0.2,0.01,0.03")
    assert made.code == 0, made.out + made.err
    written = read_volume(tmp_path / "out" / "cube.nii.gz")
    assert written.spacing_mm == pytest.approx((0.2, 0.01, 0.03))
    assert written.laterality is None
    notes = made.json["scans"][0]["notes"]
    assert any("does not state the direction" in note for note in notes)


def test_a_folder_that_names_an_eye_is_named_as_the_cause(tmp_path: Path) -> None:
    np.save(tmp_path / "cube.npy", retina(16, 96, 80))
    made = convert(tmp_path / "cube.npy", "--to", "nifti", "--out", tmp_path / "left", "--spacing", "0.2,0.01,0.03")
    (refused,) = made.json["refused"]
    assert "the eye OS by its path in place of unknown" in refused["detail"]
    assert "another folder with --out" in refused["to_do"]
    assert not list((tmp_path / "left").glob("cube*"))


def test_ids_and_protocols_in_any_script_stay_apart(tmp_path: Path) -> None:
    for person, pixels in (("病人7", retina()), ("患者7", retina()[:, :, ::-1])):
        np.save(tmp_path / f"{person}.npy", pixels)
        stated = {"person_id": person, "protocol": "黄斑", "laterality": "OD", "spacing_mm": [0.12, 0.0039, 0.0117]}
        (tmp_path / f"{person}.json").write_text(json.dumps(stated))
    made = convert(tmp_path / "*.npy", "--to", "dicom", "--out", tmp_path / "out")
    assert made.code == 0, made.out + made.err
    written = [read_volume(one["file"]) for one in made.json["scans"]]
    assert {(one.person_id, one.protocol) for one in written} == {("病人7", "黄斑"), ("患者7", "黄斑")}


def test_a_file_that_reads_as_another_person_is_refused(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", retina())
    stated = {"person_id": "P" * 65, "spacing_mm": [0.12, 0.0039, 0.0117]}  # longer than DICOM's texts
    (tmp_path / "a.json").write_text(json.dumps(stated))
    made = convert(tmp_path / "a.npy", "--to", "dicom", "--out", tmp_path / "out")
    assert "another person id" in made.json["refused"][0]["detail"]


def test_a_long_protocol_is_cut_in_dicom_and_whole_beside_it(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", retina())
    stated = {"person_id": "7", "protocol": "macula " * 12 + "end", "spacing_mm": [0.12, 0.0039, 0.0117]}
    (tmp_path / "a.json").write_text(json.dumps(stated))
    made = convert(tmp_path / "a.npy", "--to", "dicom", "--out", tmp_path / "out")
    assert made.code == 0, made.out + made.err
    assert json.loads((tmp_path / "out" / "a.json").read_text())["protocol"] == stated["protocol"]


def test_refused_scans_and_wrong_folders(scans: Path, tmp_path: Path) -> None:
    (tmp_path / "broken.dcm").write_bytes(b"no scan")
    made = convert(tmp_path, scans / "zeiss_cirrus.dcm", "--to", "tiff", "--out", tmp_path / "out")
    assert made.code == 3
    assert [(one["scan"], one["reason"]) for one in made.json["refused"]] == [("broken.dcm", "not_dicom")]
    beside = call("convert", scans / "zeiss_cirrus.dcm", "--to", "dicom", "--out", scans)
    assert beside.code == 2
    assert "holds scans" in beside.err
    (tmp_path / "conv").mkdir()
    (tmp_path / "conv" / "layers").symlink_to(scans)  # the layers of a scan would replace it
    inside = call("convert", scans, "--to", "dicom", "--out", tmp_path / "conv", "--layers")
    assert inside.code == 2
    assert "holds scans" in inside.err


def write_two_people(folder: Path) -> tuple[Path, Path]:
    """Scans of two people with the same file name, in a folder for each."""
    for person in ("patA", "patB"):
        (folder / person).mkdir()
    pixels = retina()
    return save(make_dataset(pixels), folder / "patA" / "eye.dcm"), save(
        make_dataset(np.ascontiguousarray(pixels[:, :, ::-1])), folder / "patB" / "eye.dcm"
    )


def test_only_conversions_of_the_same_scan_are_replaced(tmp_path: Path) -> None:
    scan, other = write_two_people(tmp_path)
    original = other.read_bytes()
    refused = convert(scan, "--to", "dicom", "--out", other.parent)
    assert refused.code == 2
    (entry,) = refused.json["refused"]
    assert entry["reason"] == "output_exists"
    assert "holds eye.dcm, and octjepa has no record of writing it" in entry["detail"]
    assert "--out" in entry["to_do"]
    assert other.read_bytes() == original
    assert not (other.parent / "eye.json").exists()
    (other.parent / "eye.json").write_text("{}")  # stated for the user's own scan
    assert convert(scan, "--to", "tiff", "--out", other.parent).code == 2
    assert (other.parent / "eye.json").read_text() == "{}"
    for form in FORMS:
        for _ in range(2):  # the same command again
            assert convert(scan, "--to", form, "--out", tmp_path / "out").code == 0
        refused = convert(other, "--to", form, "--out", tmp_path / "out")
        assert refused.code == 2
        assert "results of another scan called eye" in refused.json["refused"][0]["detail"]
        assert np.array_equal(read_volume(tmp_path / "out" / f"eye{ENDINGS[form]}").pixels, read_volume(scan).pixels)


def stated_cube(folder: Path, protocol: str) -> Path:
    """An array whose JSON file states all that an array cannot hold."""
    folder.mkdir(exist_ok=True)
    np.save(folder / "b.npy", retina())
    facts = {"spacing_mm": [0.12, 0.0039, 0.0117], "laterality": "OD", "device": "Topcon Maestro2"}
    (folder / "b.json").write_text(json.dumps({**facts, "person_id": "7", "protocol": protocol, "region": "Macula"}))
    return folder / "b.npy"


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.name.startswith("b.")}


def test_formats_in_one_folder_share_a_json_file_that_none_of_them_changes(tmp_path: Path) -> None:
    scan, out = stated_cube(tmp_path / "in", "macula"), tmp_path / "out"
    for form in ("nifti", "dicom", "tiff"):
        assert convert(scan, "--to", form, "--out", out).code == 0
    before = contents(out)
    assert sorted(before) == ["b.dcm", "b.json", "b.nii.gz", "b.tif"]
    assert json.loads(before["b.json"])["axes"] == "slice,depth,column"
    refused = convert(scan, "--to", "tiff", "--out", out, "--spacing", "0.3,0.005,0.02")
    assert refused.code == 2
    (entry,) = refused.json["refused"]
    assert entry["reason"] == "output_exists"
    assert "holds b.json, which belongs to b.nii.gz and states other facts" in entry["detail"]
    assert contents(out) == before
    for form in ("dicom", "tiff"):
        (out / f"b{ENDINGS[form]}").unlink()
    assert convert(scan, "--to", "nifti", "--out", out, "--spacing", "0.3,0.005,0.02").code == 0  # it is its own
    assert read_volume(out / "b.nii.gz").spacing_mm == pytest.approx((0.3, 0.005, 0.02))


def test_the_json_file_of_an_earlier_version_is_completed(tmp_path: Path) -> None:
    scan, out = stated_cube(tmp_path / "in", "macula"), tmp_path / "out"
    assert convert(scan, "--to", "dicom", "--out", out).code == 0
    stated = json.loads((out / "b.json").read_text())
    del stated["axes"]
    stated["converted"]["by"] = "octjepa 0.1"
    (out / "b.json").write_text(json.dumps(stated))
    assert convert(scan, "--to", "nifti", "--out", out).code == 0
    assert json.loads((out / "b.json").read_text())["axes"] == "slice,depth,column"


@pytest.mark.parametrize("form", ["dicom", "zarr"])
@pytest.mark.parametrize("failure", ["difference", "disk", "rename"])
def test_a_conversion_that_fails_leaves_what_was_there(
    form: str, failure: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from octjepa.convert import scans as module

    scan, out = stated_cube(tmp_path / "in", "macula"), tmp_path / "out"
    assert convert(scan, "--to", "nifti", "--out", out).code == 0
    assert convert(scan, "--to", form, "--out", out).code == 0

    def refuse(*_: object) -> None:
        raise OctjepaError("the disk is full")

    def content() -> dict[str, bytes]:
        files = (path for path in out.rglob("b.*") if path.is_file())
        return {str(path): path.read_bytes() for path in (*files, *out.glob("b.zarr/**/[.0-9]*")) if path.is_file()}

    before = content()
    if failure == "difference":
        monkeypatch.setattr(module, "_differences", lambda *_: "other pixels")
    else:
        monkeypatch.setattr(module, "write_json" if failure == "disk" else "_move", refuse)
    assert convert(scan, "--to", form, "--out", out).code in (1, 2)
    assert content() == before
    assert not list(out.glob(".new*"))


def test_capitals_of_a_protocol_are_no_difference_and_a_lost_region_is_noted(tmp_path: Path) -> None:
    scan = stated_cube(tmp_path / "in", "Line HD 5")
    made = convert(scan, "--to", "dicom", "--out", tmp_path / "out")
    assert made.code == 0, made.out + made.err
    assert json.loads((tmp_path / "out" / "b.json").read_text())["protocol"] == "Line HD 5"
    assert "the region Macula is in the JSON file only" in made.json["scans"][0]["notes"]
    other = convert(scan, "--to", "nifti", "--out", tmp_path / "out")
    assert not any("region" in note for note in other.json["scans"][0]["notes"])


def test_conversions_below_the_scans_are_not_converted_again(tmp_path: Path) -> None:
    write_two_people(tmp_path)
    for _ in range(2):
        made = convert(tmp_path, "--to", "tiff", "--out", tmp_path / "conv")
        assert made.code == 0, made.err
        assert [one["scan"] for one in made.json["scans"]] == ["patA_eye", "patB_eye"]


def write_named(folder: Path, name: str, pixels: np.ndarray) -> None:
    """A scan whose file is called after the person in its header."""
    dataset = make_dataset(pixels)
    dataset.PatientName = name.replace("_", "^")
    save(dataset, folder / f"{name}.dcm")


def test_scans_with_masked_names_keep_their_files_if_others_are_added(tmp_path: Path) -> None:
    pixels = retina()
    write_named(tmp_path / "in", "Mueller_Anna", pixels)
    write_named(tmp_path / "in", "Schmidt_Karl", np.ascontiguousarray(pixels[:, :, ::-1]))
    made = convert(tmp_path / "in", "--to", "tiff", "--out", tmp_path / "out")
    assert [one["scan"] for one in made.json["scans"]] == ["xxx", "xxx_2"]
    before = {path.name: path.read_bytes() for path in (tmp_path / "out").glob("*.tif")}
    write_named(tmp_path / "in", "Aalto_Ida", np.ascontiguousarray(pixels[:, :, ::-1] // 2))
    write_named(tmp_path / "in", "Zorn_Eva", pixels)  # the pixels of another scan
    for _ in range(2):
        made = convert(tmp_path / "in", "--to", "tiff", "--out", tmp_path / "out")
        assert made.code == 0, made.err
        assert [one["scan"] for one in made.json["scans"]] == ["xxx_3", "xxx", "xxx_2", "xxx_4"]
        assert {name: (tmp_path / "out" / name).read_bytes() for name in before} == before
    made = convert(tmp_path / "in" / "Aalto_Ida.dcm", "--to", "nifti", "--out", tmp_path / "out")
    assert [one["scan"] for one in made.json["scans"]] == ["xxx_3"]


def test_masked_names_have_the_position_of_the_file(tmp_path: Path) -> None:
    pixels = retina()
    for name, half in (("Aalto_Ida", 1), ("Mueller_Anna", 2)):
        write_named(tmp_path / "in", name, pixels // half)
    (tmp_path / "in" / "Ida_Aalto.dcm").write_bytes((tmp_path / "in" / "Aalto_Ida.dcm").read_bytes()[:-1000])
    (tmp_path / "in" / "x.dcm").write_bytes(b"no scan")
    made = convert(tmp_path / "in", "--to", "tiff", "--out", tmp_path / "out")
    assert [(one["scan"], one["position"]) for one in made.json["scans"]] == [
        ("xxx", "file 1 of 4"),
        ("xxx_2", "file 3 of 4"),
    ]
    assert [one["scan"] for one in made.json["refused"]] == ["***.dcm (file 2 of 4)", "x.dcm"]
    text = call("convert", tmp_path / "in", "--to", "tiff", "--out", tmp_path / "out", "--max-lost", 0.6)
    assert text.code == 0, text.err
    assert "file 3 of 4" in text.out
    assert "refused ***.dcm (file 2 of 4): truncated" in text.out
    assert "Aalto" not in text.out + text.err
    single = convert(tmp_path / "in" / "Aalto_Ida.dcm", "--to", "tiff", "--out", tmp_path / "out")
    assert single.json["scans"][0]["position"] == ""


def test_scans_with_the_same_file_name_keep_their_files_if_others_are_added(tmp_path: Path) -> None:
    pixels = retina()
    save(make_dataset(pixels), tmp_path / "in" / "b" / "oct.dcm")
    assert convert(tmp_path / "in", "--to", "tiff", "--out", tmp_path / "out").code == 0
    save(make_dataset(np.ascontiguousarray(pixels[:, :, ::-1])), tmp_path / "in" / "c" / "oct.dcm")
    made = convert(tmp_path / "in", "--to", "tiff", "--out", tmp_path / "out")
    assert [one["scan"] for one in made.json["scans"]] == ["oct", "c_oct"]
    assert sorted(path.name for path in (tmp_path / "out").glob("*.tif")) == ["c_oct.tif", "oct.tif"]
    save(make_dataset(pixels), tmp_path / "in" / "oct" / "a.dcm")  # a copy does not take the name of the first scan
    made = convert(tmp_path / "in" / "oct", tmp_path / "in" / "b", "--to", "tiff", "--out", tmp_path / "out")
    assert [one["scan"] for one in made.json["scans"]] == ["a", "oct"]


def test_long_names_in_any_script_are_cut_to_what_a_disk_allows(tmp_path: Path) -> None:
    pixels = retina()
    for sign, image in (("\u773c", pixels), ("\u76ee", np.ascontiguousarray(pixels[:, :, ::-1]))):
        save(make_dataset(image), tmp_path / "in" / (sign * 80) / "oct.dcm")
    made = convert(tmp_path / "in", "--to", "tiff", "--out", tmp_path / "out")
    assert made.code == 0, made.err
    assert sorted(one["scan"] for one in made.json["scans"]) == ["\u76ee" * 66, "\u773c" * 66]
    assert all(Path(file).is_file() for file in made.json["files"])


def test_layers_without_highdicom_are_refused_before_any_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scan, _ = write_two_people(tmp_path)
    monkeypatch.setitem(sys.modules, "highdicom", None)
    outcome = call("convert", scan, "--to", "dicom", "--layers", "--out", tmp_path / "out")
    assert outcome.code == 2
    assert "highdicom" in outcome.err
    assert not (tmp_path / "out").exists()


def test_layers_replace_no_file_and_are_not_read_as_scans(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scan, _ = write_two_people(tmp_path)
    monkeypatch.setattr("octjepa.convert.scans._layer_codes", lambda: lambda volume: volume.pixels // 64)
    (tmp_path / "other" / "layers").mkdir(parents=True)
    (tmp_path / "other" / "layers" / "classes.json").write_text("{}")
    outcome = call("convert", scan, "--to", "nifti", "--layers", "--out", tmp_path / "other")
    assert outcome.code == 2
    assert "layers holds classes.json, and octjepa has no record" in outcome.err
    for _ in range(2):
        assert convert(scan, "--to", "nifti", "--layers", "--out", tmp_path / "conv").code == 0
    found = discover([tmp_path / "conv"])
    assert [file.name for file in found.files] == ["eye.nii.gz"]
    assert found.ignored["folder with results of octjepa"] == 1


def test_a_scan_that_cannot_be_segmented_leaves_no_file(
    scans: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def codes(_: OCTVolume) -> np.ndarray:
        raise VolumeRejected("size_implausible", "it does not fit into memory")

    monkeypatch.setattr("octjepa.convert.scans._layer_codes", lambda: codes)
    made = convert(scans / "zeiss_cirrus.dcm", "--to", "dicom", "--out", tmp_path, "--layers")
    assert [one["reason"] for one in made.json["refused"]] == ["size_implausible"]
    assert not list(tmp_path.glob("zeiss*"))


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_layers_lie_in_the_converted_scan(form: str, scans: Path, tmp_path: Path) -> None:
    from octjepa.tasks.labels.dicom_seg import read_segmentation
    from octjepa.tasks.segmenter.measurement import LAYER_NAMES

    made = convert(scans / "heidelberg_spectralis.dcm", "--to", form, "--out", tmp_path, "--layers")
    assert made.code == 0, made.err
    path = Path(made.json["scans"][0]["layers"])
    shape = tuple(made.json["scans"][0]["shape"])
    if form == "dicom":
        found = read_segmentation(path, shape[0])
        codes, names = found.codes, found.names
    else:
        codes = read_codes(path, form)[: shape[0]]
        stated = json.loads((path.parent / "classes.json").read_text())
        names = tuple(stated[str(code)] for code in range(1, len(LAYER_NAMES) + 1))
    assert (codes.shape, names) == (shape, LAYER_NAMES)
    depth = np.arange(shape[1])[None, :, None]
    mean_row = [float((depth * (codes == code)).sum() / (codes == code).sum()) for code in range(1, 8)]
    assert mean_row == sorted(mean_row), "from the nerve fibres down to the pigment epithelium"
    pixels = read_volume(made.json["scans"][0]["file"]).pixels
    assert pixels[codes == 7].mean() > 2 * pixels[codes == 0].mean(), "the pigment epithelium is bright"


def chunk_shape(path: Path) -> tuple[int, ...]:
    return tuple(json.loads((path / "0" / ".zarray").read_text())["chunks"])


def test_a_zarr_folder_of_another_program_is_read_or_refused_with_the_reason(tmp_path: Path) -> None:
    pixels = retina(13, 96, 80)
    source = read_volume(save(make_dataset(pixels), tmp_path / "eye.dcm"))

    def zarr(name: str, **facts: object) -> Path:
        path = tmp_path / name
        write_zarr(path, source.pixels, source.spacing_mm)
        array = json.loads((path / "0" / ".zarray").read_text())
        (path / "0" / ".zarray").write_text(json.dumps({**array, **facts}))
        return path

    whole = zarr("whole.zarr")
    assert np.array_equal(read_volume(whole).pixels, source.pixels)
    assert read_volume(whole).spacing_mm == pytest.approx(source.spacing_mm)
    attributes = json.loads((whole / ".zattrs").read_text())
    attributes["multiscales"][0]["datasets"][0]["coordinateTransformations"][0]["scale"] = [
        1000 * mm for mm in source.spacing_mm
    ]
    for axis in attributes["multiscales"][0]["axes"]:
        axis["unit"] = "micrometer"
    (whole / ".zattrs").write_text(json.dumps(attributes))
    assert read_volume(whole).spacing_mm == pytest.approx(source.spacing_mm)

    def reason(path: Path) -> str:
        with pytest.raises(VolumeRejected) as refused:
            read_volume(path)
        return refused.value.reason

    assert reason(zarr("blosc.zarr", compressor={"id": "blosc"})) == "no_decoder"
    assert reason(zarr("objects.zarr", dtype="|O")) == "unsupported_pixels"
    assert reason(zarr("huge.zarr", shape=[10**7, 10**5, 10**5])) == "size_implausible"
    assert reason(zarr("more.zarr", shape=[900, 96, 80])) == "frames_missing"
    cut = zarr("cut.zarr")
    chunk = next(cut.glob("0/0/0/0"))
    chunk.write_bytes(chunk.read_bytes()[:-100])
    assert reason(cut) == "truncated"
    (zarr("three.zarr") / "zarr.json").write_text("{}")
    assert reason(tmp_path / "three.zarr") == "unknown_format"
    outside = zarr("outside.zarr")
    next(outside.glob("0/0/0/0")).unlink()
    (outside / "0" / "0" / "0" / "0").symlink_to(chunk)
    assert reason(outside) == "path_escapes"


def test_a_zarr_folder_is_one_scan_of_a_tree(tmp_path: Path) -> None:
    source = read_volume(save(make_dataset(retina(13)), tmp_path / "eye.dcm"))
    for eye in ("OD", "OS"):
        write_zarr(tmp_path / "tree" / f"P1_{eye}.zarr", source.pixels, source.spacing_mm)
    found = discover([tmp_path / "tree"])
    assert [file.name for file in found.files] == ["P1_OD.zarr", "P1_OS.zarr"]
    assert read_volume(found.files[1].path).laterality == "OS"
    assert call("inspect", tmp_path / "tree" / "P1_OD.zarr", "--json").json["format"] == "zarr"


def read_codes(path: Path, form: str) -> np.ndarray:
    if form == "nifti":
        import nibabel

        return np.asarray(nibabel.load(path).dataobj).transpose(2, 1, 0)
    if form == "zarr":
        return np.concatenate(
            [
                np.frombuffer(zlib.decompress(file.read_bytes()), np.uint8).reshape(chunk_shape(path))
                for file in sorted(path.glob("0/*/0/0"), key=lambda one: int(one.parts[-3]))
            ]
        )
    import tifffile

    return tifffile.imread(path)
