"""What JPEG does to real eyes with white registration fill: fill, false and true text, and retinal surfaces.

    OMP_NUM_THREADS=1 python benchmarks/lossy_jpeg.py --out docs/lossy_jpeg.json

The two eyes of Chiu et al. (2015) are encoded at each quality and read again. Per eye and quality: the share of
voxels taken for fill; B-scans in which text is seen, though none was painted; the share of A-scans of which anything
between the graded ILM and Bruch's membrane was blanked; the mean absolute error of the found surfaces against either
grader in um (`graders_*`: of one grader against the other), and the share of A-scans more than 50 um from their
middle; and for a name painted beside the retina the share of its ink that is covered, the worst of three sizes.
Quality null is the scan without compression. Two minutes on one core.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw, ImageFont

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))
from lossy_frames import encoded
from octjepa.canonical.burned_in import find_text
from octjepa.canonical.fill import remove_fill
from octjepa.canonical.pipeline import resample_in_plane
from octjepa.canonical.resample import centred_positions
from octjepa.canonical.surfaces import find_surfaces
from octjepa.read.reader import read_volume
from octjepa.recipe import Preprocessing
from octjepa.volume import OCTVolume

EYES = ("01", "04")
QUALITIES: tuple[int | None, ...] = (None, 98, 95, 90, 85, 80, 70, 60)
SIZES = (10, 12, 16)  # of painted text, in pixels
_WRONG_MM = 0.05
_GRADED = {"ilm": 0, "bm": 7}  # of the graders' eight surfaces


def painted(pixels: np.ndarray, size: int) -> tuple[np.ndarray, np.ndarray]:
    """(B-scans with a name near their lower border, its ink as a mask)."""
    drawn = []
    for frame in pixels:
        image = Image.fromarray(frame)
        location = (8, frame.shape[0] - 2 * size)
        ImageDraw.Draw(image).text(location, "Doe Jane 1950-01-01", fill=255, font=ImageFont.load_default(size=size))
        drawn.append(np.asarray(image))
    result = np.stack(drawn)
    return result, result.astype(int) - pixels > 100


def covered_share(pixels: np.ndarray, quality: int | None) -> float:
    """Share of the painted ink that is found after compression, the least of `SIZES`."""
    shares = []
    for size in SIZES:
        with_name, ink = painted(pixels, size)
        text = find_text(remove_fill(encoded(with_name, quality))[0])
        shares.append(0.0 if text is None else float((text & ink).sum() / ink.sum()))
    return min(shares)


def surface_errors(volume: OCTVolume, graders: list[np.ndarray]) -> dict[str, float]:
    """ilm_um_1, ...: mean absolute distance of the found surfaces from those of each grader, where both graded.

    ilm_wrong, bm_wrong: share of A-scans more than 50 um from the middle of both.
    """
    _, height, width = volume.shape
    _, dy, dx = volume.spacing_mm
    preprocessing = Preprocessing()
    _, ty, tx = preprocessing.target_spacing_mm
    columns_mm = centred_positions(int(width * dx / tx), tx)
    image = resample_in_plane(volume.pixels, volume, preprocessing, columns_mm)
    found = find_surfaces(image, ty, tx)
    errors = {}
    for name, index in _GRADED.items():
        depth_mm = (getattr(found, name) - (image.shape[1] - 1) / 2) * ty
        graded_mm = [
            np.stack([np.interp(columns_mm, centred_positions(width, dx), line) for line in one[:, index]])
            for one in [(grader - (height - 1) / 2) * dy for grader in graders]
        ]
        both = ~np.isnan(graded_mm[0]) & ~np.isnan(graded_mm[1])
        for number, true_mm in enumerate(graded_mm, start=1):
            errors[f"{name}_um_{number}"] = float(np.abs(depth_mm - true_mm)[both].mean()) * 1000
        middle = (graded_mm[0] + graded_mm[1]) / 2
        errors[f"{name}_wrong"] = float((np.abs(depth_mm - middle)[both] > _WRONG_MM).mean())
        errors[f"graders_{name}_um"] = float(np.abs(graded_mm[0] - graded_mm[1])[both].mean()) * 1000
    return errors


def read_eye(data: Path, eye: str) -> tuple[OCTVolume, list[np.ndarray]]:
    """(the scan in the order of its grades, [frames, 8, columns] of each grader)."""
    volume = read_volume(data / f"duke_dme_eye{eye}_11x496x768.dcm")
    if "frames_reversed" in volume.notes:
        volume = replace(volume, pixels=np.ascontiguousarray(volume.pixels[::-1]))
    with np.load(data.parent / "labels" / f"duke_dme_eye{eye}_layers.npz", allow_pickle=False) as file:
        return volume, [file["layers"], file["layers2"]]


def measure(volume: OCTVolume, graders: list[np.ndarray], quality: int | None) -> dict[str, Any]:
    """One row of the table."""
    pixels = encoded(volume.pixels, quality)
    cleaned, fill_share = remove_fill(pixels)
    text = find_text(cleaned)
    blanked = cleaned != pixels
    if text is not None:
        blanked |= text
    row = np.arange(pixels.shape[1])[:, None]
    retina = (row >= graders[0][:, None, 0]) & (row <= graders[0][:, None, 7])  # False where ungraded
    return {
        "quality": quality,
        "fill_share": fill_share,
        "text_frames": 0 if text is None else int(text.any(axis=(1, 2)).sum()),
        "retina_blanked": float((blanked & retina).any(axis=1).mean()),
        **surface_errors(replace(volume, pixels=cleaned), graders),
        "name_covered": covered_share(volume.pixels, quality),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    named = os.environ.get("OCTJEPA_DATA")
    beside = Path(__file__).resolve().parents[2] / "shared" / "data"
    parser.add_argument("--data", type=Path, default=Path(named) if named else beside)
    parser.add_argument("--qualities", type=int, nargs="*", help="only these, and the scan without compression")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    qualities = QUALITIES if arguments.qualities is None else (None, *arguments.qualities)
    rows = []
    for eye in EYES:
        volume, graders = read_eye(arguments.data, eye)
        for quality in qualities:
            rows.append({"eye": eye, **measure(volume, graders, quality)})
            print({name: round(of, 4) if isinstance(of, float) else of for name, of in rows[-1].items()}, flush=True)
    if arguments.out:
        arguments.out.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
