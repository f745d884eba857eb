"""One phantom eye, and writers of it for every open format."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path

import numpy as np
from PIL import Image

from octjepa.phantom import make_eye


@cache
def phantom() -> tuple[np.ndarray, tuple[float, float, float]]:
    """(pixels uint8 [D, H, W], spacing in mm) of one right eye; the spacings of the axes differ."""
    eye = make_eye(5, 0, "OD", "heidelberg_spectralis")
    pixels = eye.pixels.copy()
    pixels.setflags(write=False)
    return pixels, tuple(round(mm, 6) for mm in eye.spacing_mm)


def write_itk(path: Path, pixels: np.ndarray, spacing_mm: tuple[float, ...] = (1.0, 1.0, 1.0)) -> Path:
    """NIfTI, MHD or MHA, by the suffix; axes and spacing as they are given, the last axis the fastest."""
    import SimpleITK as sitk  # noqa: N813

    image = sitk.GetImageFromArray(pixels)
    image.SetSpacing([float(mm) for mm in spacing_mm[::-1]])
    sitk.WriteImage(image, str(path))
    return path


def write_images(folder: Path, pixels: np.ndarray, name: str = "scan_{}.png", first: int = 1) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for number, frame in enumerate(pixels, first):
        Image.fromarray(frame).save(folder / name.format(number))
    return folder


def write_tiff(path: Path, pixels: np.ndarray) -> Path:
    pages = [Image.fromarray(frame) for frame in pixels]
    pages[0].save(path, save_all=True, append_images=pages[1:])
    return path


def write_sidecar(path: Path, **fields: object) -> Path:
    path.write_text(json.dumps(fields))
    return path
