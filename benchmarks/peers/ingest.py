"""`octjepa ingest` against a plain pipeline on the same DICOM files, each by one process on one thread.

- octjepa: pydicom and its decoders frame by frame, every fault looked for; spacing from ordered sources; low-pass
  resampling; membranes found, flattened on Bruch's membrane; stored size; percentiles to 8 bit; quality, content hash,
  index, ledger, duplicates, splits; pixels.npy and geometry.npz on disk (fsync). A bad file costs a ledger row.
- Both peers: pydicom's `pixel_array` with the same decoders; Pixel Spacing and frame positions (or SliceThickness);
  trilinear resampling to the same spacing, padded or cropped to the same size; percentiles to 8 bit; one .npy (no
  fsync). A bad file ends the run. `monai` does it with `Spacingd`, `ResizeWithPadOrCropd` and
  `ScaleIntensityRangePercentilesd`, `pydicom` with SciPy's `zoom` and NumPy.

The peers therefore do less: the ratio says what knowing the scan costs, not which resampler is faster.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pydicom
import torch
from benchmarks.peers.alternating_runs import Comparison, rate
from benchmarks.peers.data import bench_recipe, one_thread, phantom_files
from jaxtyping import Float, UInt8
from scipy import ndimage

from octjepa.errors import OctjepaError, UsageError, install_command
from octjepa.ingest import build_store
from octjepa.recipe import Preprocessing

Pipeline = Callable[[Path, Path, Preprocessing], None]


def read_plainly(path: Path) -> tuple[Float[np.ndarray, "D H W"], tuple[float, float, float]]:
    """(pixels, (dz, dy, dx) in mm) as a person reads them who trusts the header."""
    data = pydicom.dcmread(path)
    measures = data.SharedFunctionalGroupsSequence[0].PixelMeasuresSequence[0]
    row_mm, column_mm = map(float, measures.PixelSpacing)
    try:
        positions = [
            group.PlanePositionSequence[0].ImagePositionPatient for group in data.PerFrameFunctionalGroupsSequence
        ]
        slice_mm = float(np.linalg.norm(np.subtract(positions[-1], positions[0])) / (len(positions) - 1))
    except (AttributeError, TypeError, ValueError):  # some devices give no positions
        slice_mm = float(measures.SliceThickness)
    return data.pixel_array.astype(np.float32), (slice_mm, row_mm, column_mm)


def by_scipy(path: Path, out: Path, preprocessing: Preprocessing) -> None:
    """One file to one .npy in `out`, by SciPy and NumPy."""
    np.save(out / f"{path.stem}.npy", resample_by_scipy(path, preprocessing))


def resample_by_scipy(path: Path, preprocessing: Preprocessing) -> UInt8[np.ndarray, "D H W"]:
    """One file at the spacing and size of a store, in 8 bit."""
    pixels, spacing_mm = read_plainly(path)
    factors = np.divide(spacing_mm, preprocessing.target_spacing_mm)
    coarse = ndimage.zoom(pixels, factors, order=1, mode="grid-constant", grid_mode=True)  # voxels are areas
    sized = np.zeros(preprocessing.stored_size, np.float32)
    room = [min(have, want) for have, want in zip(coarse.shape, sized.shape, strict=True)]
    sized[_middle(sized.shape, room)] = coarse[_middle(coarse.shape, room)]
    low, high = np.percentile(sized, preprocessing.clip_percentiles)
    scaled = np.clip((sized - low) / max(high - low, 1e-6), 0, 1) * 255
    return np.asarray(scaled.astype(np.uint8))


def _middle(shape: tuple[int, ...], room: list[int]) -> tuple[slice, ...]:
    starts = [(have - want) // 2 for have, want in zip(shape, room, strict=True)]
    return tuple(slice(start, start + want) for start, want in zip(starts, room, strict=True))


def by_monai(path: Path, out: Path, preprocessing: Preprocessing) -> None:
    """One file to one .npy in `out`, by MONAI. Raises UsageError where it is not installed."""
    pixels, spacing_mm = read_plainly(path)
    affine = torch.diag(torch.tensor([*spacing_mm, 1.0], dtype=torch.float64))
    image = monai("data").MetaTensor(torch.from_numpy(pixels)[None], affine=affine)
    made = _monai_pipeline(preprocessing)({"image": image})["image"]
    np.save(out / f"{path.stem}.npy", made[0].numpy().astype(np.uint8))


@cache
def _monai_pipeline(preprocessing: Preprocessing) -> Any:
    """Spacing, size and intensity; the axes of the tensor are [1, D, H, W]."""
    known = monai("transforms")
    low, high = preprocessing.clip_percentiles
    return known.Compose(
        [
            known.Spacingd("image", pixdim=preprocessing.target_spacing_mm, mode="bilinear", padding_mode="zeros"),
            known.ResizeWithPadOrCropd("image", preprocessing.stored_size),
            known.ScaleIntensityRangePercentilesd("image", low, high, 0, 255, clip=True),
        ]
    )


def monai(module: str) -> Any:
    """A part of MONAI. Raises UsageError where it is not installed."""
    try:
        return import_module(f"monai.{module}")
    except ImportError:
        raise UsageError(f"the peer monai needs MONAI: {install_command('monai')}") from None


@contextmanager
def compare_with(pipeline: Pipeline) -> Iterator[Comparison]:
    """Against `by_scipy` or `by_monai`. Raises UsageError where MONAI is needed and not installed."""
    if pipeline is by_monai:
        monai("transforms")  # refused before anything is drawn
    preprocessing = bench_recipe().preprocessing
    with phantom_files() as (work, cohort), one_thread():
        paths = sorted(cohort.rglob("*.dcm"))
        number = count()

        def ours() -> int:
            made = build_store([cohort], work / f"store {next(number)}", preprocessing)
            return _all_of(made.accepted, paths, "octjepa")

        def other() -> int:
            out = work / f"plain {next(number)}"
            out.mkdir()
            for path in paths:
                pipeline(path, out, preprocessing)
            return _all_of(len(list(out.glob("*.npy"))), paths, "the peer")

        yield Comparison(
            rate(ours),
            rate(other),
            {"volumes": len(paths), "size": "small", "processes": 1},
        )


def _all_of(made: int, paths: list[Path], who: str) -> int:
    if made != len(paths):
        raise OctjepaError(f"{who} made {made} of {len(paths)} volumes: nothing to compare")
    return made
