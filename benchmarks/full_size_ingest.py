"""Ingest of full-size scans in one process of one thread, against pydicom with MONAI or SciPy, and against decoding.

    python -m benchmarks full_size_ingest [--real FOLDER] [--syntaxes] [--turns 3] [--out FILE.json]

One phantom of full size of each instrument, each in its transfer syntax (JPEG 2000, JPEG, RLE, uncompressed), and the
DICOM files of --real, each by itself, to the grid of `tiny_cpu_vjepa`: medians in CPU-seconds, which other work on the
machine changes little. --syntaxes takes the uncompressed one in every other transfer syntax instead, which no
instrument's phantom has. The ways take turns, in an order that is reversed from turn to turn. --out keeps what other
runs measured there. Next to octjepa and its peers stands the decoding alone: the same file read and its frames decoded
by the same decoders, without a check of their content.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import pydicom
from benchmarks.peers.data import bench_recipe, one_thread
from benchmarks.peers.ingest import by_monai, by_scipy
from pydicom.uid import DeflatedExplicitVRLittleEndian

from octjepa.files import write_json
from octjepa.ingest import build_store
from octjepa.phantom import CohortDesign, write_cohort
from octjepa.read.dicom import read_with_pixels
from octjepa.read.encapsulated import FrameDecoder, read_stream_header, split_frames
from octjepa.read.pixels import integer, read_layout

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "support"))

from performance import machine

from oct_dicom import put_frames
from syntaxes import CODED

DEVICES = ("heidelberg_spectralis", "topcon_maestro2", "topcon_triton", "zeiss_cirrus")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--real", type=Path)
    parser.add_argument("--syntaxes", action="store_true")
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    found = json.loads(given.out.read_text(encoding="utf-8")) if given.out and given.out.is_file() else {}
    with tempfile.TemporaryDirectory() as name, one_thread():
        work = Path(name)
        paths = {}
        for device in DEVICES[-1:] if given.syntaxes else DEVICES:
            write_cohort(
                work / device, 1, 3, devices=[device], size="full", workers=1, design=CohortDesign(eyes_per_person=1)
            )
            paths[device] = next((work / device).rglob("*.dcm"))
        if given.syntaxes:
            paths = in_other_syntaxes(paths[DEVICES[-1]], work)
        paths |= {path.stem: path for path in sorted(given.real.glob("*.dcm"))} if given.real else {}
        for scan, path in paths.items():
            seconds = measure(path, work / "out" / scan, given.turns)
            medians = {way: round(statistics.median(all_), 3) for way, all_ in seconds.items()}
            about = {"megabytes": round(path.stat().st_size / 1e6, 1), "machine": machine()}
            found[scan] = {**about, **medians, "seconds": seconds}
            print(scan, medians, flush=True)
            if given.out:
                write_json(given.out, found)


def in_other_syntaxes(path: Path, out: Path) -> dict[str, Path]:
    """The uncompressed scan of 8 bits in each transfer syntax of `CODED`, and deflated."""
    paths = {}
    for coded in CODED:
        if 8 in coded.depths:
            data = pydicom.dcmread(path)
            put_frames(data, [coded.encode(frame, 8) for frame in data.pixel_array])
            data.file_meta.TransferSyntaxUID = coded.syntax
            paths[f"zeiss_cirrus, {coded.name}"] = out / f"{coded.syntax}.dcm"
            data.save_as(out / f"{coded.syntax}.dcm")
    data = pydicom.dcmread(path)
    data.file_meta.TransferSyntaxUID = DeflatedExplicitVRLittleEndian
    paths["zeiss_cirrus, deflated"] = out / "deflated.dcm"
    data.save_as(out / "deflated.dcm")
    return paths


def decode(path: Path) -> None:
    """Reads a file and decodes its frames."""
    data = read_with_pixels(path, lambda header: None)
    syntax = data.file_meta.TransferSyntaxUID
    if not syntax.is_encapsulated:
        np.frombuffer(data.PixelData, np.uint8).copy()
        return
    decoder = FrameDecoder(syntax, read_layout(data))
    for frame in split_frames(data, integer(data, "NumberOfFrames")):
        decoder(frame, read_stream_header(frame))


def measure(path: Path, out: Path, turns: int) -> dict[str, list[float]]:
    """CPU-seconds of each way in each turn, after one turn that is not counted."""
    preprocessing = bench_recipe().preprocessing
    seconds: dict[str, list[float]] = {"octjepa": [], "monai": [], "scipy": [], "decoding": []}
    for turn in range(-1, turns):
        folder = out / str(turn)
        folder.mkdir(parents=True)
        for way in list(seconds)[:: 1 if turn % 2 else -1]:
            start = time.process_time()
            if way == "octjepa":
                accepted = build_store([path], folder / "store", preprocessing).accepted
                if accepted != 1:
                    raise SystemExit(f"octjepa accepted {accepted} scans of {path.name}: nothing to compare")
            elif way == "decoding":
                decode(path)
            else:
                (by_monai if way == "monai" else by_scipy)(path, folder, preprocessing)
            if turn >= 0:
                seconds[way].append(round(time.process_time() - start, 3))
    return seconds


if __name__ == "__main__":
    main()
