"""The eye itself: a function of its arguments, with the geometry of a retina, and its truth is in the pixels."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from octjepa.errors import UsageError
from octjepa.phantom import DEVICES, DIALECTS, LESIONS, SURFACES, Eye, make_eye
from octjepa.phantom.anatomy import BM, ILM, RPE, make_anatomy
from octjepa.phantom.dicom import sop_uid
from octjepa.phantom.eye import assemble_eye
from octjepa.phantom.person import STUDY_GROUPS, make_person
from octjepa.phantom.render import speckle, stack_sheets


def eye_with(device: str, *lesions: str, person: int = 3) -> Eye:
    """A right eye with exactly the given lesions, all of severity 0.8."""
    chosen = dataclasses.replace(make_person(1, person), lesions={"OD": dict.fromkeys(lesions, 0.8)})
    return assemble_eye(1, chosen, "OD", DIALECTS[device], "small")


def test_equal_arguments_give_equal_eyes_and_each_argument_matters() -> None:
    first, again = make_eye(0, 5, "OD", "zeiss_cirrus"), make_eye(0, 5, "OD", "zeiss_cirrus")
    assert np.array_equal(first.pixels, again.pixels)
    assert np.array_equal(first.truth.surfaces_px, again.truth.surfaces_px)
    for other in (make_eye(1, 5, "OD", "zeiss_cirrus"), make_eye(0, 6, "OD", "zeiss_cirrus")):
        assert not np.array_equal(first.pixels, other.pixels)
    assert not np.array_equal(first.pixels, make_eye(0, 5, "OS", "zeiss_cirrus").pixels)


@pytest.mark.parametrize("device", DEVICES)
def test_geometry_is_the_dialects_and_plausible(device: str) -> None:
    eye = make_eye(0, 1, "OS", device)
    grid = DIALECTS[device].small
    assert eye.pixels.shape == grid.shape
    assert eye.pixels.dtype == np.uint8
    dz, dy, dx = eye.spacing_mm
    assert 0.002 <= dz <= 0.5
    assert 0.001 <= dy <= 0.01
    assert 0.002 <= dx <= 0.06
    depth, _, width = eye.pixels.shape
    assert (depth - 1) * dz >= 5.9
    assert (width - 1) * dx >= 5.9
    assert eye.truth.surfaces_px.shape == (len(SURFACES), depth, width)


def test_surfaces_lie_in_order_and_in_the_scan() -> None:
    for person in range(12):
        eye = make_eye(2, person, "OD", DEVICES[person % 4])
        surfaces = eye.truth.surfaces_px
        assert np.diff(surfaces[: BM + 1], axis=0).min() >= 0
        # The retina must be in the picture; a corner of a strongly tilted eye may leave it.
        inside = (surfaces[ILM] > 0) & (surfaces[BM] < eye.pixels.shape[1])
        assert inside.mean() > 0.98


def test_thickness_profile_is_a_macula() -> None:
    profile = []
    for person in range(24):
        anatomy = make_anatomy(0, person, "OD", DIALECTS["heidelberg_spectralis"], "small")
        thickness = anatomy.surfaces_um[BM] - anatomy.surfaces_um[ILM]

        def at(u: float, anatomy=anatomy, thickness=thickness) -> float:
            return float(thickness.ravel()[np.argmin((anatomy.u_mm - u) ** 2 + anatomy.v_mm**2)])

        profile.append([at(0), at(-1), at(1), at(-2.6), at(2.6)])
    fovea, temporal, nasal, far_temporal, far_nasal = np.mean(profile, axis=0)
    # Measured on real eyes: 218, 364-377 at 1 mm, 284 and 319 at 2.6 mm.
    assert fovea == pytest.approx(218, abs=15)
    assert temporal == pytest.approx(364, abs=20)
    assert nasal == pytest.approx(370, abs=20)
    assert far_temporal == pytest.approx(284, abs=15)
    assert far_nasal == pytest.approx(319, abs=15)


def test_left_eye_is_mirrored() -> None:
    """The nerve fibres are thick towards the nose: right in the image of a right eye, left in that of a left eye."""
    for eye, nasal_side in (("OD", slice(-30, None)), ("OS", slice(None, 30))):
        other_side = slice(None, 30) if eye == "OD" else slice(-30, None)
        fibres = [np.diff(make_eye(0, p, eye, "zeiss_cirrus").truth.surfaces_px[:2], axis=0)[0] for p in (1, 2, 5)]
        mean = np.mean(fibres, axis=0)
        assert mean[:, nasal_side].mean() > 1.5 * mean[:, other_side].mean()


def test_fovea_is_where_the_retina_is_thinnest() -> None:
    for person in (0, 1, 2):
        eye = eye_with("topcon_triton", person=person)
        thickness = eye.truth.surfaces_px[BM] - eye.truth.surfaces_px[ILM]
        frame, column = np.unravel_index(thickness.argmin(), thickness.shape)
        dz, _, dx = eye.spacing_mm
        assert abs(frame * dz - eye.truth.fovea_mm[0]) <= 1.01 * dz
        assert abs(column * dx - eye.truth.fovea_mm[1]) <= 4 * dx


def _mean_at(eye: Eye, rows: np.ndarray) -> float:
    depth, _, width = eye.pixels.shape
    picked = np.clip(np.round(rows).astype(int), 0, eye.pixels.shape[1] - 1)
    return float(eye.pixels[np.arange(depth)[:, None], picked, np.arange(width)].mean())


@pytest.mark.parametrize("device", DEVICES)
def test_rpe_is_brighter_than_its_neighbours_and_vitreous_darkest(device: str) -> None:
    eye = eye_with(device)
    surfaces, row_um = eye.truth.surfaces_px, eye.spacing_mm[1] * 1000
    rpe = _mean_at(eye, surfaces[RPE] + 11 / row_um)
    onl = _mean_at(eye, (surfaces[5] + surfaces[6]) / 2)
    sclera = _mean_at(eye, surfaces[10] + 100 / row_um)
    vitreous = _mean_at(eye, surfaces[ILM] - 40 / row_um)
    spread = float(eye.pixels[:, :20].std())
    assert rpe > onl + 2 * spread
    assert rpe > sclera + 2 * spread
    assert onl > vitreous + 0.3 * spread


@pytest.mark.parametrize("lesion", ["intraretinal_fluid", "subretinal_fluid"])
@pytest.mark.parametrize("device", DEVICES)
def test_fluid_is_darker_than_the_tissue_around_it(device: str, lesion: str) -> None:
    eye = eye_with(device, lesion)
    mask = eye.truth.masks[lesion]
    row = np.arange(eye.pixels.shape[1])[None, :, None]
    surfaces = eye.truth.surfaces_px
    retina = (row > surfaces[ILM][:, None] + 2) & (row < surfaces[BM][:, None]) & mask.any(axis=1)[:, None]
    inner = mask & np.roll(mask, 1, axis=1) & np.roll(mask, -1, axis=1)
    tissue, vitreous = eye.pixels[retina & ~mask].mean(), eye.pixels[:, :12].mean()
    # Water scatters hardly at all: fluid is nearly as dark as the vitreous, which no layer of the retina is.
    assert eye.pixels[inner].mean() < vitreous + 0.25 * (tissue - vitreous)


def test_atrophy_brightens_the_choroid_and_takes_the_rpe() -> None:
    eye, healthy = eye_with("heidelberg_spectralis", "geographic_atrophy"), eye_with("heidelberg_spectralis")
    lost = eye.truth.masks["geographic_atrophy"].any(axis=1)
    assert 0.005 < lost.mean() < 0.5
    row = np.arange(eye.pixels.shape[1])[None, :, None]
    bruch = eye.truth.surfaces_px[BM][:, None]
    choroid = (row > bruch + 5) & (row < bruch + 18) & lost[:, None]
    rpe = (row > bruch - 3) & (row < bruch) & lost[:, None]
    assert eye.pixels[choroid].mean() > 1.15 * healthy.pixels[choroid].mean()
    assert eye.pixels[rpe].mean() < 0.85 * healthy.pixels[rpe].mean()


def test_drusen_lift_the_rpe_and_epiretinal_membrane_is_bright() -> None:
    eye = eye_with("topcon_maestro2", "drusen")
    mask, surfaces = eye.truth.masks["drusen"], eye.truth.surfaces_px
    row_um = eye.spacing_mm[1] * 1000
    lift_um = (surfaces[BM] - surfaces[RPE]) * row_um
    assert lift_um[mask.sum(axis=1) > 5].min() > lift_um[~mask.any(axis=1)].max()
    assert 30 < (mask.sum(axis=1).max() * row_um) <= 140

    eye = eye_with("heidelberg_spectralis", "epiretinal_membrane")
    epiretinal = eye.truth.masks["epiretinal_membrane"]
    below = np.roll(epiretinal, 6, axis=1)  # 47 um deeper: nerve fibres and ganglion cells
    assert eye.pixels[epiretinal].mean() > eye.pixels[below].mean()


def test_labels_name_what_the_masks_hold() -> None:
    for person in range(8):
        eye = make_eye(4, person, "OD", DEVICES[person % 4])
        assert set(eye.truth.labels) == set(LESIONS)
        assert {name for name, present in eye.truth.labels.items() if present} == set(eye.truth.masks)
        assert all(mask.any() and mask.shape == eye.pixels.shape for mask in eye.truth.masks.values())
        # Every drawn lesion shows in the scan.
        assert set(eye.truth.masks) == set(eye.person.lesions["OD"])


def test_prevalence_groups_and_fellow_eyes() -> None:
    people = [make_person(0, index) for index in range(2997)]
    assert len({person.person_id for person in people}) == 2997
    assert {person.person_id[0] for person in people} == {"1", "4", "7"}
    has = np.array([[[name in person.lesions[eye] for name in LESIONS] for eye in ("OD", "OS")] for person in people])
    prevalence = has.mean(axis=(0, 1))
    assert ((prevalence > 0.22) & (prevalence < 0.37)).all()
    for k in range(len(LESIONS)):
        assert 0.25 < np.corrcoef(has[:, 0, k], has[:, 1, k])[0, 1] < 0.75
    load = has.sum(axis=(1, 2))
    groups = np.array([STUDY_GROUPS.index(person.study_group) for person in people])
    means = [load[groups == group].mean() for group in range(4)]
    assert means == sorted(means)
    assert means[3] > 1.4 * means[0]


def test_eyes_of_one_person_are_alike() -> None:
    """Thickness at 1 mm correlates between fellow eyes and not between strangers."""

    def thickness(person: int, eye: str) -> float:
        anatomy = make_anatomy(0, person, eye, DIALECTS["zeiss_cirrus"], "small")
        ring = np.abs(np.hypot(anatomy.u_mm, anatomy.v_mm) - 1) < 0.15
        return float((anatomy.surfaces_um[BM] - anatomy.surfaces_um[ILM])[ring].mean())

    right = np.array([thickness(person, "OD") for person in range(40)])
    left = np.array([thickness(person, "OS") for person in range(40)])
    assert np.corrcoef(right, left)[0, 1] > 0.7
    assert abs(np.corrcoef(right, np.roll(left, 1))[0, 1]) < 0.45


def test_speckle_follows_the_gamma_law_and_its_grain() -> None:
    one = speckle(np.random.default_rng(0), (8, 120, 120), (12, 16), 1)
    four = speckle(np.random.default_rng(0), (8, 120, 120), (12, 16), 4)
    assert one.mean() == pytest.approx(1, abs=0.05)
    assert one.var() == pytest.approx(1, abs=0.15)  # exponential
    assert four.var() == pytest.approx(0.25, abs=0.05)  # gamma of shape 4
    # (12/13)^2 and (16/17)^2: the squared autocorrelation of the binomial kernels.
    assert np.corrcoef(one[:, 1:].ravel(), one[:, :-1].ravel())[0, 1] == pytest.approx(0.852, abs=0.03)
    assert np.corrcoef(one[:, :, 1:].ravel(), one[:, :, :-1].ravel())[0, 1] == pytest.approx(0.886, abs=0.03)
    assert abs(np.corrcoef(one[1:].ravel(), one[:-1].ravel())[0, 1]) < 0.05


def test_sheets_mix_by_area() -> None:
    tops = np.array([2.0, 4.25], np.float32).reshape(2, 1, 1)
    values = np.array([8.0, 16.0], np.float32).reshape(2, 1, 1)
    column = stack_sheets(tops, values, 8)[0, :, 0]
    # Row 2 covers 1.5-2.5: half of it lies below 2.0. Row 4 covers 3.5-4.5: a quarter of it lies below 4.25.
    assert column == pytest.approx([0, 0, 4, 8, 10, 16, 16, 16])


def test_unknown_device_size_and_person_are_refused() -> None:
    with pytest.raises(UsageError, match="heidelberg_spectralis"):
        make_eye(0, 0, "OD", "heidelberg")
    with pytest.raises(UsageError, match="one of small, dense, full"):
        make_eye(0, 0, "OD", "zeiss_cirrus", "medium")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="4-digit"):
        make_eye(0, 2997, "OD", "zeiss_cirrus")


def test_realistic_lesions_are_rarer_and_smaller_in_the_same_eyes() -> None:
    plain, real = ([make_person(0, index, kind) for index in range(1500)] for kind in ("plain", "realistic"))
    assert [person.age for person in plain] == [person.age for person in real]
    has = np.array([[[name in person.lesions[eye] for name in LESIONS] for eye in ("OD", "OS")] for person in real])
    assert ((has.mean(axis=(0, 1)) > 0.05) & (has.mean(axis=(0, 1)) < 0.18)).all()
    for lesion in LESIONS:
        mild, marked = (
            dataclasses.replace(make_person(1, 5, kind), lesions={"OD": {lesion: 0.5}})
            for kind in ("realistic", "plain")
        )
        sizes = [
            assemble_eye(1, one, "OD", DIALECTS["zeiss_cirrus"], "small").truth.masks[lesion].sum()
            for one in (mild, marked)
        ]
        assert 0 < 1.5 * sizes[0] < sizes[1], lesion


def test_a_cohort_of_another_difficulty_has_other_uids_and_an_unknown_one_is_refused() -> None:
    plain, real = (make_eye(0, 3, "OD", "zeiss_cirrus", difficulty=kind) for kind in ("plain", "realistic"))
    assert sop_uid(0, plain) != sop_uid(0, real)
    with pytest.raises(UsageError, match="plain, realistic"):
        make_eye(0, 0, "OD", "zeiss_cirrus", difficulty="hard")  # type: ignore[arg-type]


def test_the_group_effect_multiplies_what_the_study_group_does() -> None:
    def lesions(effect: float, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
        people = [make_person(seed, index, group_effect=effect) for index in range(800)]
        counts = np.array([sum(map(len, person.lesions.values())) for person in people])
        return counts, np.array([STUDY_GROUPS.index(person.study_group) for person in people])

    means = {}
    for effect in (0.0, 1.0, 6.0):
        counts, groups = lesions(effect)
        means[effect] = [counts[groups == group].mean() for group in range(len(STUDY_GROUPS))]
    assert np.ptp(means[0.0]) < 0.6
    assert 1 < means[1.0][3] - means[1.0][0] < 3.5
    assert means[6.0][0] < 0.6
    assert means[6.0][3] > 9.0
    usual, strong = (make_eye(0, 3, "OD", "zeiss_cirrus", group_effect=effect) for effect in (1.0, 6.0))
    assert usual.person.study_group == strong.person.study_group
    assert sop_uid(0, usual) != sop_uid(0, strong)
