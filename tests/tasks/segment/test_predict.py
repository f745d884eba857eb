"""A head on whole scans: files in the scan's geometry that are read back as what was said, and nothing personal."""

from __future__ import annotations

import csv
import io
import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pydicom
import pytest

from command_line import call
from octjepa.checkpoint.folder import SCHEMA
from octjepa.errors import OctjepaError
from octjepa.read.reader import read_volume
from octjepa.tasks.labels.dicom_seg import read_segmentation, segmentation_source, write_segmentation
from octjepa.tasks.labels.label_files import LabelFolder, made_automatically
from octjepa.tasks.nifti import write_nifti
from octjepa.tasks.segment import predict
from octjepa.tasks.segment.folder import KIND, load_head
from octjepa.tasks.segment.predict import segment_volume
from octjepa.tasks.thickness import MIN_AREA_SHARE, SECTORS

from .conftest import Line

pytestmark = pytest.mark.timeout(400)  # the first one makes the cohort and imports MONAI


@pytest.fixture(scope="module")
def applied(line: Line, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict]:
    out = tmp_path_factory.mktemp("applied")
    scans = [word for device in ("maestro2", "cirrus") for word in ("--scan", line.scan(device))]
    outcome = call("segment", line.out, "--from", line.encoder, *scans, "--out", out, "--json")
    assert outcome.code == 0, outcome.err
    return out, outcome.json


def test_files_are_in_the_geometry_and_order_of_the_scan(line: Line, applied: tuple[Path, dict]) -> None:
    out, message = applied
    head = load_head(line.out, str(line.encoder))
    for device, result in zip(("maestro2", "cirrus"), message["scans"], strict=True):
        scan = read_volume(line.scan(device))
        turned = "frames_reversed" in scan.notes
        assert turned == (device == "maestro2")
        codes, _ = segment_volume(head, scan)
        expected = codes[::-1] if turned else codes
        labels = LabelFolder(out)
        nifti = labels.read(Path(result["nifti"]), head.classes, scan.shape)
        nifti.check(scan.shape, scan.spacing_mm, "the answer")
        assert np.array_equal(nifti.codes, expected)
        made = read_segmentation(Path(result["dicom"]), scan.shape[0])
        assert made.names == head.classes
        assert np.array_equal(made.codes, np.where(expected == 255, 0, expected))
        assert made.spacing_mm == pytest.approx(scan.spacing_mm, rel=1e-4)
        assert 60 < result["mean_um"]["inner"] < 200


def test_predict_applies_a_head_to_a_folder_of_scans(line: Line, applied: tuple[Path, dict], tmp_path: Path) -> None:
    out, _ = applied
    scans = tmp_path / "scans"
    scans.mkdir()
    shutil.copy(line.scan("cirrus"), scans / "scan.dcm")
    made = call("predict", line.out, scans, "--from", line.encoder, "--out", tmp_path / "masks", "--json")
    assert made.code == 0, made.err
    (name,) = [one["volume_id"] for one in made.json["scans"]]
    for suffix in ("dcm", "etdrs.tsv"):
        sizes = [(folder / f"{name}.{suffix}").stat().st_size for folder in (tmp_path / "masks", out)]
        assert sizes[0] == pytest.approx(sizes[1], abs=64)  # UIDs are drawn, with digits of any number
    stored = call("predict", line.out, "--store", scans, "--from", line.encoder, "--out", tmp_path / "masks")
    assert "is applied to scans, not to a --store" in stored.err


def test_a_linked_head_folder_is_refused_before_training(line: Line, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "head").symlink_to(tmp_path)
    made = call(
        "segment",
        "segment_linear",
        "--from",
        line.encoder,
        "--store",
        line.root / "store",
        "--labels",
        line.root / "phantom" / "truth",
        "--out",
        out,
    )
    assert made.code == 2
    assert "head is a link" in made.err
    assert not (out / "training").exists()


def test_predict_refuses_what_a_head_would_ignore(tmp_path: Path) -> None:
    head = tmp_path / "head"
    head.mkdir()
    manifest = {"schema": SCHEMA, "update": 0, "files": {}, "kind": KIND}
    (head / "manifest.json").write_text(json.dumps(manifest))
    words = ("predict", head, tmp_path, "--out", tmp_path / "out", "--level", "eye", "--workers", 1)
    refused = call(*words)
    assert refused.code == 2
    assert "a segmentation head does not take --level, --workers" in refused.err
    (tmp_path / "scan.dcm").write_bytes(b"")
    refused = call("segment", head, tmp_path / "scan.dcm", "--out", tmp_path / "out", "--model", head)
    assert refused.code == 2
    assert "--model is for scans, single B-scans and adapt, not for a trained head" in refused.err


def test_the_dicom_segmentation_references_its_scan_and_holds_nobodys_name(
    line: Line, applied: tuple[Path, dict]
) -> None:
    source = pydicom.dcmread(line.scan("cirrus"), stop_before_pixels=True)
    made = pydicom.dcmread(applied[1]["scans"][1]["dicom"])
    assert source.PatientID
    assert made.StudyInstanceUID == source.StudyInstanceUID
    assert made.ReferencedSeriesSequence[0].SeriesInstanceUID == source.SeriesInstanceUID
    (instance,) = made.ReferencedSeriesSequence[0].ReferencedInstanceSequence
    assert instance.ReferencedSOPInstanceUID == source.SOPInstanceUID
    assert (made.Rows, made.Columns) == (source.Rows, source.Columns)
    frame = made.PerFrameFunctionalGroupsSequence[0]
    assert 1 <= frame.DerivationImageSequence[0].SourceImageSequence[0].ReferencedFrameNumber <= source.NumberOfFrames
    for name in ("PatientName", "PatientID", "PatientBirthDate", "PatientSex", "StudyDate", "StudyID"):
        assert not made.get(name), name
    text = made.to_json()
    for secret in (str(source.PatientID), str(source.get("PatientName", "")), str(source.get("StudyDate", ""))):
        assert not secret or f'"{secret}"' not in text


def test_a_scan_wider_than_the_view_is_read_window_by_window(line: Line) -> None:
    head = load_head(line.out, str(line.encoder))
    scan = read_volume(line.scan("cirrus"))
    wide = replace(scan, pixels=np.concatenate([scan.pixels, scan.pixels[..., ::-1]], axis=2), content_hash="")
    codes, _ = segment_volume(head, wide)
    assert codes.shape == wide.shape
    inside = codes != 255
    seen = inside.any(axis=(0, 1))
    assert seen[3:-3].all()
    thick = [(codes[..., half] == 1).sum() for half in (slice(0, 168), slice(168, None))]
    alone, _ = segment_volume(head, scan)
    assert thick[0] == pytest.approx((alone == 1).sum(), rel=0.4)
    assert thick[1] == pytest.approx((alone == 1).sum(), rel=0.4)


def test_what_cannot_be_segmented_is_reported_and_the_rest_is_done(line: Line, tmp_path: Path) -> None:
    broken = tmp_path / "broken.dcm"
    broken.write_bytes(line.scan("cirrus").read_bytes()[:3000])
    arguments = ("segment", line.out, "--from", line.encoder, "--out", tmp_path / "out", "--format", "nifti", "--json")
    outcome = call(*arguments, "--max-lost", 0.5, "--scan", broken, "--scan", line.scan("cirrus"))
    assert outcome.code == 0
    assert len(outcome.json["scans"]) == 1
    assert outcome.json["refused"][0]["scan"] == "broken.dcm"
    assert outcome.json["refused"][0]["to_do"]
    assert call(*arguments, broken, line.scan("cirrus")).code == 3  # scans are arguments too
    assert not list((tmp_path / "out").glob("*.dcm"))
    assert call(*arguments, "--scan", broken).code == 2
    nothing = call(*arguments)
    assert nothing.code == 2
    assert "name the scans to segment" in nothing.err


def test_a_segmentation_of_nothing_or_of_another_scan_is_not_written(line: Line, tmp_path: Path) -> None:
    from octjepa.errors import UsageError

    scan = read_volume(line.scan("cirrus"))
    empty = np.zeros(scan.shape, np.uint8)
    with pytest.raises(UsageError, match="no class was found"):
        write_segmentation(tmp_path / "a.dcm", empty, ("fluid",), scan.spacing_mm, line.scan("cirrus"))
    with pytest.raises(UsageError, match="other frames"):
        write_segmentation(tmp_path / "a.dcm", empty[1:], ("fluid",), scan.spacing_mm, line.scan("cirrus"))


def test_an_eye_without_any_class_is_a_result_and_has_no_dicom_segmentation(
    line: Line, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scan = read_volume(line.scan("cirrus"))
    monkeypatch.setattr(predict, "segment_volume", lambda saved, volume: (np.zeros(scan.shape, np.uint8), "healthy"))
    made = call("segment", line.out, "--from", line.encoder, "--scan", line.scan("cirrus"), "--out", tmp_path, "--json")
    assert made.code == 0, made.err
    (result,) = made.json["scans"]
    assert "no class was found in any voxel" in result["notes"][0]
    assert "dicom" not in result
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "classes.json",
        "healthy.etdrs.tsv",
        "healthy.nii.gz",
        "healthy.svg",
        "octjepa_segmented.jsonl",
    ]
    with (tmp_path / "healthy.etdrs.tsv").open() as file:
        rows = [row for row in csv.DictReader(file, delimiter="\t") if row["class"] == "inner"]
    assert len(rows) == len(SECTORS)
    assert all((float(row["measured_share"]) >= MIN_AREA_SHARE) == bool(row["predicted_um"]) for row in rows)
    assert any(float(row["measured_share"]) < 1 for row in rows)
    assert json.loads((tmp_path / "classes.json").read_text())["source"].startswith("made automatically by octjepa")


def test_files_appear_whole_or_not_at_all(line: Line, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    scan = read_volume(line.scan("cirrus"))
    codes = np.ones(scan.shape, np.uint8)
    names = tmp_path / "eye.nii.gz", tmp_path / "eye.dcm"
    for end, expected in ((KeyboardInterrupt, KeyboardInterrupt), (OSError(28, "no space"), OctjepaError)):

        def stopped(*words: Any, end: BaseException | type[BaseException] = end, **more: Any) -> None:
            target = next(word for word in words if isinstance(word, Path | io.IOBase))
            (target.write_bytes if isinstance(target, Path) else target.write)(b"half of it")
            raise end

        with monkeypatch.context() as patch:
            patch.setattr("nibabel.save", stopped)
            with pytest.raises(expected):
                write_nifti(names[0], codes, scan.spacing_mm)
    with monkeypatch.context() as patch:
        patch.setattr("pydicom.dataset.pydicom.dcmwrite", stopped)
        with pytest.raises(OctjepaError):
            write_segmentation(names[1], codes, ("fluid",), scan.spacing_mm, line.scan("cirrus"))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_segmentation_that_says_two_things_or_of_another_scan_is_refused(
    applied: tuple[Path, dict], tmp_path: Path
) -> None:
    from octjepa.errors import UsageError

    source = applied[1]["scans"][1]["dicom"]

    def spoilt(how: str) -> Path:
        made = pydicom.dcmread(source)
        frames = made.PerFrameFunctionalGroupsSequence
        if how == "overlap":  # the same B-scan's pixels once more, as another class
            made.PixelData, made.NumberOfFrames = bytes([255]) * (made.Rows * made.Columns // 8 * 2), 2
            made.PerFrameFunctionalGroupsSequence = [frames[0], frames[0]]
        elif how == "fractional":
            made.SegmentationType = "FRACTIONAL"
        made.save_as(tmp_path / f"{how}.dcm")
        return tmp_path / f"{how}.dcm"

    for how, message in (("overlap", "segments overlap"), ("fractional", "expected a binary one")):
        with pytest.raises(UsageError, match=message):
            read_segmentation(spoilt(how), 32)
    with pytest.raises(UsageError, match="of another scan"):
        read_segmentation(Path(source), 5)
    cut = tmp_path / "cut.dcm"
    cut.write_bytes(Path(source).read_bytes()[:4000])
    with pytest.raises(UsageError, match="cut"):
        read_segmentation(cut, 32)


def test_a_scan_without_positions_is_referenced_and_classes_are_coded(line: Line, tmp_path: Path) -> None:
    scan = pydicom.dcmread(line.scan("cirrus"))
    for group in scan.PerFrameFunctionalGroupsSequence:
        group.pop("PlanePositionSequence", None)
    scan.save_as(tmp_path / "scan.dcm")
    codes = np.zeros((int(scan.NumberOfFrames), scan.Rows, scan.Columns), np.uint8)
    codes[3, 10:20], codes[5, 5:9] = 1, 2
    classes = ("onl", "intraretinal_fluid")
    write_segmentation(tmp_path / "seg.dcm", codes, classes, (0.2, 0.004, 0.03), tmp_path / "scan.dcm")
    read = read_segmentation(tmp_path / "seg.dcm", len(codes))
    assert np.array_equal(read.codes, codes)
    assert (read.names, read.spacing_mm) == (classes, (0.2, 0.004, 0.03))
    properties = [
        (one.SegmentedPropertyCategoryCodeSequence[0].CodeMeaning, one.SegmentedPropertyTypeCodeSequence[0].CodeMeaning)
        for one in pydicom.dcmread(tmp_path / "seg.dcm").SegmentSequence
    ]
    assert properties == [("Anatomical Structure", "Retina"), ("Body Substance", "Body fluid")]


@pytest.mark.parametrize("is_adapted", [False, True])
def test_a_segmentation_states_whether_an_adapted_network_made_it(line: Line, tmp_path: Path, is_adapted: bool) -> None:
    scan = line.scan("cirrus")
    stored = pydicom.dcmread(scan, stop_before_pixels=True)
    codes = np.zeros((int(stored.NumberOfFrames), stored.Rows, stored.Columns), np.uint8)
    codes[3, 10:20] = 1
    write_segmentation(tmp_path / "seg.dcm", codes, ("fluid",), (0.2, 0.004, 0.03), scan, is_adapted)
    assert segmentation_source(tmp_path / "seg.dcm") == made_automatically(is_adapted)
