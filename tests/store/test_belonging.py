"""B-scans that do not belong together, and scans of something else than a human retina, are refused for that reason."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from drawn_eyes import CORNEA, RODENT, bent, with_instrument
from octjepa.canonical.pipeline import CanonicalisationResult, canonicalise
from octjepa.errors import VolumeRejected
from octjepa.phantom import DEVICES
from octjepa.recipe import Preprocessing
from octjepa.volume import OCTVolume
from shaped_eye import SHAPES, shaped_eye


def of_frames(device: str, frames: Sequence[np.ndarray]) -> OCTVolume:
    return replace(shaped_eye(device, seed=3).volume, pixels=np.stack(frames), content_hash="")


def made(volume: OCTVolume) -> CanonicalisationResult:
    return canonicalise(volume, Preprocessing())


def repeated(device: str, positions: Sequence[int], times: int) -> OCTVolume:
    """Each position scanned `times` times, with other speckle, noise and motion."""
    takes = [shaped_eye(device, "healthy", 3, light=take, motion=take).volume.pixels for take in range(times)]
    return of_frames(device, [take[position] for position in positions for take in takes])


@pytest.mark.parametrize("device", DEVICES)
def test_neighbouring_frames_of_many_eyes_are_refused(device: str) -> None:
    eyes = [shaped_eye(device, "healthy", seed).volume.pixels for seed in range(12)]
    middle = eyes[0].shape[0] // 2
    for frames in ([eye[middle] for eye in eyes], [eye[5 * seed % len(eye)] for seed, eye in enumerate(eyes)]):
        with pytest.raises(VolumeRejected, match=r"frames_unrelated: neighbouring B-scans differ by \d+ um"):
            made(of_frames(device, frames))


@pytest.mark.slow
@pytest.mark.parametrize("gap_mm", [0.06, 0.4, 0.8])
def test_frames_of_many_eyes_are_refused_whatever_gap_is_stated(gap_mm: float) -> None:
    """120 single lines of 120 eyes, or a folder of mixed B-scans: the stated spacing is invented."""
    volume = shaped_eye("topcon_maestro2", seed=3).volume
    frames = [shaped_eye("topcon_maestro2", "healthy", seed).volume.pixels[14] for seed in range(14)]
    _, dy, dx = volume.spacing_mm
    with pytest.raises(VolumeRejected, match="frames_unrelated"):
        made(replace(volume, pixels=np.stack(frames), spacing_mm=(gap_mm, dy, dx), content_hash=""))
    in_order = replace(volume, pixels=volume.pixels[::2], spacing_mm=(gap_mm, dy, dx), content_hash="")
    assert "neighbours_unlike" not in made(in_order).notes


@pytest.mark.parametrize("device", DEVICES)
def test_frames_whose_order_is_lost_are_refused(device: str) -> None:
    pixels = shaped_eye(device, seed=3).volume.pixels
    order = np.random.default_rng(0).permutation(len(pixels))
    interlaced = np.arange(len(pixels)).reshape(2, -1).T.ravel()  # 0, 14, 1, 15, ...
    for frames in (pixels[order], pixels[interlaced]):
        with pytest.raises(VolumeRejected, match="frames_unrelated"):
            made(of_frames(device, list(frames)))


@pytest.mark.parametrize("position", [4, 17])  # with vessels, and through the fovea
@pytest.mark.parametrize("device", DEVICES)
def test_a_film_of_one_position_is_refused(device: str, position: int) -> None:
    with pytest.raises(VolumeRejected, match="one_position: 12 B-scans of one thickness, to"):
        made(repeated(device, [position], 12))


@pytest.mark.parametrize("times", [2, 3, 4])
def test_repeats_of_each_position_are_noted(times: int) -> None:
    result = made(repeated("topcon_maestro2", range(0, 28, 2), times))
    assert f"repeats_per_position={times}" in result.notes


@pytest.mark.parametrize("shape", SHAPES)
def test_one_eye_in_order_is_neither_refused_nor_noted(shape: str) -> None:
    device = DEVICES[SHAPES.index(shape) % len(DEVICES)]
    result = made(shaped_eye(device, shape, seed=3).volume)
    assert not [note for note in result.notes if "neighbours" in note or "repeats" in note or "object" in note]
    assert result.measurements["retina_score"] == 1


def test_sparse_lines_and_noise_are_not_taken_for_many_eyes() -> None:
    volume = shaped_eye("zeiss_cirrus", seed=3).volume
    _, dy, dx = volume.spacing_mm
    made(replace(volume, pixels=volume.pixels[::4], spacing_mm=(0.5, dy, dx), content_hash=""))
    noise = np.random.default_rng(0).normal(20, 40, volume.pixels.shape)
    made(replace(volume, pixels=np.clip(volume.pixels * 0.35 + noise, 0, 255).astype(np.uint8), content_hash=""))


def test_a_cornea_is_refused_by_its_shape() -> None:
    with pytest.raises(VolumeRejected, match=r"not_retina: .*score 0\.00.*bend towards the vitreous, as a cornea"):
        made(bent(*CORNEA))


def test_the_eye_of_a_small_animal_is_refused_by_its_shape() -> None:
    with pytest.raises(VolumeRejected, match=r"not_retina: .*bend towards the sclera, as the retina of a small animal"):
        made(bent(*RODENT))


@pytest.mark.parametrize("device", DEVICES)
def test_an_instrument_above_the_retina_is_noted(device: str) -> None:
    volume = shaped_eye(device, seed=3).volume
    result = made(replace(volume, pixels=with_instrument(volume.pixels, 9, 14), content_hash=""))
    assert "object_in_vitreous=5" in result.notes
