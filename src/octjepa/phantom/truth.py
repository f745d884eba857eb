"""The truth of one eye as a small file: surfaces in 16 bit (1/64 row, 1/16 in deep scans), lesion masks as packed bits.

`np.load` reads it without pickle; `read_truth` unpacks it. Zip members carry a fixed date, so equal truths are equal
bytes.
"""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np

from octjepa.errors import UsageError
from octjepa.phantom.anatomy import SURFACES
from octjepa.phantom.eye import Eye, Truth

_LIMIT = 32767  # of 16 bit: +-511 rows in 1/64, +-2047 in 1/16


def write_truth(path: Path, eye: Eye) -> None:
    """Writes the truth of `eye`. Raises OSError where the disk refuses."""
    steps = 64 if eye.pixels.shape[1] <= 256 else 16
    rows = np.clip(eye.truth.surfaces_px, -_LIMIT / steps, _LIMIT / steps)
    arrays: dict[str, np.ndarray] = {
        "surfaces": np.round(rows * steps).astype(np.int16),
        "surface_steps_per_row": np.array(steps, np.int16),
        "surface_names": np.array(SURFACES),
        "shape": np.array(eye.pixels.shape, np.int32),
        "spacing_mm": np.array(eye.spacing_mm, np.float64),
        "fovea_mm": np.array(eye.truth.fovea_mm, np.float64),
        "laterality": np.array(eye.eye),
        "device": np.array(eye.device),
    }
    for name, mask in eye.truth.masks.items():
        arrays[f"mask_{name}"] = np.packbits(mask, axis=2)
    buffer = io.BytesIO()
    np.savez_compressed(buffer, allow_pickle=False, **arrays)
    path.write_bytes(buffer.getvalue())


def read_truth(path: Path) -> Truth:
    """The truth in `path`. Raises UsageError where the file is missing or holds something else."""
    try:
        with np.load(path, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
        width = int(arrays["shape"][2])
        masks = {
            name.removeprefix("mask_"): np.unpackbits(bits, axis=2, count=width).astype(bool)
            for name, bits in arrays.items()
            if name.startswith("mask_")
        }
        surfaces = arrays["surfaces"].astype(np.float32) / np.float32(arrays["surface_steps_per_row"])
        fovea = (float(arrays["fovea_mm"][0]), float(arrays["fovea_mm"][1]))
    except (OSError, KeyError, ValueError) as error:
        raise UsageError(f"{path} is no truth file of a phantom ({error}): expected truth/<SOP UID>.npz") from None
    return Truth(surfaces, masks, fovea)
