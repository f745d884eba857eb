"""The cohort on disk: DICOM headers of each dialect, lossless pixels, the tree, the tables, the broken files."""

from __future__ import annotations

import csv
import hashlib
import io
import warnings
from collections import Counter
from pathlib import Path

import numpy as np
import pydicom
import pytest

from octjepa.errors import UsageError
from octjepa.phantom import DEVICES, DIALECTS, LESIONS, CohortDesign, make_eye, read_truth, write_cohort
from octjepa.phantom.cohort import MANIFEST_COLUMNS, PARTICIPANT_COLUMNS
from octjepa.phantom.dicom import SOP_CLASS, sop_uid, write_eye

SYNTAX = {
    "heidelberg_spectralis": "1.2.840.10008.1.2.4.90",
    "topcon_maestro2": "1.2.840.10008.1.2.4.50",
    "topcon_triton": "1.2.840.10008.1.2.5",
    "zeiss_cirrus": "1.2.840.10008.1.2.1",
}


@pytest.fixture(scope="module")
def cohort(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, int]]:
    out = tmp_path_factory.mktemp("phantom") / "cohort"
    return out, write_cohort(out, people=8, seed=3, design=CohortDesign(broken=6))


def read_tsv(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file, delimiter="\t"))


def folder_hash(folder: Path) -> dict[str, str]:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


@pytest.mark.parametrize("device", DEVICES)
def test_header_and_pixels_of_each_dialect(device: str, tmp_path: Path) -> None:
    eye = make_eye(0, 2, "OS", device)
    dialect = DIALECTS[device]
    path = tmp_path / "eye.dcm"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        write_eye(path, eye, seed=0)
        ds = pydicom.dcmread(path)
        pixels = ds.pixel_array
        str(ds)  # every element's value is read and checked against its VR
    assert ds.file_meta.TransferSyntaxUID == SYNTAX[device]
    assert ds.SOPClassUID == ds.file_meta.MediaStorageSOPClassUID == SOP_CLASS
    assert ds.SOPInstanceUID == ds.file_meta.MediaStorageSOPInstanceUID == sop_uid(0, eye)
    assert ds.SOPInstanceUID.is_valid
    assert (ds.Modality, ds.Manufacturer, ds.PhotometricInterpretation) == ("OPT", dialect.manufacturer, "MONOCHROME2")
    assert (ds.PatientName, ds.PatientSex, ds.ImageLaterality) == ("", "M", "L")
    assert ds.PatientID == dialect.patient_id_prefix + eye.person.person_id
    assert (ds.NumberOfFrames, ds.Rows, ds.Columns) == eye.pixels.shape
    shared = ds.SharedFunctionalGroupsSequence[0]
    dz, dy, dx = eye.spacing_mm
    measures = shared.PixelMeasuresSequence[0]
    assert list(map(float, measures.PixelSpacing)) == pytest.approx([dy, dx], abs=1e-7)
    assert float(measures.SliceThickness) == pytest.approx(dx if device == "zeiss_cirrus" else dz, abs=1e-7)
    assert shared.FrameAnatomySequence[0].FrameLaterality == "L"
    frames = ds.PerFrameFunctionalGroupsSequence
    assert [frame.FrameContentSequence[0].InStackPositionNumber for frame in frames] == list(range(1, len(frames) + 1))
    positions = [frame.PlanePositionSequence[0].ImagePositionPatient for frame in frames]
    if device == "topcon_triton":
        assert all(not position for position in positions)
    else:
        step = np.diff([float(position[1]) for position in positions])
        assert np.abs(step) == pytest.approx(dz, abs=1e-6)
        assert (step > 0).all() == (dialect.first_frame == "inferior")
    if dialect.codec == "jpeg":
        assert ds.LossyImageCompression == "01"
        assert np.abs(pixels.astype(int) - eye.pixels).mean() < 3
    else:
        assert np.array_equal(pixels, eye.pixels)


@pytest.mark.slow
def test_tree_and_tables(cohort: tuple[Path, dict[str, int]]) -> None:
    out, counts = cohort
    assert counts == {"people": 8, "volumes": 16, "files": 22, "broken": 6}
    manifest = read_tsv(out / "retinal_oct" / "manifest.tsv")
    truth = read_tsv(out / "truth" / "eyes.tsv")
    participants = read_tsv(out / "participants.tsv")
    assert tuple(manifest[0]) == MANIFEST_COLUMNS
    assert len(MANIFEST_COLUMNS) == 15
    assert tuple(participants[0]) == PARTICIPANT_COLUMNS
    assert len(list((out / "retinal_oct").rglob("*.dcm"))) == counts["files"]
    assert len(manifest) == 16 + 5  # the resource fork has no row
    assert all((out / row["filepath"].lstrip("/")).is_file() for row in manifest)
    assert len(truth) == 16
    assert Counter(row["device"] for row in truth) == dict.fromkeys(DEVICES, 4)
    assert {row["laterality"] for row in manifest} == {"L", "R"}
    for row in truth:
        assert row["filepath"].startswith(f"/retinal_oct/structural_oct/{row['device']}/{row['person_id']}/")
        side = {"OD": "r", "OS": "l"}[row["eye"]]
        assert row["filepath"].endswith(f"_oct_{side}_{row['sop_instance_uid']}.dcm")
        assert all(row[name] in {"0", "1"} for name in LESIONS)
        assert 2 < float(row["fovea_slice_mm"]) < 4.2
        assert 2 < float(row["fovea_column_mm"]) < 4.2
    assert {row["person_id"] for row in truth} == {row["participant_id"] for row in participants}
    assert Counter(row["recommended_split"] for row in participants) == {"train": 6, "val": 1, "test": 1}


@pytest.mark.slow
def test_truth_file_gives_back_the_truth(cohort: tuple[Path, dict[str, int]]) -> None:
    out, _ = cohort
    for row in read_tsv(out / "truth" / "eyes.tsv")[:6]:
        truth = read_truth(out / "truth" / f"{row['sop_instance_uid']}.npz")
        index = next(i for i in range(8) if make_eye_id(i) == row["person_id"])
        eye = make_eye(3, index, row["eye"], row["device"])  # type: ignore[arg-type]
        assert np.abs(truth.surfaces_px - eye.truth.surfaces_px).max() <= 1 / 128 + 1e-6
        assert truth.masks.keys() == eye.truth.masks.keys()
        assert all(np.array_equal(truth.masks[name], eye.truth.masks[name]) for name in truth.masks)
        assert {name: str(int(present)) for name, present in truth.labels.items()} == {n: row[n] for n in LESIONS}
        assert truth.fovea_mm == pytest.approx(eye.truth.fovea_mm)


def test_a_damaged_truth_file_is_refused_in_one_line(cohort: tuple[Path, dict[str, int]], tmp_path: Path) -> None:
    whole = next((cohort[0] / "truth").glob("*.npz")).read_bytes()
    damaged = bytearray(whole)
    damaged[len(whole) // 3 : len(whole) // 3 + 40] = bytes(40)
    array = io.BytesIO()
    np.save(array, np.zeros(3))
    for content in (b"", b"<html>", whole[: len(whole) * 3 // 5], bytes(damaged), array.getvalue()):
        (tmp_path / "truth.npz").write_bytes(content)
        with pytest.raises(UsageError, match="is not a truth file of a phantom") as refused:
            read_truth(tmp_path / "truth.npz")
        assert "\n" not in str(refused.value)


def make_eye_id(index: int) -> str:
    from octjepa.phantom.person import make_person

    return make_person(3, index).person_id


@pytest.mark.slow
def test_same_seed_gives_equal_bytes_whatever_the_workers(cohort: tuple[Path, dict[str, int]], tmp_path: Path) -> None:
    write_cohort(tmp_path / "again", people=8, seed=3, workers=2, design=CohortDesign(broken=6))
    assert folder_hash(tmp_path / "again") == folder_hash(cohort[0])


@pytest.mark.slow
def test_broken_files_are_broken(cohort: tuple[Path, dict[str, int]]) -> None:
    out, _ = cohort
    good = {row["filepath"].lstrip("/") for row in read_tsv(out / "truth" / "eyes.tsv")}
    broken = [path for path in (out / "retinal_oct").rglob("*.dcm") if path.relative_to(out).as_posix() not in good]
    kinds = Counter(_kind(path) for path in broken)
    expected = ("truncated", "zero_bytes", "html_page", "no_pixel_data", "resource_fork", "wrong_spacing")
    assert kinds == dict.fromkeys(expected, 1)


def _kind(path: Path) -> str:
    content = path.read_bytes()
    if path.name.startswith("._"):
        return "resource_fork"
    if not content:
        return "zero_bytes"
    if content.startswith(b"<!DOCTYPE"):
        return "html_page"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # a file cut inside its pixels is read with a warning
        dataset = pydicom.dcmread(path)
    if "SharedFunctionalGroupsSequence" not in dataset:
        return "truncated"  # pydicom gives up the whole header of a file cut inside encapsulated pixels
    spacing = dataset.SharedFunctionalGroupsSequence[0].PixelMeasuresSequence[0].PixelSpacing
    if float(spacing[0]) == 1:
        return "wrong_spacing"
    return "good" if "PixelData" in dataset else "no_pixel_data"


@pytest.mark.slow
def test_refusals(tmp_path: Path, cohort: tuple[Path, dict[str, int]]) -> None:
    with pytest.raises(UsageError, match="people 0"):
        write_cohort(tmp_path / "a", people=0)
    with pytest.raises(UsageError, match="optovue"):
        write_cohort(tmp_path / "a", people=1, devices=("optovue",))
    with pytest.raises(UsageError, match="sum 1"):
        write_cohort(tmp_path / "a", people=1, split_shares=(0.7, 0.2, 0.2))
    with pytest.raises(UsageError, match="2997"):
        write_cohort(tmp_path / "a", people=3000)
    with pytest.raises(UsageError, match="not an empty folder"):
        write_cohort(cohort[0], people=1)
    assert not (tmp_path / "a").exists()
