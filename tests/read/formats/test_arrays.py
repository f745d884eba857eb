"""NIfTI, MetaImage, NumPy and MATLAB: number types, labels inside, and each bad input with its reason."""

from __future__ import annotations

import gzip
import io
import os
import struct
import zipfile
from pathlib import Path
from typing import Literal

import h5py
import numpy as np
import pytest
from scipy.io import savemat

from eye_files import phantom, write_voxels
from octjepa.errors import VolumeRejected
from octjepa.read import memory_budget
from octjepa.read.reader import read_volume

PIXELS, SPACING = phantom()


def refused(path: Path) -> VolumeRejected:
    with pytest.raises(VolumeRejected) as caught:
        read_volume(path, spacing_mm=SPACING)
    for secret in ("Doe", "19500101", str(path.parent)):
        assert secret not in str(caught.value)
    return caught.value


def npy(path: Path, values: np.ndarray) -> Path:
    np.save(path, values)
    return path


# Number types


def test_deep_signed_and_float_values_become_bytes(tmp_path: Path) -> None:
    whole = PIXELS.astype(np.float64)
    unit = PIXELS.astype(np.float32) / 255
    holes = unit.copy()
    holes[0, 0, :5] = np.nan
    holes[0, 1, 0] = np.inf
    full = np.array([0, 255])
    assert np.array_equal([PIXELS.min(), PIXELS.max()], full)  # so that the float scale is that of the bytes
    for name, values, note in (
        ("i16", PIXELS.astype(np.int16), None),
        ("u16", PIXELS.astype(np.uint16) * 257, "scaled_from_16_bit"),
        ("u12", PIXELS.astype(np.uint16) * 16 + 15, "scaled_from_12_bit"),
        ("signed", PIXELS.astype(np.int32) - 128, "signed"),
        ("whole", whole, "float_of_whole_numbers"),
        ("unit", unit, "scaled_from_float"),
        ("half", unit.astype(np.float16), "scaled_from_float"),
    ):
        volume = read_volume(npy(tmp_path / f"{name}.npy", values), spacing_mm=SPACING)
        assert np.abs(volume.pixels.astype(int) - PIXELS).max() <= 1, name
        assert note is None or note in volume.notes, name
    volume = read_volume(npy(tmp_path / "holes.npy", holes), spacing_mm=SPACING)
    assert "not_finite_values=6" in volume.notes
    assert volume.pixels[0, 0, :5].max() == 0
    assert np.array_equal(volume.pixels[1:], PIXELS[1:])


def test_marks_of_what_was_not_measured_do_not_squeeze_the_scan(tmp_path: Path) -> None:
    """The least short, the largest of 16 bits, the largest float: the scan keeps its scale, the mark becomes an end."""
    marked = np.zeros(PIXELS.shape, bool)
    marked[:, :4] = True
    twelve = PIXELS.astype(np.int32) * 16
    for name, values, white in (
        ("short", np.where(marked, -32768, twelve).astype(np.int16), False),
        ("most", np.where(marked, 65535, twelve).astype(np.uint16), True),
        ("float", np.where(marked, np.finfo(np.float32).max, PIXELS / np.float32(255)).astype(np.float32), True),
        ("minus", np.where(marked, -999, PIXELS / 255), False),
    ):
        volume = read_volume(npy(tmp_path / f"{name}.npy", values), spacing_mm=SPACING)
        assert "fill_value" in volume.notes, name
        assert np.abs(volume.pixels.astype(int) - PIXELS)[~marked].max() <= 1, name
        assert set(np.unique(volume.pixels[marked])) == {255 if white else 0}, name


def test_values_that_are_no_scan(tmp_path: Path) -> None:
    labels = (PIXELS // 32).astype(np.uint8)
    for name, values, words in (
        ("bool", PIXELS > 100, "it is a mask"),
        ("labels", labels, "looks like a segmentation"),
        ("labels_f", labels.astype(np.float32), "looks like a segmentation"),
        ("constant", np.full((8, 16, 16), 7, np.uint8), "the same value"),
        ("nan", np.full((8, 16, 16), np.nan), "no value is a finite number|same value"),
        ("complex", PIXELS.astype(np.complex64), "complex64"),
        ("empty", np.zeros((0, 4, 4), np.uint8), "holds no values"),
        ("b_scan", PIXELS[0], "one B-scan of"),
        ("table", PIXELS[0, :4], "2 axes"),
        ("four", np.stack([PIXELS, PIXELS]), "4 axes"),
        ("text", np.array([["a"]]), "<U1|str|type|axes"),
    ):
        error = refused(npy(tmp_path / f"{name}.npy", values))
        reasons = dict.fromkeys(("bool", "labels", "labels_f"), "not_structural_oct") | {"b_scan": "too_few_frames"}
        assert error.reason == reasons.get(name, "unsupported_pixels"), name
        assert __import__("re").search(words, error.detail), (name, error.detail)


def test_nothing_beyond_the_memory_limit_is_allocated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    head = io.BytesIO()
    np.lib.format.write_array_header_1_0(head, {"descr": "<f8", "fortran_order": False, "shape": (1 << 20,) * 3})
    (tmp_path / "huge.npy").write_bytes(head.getvalue())
    with zipfile.ZipFile(tmp_path / "huge.npz", "w") as archive:
        archive.writestr("oct_bscans.npy", head.getvalue())
    header = bytearray(write_voxels(tmp_path / "huge.nii", PIXELS, SPACING).read_bytes())
    struct.pack_into("<4h", header, 40, 3, 32767, 32767, 32767)
    (tmp_path / "huge.nii").write_bytes(header)
    (tmp_path / "huge.nii.gz").write_bytes(gzip.compress(header))
    text = write_voxels(tmp_path / "huge.mhd", PIXELS, SPACING).read_text()
    lines = [("DimSize = 99999 99999 99999" if line.startswith("DimSize") else line) for line in text.splitlines()]
    (tmp_path / "huge.mhd").write_text("\n".join(lines))
    for name in ("huge.npy", "huge.npz", "huge.nii", "huge.nii.gz", "huge.mhd"):
        assert refused(tmp_path / name).reason == "size_implausible", name
    savemat(tmp_path / "big.mat", {"images": PIXELS.transpose(1, 2, 0)})
    monkeypatch.setattr(memory_budget, "budget_bytes", lambda: PIXELS.size - 1)
    assert refused(tmp_path / "big.mat").reason == "size_implausible"


# Archives with labels inside


def test_labels_and_identity_inside_an_archive(tmp_path: Path) -> None:
    np.savez(
        tmp_path / "scan.npz",
        oct_bscans=PIXELS,
        slo_fundus=PIXELS[0],
        glaucoma=np.array(1),
        dr_class=np.array([2]),
        race="asian",
        age=61.5,
        male=np.bool_(True),
        td=np.arange(3.0),
        md=np.nan,
        patient_name="Doe^Jane",
        dob="19500101",
        person_id="P9",
        laterality="OS",
        wide=np.arange(52.0),
        filename="Doe_Jane.npz",
        exported="2021-03-04",
        who="Doe^Jane",
        place="scans/doe",
        grade="PDR 2.5",
    )
    volume = read_volume(tmp_path / "scan.npz", spacing_mm=SPACING)
    assert volume.labels == {
        "glaucoma": 1,
        "dr_class": 2,
        "race": "asian",
        "age": 61.5,
        "male": 1,
        "td_0": 0,
        "td_1": 1,
        "td_2": 2,
        "grade": "PDR 2.5",
    }
    assert (volume.person_id, volume.laterality) == ("P9", "OS")
    assert set(volume.personal) == {"PatientName", "PatientBirthDate", "PatientAge", "PatientSex", "EthnicGroup"}
    assert np.array_equal(volume.pixels, PIXELS)
    np.savez(tmp_path / "named.npz", oct_bscans=PIXELS, first_name="Jane", surname="Doe", person_id="doe_j")
    assert read_volume(tmp_path / "named.npz", spacing_mm=SPACING).person_id.startswith("p-")
    savemat(
        tmp_path / "scan.mat",
        {
            "images": PIXELS.transpose(1, 2, 0),
            "layers": PIXELS.transpose(1, 2, 0),
            "eye": "OD",
            "amd": 1.0,
            "stage": "early",
        },
    )
    volume = read_volume(tmp_path / "scan.mat", spacing_mm=SPACING)
    assert volume.labels == {"amd": 1, "stage": "early"}
    assert volume.laterality == "OD"


def test_numbers_and_dates_of_a_person_are_no_labels(tmp_path: Path) -> None:
    numbers = (
        "nhs_number",
        "record_number",
        "medicalRecordNo",
        "file_no",
        "caseNumber",
        "case_id",
        "medicare",
        "accessionNo",
    )
    others = ("acquisition_date", "examDate", "yob", "timestamp", "zip_code")
    labels = {
        "stage": 2,
        "visit_number": 3,
        "lesion_no": 4,
        "number_of_injections": 5,
        "drusen_count": 6,
        "surgery_candidate": 1,
        "case": 1,
        "fluid": 1,
        "fluid_number": 2,
        "time_to_event": 7,
        "updated_grade": 1,
    }
    for name in (*numbers, *others):
        members = {name: np.array(19480514), **labels}
        np.savez(tmp_path / "scan.npz", oct_bscans=PIXELS, **members)  # type: ignore[arg-type]
        volume = read_volume(tmp_path / "scan.npz", spacing_mm=SPACING)
        assert volume.labels == labels, name
        assert volume.personal == (("OtherPatientIDs",) if name in numbers else ()), name


@pytest.mark.parametrize("suffix", ["npz", "mat"])
@pytest.mark.parametrize(
    ("number", "text"), [(1234567, "1234567"), (20231234.0, "20231234"), (2**53 + 1, str(2**53 + 1)), (12.5, "12.5")]
)
def test_a_person_id_that_is_a_number_keeps_all_its_digits(
    number: float, text: str, suffix: str, tmp_path: Path
) -> None:
    path = tmp_path / f"scan.{suffix}"
    members = {"oct_bscans": PIXELS, "spacing_mm": np.array(SPACING), "person_id": np.array(number)}
    np.savez(path, **members) if suffix == "npz" else savemat(path, members)
    assert read_volume(path).person_id == text


@pytest.mark.parametrize("suffix", ["npz", "mat"])
@pytest.mark.parametrize(
    "members",
    [
        {"person_id": "P017", "pid": np.array([1, 2]), "laterality": "OD", "eye": 1},
        {
            "pid": "unknown",
            "patient_id": "P017",
            "subject_id": "P018",
            "eye": 1,
            "laterality": "OD",
            "image_laterality": "L",
        },
    ],
)
def test_of_several_members_for_one_fact_the_first_that_states_it_counts(
    members: dict[str, np.ndarray | str | int], suffix: str, tmp_path: Path
) -> None:
    path = tmp_path / f"scan.{suffix}"
    arrays = {"oct_bscans": PIXELS, "spacing_mm": np.array(SPACING), **members}
    np.savez(path, **arrays) if suffix == "npz" else savemat(path, arrays)
    volume = read_volume(path)
    assert (volume.person_id, volume.laterality) == ("P017", "OD")


@pytest.mark.parametrize("name", ["pattern", "scan_pattern"])
def test_a_pattern_that_a_member_states_is_used(tmp_path: Path, name: str) -> None:
    np.savez(tmp_path / "star.npz", oct_bscans=PIXELS, spacing_mm=SPACING, **{name: "radial"})
    assert read_volume(tmp_path / "star.npz").pattern == "radial"


def test_which_array_is_the_scan(tmp_path: Path) -> None:
    np.savez(tmp_path / "one.npz", anything=PIXELS[None], other=PIXELS[0])
    assert np.array_equal(read_volume(tmp_path / "one.npz", spacing_mm=SPACING).pixels, PIXELS)
    np.savez(tmp_path / "two.npz", a=PIXELS, b=PIXELS)
    assert refused(tmp_path / "two.npz").reason == "unsupported_pixels"
    np.savez(tmp_path / "none.npz", a=PIXELS[0, :4])
    assert refused(tmp_path / "none.npz").reason == "no_pixel_data"


def test_files_that_hold_only_labels_are_left_out(tmp_path: Path) -> None:
    rows = np.zeros((len(PIXELS), 8, PIXELS.shape[2]), np.float32)
    labels: dict[str, np.ndarray] = {"layers": rows, "layers2": rows, "fluid": PIXELS, "bscan_index": np.arange(40)}
    files = {
        "layers": labels,
        "one_hot": {"labels": np.zeros((*PIXELS.shape, 2), np.uint8), "names": np.array(["a", "b"])},
        "boundaries": {"rows": rows, "um": rows, "expected_error_um": rows, "names": np.array(["ilm"] * 8)},
        "bscan_boundaries": {"rows": rows[:1], "expected_error_px": rows[:1]},
    }
    for name, arrays in files.items():
        np.savez(tmp_path / f"{name}.npz", **arrays)  # type: ignore[arg-type]
        error = refused(tmp_path / f"{name}.npz")
        assert (error.reason, "labels of a scan" in error.detail) == ("not_structural_oct", True), name
    savemat(tmp_path / "layers.mat", labels)
    assert refused(tmp_path / "layers.mat").reason == "not_structural_oct"
    np.savez(tmp_path / "with_scan.npz", volume=PIXELS, **labels)  # type: ignore[arg-type]
    assert np.array_equal(read_volume(tmp_path / "with_scan.npz", spacing_mm=SPACING).pixels, PIXELS)
    np.savez(tmp_path / "with_unnamed.npz", b=PIXELS, layers=rows)
    assert refused(tmp_path / "with_unnamed.npz").reason == "unsupported_pixels"
    np.savez(tmp_path / "spacing.npz", oct=PIXELS, spacing_mm=[0.1, 0.1])
    assert refused(tmp_path / "spacing.npz").reason == "broken_header"


@pytest.mark.parametrize("suffix", ["npz", "mat", "v73.mat"])
def test_a_second_scan_in_an_archive_is_counted(suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"scan.{suffix}"
    arrays = {"oct_bscans": PIXELS, "volume": PIXELS[:, ::-1].copy(), "age": np.array(61)}
    if suffix == "npz":
        np.savez(path, **arrays)
    elif suffix == "mat":
        savemat(path, arrays)
    else:
        with h5py.File(path, "w") as file:
            for name, values in arrays.items():
                file[name] = values.T
    volume = read_volume(path, spacing_mm=SPACING)
    assert np.array_equal(volume.pixels, PIXELS)
    assert "arrays_left_out=1" in volume.notes


def test_python_objects_are_never_loaded(tmp_path: Path) -> None:
    class Trap:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return (Path.touch, (tmp_path / "sprung",))  # type: ignore[return-value]

    np.save(tmp_path / "objects.npy", np.full((2, 2, 2), Trap()), allow_pickle=True)
    np.savez(tmp_path / "objects.npz", oct_bscans=np.full((2, 2, 2), Trap()))
    np.savez(tmp_path / "next to.npz", oct_bscans=PIXELS, label=np.array(Trap(), object))
    assert refused(tmp_path / "objects.npy").reason == "unsupported_pixels"
    assert refused(tmp_path / "objects.npz").reason == "unsupported_pixels"
    assert read_volume(tmp_path / "next to.npz", spacing_mm=SPACING).labels == {}
    assert not (tmp_path / "sprung").exists()


def test_an_hdf5_link_to_another_file_is_not_followed(tmp_path: Path) -> None:
    with h5py.File(tmp_path / "other.h5", "w") as file:
        file["images"] = PIXELS
    path = tmp_path / "scan.mat"
    with h5py.File(path, "w") as file:
        file["images"] = h5py.ExternalLink("other.h5", "/images")
        file["small"] = np.arange(3)
    assert refused(path).reason == "no_pixel_data"


# Files that were cut, are written again, or point elsewhere


@pytest.mark.parametrize("order", ["C", "F"])
def test_pixels_of_an_npy_stay_when_the_file_is_written_again(order: Literal["C", "F"], tmp_path: Path) -> None:
    path = npy(tmp_path / "scan.npy", np.asarray(PIXELS, order=order))
    volume = read_volume(path, spacing_mm=SPACING)
    with path.open("r+b") as file:
        file.seek(128)
        file.write(bytes(PIXELS.size))
    assert np.array_equal(volume.pixels, PIXELS)


def test_an_npy_that_shrinks_while_it_is_read_is_truncated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = npy(tmp_path / "scan.npy", PIXELS)

    def shrink(*_: object) -> None:
        os.truncate(path, PIXELS.size // 2)

    monkeypatch.setattr("octjepa.read.formats.arrays._check_header", shrink)
    assert refused(path).reason == "truncated"


@pytest.mark.parametrize("name", ["scan.nii", "scan.nii.gz", "scan.mha", "scan.npy", "scan.npz", "scan.mat"])
@pytest.mark.parametrize("share", [0.02, 0.5, 0.999])
def test_cut_files_are_never_read_as_whole_ones(name: str, share: float, tmp_path: Path) -> None:
    path = tmp_path / name
    if name.endswith(".npy"):
        npy(path, PIXELS)
    elif name.endswith(".npz"):
        np.savez_compressed(path, oct_bscans=PIXELS)
    elif name.endswith(".mat"):
        savemat(path, {"images": PIXELS.transpose(1, 2, 0)}, do_compression=True)
    else:
        write_voxels(path, PIXELS, SPACING)
    whole = path.read_bytes()
    path.write_bytes(whole[: int(share * len(whole))])
    assert refused(path).reason in {"truncated", "broken_header"}


def test_a_compressed_metaimage_that_was_cut(tmp_path: Path) -> None:
    write_voxels(tmp_path / "scan.mha", PIXELS, compressed=True)
    whole = (tmp_path / "scan.mha").read_bytes()
    assert read_volume(tmp_path / "scan.mha", spacing_mm=SPACING).shape == PIXELS.shape
    (tmp_path / "scan.mha").write_bytes(whole[:-500])
    assert refused(tmp_path / "scan.mha").reason == "truncated"


def test_the_voxels_of_an_mhd_are_whole_and_in_its_folder(tmp_path: Path) -> None:
    path = write_voxels(
        tmp_path / "in" / "scan.mhd" if (tmp_path / "in").mkdir() is None else tmp_path, PIXELS, SPACING
    )
    text = path.read_text()
    raw = path.with_suffix(".raw")
    (tmp_path / "secret.raw").write_bytes(raw.read_bytes())
    for name in ("../secret.raw", str(tmp_path / "secret.raw"), "..\\secret.raw", "C:\\secret.raw"):
        path.write_text(text.replace("scan.raw", name))
        error = refused(path)
        assert (error.reason, "outside its folder" in error.detail) == ("broken_header", True), name
    for name, reason in (
        ("gone.raw", "no_pixel_data"),
        ("LIST", "unsupported_pixels"),
        ("s%d.raw", "unsupported_pixels"),
    ):
        path.write_text(text.replace("scan.raw", name))
        assert refused(path).reason == reason, name
    path.write_text(text)
    raw.write_bytes(raw.read_bytes()[:-1])
    assert refused(path).reason == "truncated"
    path.write_text(text.replace("DimSize", "Dims"))
    assert refused(path).reason == "broken_header"
    path.write_text("NDims = 3\nDimSize = 4 4 4\n")
    assert refused(path).reason == "broken_header"


def test_nifti_of_other_kinds(tmp_path: Path) -> None:
    path = write_voxels(tmp_path / "scan.nii", PIXELS, SPACING)
    head = bytearray(path.read_bytes())
    two_files = bytes(head[:344]) + b"ni1\0" + bytes(head[348:])
    path.write_bytes(two_files)
    assert refused(path).reason == "unknown_format"
    path.write_bytes(struct.pack("<i", 540) + b"ni2\0" + bytes(head[8:]))
    assert refused(path).reason == "unknown_format"
    series = bytes(head[:40]) + struct.pack("<5h", 4, *PIXELS.shape[::-1], 2) + bytes(head[50:])
    path.write_bytes(series)
    assert refused(path).reason == "unsupported_pixels"
    colour = write_voxels(tmp_path / "colour.mha", PIXELS).read_bytes()
    colour = colour.replace(b"ElementType", b"ElementNumberOfChannels = 3\nElementType")
    (tmp_path / "colour.mha").write_bytes(colour + PIXELS.tobytes() * 2)
    assert refused(tmp_path / "colour.mha").reason == "unsupported_pixels"


def test_parsers_that_fail_in_their_own_way_are_understood(tmp_path: Path) -> None:
    whole = npy(tmp_path / "scan.npy", PIXELS).read_bytes()
    (tmp_path / "scan.npy").write_bytes(whole.replace(b"(", b"[", 1))
    assert refused(tmp_path / "scan.npy").reason == "broken_header"
    plain = write_voxels(tmp_path / "scan.nii", PIXELS, SPACING).read_bytes()
    (tmp_path / "scan.nii").write_bytes(plain[:344] + bytes(4) + plain[348:])  # as in Analyze files
    assert refused(tmp_path / "scan.nii").reason == "broken_header"
