"""What is not a retina is refused for that reason; sparse, oedematous and other diseased retinas are not."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from octjepa.canonical.pipeline import CanonicalisationResult, canonicalise
from octjepa.errors import VolumeRejected
from octjepa.phantom import DEVICES
from octjepa.read.reader import read_volume
from octjepa.recipe import Preprocessing
from octjepa.volume import OCTVolume
from shaped_eye import SHAPES, as_volume, shaped_eye

SPACING_MM = (0.12, 0.0039, 0.0117)


def made(volume: OCTVolume) -> CanonicalisationResult:
    return canonicalise(volume, Preprocessing())


@pytest.fixture(scope="module")
def not_retina(root: Path) -> Path:
    folder = root.parent / "shared" / "real" / "not_retina"
    if not folder.is_dir():
        pytest.skip(f"no {folder}")
    return folder


def stack(folder: Path, name: str) -> np.ndarray:
    frames = np.load(folder / f"{name}.npz")["volume"]
    return frames if len(frames) >= 4 else np.concatenate([frames, frames[::-1]])


@pytest.mark.parametrize("first", range(0, 35, 5))
def test_anterior_segments_are_refused_as_no_retina(not_retina: Path, first: int) -> None:
    frames = stack(not_retina, "asoct_pourzand")[first : first + 5]
    with pytest.raises(VolumeRejected, match=r"not_retina: .*bright tissue down to"):
        made(as_volume(frames, SPACING_MM))


@pytest.mark.parametrize("name", ["wyzhn_10_finger", "wyzhn_4_orange_slice"])
@pytest.mark.parametrize("spacing_mm", [(0.12, 0.002, 0.006), SPACING_MM, (0.12, 0.0078, 0.015)])
def test_skin_and_fruit_are_refused_or_left_out_of_training(
    not_retina: Path, name: str, spacing_mm: tuple[float, float, float]
) -> None:
    volume = as_volume(stack(not_retina, name), spacing_mm)
    if name.endswith("orange_slice") and spacing_mm[1] < 0.005:  # so small that it could be a retina in ruins
        result = made(volume)
        assert "retina_doubtful" in result.notes
        assert float(result.measurements["retina_score"]) < 0.7
        return
    with pytest.raises(VolumeRejected, match="not_retina"):
        made(volume)


def drawn_object(seed: int) -> np.ndarray:
    """[8, 400, 300] Two smooth bright edges with dark between, and a bright body far below: an iris and a lens."""
    rng = np.random.default_rng(seed)
    depth = np.arange(400)[:, None]
    column = np.arange(300)[None]
    top = 80 + 0.0006 * (column - 150) ** 2
    image = 15 + 120 * ((depth > top) & (depth < top + 40)) + 90 * ((depth > top + 150) & (depth < top + 300))
    return np.clip(image + rng.normal(0, 6, (8, 400, 300)), 0, 255).astype(np.uint8)


def test_a_drawn_object_with_a_bright_body_far_below_is_no_retina() -> None:
    with pytest.raises(VolumeRejected, match="not_retina"):
        made(as_volume(drawn_object(0), (0.12, 0.0078, 0.02)))


@pytest.mark.parametrize("shape", SHAPES)
def test_phantoms_of_every_shape_score_one(shape: str) -> None:
    result = made(shaped_eye(DEVICES[SHAPES.index(shape) % len(DEVICES)], shape, seed=5).volume)
    assert result.measurements["retina_score"] == 1
    assert "retina_doubtful" not in result.notes


def test_five_lines_and_noise_are_no_reason_to_refuse() -> None:
    volume = shaped_eye("zeiss_cirrus", seed=3).volume
    _, dy, dx = volume.spacing_mm
    sparse = replace(volume, pixels=volume.pixels[::6], spacing_mm=(0.8, dy, dx), content_hash="")
    noise = np.random.default_rng(0).normal(20, 40, volume.pixels.shape)
    noisy = np.clip(volume.pixels * 0.35 + noise, 0, 255).astype(np.uint8)
    for changed in (sparse, replace(volume, pixels=noisy, content_hash="")):
        assert float(made(changed).measurements["retina_score"]) > 0.5


def test_real_retinas_pass(real_scans: Path) -> None:
    for path in sorted(real_scans.glob("duke*.dcm")):
        assert made(read_volume(path)).measurements["retina_score"] == 1


def radial(volume: OCTVolume, lines: int) -> OCTVolume:
    """B-scans through the centre of `volume`, half a turn of them, interpolated between its slices."""
    pixels, (dz, _, dx) = volume.pixels, volume.spacing_mm
    slices, height, width = pixels.shape
    count = int(0.95 * min(slices * dz, width * dx) / dx)
    along_mm = (np.arange(count) - (count - 1) / 2) * dx
    out = np.zeros((lines, height, count), np.uint8)
    for index in range(lines):
        angle = np.pi * index / lines
        column = np.clip(np.rint(along_mm * np.cos(angle) / dx + (width - 1) / 2), 0, width - 1).astype(int)
        position = along_mm * np.sin(angle) / dz + (slices - 1) / 2
        below = np.clip(np.floor(position), 0, slices - 2).astype(int)
        share = np.clip(position - below, 0, 1)
        out[index] = np.rint(pixels[below, :, column].T * (1 - share) + pixels[below + 1, :, column].T * share)
    return replace(volume, pixels=out, spacing_mm=(0.26, *volume.spacing_mm[1:]), content_hash="")


@pytest.mark.parametrize("device", DEVICES)
def test_radial_lines_under_a_raster_header_are_noted(device: str) -> None:
    volume = shaped_eye(device, seed=3).volume
    assert "radial_by_content" in made(radial(volume, 24)).notes
    for seed in (3, 4):
        assert "radial_by_content" not in made(shaped_eye(device, seed=seed).volume).notes
