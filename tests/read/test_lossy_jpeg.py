"""JPEG rings where white fill ends: fill is still removed whole, ringing is not text, and text is still found."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageDraw, ImageFont

from lossy_frames import encoded
from octjepa.canonical.burned_in import find_text
from octjepa.canonical.fill import remove_fill
from octjepa.phantom import DEVICES
from octjepa.read.reader import read_volume
from shaped_eye import shaped_eye

QUALITIES = (60, 75, 90, 95, 98)


def with_white_wedge(pixels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(B-scans as registration leaves them, white above a slanting line; that wedge as a mask)."""
    _, height, width = pixels.shape
    row, column = np.arange(height)[:, None], np.arange(width)
    wedge = np.stack([row < 4 + 0.06 * (column + 3 * index) for index in range(len(pixels))])
    return np.where(wedge, np.uint8(255), pixels), wedge


@pytest.mark.parametrize("quality", QUALITIES)
@pytest.mark.parametrize("device", DEVICES)
def test_fill_is_removed_whole_and_its_ringing_is_no_text(device: str, quality: int) -> None:
    pixels, wedge = with_white_wedge(shaped_eye(device, seed=3).volume.pixels)
    exact, exact_share = remove_fill(pixels)
    cleaned, share = remove_fill(encoded(pixels, quality))
    assert find_text(cleaned) is None
    assert np.count_nonzero(cleaned[wedge] > 160) == 0
    assert share == pytest.approx(exact_share, abs=0.003)
    assert np.count_nonzero(exact[wedge] > 160) == 0


@pytest.mark.parametrize("quality", QUALITIES)
def test_text_survives_compression(quality: int) -> None:
    pixels = shaped_eye("heidelberg_spectralis", seed=3).volume.pixels.copy()
    clean = pixels.copy()
    for index, frame in enumerate(clean):
        image = Image.fromarray(frame)
        ImageDraw.Draw(image).text((4, 4), "Doe Jane 1950", fill=255, font=ImageFont.load_default(size=12))
        pixels[index] = np.asarray(image)
    ink = pixels.astype(int) - clean > 100
    found = find_text(remove_fill(encoded(pixels, quality))[0])
    assert found is not None
    assert not (ink & ~found).any()


def test_a_saturated_layer_at_the_side_of_a_scan_is_no_fill() -> None:
    pixels = shaped_eye("heidelberg_spectralis", seed=3).volume.pixels.copy()
    pixels[:, 90:97, :30] = 255
    assert remove_fill(pixels)[0] is pixels
    assert remove_fill(encoded(pixels, 90))[1] == 0


def test_fill_that_meets_a_bright_layer_takes_next_to_none_of_it() -> None:
    pixels, wedge = with_white_wedge(shaped_eye("heidelberg_spectralis", seed=3).volume.pixels)
    below = np.roll(wedge, 12, axis=1) & ~wedge
    pixels[below] = 200  # a layer right below the wedge
    coded = encoded(pixels, 75)
    cleaned, _ = remove_fill(coded)
    deep = np.roll(wedge, 12, axis=1) & ~np.roll(wedge, 6, axis=1) & below
    assert np.array_equal(cleaned[deep], coded[deep])


@pytest.mark.data
@pytest.mark.parametrize("quality", [60, 80, 90, 95])
def test_real_eyes_after_compression(real_scans: Path, quality: int) -> None:
    for path in sorted(real_scans.glob("duke*.dcm")):
        pixels = read_volume(path).pixels
        _, exact_share = remove_fill(pixels)
        cleaned, share = remove_fill(encoded(pixels, quality))
        assert find_text(cleaned) is None, path.name
        assert share == pytest.approx(exact_share, abs=0.0005)
        left = np.count_nonzero(cleaned[:, :6] > 200)  # of a wedge thinner than six pixels
        assert left <= (400 if quality == 60 else 0)
