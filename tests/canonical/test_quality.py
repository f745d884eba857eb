"""Every part of the quality falls with its own kind of damage, step by step, and the score with it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from octjepa.canonical.pipeline import CanonicalisationResult, canonicalise, resample_in_plane
from octjepa.canonical.plausibility import implausible_share
from octjepa.canonical.resample import centred_positions
from octjepa.canonical.surfaces import Surfaces, find_surfaces
from octjepa.errors import VolumeRejected
from octjepa.phantom import DEVICES
from octjepa.recipe import Preprocessing
from octjepa.volume import OCTVolume
from shaped_eye import as_volume, shaped_eye

Damage = Callable[[OCTVolume, int], np.ndarray]


def made(volume: OCTVolume, pixels: np.ndarray | None = None) -> CanonicalisationResult:
    if pixels is not None:
        volume = replace(volume, pixels=np.ascontiguousarray(pixels), content_hash="")
    return canonicalise(volume, Preprocessing())


def noisier(volume: OCTVolume, step: int) -> np.ndarray:
    noise = np.random.default_rng(0).normal(0, 1, volume.shape)
    return np.clip(volume.pixels + 9.0 * step * noise, 0, 255).astype(np.uint8)


def darker(volume: OCTVolume, step: int) -> np.ndarray:
    """An opaque lens: less light from the eye, the floor of noise as it was."""
    floor = volume.pixels[:, :20].astype(float)
    noise = np.random.default_rng(1).normal(0, float(floor.std()), volume.shape)
    share = 0.75**step
    return np.clip(
        floor.mean() + share * (volume.pixels - floor.mean()) + np.sqrt(1 - share**2) * noise, 0, 255
    ).astype(np.uint8)


def cut_above(volume: OCTVolume, step: int) -> np.ndarray:
    return volume.pixels[:, 28 * step :] if step else volume.pixels


def blanked(volume: OCTVolume, step: int) -> np.ndarray:
    pixels = volume.pixels.copy()
    pixels[2 : 2 + 3 * step] = 0
    return pixels


def jittered(volume: OCTVolume, step: int) -> np.ndarray:
    jumps = np.rint(2.5 * step * np.random.default_rng(2).normal(0, 1, len(volume.pixels))).astype(int)
    return np.stack([np.roll(frame, jump, axis=0) for frame, jump in zip(volume.pixels, jumps, strict=True)])


def filled(volume: OCTVolume, step: int) -> np.ndarray:
    pixels = volume.pixels.copy()
    pixels[:, : 9 * step] = 255
    return pixels


@pytest.mark.parametrize(
    ("part", "sign", "damage"),
    [
        ("snr_db", -1, noisier),
        ("snr_db", -1, darker),
        ("clipped_share", 1, cut_above),
        ("blank_share", 1, blanked),
        ("motion_um", 1, jittered),
        ("fill_share", 1, filled),
    ],
)
@pytest.mark.parametrize("device", ["topcon_triton", "zeiss_cirrus"])
@pytest.mark.slow
def test_parts_and_score_fall_step_by_step(device: str, part: str, sign: int, damage: Damage) -> None:
    volume = shaped_eye(device, seed=2).volume
    figures = [made(volume, damage(volume, step)).measurements for step in range(4)]
    values, scores = ([float(of[name]) for of in figures] for name in (part, "quality"))
    assert (sign * np.diff(values) >= 0).all(), values
    assert sign * (values[-1] - values[0]) > 0.02
    assert (np.diff(scores) <= 0).all(), scores
    assert scores[-1] < scores[0] - 0.03


def test_what_is_measured_is_what_was_done() -> None:
    volume = shaped_eye("zeiss_cirrus", seed=2).volume
    frames = len(volume.pixels)
    assert made(volume, blanked(volume, 2)).measurements["blank_share"] == pytest.approx(6 / frames)
    share = float(made(volume, filled(volume, 2)).measurements["fill_share"])
    assert share == pytest.approx(19 / volume.shape[1], abs=0.01)
    rows = np.rint(5 * np.random.default_rng(2).normal(0, 1, frames))
    still = shaped_eye("heidelberg_spectralis", seed=2).volume  # tracked: the phantom moves it not at all
    assert float(made(still).measurements["motion_um"]) < 3
    rows = np.rint(5 * np.random.default_rng(2).normal(0, 1, len(still.pixels)))
    expected = 7.8 * np.sqrt(np.mean(np.diff(rows) ** 2))
    assert float(made(still, jittered(still, 2)).measurements["motion_um"]) == pytest.approx(expected, rel=0.1)


def test_damaged_b_scans_are_noted_and_left_out() -> None:
    volume = shaped_eye("zeiss_cirrus", seed=2).volume
    pixels = volume.pixels.copy()
    for index in (0, 14, 15):  # an end, and two side by side
        pixels[index] = np.random.default_rng(index).integers(0, 256, pixels[index].shape)
    result, reference = made(volume, pixels), made(volume)
    assert "damaged_frames=3" in result.notes
    assert float(result.measurements["blank_share"]) == pytest.approx(0.1, abs=0.01)
    inside = (result.volume.band[0] >= 0) & (reference.volume.band[0] >= 0)
    assert np.abs(result.volume.band[0].astype(int) - reference.volume.band[0])[inside].mean() < 2
    assert abs(result.volume.tissue_mean - reference.volume.tissue_mean) < 3
    assert not [note for note in reference.notes if "frames" in note]


def test_a_damaged_b_scan_decides_nothing_about_the_others() -> None:
    """Noise in one frame holds strokes, as text does, and is bright where a B-scan is dark."""
    volume = shaped_eye("topcon_maestro2", seed=2).volume
    pixels = volume.pixels.copy()
    pixels[7] = np.kron(np.random.default_rng(0).integers(0, 2, (48, 44)) * 255, np.ones((4, 4)))[
        : pixels.shape[1], : pixels.shape[2]
    ]
    result = made(volume, pixels)
    assert "damaged_frames=1" in result.notes
    assert "burned_in_text" not in result.notes


def test_clean_scans_of_four_vendors_score_alike() -> None:
    scores = {device: float(made(shaped_eye(device, seed=7).volume).measurements["quality"]) for device in DEVICES}
    assert min(scores.values()) > 0.85, scores
    assert max(scores.values()) - min(scores.values()) < 0.12, scores


def test_a_blink_is_blank_though_its_noise_is_not() -> None:
    volume = shaped_eye("topcon_triton", seed=2).volume
    pixels = volume.pixels.copy()
    vitreous = pixels[5:8, :20]
    pixels[5:8] = np.tile(vitreous, (1, 10, 1))[:, : volume.shape[1]]
    result = made(volume, pixels)
    assert "blank_frames=3" in result.notes
    reference = made(volume)
    inside = (result.volume.band[0] >= 0) & (reference.volume.band[0] >= 0)
    assert np.abs(result.volume.band[0].astype(int) - reference.volume.band[0])[inside].max() < 8
    assert np.abs(result.volume.tissue_mean - reference.volume.tissue_mean) < 5


def test_bruch_below_the_last_row_is_clipped() -> None:
    volume = shaped_eye("heidelberg_spectralis", seed=2).volume
    whole = made(volume).measurements
    rows = shaped_eye("heidelberg_spectralis", seed=2).bm
    cut = int(np.percentile(rows, 60))
    result = made(volume, volume.pixels[:, :cut]).measurements
    assert whole["clipped_share"] == 0
    assert 0.2 < float(result["clipped_share"]) <= 1
    assert float(result["quality"]) < 0.85 * float(whole["quality"])


# Smooth brightness is not a retina


def _no_retina() -> dict[str, np.ndarray]:
    rows = np.arange(184)[None, :, None]
    flat = np.zeros((24, 184, 160))
    frames = np.arange(24)[:, None, None]
    wrapping = (np.linspace(255, 0, 160).astype(int)[None, :, None] + frames) % 256
    return {
        "ramp that wraps": wrapping + np.zeros((24, 160, 184)),
        "ramp with a cliff": np.where(rows < 12, 5 + frames / 8, 265 - rows * 1.4) + flat,
        "waves": 127 + 120 * np.sin(rows / 15) + flat,
        "hill": 255 - 2.5 * np.abs(rows - 90).clip(0, 100) + flat,
    }


@pytest.mark.parametrize("what", list(_no_retina()))
def test_smooth_brightness_is_no_retina(what: str) -> None:
    pixels = np.clip(_no_retina()[what], 0, 255).astype(np.uint8)
    with pytest.raises(VolumeRejected, match="no_tissue"):
        made(as_volume(pixels, (0.26, 0.0078, 0.04)))


@pytest.mark.parametrize("device", DEVICES)
def test_a_faint_and_noisy_retina_is_one(device: str) -> None:
    """Less than a fifth of the light, noise of the same strength; atrophy, which takes the outer edge away."""
    volume = shaped_eye(device, "geographic_atrophy", seed=5).volume
    noise = np.random.default_rng(0).normal(12, 10, volume.shape)
    made(volume, np.clip(0.2 * volume.pixels + noise, 0, 255).astype(np.uint8))


def test_an_ilm_torn_by_noise_is_repaired_and_what_is_left_lowers_the_quality(monkeypatch: pytest.MonkeyPatch) -> None:
    from band_error import errors_um
    from octjepa.canonical import surfaces

    eye = shaped_eye("topcon_maestro2", seed=3)
    noise = np.random.default_rng(0).normal(20, 30, eye.volume.pixels.shape)
    noisy = replace(
        eye.volume, pixels=np.clip(eye.volume.pixels * 0.35 + noise, 0, 255).astype(np.uint8), content_hash=""
    )

    def wrong() -> float:
        return float((np.abs(errors_um(noisy, eye.ilm, eye.bm, Preprocessing())["ilm"]) > 50).mean())

    repaired, result = wrong(), canonicalise(noisy, Preprocessing())
    monkeypatch.setattr(surfaces, "TORN_SHARE", 1.0)
    torn, unrepaired = wrong(), canonicalise(noisy, Preprocessing())
    assert torn > 0.1
    assert repaired < torn / 2
    assert float(unrepaired.measurements["torn_share"]) == pytest.approx(torn, abs=0.06)
    assert float(result.measurements["torn_share"]) == pytest.approx(repaired, abs=0.06)
    assert float(result.measurements["quality"]) > 0
    assert canonicalise(eye.volume, Preprocessing()).measurements["torn_share"] == 0


def looked_at(volume: OCTVolume) -> tuple[np.ndarray, Surfaces, np.ndarray]:
    """(in-plane canonical B-scans, their surfaces, their positions in mm)."""
    preprocessing = Preprocessing()
    _, ty, tx = preprocessing.target_spacing_mm
    columns_mm = centred_positions(int(volume.shape[2] * volume.spacing_mm[2] / tx), tx)
    image = resample_in_plane(volume.pixels, volume, preprocessing, columns_mm)
    return image, find_surfaces(image, ty, tx), centred_positions(len(image), volume.spacing_mm[0])


@pytest.mark.parametrize("device", DEVICES)
def test_surfaces_that_follow_a_wrong_layer_smoothly_are_implausible(device: str) -> None:
    _, ty, tx = Preprocessing().target_spacing_mm
    image, found, positions = looked_at(shaped_eye(device, seed=3).volume)
    assert implausible_share(image, found, positions, ty, tx) < 0.005
    at_the_rpe = replace(found, ilm=found.bm - 0.07 / ty)
    assert implausible_share(image, at_the_rpe, positions, ty, tx) > 0.95
    in_the_middle = replace(found, ilm=found.ilm + 0.45 * (found.bm - found.ilm))
    assert implausible_share(image, in_the_middle, positions, ty, tx) > 0.6
    half = replace(found, ilm=np.where(np.arange(len(image))[:, None] < 14, at_the_rpe.ilm, found.ilm))
    assert implausible_share(image, half, positions, ty, tx) == pytest.approx(14 / len(image), abs=0.06)


@pytest.mark.parametrize("shape", ["macular_hole", "subretinal_fluid", "geographic_atrophy", "epiretinal_membrane"])
def test_sick_retinas_are_plausible(shape: str) -> None:
    assert (
        float(made(shaped_eye("heidelberg_spectralis", shape, seed=3).volume).measurements["implausible_share"]) < 0.02
    )
