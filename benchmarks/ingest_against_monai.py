"""Volumes per second of `octjepa ingest` against a plain MONAI pipeline, on the same files, in turn in one run.

    .venv/bin/python benchmarks/ingest_against_monai.py [--volumes 200] [--size small|full] [--workers 2] [--repeats 5]

What each does:
- octjepa: pydicom and its decoders frame by frame, every fault looked for; spacing from ordered sources; low-pass
  resampling; membranes found, flattened on Bruch's membrane; stored size; percentiles to 8 bit; quality, content hash,
  index, ledger, duplicates, splits; pixels.npy and geometry.npz on disk (fsync). A bad file costs a ledger row.
- MONAI: pydicom's `pixel_array` with the same decoders; affine from Pixel Spacing and frame positions (SliceThickness);
  `Spacingd` (trilinear) to the same spacing; `ResizeWithPadOrCropd` to the same size; percentiles to 8 bit; one .npy
  (no fsync). A bad file ends the run.

MONAI therefore does less; the ratio says what knowing the scan costs or saves, not which resampler is faster. Both get
the same files, as many spawned processes of one thread each, and an empty folder. Processes are started and libraries
imported before the clock starts: the workers of both read a few files first. The order within a repeat alternates. The
ratio is the median of the repeats' ratios.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager, nullcontext
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np

from octjepa.config import load_recipe
from octjepa.recipe import Preprocessing

# -- plain MONAI: what a person writes in an afternoon --


def _one_thread() -> None:
    import torch
    from threadpoolctl import threadpool_limits

    threadpool_limits(1)
    torch.set_num_threads(1)


def monai_pipeline(preprocessing: Preprocessing) -> Callable[[Any], Any]:
    """Spacing, size and intensity; the axes of the tensor are [1, D, H, W]."""
    from monai.transforms import Compose, ResizeWithPadOrCropd, ScaleIntensityRangePercentilesd, Spacingd

    low, high = preprocessing.clip_percentiles
    return Compose(
        [
            Spacingd("image", pixdim=preprocessing.target_spacing_mm, mode="bilinear", padding_mode="zeros"),
            ResizeWithPadOrCropd("image", preprocessing.stored_size),
            ScaleIntensityRangePercentilesd("image", low, high, 0, 255, clip=True),
        ]
    )


def monai_one(path: Path, out: Path, preprocessing: Preprocessing) -> None:
    import pydicom
    import torch
    from monai.data import MetaTensor

    data = pydicom.dcmread(path)
    measures = data.SharedFunctionalGroupsSequence[0].PixelMeasuresSequence[0]
    row_mm, column_mm = map(float, measures.PixelSpacing)
    groups = data.PerFrameFunctionalGroupsSequence
    try:
        places = [group.PlanePositionSequence[0].ImagePositionPatient for group in groups]
        slice_mm = float(np.linalg.norm(np.subtract(places[-1], places[0])) / (len(places) - 1))
    except (AttributeError, TypeError, ValueError):  # some devices give no positions
        slice_mm = float(measures.SliceThickness)
    affine = torch.diag(torch.tensor([slice_mm, row_mm, column_mm, 1.0], dtype=torch.float64))
    pixels = torch.from_numpy(data.pixel_array.astype(np.float32))[None]
    made = monai_pipeline(preprocessing)({"image": MetaTensor(pixels, affine=affine)})["image"]
    np.save(out / f"{path.stem}.npy", made[0].numpy().astype(np.uint8))


@contextmanager
def monai_workers(
    workers: int, warm: Path, preprocessing: Preprocessing
) -> Iterator[Callable[[Sequence[Path], Path], tuple[int, float]]]:
    """A function that runs files through the pipeline and gives (their number, seconds)."""
    with ProcessPoolExecutor(workers, mp_context=get_context("spawn"), initializer=_one_thread) as pool:

        def run(files: Sequence[Path], out: Path) -> tuple[int, float]:
            out.mkdir()
            start = time.perf_counter()
            list(pool.map(partial(monai_one, out=out, preprocessing=preprocessing), files))
            seconds = time.perf_counter() - start
            return len(list(out.glob("*.npy"))), seconds

        with tempfile.TemporaryDirectory() as folder:
            run([warm] * 4 * workers, Path(folder, "warm"))
        yield run


# -- octjepa: the ingest job itself --


def octjepa_run(source: Path, store: Path, workers: int, warm: Path, preprocessing: Preprocessing) -> tuple[int, float]:
    """(volumes in the store, seconds) of `build_store`, whose workers have read a file before the clock starts."""
    from octjepa.ingest import SourceFile
    from octjepa.store import Store, build, build_store
    from octjepa.store.crew import Crew
    from octjepa.store.one_file import ingest_one

    work = partial(ingest_one, store=Store.create(store, preprocessing).path, preprocessing=preprocessing)
    with Crew(work, workers, build.SECONDS_PER_FILE) as crew:
        list(crew.results([SourceFile(warm, str(number)) for number in range(4 * workers)]))
        build.Crew = lambda *_: nullcontext(crew)  # type: ignore[assignment,misc]
        try:
            start = time.perf_counter()
            made = build_store([source], store, preprocessing, workers=workers)
            return int(made["accepted"]), time.perf_counter() - start
        finally:
            build.Crew = Crew  # type: ignore[misc]


def compare(files: int, size: str, workers: int, repeats: int) -> dict[str, Any]:
    """{"ours", "other", "ratio", "runs"} in volumes per second, medians."""
    from octjepa.phantom import write_cohort

    preprocessing = load_recipe("tiny_cpu").preprocessing
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_cohort(folder / "cohort", people=(files + 1) // 2, seed=41, size=size, workers=workers)
        paths = sorted((folder / "cohort").rglob("*.dcm"))
        runs: list[dict[str, float]] = []
        with monai_workers(workers, paths[0], preprocessing) as other:
            for repeat in range(repeats):
                taken: dict[str, float] = {}
                for who in ("ours", "other") if repeat % 2 == 0 else ("other", "ours"):
                    out = folder / f"{who} {repeat}"
                    if who == "ours":
                        made, seconds = octjepa_run(folder / "cohort", out, workers, paths[0], preprocessing)
                    else:
                        made, seconds = other(paths, out)
                    taken[who] = len(paths) / seconds
                    if made != len(paths):
                        raise SystemExit(f"{who}: {made} of {len(paths)} volumes made")
                runs.append({**taken, "ratio": taken["ours"] / taken["other"]})
                print(f"repeat {repeat + 1}: {json.dumps({k: round(v, 3) for k, v in runs[-1].items()})}", flush=True)
    middle = {key: statistics.median(run[key] for run in runs) for key in ("ours", "other", "ratio")}
    return {**middle, "volumes": len(paths), "workers": workers, "size": size, "runs": runs}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--volumes", type=int, default=200)
    parser.add_argument("--size", choices=("small", "full"), default="small")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=5)
    asked = parser.parse_args()
    told = compare(asked.volumes, asked.size, asked.workers, asked.repeats)
    print(f"octjepa {told['ours']:.2f} volumes/s, MONAI {told['other']:.2f} volumes/s, ratio {told['ratio']:.2f}")
    print(json.dumps(told))


if __name__ == "__main__":
    main()
