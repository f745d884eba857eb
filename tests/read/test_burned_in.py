"""Painted text is found and blanked; speckle, vessels, lesions and registration fill are not taken for it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from benchmarks.exam.decoys import make_decoy
from PIL import Image, ImageDraw, ImageFont

from octjepa.canonical.burned_in import find_text
from octjepa.canonical.fill import remove_fill
from octjepa.canonical.pipeline import canonicalise
from octjepa.errors import VolumeRejected
from octjepa.phantom import DEVICES
from octjepa.recipe import Preprocessing
from shaped_eye import SHAPES, shaped_eye

NAME = "Doe Jane 1950-01-01"


def painted(
    pixels: np.ndarray,
    size: int = 12,
    location: tuple[int, int] = (4, 4),
    level: int = 255,
    frames: Iterable[int] | None = None,
    counter: bool = False,
) -> tuple[np.ndarray, np.ndarray]:
    """(pixels with a name in them, which of them are ink)."""
    result = pixels.copy()
    for index in range(len(pixels)) if frames is None else frames:
        image = Image.fromarray(result[index])
        text = f"{NAME} {index}" if counter else NAME
        ImageDraw.Draw(image).text(location, text, fill=level, font=ImageFont.load_default(size=size))
        result[index] = np.asarray(image)
    return result, np.abs(result.astype(int) - pixels) > 40


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("size", "level"), [(8, 255), (10, 226), (12, 255), (16, 226), (24, 255)])
def test_text_in_all_frames_is_found_whole(device: str, size: int, level: int) -> None:
    pixels, ink = painted(shaped_eye(device, seed=3).volume.pixels, size, level=level)
    found = find_text(pixels)
    assert found is not None
    assert not (ink & ~found).any()
    assert found.mean() < (0.18 if size == 24 else 0.12)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("size", [10, 16])
def test_text_that_counts_or_stands_in_one_frame_is_found(device: str, size: int) -> None:
    clean = shaped_eye(device, seed=3).volume.pixels
    for pixels, ink in (painted(clean, size, counter=True), painted(clean, size, frames=[4])):
        found = find_text(pixels)
        assert found is not None
        assert not (ink & ~found).any()


def test_scale_bars_and_the_frame_of_a_viewer_are_found() -> None:
    clean = shaped_eye("zeiss_cirrus", seed=3).volume.pixels
    bar, frame = clean.copy(), clean.copy()
    bar[:, 20:23, 110:150] = 255
    found = find_text(bar)
    assert found is not None
    assert found[:, 20:23, 110:150].all()
    assert found.mean() < 0.02
    for location in (np.s_[:, 3:5, 5:-5], np.s_[:, -6:-4, 5:-5], np.s_[:, 3:-4, 5:7], np.s_[:, 3:-4, -7:-5]):
        frame[location] = 255
    found = find_text(frame)
    assert found is not None
    assert found[:, 3:-4, 5:7].all()
    assert found.mean() < 0.2  # the lines, not what they hold


@pytest.mark.parametrize("device", DEVICES)
def test_no_phantom_is_taken_for_text(device: str) -> None:
    for shape in SHAPES:
        assert find_text(remove_fill(shaped_eye(device, shape, seed=1).volume.pixels)[0]) is None, shape


@pytest.mark.parametrize(("seed", "person"), [(23, 360), (103, 224)])
def test_a_detached_hyaloid_is_no_text(seed: int, person: int) -> None:
    pixels = make_decoy(seed, person, "membrane_or_hyaloid", 0, "OD", "heidelberg_spectralis").pixels
    assert find_text(pixels) is None


@pytest.mark.parametrize("looks", [2.0, 4.0])
@pytest.mark.parametrize("device", DEVICES)
def test_strong_speckle_is_no_text(device: str, looks: float) -> None:
    pixels = shaped_eye(device, seed=3).volume.pixels[:8]
    speckle = np.random.default_rng(0).gamma(looks, 1 / looks, pixels.shape)
    assert find_text(np.clip((pixels + 20.0) * speckle, 0, 255).astype(np.uint8)) is None


def test_a_folded_sheet_is_no_text() -> None:
    fold = np.full((4, 120, 100), 20, np.uint8)  # both flanks of two folds, 1.5 rows to a column
    column = np.arange(10, 90)
    depth = np.rint(40 + 1.5 * np.abs((column - 10) % 40 - 20)).astype(int)
    for thick in range(4):
        fold[:, depth + thick, column] = 255
    assert find_text(fold) is None


def test_small_and_constant_scans_hold_no_text() -> None:
    for shape in ((4, 3, 2), (9, 2, 40), (12, 40, 40)):
        assert find_text(np.zeros(shape, np.uint8)) is None
        assert find_text(np.full(shape, 255, np.uint8)) is None


@pytest.mark.data
def test_real_scans_with_fill_are_not_taken_for_text(real_scans: Path) -> None:
    from octjepa.read.reader import read_volume

    for path in sorted(real_scans.glob("duke*.dcm")):
        assert find_text(remove_fill(read_volume(path).pixels)[0]) is None, path.name


def test_text_beside_the_retina_is_blanked_and_noted() -> None:
    volume = shaped_eye("heidelberg_spectralis", seed=3).volume
    pixels, _ = painted(volume.pixels)
    made = canonicalise(replace(volume, pixels=pixels, content_hash=""), Preprocessing())
    assert "burned_in_text" in made.notes
    assert f"text_blanked={len(pixels)}" in made.notes
    clean = canonicalise(volume, Preprocessing())
    assert not {"burned_in_text"} & set(clean.notes)
    assert made.volume.pixels[:, :30].max() < 90  # the ink was 255 on a vitreous of 3
    assert np.abs(made.volume.band.astype(int) - clean.volume.band).mean() < 0.2


def test_text_on_the_retina_is_refused() -> None:
    eye = shaped_eye("topcon_maestro2", seed=3)
    row = int(np.median(eye.bm)) - 25
    pixels, _ = painted(eye.volume.pixels, 16, location=(4, row))
    with pytest.raises(VolumeRejected, match=r"burned_in_text: text covers the retina in \d+ of"):
        canonicalise(replace(eye.volume, pixels=pixels, content_hash=""), Preprocessing())


def test_the_picture_of_a_screen_is_refused() -> None:
    volume = shaped_eye("topcon_maestro2", seed=3).volume
    pixels = volume.pixels
    for row in range(0, 180, 14):
        pixels, _ = painted(pixels, 12, location=(2, row))
    with pytest.raises(VolumeRejected, match="burned_in_text: text and lines cover"):
        canonicalise(replace(volume, pixels=pixels, content_hash=""), Preprocessing())
