"""Damages valid files at random and has them read: no crash, no hang, no 2 GiB, no geometry that nobody said.

    .venv/bin/python tests/stress/fuzz_ingest.py --files 10000 [--seconds S] [--workers N] [--results fuzz.jsonl]
    .venv/bin/python tests/stress/fuzz_ingest.py --case 4711 [--keep damaged.dcm]

Each file is read and canonicalised in a worker process of the ingest job itself (`octjepa.ingest.worker_pool`), with
10 s a file and an address space of 2 GiB above what the idle worker holds. A line per file is written as it comes, and
a second run with the same --results continues; a case is made again from its number alone.

What an accepted file's geometry is held against:
- Shape and spacing are those of the undamaged file: `same`.
- They differ, and the damaged DICOM file, parsed here by pydicom without octjepa, says something else of its
  geometry than the undamaged one: each axis must then have a plausible value that the damaged file itself names for
  it (or the table of known protocols, where provenance says so), and each dimension must be the file's own: `as_said`.
- Other formats: they differ, and the damage touched bytes that may speak of geometry: the value must be plausible,
  no more can be judged: `header_hit`. Where only pixel bytes were touched, nothing may differ.
- Everything else is `changed_geometry`, a fault. So are `crashed`, `hung` and `over_memory`.
- A tenth of the cases are whole files whose content was changed (`fuzz_content`): `content_right`, refused for the
  right reason or accepted with the right note, else the fault `content_wrong`.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import closing
from functools import cache
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from octjepa.canonical.pipeline import canonicalise
from octjepa.errors import VolumeRejected
from octjepa.ingest import SourceFile
from octjepa.ingest.one_file import RefusedFile
from octjepa.ingest.worker_pool import WorkerPool
from octjepa.read.reader import read_volume
from octjepa.recipe import Preprocessing
from octjepa.volume import OCTVolume

sys.path.insert(0, str(Path(__file__).resolve().parent))

from fuzz_cases import GEOMETRY, Base, Case, dicom_bases, make_case, other_bases
from fuzz_content import content_case

SECONDS, MEMORY_BYTES = 10.0, 2 << 30
FAULTS = ("crashed", "hung", "over_memory", "changed_geometry", "content_wrong")
PREPROCESSING = Preprocessing(
    image_size=(8, 64, 64), margin=(0, 8, 8), target_spacing_mm=(0.05, 0.0078, 0.0117), axial_anchor=0.65
)
CONTENT_PREPROCESSING = Preprocessing()  # what a scan shows is told at the default spacing
PLAUSIBLE_MM = ((0.002, 1.5), (0.001, 0.01), (0.002, 0.06))  # docs/ingest.md; written here again on purpose


@cache
def bases() -> list[Base]:
    with tempfile.TemporaryDirectory() as folder:
        return [*dicom_bases(), *other_bases(Path(folder))]


@cache
def _truth(number: int) -> OCTVolume:
    with tempfile.TemporaryDirectory() as folder:
        return _read(bases()[number].content, bases()[number], Path(folder))


def _read(content: bytes, base: Base, folder: Path) -> OCTVolume:
    path = folder / f"scan{base.suffix}"
    path.write_bytes(content)
    return read_volume(path, spacing_mm=base.option_mm)


# -- what a damaged DICOM says itself, without octjepa --


def _header_values(content: bytes) -> dict[str, list[list[str]]]:
    """Keyword -> every value in the file, as text, in order; what cannot be parsed ends the list."""
    from io import BytesIO

    from pydicom import dcmread

    header: dict[str, list[list[str]]] = {}

    def walk(data: Any) -> None:
        for tag in list(data.keys()):
            try:
                element = data[tag]
                if element.VR == "SQ":
                    for item in element.value:
                        walk(item)
                elif element.keyword in GEOMETRY:
                    value = element.value
                    many = isinstance(value, list | tuple) or type(value).__name__ == "MultiValue"
                    header.setdefault(element.keyword, []).append([str(one) for one in (value if many else [value])])
            except Exception as error:
                header.setdefault("unparsed", []).append([str(tag), type(error).__name__])

    try:
        walk(dcmread(BytesIO(content), force=True))
    except Exception as error:
        header["unparsed"] = [[type(error).__name__]]
    return header


def _numbers(header: dict[str, list[list[str]]], keyword: str, location: int) -> list[float]:
    found = []
    for values in header.get(keyword, []):
        try:
            found.append(float(values[location]))
        except (ValueError, IndexError):
            found.append(float("nan"))
    return found


def _pitches(header: dict[str, list[list[str]]]) -> list[float]:
    """Median gaps of frame positions: along the line that the frames lie on, and along each orientation's normal."""
    points = np.array([_numbers(header, "ImagePositionPatient", axis) for axis in range(3)]).T
    points = points[np.isfinite(points).all(axis=1)] if points.size else points
    if len(points) < 2:
        return []
    directions = list(np.linalg.svd(points - points.mean(axis=0))[2])
    cosines = np.array([_numbers(header, "ImageOrientationPatient", axis) for axis in range(6)]).T
    for six in cosines[np.isfinite(cosines).all(axis=1)] if cosines.size else []:
        normal = np.cross(six[:3], six[3:])
        if np.linalg.norm(normal) > 1e-6:
            directions.append(normal / np.linalg.norm(normal))
    gaps = []
    for direction in directions:
        along = np.sort(points @ direction)
        gaps += [
            float(np.median(np.diff(along))),
            float(np.median(np.diff(np.unique(along)))) if np.ptp(along) else 0.0,
        ]
    return gaps


def _spoken_mm(header: dict[str, list[list[str]]], volume: OCTVolume) -> tuple[list[float], list[float], list[float]]:
    """Values that the file names for slice, row and column."""
    from octjepa.read.protocols import protocol_spacing

    pairs = [_numbers(header, "PixelSpacing", location) for location in (0, 1)]
    slices = [
        *_numbers(header, "SliceThickness", 0),
        *_numbers(header, "SpacingBetweenSlices", 0),
        *_pitches(header),
    ]
    rows, columns = pairs
    if {"spacing_swapped", "axes_transposed"} & set(volume.notes):
        rows, columns = [*rows, *columns], [*columns, *rows]
    if "protocol" in volume.provenance.values():
        known = protocol_spacing(volume.device, f"{volume.protocol} {volume.region}".lower(), volume.shape)
        if known is not None:
            slices, rows, columns = (
                [*slices, known.slice_mm or 0],
                [*rows, known.depth_mm or 0],
                [*columns, known.column_mm or 0],
            )
    if volume.provenance["slice"] == "scan_pattern":
        slices.append(float(np.pi * volume.spacing_mm[2] / 4 * volume.shape[2] / volume.shape[0]))
    return slices, rows, columns


def _as_in_header(case: Case, volume: OCTVolume) -> bool:
    header = _header_values(case.content)
    dropped = sum(int(note.partition("=")[2]) for note in volume.notes if note.startswith("circle_frames_dropped="))
    corrected = any(note.startswith("frame_count_corrected=") for note in volume.notes)
    frames = [int(n) for n in _numbers(header, "NumberOfFrames", 0) if np.isfinite(n)]
    if not corrected and volume.shape[0] + dropped not in frames:
        return False
    plane = [int(n) for word in ("Rows", "Columns") for n in _numbers(header, word, 0) if np.isfinite(n)]
    if not {volume.shape[1], volume.shape[2]} <= set(plane):
        return False
    for spoken, mm, (low, high) in zip(_spoken_mm(header, volume), volume.spacing_mm, PLAUSIBLE_MM, strict=True):
        if volume.provenance["slice"] == "scan_pattern" and spoken and mm == volume.spacing_mm[0]:
            low, high = 0.0, 10.0
        if not low <= mm <= high or not any(abs(mm - value) <= 0.01 * mm for value in spoken):
            return False
    return corrected or header != _header_values(case.base.content)


def evaluate(case: Case, volume: OCTVolume, truth: OCTVolume) -> str:
    """ "same", "as_said", "header_hit" or "changed_geometry"."""
    if volume.shape == truth.shape and np.allclose(volume.spacing_mm, truth.spacing_mm, rtol=1e-6, atol=0):
        return "same"
    if case.base.dicom:
        return "as_said" if _as_in_header(case, volume) else "changed_geometry"
    plausible = all(low <= mm <= high for mm, (low, high) in zip(volume.spacing_mm, PLAUSIBLE_MM, strict=True))
    first, last = case.base.header or (0, len(case.content))
    touched = case.span[0] < last and case.span[1] > first
    return "header_hit" if touched and plausible else "changed_geometry"


# -- one case, and many --


def run_case(number: int, folder: Path) -> dict[str, Any]:
    """{"case", "base", "what", "verdict", "detail"}; verdicts as above, and "refused" with the reason as detail."""
    case = make_case(number, bases())
    if case.expected is not None:
        return run_content(case, folder)
    truth = _truth(bases().index(case.base))
    about = {"case": number, "base": case.base.name, "what": case.what}
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            volume = _read(case.content, case.base, folder)
            verdict = evaluate(case, volume, truth)
        detail = f"{volume.shape} {volume.spacing_mm} {volume.provenance}" if verdict == "changed_geometry" else ""
        canonicalise(volume, PREPROCESSING)
    except VolumeRejected as error:
        return {**about, "verdict": "refused", "detail": error.reason, "why": error.detail}
    except MemoryError:
        return {**about, "verdict": "over_memory", "detail": ""}
    except Exception as error:
        return {**about, "verdict": "crashed", "detail": f"{type(error).__name__}: {error}"}
    return {**about, "verdict": verdict, "detail": detail}


def run_content(case: Case, folder: Path) -> dict[str, Any]:
    """As `run_case`, of a case whose content was changed."""
    about = {"case": case.number, "base": case.base.name, "what": case.what}
    reason, notes, shape = "", (), ()
    assert case.expected is not None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            volume = _read(case.content, case.base, folder)
            shape = volume.shape
            notes = (*volume.notes, *canonicalise(volume, CONTENT_PREPROCESSING).notes)
    except VolumeRejected as error:
        reason = error.reason
    except MemoryError:
        return {**about, "verdict": "over_memory", "detail": ""}
    except Exception as error:
        return {**about, "verdict": "crashed", "detail": f"{type(error).__name__}: {error}"}
    if case.expected.is_right(reason, notes, shape):
        return {**about, "verdict": "content_right", "detail": reason}
    return {**about, "verdict": "content_wrong", "detail": reason or f"{shape} {';'.join(notes)}"}


class Work:
    """A case in a worker: `source.name` is its number. Made ready, and its memory limited, where it is unpickled."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        for number in range(len(bases())):
            _truth(number)  # loads the libraries of every reader: neither time nor memory of a damaged file
        for device in range(20):  # nor the drawing of eyes
            content_case(random.Random(device), "many eyes")
        pages = int(Path("/proc/self/statm").read_text().split()[0])
        most = pages * resource.getpagesize() + MEMORY_BYTES
        resource.setrlimit(resource.RLIMIT_AS, (most, most))

    def __call__(self, source: SourceFile) -> dict[str, Any]:
        with tempfile.TemporaryDirectory(dir=self.folder) as own:
            return run_case(int(source.name), Path(own))


def run_cases(numbers: Iterator[int], workers: int, seconds: float) -> Iterator[dict[str, Any]]:
    """Results as they come, for `seconds` at most."""
    until = time.monotonic() + seconds
    with tempfile.TemporaryDirectory() as name, WorkerPool(Work(Path(name)), workers, SECONDS) as pool:
        while time.monotonic() < until and (some := list(islice(numbers, 50 * workers))):
            sources = [SourceFile(Path(name, str(number)), str(number)) for number in some]
            with closing(pool.results(sources)) as results:
                for source, result in results:
                    if isinstance(result, RefusedFile):  # by the crew: the worker died or was killed
                        case = make_case(int(source.name), bases())
                        verdict = {"worker_died": "crashed", "timed_out": "hung"}[result.entry["reason"]]
                        detail = result.entry["detail"]
                        result = {"base": case.base.name, "what": case.what, "verdict": verdict, "detail": detail}
                        result = {"case": case.number, **result}
                    yield result
                    if time.monotonic() >= until:
                        return


def summary(results: list[dict[str, Any]]) -> str:
    verdicts = Counter(result["verdict"] for result in results)
    reasons = Counter(result["detail"] for result in results if result["verdict"] == "refused")
    accepted = sum(verdicts[word] for word in ("same", "as_said", "header_hit"))
    changed = verdicts["content_right"] + verdicts["content_wrong"]
    lines = [f"{len(results)} files: {accepted} accepted, {verdicts['refused']} refused, {changed} of other content"]
    lines += [f"  {word:<17} {verdicts[word]}" for word in ("same", "as_said", "header_hit", "content_right", *FAULTS)]
    lines += ["refused by reason:", *(f"  {reason:<24} {count}" for reason, count in reasons.most_common())]
    lines += [f"FAULT {json.dumps(result)}" for result in results if result["verdict"] in FAULTS]
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--files", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0, help="number of the first case")
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--results", type=Path, default=None, help="JSON lines; a run with the same file continues")
    parser.add_argument("--case", type=int, default=None, help="one case, in this process")
    parser.add_argument("--keep", type=Path, default=None, help="write the damaged file of --case here")
    arguments = parser.parse_args()
    if arguments.case is not None:
        if arguments.keep is not None:
            arguments.keep.write_bytes(make_case(arguments.case, bases()).content)
        with tempfile.TemporaryDirectory() as folder:
            print(json.dumps(run_case(arguments.case, Path(folder)), indent=1))
        return 0
    results: list[dict[str, Any]] = []
    if arguments.results is not None and arguments.results.is_file():
        results = [json.loads(line) for line in arguments.results.read_text().splitlines() if line.endswith("}")]
    numbers = set(range(arguments.first, arguments.first + arguments.files))
    results = [result for result in results if result["case"] in numbers]
    left = iter(sorted(numbers - {result["case"] for result in results}))
    start, before = time.monotonic(), len(results)
    for result in run_cases(left, arguments.workers, arguments.seconds):
        results.append(result)
        if arguments.results is not None:
            with arguments.results.open("a") as lines:
                lines.write(json.dumps(result) + "\n")
        if sys.stderr.isatty():
            rate = (len(results) - before) / (time.monotonic() - start)
            print(f"\r{len(results)} of {len(numbers)}, {rate:.1f} files/s", end="", file=sys.stderr)
    print(summary(results))
    return int(any(result["verdict"] in FAULTS for result in results))


if __name__ == "__main__":
    sys.exit(main())
