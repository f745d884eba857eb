"""What else a store could be made of: plain arrays against zarr 3 and blosc2, by size, cold and warm reads.

    python benchmarks/store_formats.py STORE [--volumes 60] [--turns 5] [--out docs/store_formats.json]

Needs NumPy, zarr and blosc2 alone, so that an environment of its own will do (`pip install numpy zarr blosc2`). The
volumes of a store are written in every format into a folder beside it, and each is then read whole, as a view of the
training loader reads it, in alternating turns and in random order. Cold: the kernel was asked to drop the files from
memory (`posix_fadvise`); the disk below may still hold them. Milliseconds are medians a volume by the clock, CPU
milliseconds the mean over all turns; they say what a reading costs where the disk is fast.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import blosc2
import numpy as np
import zarr
from zarr.codecs import BloscCodec

Reader = Callable[[], np.ndarray]
SHARD = 16  # volumes in a shard


def write_plain(volumes: list[np.ndarray], folder: Path) -> list[Reader]:
    """One .npy a volume, memory-mapped: as octjepa stores them."""
    for number, volume in enumerate(volumes):
        np.save(folder / f"{number}.npy", volume)
    return [lambda path=folder / f"{n}.npy": np.array(np.load(path, mmap_mode="r")) for n in range(len(volumes))]


def write_zarr(volumes: list[np.ndarray], folder: Path) -> list[Reader]:
    """One zarr 3 array a volume, one chunk of zstd 5 with shuffled bits."""
    codec = BloscCodec(cname="zstd", clevel=5, shuffle="bitshuffle")
    for number, volume in enumerate(volumes):
        array = zarr.create_array(
            folder / f"{number}.zarr", shape=volume.shape, chunks=volume.shape, dtype=volume.dtype, compressors=codec
        )
        array[...] = volume
    return [lambda path=folder / f"{n}.zarr": zarr.open_array(path, mode="r")[...] for n in range(len(volumes))]


def write_zarr_shards(volumes: list[np.ndarray], folder: Path) -> list[Reader]:
    """One zarr 3 array of all volumes in shards of 16, a chunk a volume; opened once."""
    codec = BloscCodec(cname="zstd", clevel=5, shuffle="bitshuffle")
    shape = volumes[0].shape
    array = zarr.create_array(
        folder / "all.zarr", shape=(len(volumes), *shape), chunks=(1, *shape), shards=(SHARD, *shape),
        dtype=volumes[0].dtype, compressors=codec,
    )  # fmt: skip
    array[...] = np.stack(volumes)
    opened = zarr.open_array(folder / "all.zarr", mode="r")
    return [lambda number=n: opened[number] for n in range(len(volumes))]


def write_blosc2(codec: blosc2.Codec) -> Callable[[list[np.ndarray], Path], list[Reader]]:
    """One .b2nd a volume, in blosc2's own choice of blocks."""

    def write(volumes: list[np.ndarray], folder: Path) -> list[Reader]:
        settings = {"codec": codec, "clevel": 5, "filters": [blosc2.Filter.BITSHUFFLE], "nthreads": 1}
        for number, volume in enumerate(volumes):
            blosc2.asarray(volume, urlpath=str(folder / f"{number}.b2nd"), mode="w", cparams=settings)
        return [
            lambda path=str(folder / f"{n}.b2nd"): blosc2.open(path, mode="r", dparams={"nthreads": 1})[...]
            for n in range(len(volumes))
        ]

    return write


FORMATS: dict[str, Callable[[list[np.ndarray], Path], list[Reader]]] = {
    "plain": write_plain,
    "zarr": write_zarr,
    "zarr_shards": write_zarr_shards,
    "blosc2_zstd": write_blosc2(blosc2.Codec.ZSTD),
    "blosc2_lz4": write_blosc2(blosc2.Codec.LZ4),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("store", type=Path)
    parser.add_argument("--volumes", type=int, default=60)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--note", default="nothing else ran on the machine", help="what ran beside it")
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    paths = sorted((given.store / "chunks").glob("*/*/pixels.npy"))[: given.volumes]
    volumes = [np.load(paths[number % len(paths)]) for number in range(given.volumes)]
    work = given.store.parent / "formats"
    work.mkdir()
    try:
        rows = measure(volumes, work, given.turns)
    finally:
        shutil.rmtree(work)
    found = {
        "shape": list(volumes[0].shape), "different_volumes": len(paths), "volumes": len(volumes), "beside": given.note,
        "versions": {"zarr": zarr.__version__, "blosc2": blosc2.__version__}, "rows": rows,
    }  # fmt: skip
    if given.out:
        before = json.loads(given.out.read_text()) if given.out.is_file() else {}
        name = "x".join(map(str, volumes[0].shape))
        given.out.write_text(json.dumps(before | {name: found}, indent=1, sort_keys=True) + "\n")


def measure(volumes: list[np.ndarray], work: Path, turns: int) -> list[dict[str, Any]]:
    """A row a format, printed as they come."""
    readers: dict[str, list[Reader]] = {}
    for name, write in FORMATS.items():
        (work / name).mkdir()
        readers[name] = write(volumes, work / name)
        for number in (0, len(volumes) - 1):
            assert np.array_equal(readers[name][number](), volumes[number])
    os.sync()
    taken: dict[str, dict[str, list[float]]] = {name: {"cold": [], "warm": [], "cpu": []} for name in FORMATS}
    order = list(range(len(volumes)))
    for _ in range(turns):
        for name, of_format in readers.items():
            random.shuffle(order)
            _forget(work / name)
            for state in ("cold", "warm"):
                cpu = time.process_time()
                for number in order:
                    started = time.perf_counter()
                    of_format[number]()
                    taken[name][state].append(1e3 * (time.perf_counter() - started))
                if state == "warm":
                    taken[name]["cpu"].append(1e3 * (time.process_time() - cpu) / len(order))
    rows = []
    for name, times in taken.items():
        files = [path for path in (work / name).rglob("*") if path.is_file()]
        rows.append(
            {
                "format": name,
                "files": len(files),
                "share_of_plain_size": round(sum(p.stat().st_size for p in files) / sum(v.nbytes for v in volumes), 3),
                "cold_ms": round(statistics.median(times["cold"]), 3),
                "warm_ms": round(statistics.median(times["warm"]), 3),
                "cpu_ms": round(statistics.mean(times["cpu"]), 3),
            }
        )
        print(rows[-1], flush=True)
    return rows


def _forget(folder: Path) -> None:
    for path in folder.rglob("*"):
        if path.is_file():
            handle = os.open(path, os.O_RDONLY)
            try:
                os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(handle)


if __name__ == "__main__":
    main()
