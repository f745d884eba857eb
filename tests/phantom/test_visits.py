"""One eye on two days: the same anatomy and lesions in another scan; the first scan is what it always was."""

from __future__ import annotations

import csv
import dataclasses
from pathlib import Path

import numpy as np
import pytest

from octjepa.errors import UsageError
from octjepa.phantom import DEVICES, DIALECTS, LESIONS, CohortDesign, Eye, Visit, make_eye, write_cohort
from octjepa.phantom.anatomy import BM, ILM, SCLERA, Anatomy, make_anatomy
from octjepa.phantom.dialect import Dialect, Grid
from octjepa.phantom.dicom import eye_dataset, sop_uid
from octjepa.phantom.eye import assemble_eye, eye_measures, lesion_masks
from octjepa.phantom.lesions import make_disease
from octjepa.phantom.person import LESION_SIZES, make_person

SPECTRALIS, CIRRUS, TRITON = "heidelberg_spectralis", "zeiss_cirrus", "topcon_triton"


def test_the_first_visit_is_as_it_was_before_there_were_visits() -> None:
    """Figures kept from then; other processors may differ in a voxel, so that they are compared loosely."""
    eye = make_eye(4, 5, "OS", CIRRUS, "small", "realistic")
    assert eye.pixels.mean() == pytest.approx(78.30936, abs=1e-3)
    assert eye.pixels.std() == pytest.approx(53.81075, abs=1e-3)
    assert eye.truth.surfaces_px[[0, 9, 10], 3, 7] == pytest.approx([90.98909, 132.95293, 155.45067], abs=1e-3)
    assert eye.truth.fovea_mm == pytest.approx((3.0992559, 2.9711818), abs=1e-6)
    assert eye.truth.masks["epiretinal_membrane"].sum() == pytest.approx(1886, abs=2)
    assert sop_uid(4, eye) == sop_uid(4, make_eye(4, 5, "OS", CIRRUS, "small", "realistic", visit=Visit(0, TRITON)))


def anatomy_at(visit: int, device: str, home: str) -> Anatomy:
    return make_anatomy(1, 3, "OS", DIALECTS[device], "small", visit, DIALECTS[home])


def at_points(anatomy: Anatomy, surface: np.ndarray) -> np.ndarray:
    """`surface` `[D, W]` read on a lattice of the eye within 1.8 mm of the fovea."""
    lattice = np.stack(np.meshgrid(np.linspace(-1.8, 1.8, 19), np.linspace(-1.8, 1.8, 13)), axis=-1).reshape(-1, 2)
    near = [np.argmin((anatomy.u_mm - u) ** 2 + (anatomy.v_mm - v) ** 2) for u, v in lattice]
    return surface.ravel()[near]


@pytest.mark.parametrize("device", DEVICES)
def test_layers_and_choroid_belong_to_the_eye(device: str) -> None:
    first, again = anatomy_at(0, SPECTRALIS, SPECTRALIS), anatomy_at(1, device, SPECTRALIS)
    assert first.fovea_mm != again.fovea_mm
    for upper, lower, tolerance in ((ILM, BM, 12), (BM, SCLERA, 6)):  # um; the lattice is read at the nearest A-scan
        thick = [at_points(one, one.surfaces_um[lower] - one.surfaces_um[upper]) for one in (first, again)]
        assert np.abs(thick[0] - thick[1]).mean() < tolerance
        assert np.corrcoef(*thick)[0, 1] > 0.95


def test_bruchs_ripple_is_the_eyes_and_the_tilt_is_the_scans() -> None:
    """Without plane and bowl, what is left of Bruch's membrane is the same from visit to visit."""
    left = []
    for visit, device in ((0, SPECTRALIS), (1, SPECTRALIS), (2, SPECTRALIS)):
        anatomy = anatomy_at(visit, device, SPECTRALIS)
        u, v, bruch = (at_points(anatomy, one) for one in (anatomy.u_mm, anatomy.v_mm, anatomy.surfaces_um[BM]))
        shape = np.stack([np.ones_like(u), u, v, u * u + v * v], axis=1).astype(np.float64)
        fit = np.linalg.lstsq(shape, bruch, rcond=None)[0]
        left.append((fit[1:3], bruch - shape @ fit))
    assert np.corrcoef(left[0][1], left[1][1])[0, 1] > 0.9
    assert np.corrcoef(left[0][1], left[2][1])[0, 1] > 0.9
    assert np.abs(left[0][0] - left[1][0]).max() > 5  # um a mm


def eye_with(lesion: str, device: str) -> Eye:
    person = dataclasses.replace(make_person(1, 3, "realistic"), lesions={"OD": {lesion: 0.9}})
    return assemble_eye(1, person, "OD", DIALECTS[device], "small")


def with_close_slices(device: str) -> Dialect:
    """So close that no druse or cyst falls between two of them."""
    dialect = DIALECTS[device]
    (slices, depth, columns), (dz, dy, dx) = dialect.small.shape, dialect.small.spacing_mm
    return dataclasses.replace(
        dialect, small=Grid((4 * slices - 3, depth, columns), (dz / 4, dy, dx), dialect.small.grain)
    )


def position_and_volume(lesion: str, visit: int, device: str) -> tuple[np.ndarray, float]:
    """The middle of a lesion (up, nasal) in mm from the fovea, and its volume in mm3."""
    dialect = with_close_slices(device)
    shape, (dz, dy, dx) = dialect.small.shape, dialect.small.spacing_mm
    anatomy = make_anatomy(1, 3, "OD", dialect, "small", visit, with_close_slices(SPECTRALIS))
    disease = make_disease(anatomy, {lesion: 0.9}, np.random.default_rng(5), LESION_SIZES["realistic"])
    voxels = lesion_masks(disease, shape, 1000 * dy)[lesion].sum(axis=1)
    centre = [np.average(mm, weights=voxels) for mm in (anatomy.v_mm, anatomy.u_mm)]
    return np.array(centre), float(voxels.sum() * dz * dy * dx)


@pytest.mark.parametrize("lesion", LESIONS)
def test_a_lesion_keeps_its_position_and_extent_at_another_visit_and_vendor(lesion: str) -> None:
    position, volume = position_and_volume(lesion, 0, SPECTRALIS)
    for device in (SPECTRALIS, CIRRUS, TRITON):
        position_again, volume_again = position_and_volume(lesion, 1, device)
        assert np.abs(position - position_again).max() < 0.03, device
        assert volume_again == pytest.approx(volume, rel=0.08), device


def test_the_scan_is_new_and_a_visit_is_a_pure_function() -> None:
    first, second, third = (make_eye(1, 3, "OD", CIRRUS, visit=Visit(visit)) for visit in range(3))
    assert np.array_equal(second.pixels, make_eye(1, 3, "OD", CIRRUS, visit=Visit(1)).pixels)
    assert len({one.pixels.tobytes() for one in (first, second, third)}) == 3
    assert len({one.truth.fovea_mm for one in (first, second, third)}) == 3
    elsewhere = make_eye(1, 3, "OD", CIRRUS, visit=Visit(1, TRITON))
    assert len({sop_uid(1, one) for one in (first, second, third, elsewhere)}) == 4
    for one in (second, third):
        assert one.person.lesions == first.person.lesions
        assert one.person.study_visit_date > first.person.study_visit_date
    files = [eye_dataset(one, 1) for one in (first, second)]
    for keyword in ("SOPInstanceUID", "StudyInstanceUID", "SeriesInstanceUID", "StudyDate"):
        assert files[0][keyword].value != files[1][keyword].value
    assert files[0].PatientID == files[1].PatientID
    with pytest.raises(UsageError, match="visit -1"):
        make_eye(1, 3, "OD", CIRRUS, visit=Visit(-1))


def test_two_scans_of_one_eye_are_of_equal_light_by_layer_and_of_other_speckle() -> None:
    """The brightness of layers is the eye's: it varies from person to person more than from visit to visit."""

    def ratio(person: int, visit: int) -> float:
        eye = make_eye(2, person, "OD", SPECTRALIS, visit=Visit(visit, SPECTRALIS))
        row = np.arange(eye.pixels.shape[1])[None, :, None]
        top, middle, bottom = (eye.truth.surfaces_px[k][:, None] for k in (1, 3, 4))
        return float(
            eye.pixels[(row > top + 1) & (row < middle - 1)].mean()
            / eye.pixels[(row > middle + 1) & (row < bottom)].mean()
        )

    table = np.array([[ratio(person, visit) for visit in (0, 1)] for person in range(5)])
    assert np.corrcoef(table[:, 0], table[:, 1])[0, 1] > 0.7


def rows_of(out: Path) -> list[dict[str, str]]:
    with (out / "truth" / "eyes.tsv").open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file, delimiter="\t"))


@pytest.mark.slow
def test_another_folder_holds_the_same_eyes_on_other_devices(tmp_path: Path) -> None:
    devices = (SPECTRALIS, CIRRUS)
    design = CohortDesign(difficulty="exam", eyes_per_person=1)
    counts = write_cohort(tmp_path / "a", 4, 3, devices, design=design)
    assert counts == {"people": 4, "volumes": 4, "files": 4, "broken": 0}
    write_cohort(tmp_path / "b", 4, 3, devices, design=dataclasses.replace(design, visit=1, device_offset=1))
    first, again = ({(row["person_id"], row["eye"]): row for row in rows_of(tmp_path / name)} for name in "ab")
    assert first.keys() == again.keys()
    # Right and left alike on each device.
    assert sorted((row["device"], row["eye"]) for row in first.values()) == sorted(
        (device, eye) for device in devices for eye in ("OD", "OS")
    )
    for eye, row in first.items():
        assert {row["device"], again[eye]["device"]} == set(devices)
        assert row["sop_instance_uid"] != again[eye]["sop_instance_uid"]
        assert float(row["central_thickness_um"]) == pytest.approx(float(again[eye]["central_thickness_um"]), abs=8)
    # The second folder's eyes are those that the first folder's devices saw.
    index = next(i for i in range(4) if make_person(3, i).person_id == first[min(first)]["person_id"])
    laterality = min(first)[1]
    eye = make_eye(
        3, index, laterality, devices[(index + 1) % 2], difficulty="exam", visit=Visit(1, devices[index % 2])
    )
    assert sop_uid(3, eye) == again[min(first)]["sop_instance_uid"]
    with pytest.raises(UsageError, match="1 or 2 eyes"):
        write_cohort(tmp_path / "c", people=1, design=CohortDesign(eyes_per_person=3))  # type: ignore[arg-type]


def test_the_exam_has_every_lesion_in_a_quarter_of_eyes_and_realistic_sizes() -> None:
    people = [make_person(0, index, "exam") for index in range(2000)]
    has = np.array([[name in person.lesions["OD"] for name in LESIONS] for person in people])
    assert np.abs(has.mean(axis=0) - 0.25).max() < 0.03
    severities = [value for person in people for value in person.lesions["OD"].values()]
    assert min(severities) < 0.05
    assert max(severities) > 0.95
    person = dataclasses.replace(make_person(1, 3, "exam"), lesions={"OD": {"drusen": 0.9}})
    exam = assemble_eye(1, person, "OD", DIALECTS[SPECTRALIS], "small")
    assert np.array_equal(exam.truth.masks["drusen"], eye_with("drusen", SPECTRALIS).truth.masks["drusen"])


def test_measures_of_a_drawn_eye_are_those_of_its_masks() -> None:
    eye = eye_with("drusen", SPECTRALIS)
    measures = eye_measures(eye.truth, eye.spacing_mm)
    assert measures["drusen_mm3"] == pytest.approx(eye.truth.masks["drusen"].sum() * np.prod(eye.spacing_mm))
    assert measures["atrophy_mm2"] == measures["subretinal_fluid_mm3"] == 0
    assert 200 < measures["central_thickness_um"] < 330
