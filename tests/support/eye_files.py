"""One phantom eye, and writers of it for every open format."""

from __future__ import annotations

import json
import zlib
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


def write_voxels(
    path: Path, pixels: np.ndarray, spacing_mm: tuple[float, ...] = (1.0, 1.0, 1.0), compressed: bool = False
) -> Path:
    """NIfTI, MHD or MHA, by the suffix; axes and spacing as they are given, the last axis the fastest."""
    if path.suffix in (".mhd", ".mha"):
        return _write_metaimage(path, pixels, spacing_mm, compressed)
    import nibabel

    affine = np.diag([*(float(mm) for mm in spacing_mm[::-1]), *[1.0] * (4 - len(spacing_mm))])
    image = nibabel.Nifti1Image(pixels.T, affine)
    image.header.set_xyzt_units("mm")
    nibabel.save(image, path)
    return path


_MET_TYPES = {"uint8": "MET_UCHAR", "int16": "MET_SHORT", "uint16": "MET_USHORT", "float32": "MET_FLOAT"}


def _write_metaimage(path: Path, pixels: np.ndarray, spacing_mm: tuple[float, ...], compressed: bool) -> Path:
    """With the fields that SimpleITK 2.5 writes, in its order."""
    voxels = np.ascontiguousarray(pixels).tobytes()
    packed = zlib.compress(voxels) if compressed else voxels
    axes = pixels.ndim
    suffix = ".zraw" if compressed else ".raw"
    lines = {
        "ObjectType": "Image",
        "NDims": axes,
        "BinaryData": True,
        "BinaryDataByteOrderMSB": False,
        "CompressedData": compressed,
        **({"CompressedDataSize": len(packed)} if compressed else {}),
        "TransformMatrix": " ".join(f"{value:g}" for value in np.eye(axes).ravel()),
        "Offset": " ".join(["0"] * axes),
        "CenterOfRotation": " ".join(["0"] * axes),
        "AnatomicalOrientation": "RAI",
        "ElementSpacing": " ".join(f"{mm:.17g}" for mm in spacing_mm[::-1]),
        "DimSize": " ".join(map(str, pixels.shape[::-1])),
        "ElementType": _MET_TYPES[pixels.dtype.name],
        "ElementDataFile": "LOCAL" if path.suffix == ".mha" else path.with_suffix(suffix).name,
    }
    header = "".join(f"{name} = {value}\n" for name, value in lines.items()).encode()
    if path.suffix == ".mha":
        path.write_bytes(header + packed)
    else:
        path.write_bytes(header)
        path.with_suffix(suffix).write_bytes(packed)
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
