"""Cost per file and memory of the ingest's own process from 10 to 10,000 files: both must not grow with the number.

    .venv/bin/python benchmarks/ingest_scale.py [--kind headers|volumes] [--files 10 100 1000 10000] [--workers 1]

- `headers`: DICOM headers without pixel data, which all end in quarantine. Discovery, reading, quarantine, journal,
  consolidation are real.
- `volumes`: the same headers, whose reading and canonicalising is replaced by an index entry and a chunk folder
  with two small files. Discovery, index, journal, swap into place, splits, participants, consolidation are real.

Each number of files is ingested by a process of its own, so that its peak memory is its own, into an empty store;
then once more, when everything is known. Time is of `build_store` alone, imports left out. With one worker all
work is done in the process that is measured. Most of the wall time of `volumes` is waiting for the disk (fsync).
"""

from __future__ import annotations

import argparse
import hashlib
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from octjepa.errors import TooManyLostError, UsageError
from octjepa.ingest import SourceFile
from octjepa.ingest.one_file import PreparedVolume
from octjepa.recipe import Preprocessing

PREPROCESSING = Preprocessing(
    image_size=(8, 64, 64), margin=(0, 8, 8), target_spacing_mm=(0.7, 0.0156, 0.094), axial_anchor=0.65
)


def write_headers(folder: Path, count: int) -> None:
    """AI-READI-shaped tree of `count` OPT headers without pixel data, with manifest.tsv and participants.tsv."""
    from io import BytesIO

    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "support"))
    from oct_dicom import make_dataset, retina

    data = make_dataset(retina(4, 8, 8))
    del data.PixelData
    data.SOPInstanceUID = "1.2.3." + "1" * 12
    buffer = BytesIO()
    data.save_as(buffer, enforce_file_format=True)
    head, tail = buffer.getvalue().rsplit(b"1" * 12, 1)
    rows, people = [], []
    for number in range(count):
        person, eye = 1001 + number // 2, "rl"[number % 2]
        location = (
            f"retinal_oct/structural_oct/topcon_maestro2/{person}/{person}_maestro2_3d_macula_oct_{eye}_{number}.dcm"
        )
        path = folder / location
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(head + b"1%011d" % number + tail)
        rows.append(f"{person}\tTopcon\tMaestro2\tMacula\t{eye.upper()}\t1.2.3.1{number:011}\t/{location}")
        if eye == "r":
            people.append(f"{person}\tUW\thealthy\t60\t{'train' if number % 10 else 'val'}")
    columns = (
        "person_id\tmanufacturer\tmanufacturers_model_name\tanatomic_region\tlaterality\tsop_instance_uid\tfilepath"
    )
    (folder / "retinal_oct" / "manifest.tsv").write_text("\n".join([columns.replace(" ", "\t"), *rows, ""]))
    head_line = "participant_id\tclinical_site\tstudy_group\tage\trecommended_split"
    (folder / "participants.tsv").write_text("\n".join([head_line, *people, ""]))


def tiny_volume(source: SourceFile, store: Path, **_: object) -> PreparedVolume:
    """In the place of `ingest_one`: a row like that of a real scan and a chunk folder of two small files."""
    from octjepa.files import write_new_folder
    from octjepa.ingest.one_file import state
    from octjepa.read.personal_data import StatedPerson
    from octjepa.store.index import IndexEntry

    content = hashlib.sha256(source.name.encode()).hexdigest()
    name, now = content[:16], state(source)
    assert source.row is not None
    assert now is not None
    chunk = write_new_folder(
        store / "chunks" / name[:2],
        {
            "pixels.npy": lambda file: np.save(file, np.zeros(8, np.uint8)),
            "geometry.npz": lambda file: file.write(b"0"),
        },
    )
    entry = IndexEntry(
        volume_id=name,
        content_hash=content,
        person_id=source.row.person_id,
        eye="OD",
        sop_instance_uid=f"1.2.826.{int(name, 16)}",
        source=source.name,
        device="topcon_maestro2",
        pattern="raster",
        personal="",
        notes="",
        split="",
        file=source.name,
        file_key=source.key,
        file_size=now.size,
        file_mtime_ns=now.mtime_ns,
        manifest_hash=now.manifest_hash,
        user_spacing_mm=now.user_spacing_text,
        enface_hash=content,
        chunk_hash=content,
    )
    return PreparedVolume(entry, chunk, StatedPerson())


def measure(source: Path, store: Path, kind: str, workers: int) -> dict[str, float]:
    """{"first_ms", "first_cpu_ms", "again_cpu_ms"} per file and {"rss_mib"}, the peak of this process."""
    from octjepa.ingest import build, build_store
    from octjepa.store import Store

    if kind == "volumes":
        build.ingest_one = tiny_volume
    count, taken = sum(1 for _ in source.rglob("*.dcm")), []
    for turn in range(3):
        if turn == 0:  # loads what is imported late
            source, store, real = source.with_name("warm"), store.with_name(f"warm {kind}"), (source, store)
        else:
            source, store = real
        start, cpu = time.perf_counter(), time.process_time()
        try:
            build_store([source], store, PREPROCESSING, workers=workers, max_lost=1.0)
        except (UsageError, TooManyLostError):
            assert kind == "headers"  # where not one file is accepted, ingest says so
        taken.append([1e3 / count * passed for passed in (time.perf_counter() - start, time.process_time() - cpu)])
    opened = Store.open(store)
    assert (len(opened.table), len(opened.quarantine)) == ((count, 0) if kind == "volumes" else (0, count))
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    (first, first_cpu), (_, again_cpu) = taken[1:]
    return {"first_ms": first, "first_cpu_ms": first_cpu, "again_cpu_ms": again_cpu, "rss_mib": peak}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kind", choices=("headers", "volumes"), action="append")
    parser.add_argument("--files", type=int, nargs="+", default=[10, 100, 1000, 10000])
    parser.add_argument("--workers", type=int, default=1)
    parser.add_argument("--one", nargs=2, metavar=("SOURCE", "STORE"), help=argparse.SUPPRESS)  # the inner process
    arguments = parser.parse_args()
    kinds = arguments.kind or ["headers", "volumes"]
    if arguments.one:
        print(json.dumps(measure(Path(arguments.one[0]), Path(arguments.one[1]), kinds[0], arguments.workers)))
        return
    print("| kind | files | ms per file | CPU ms | CPU ms, again | peak memory, MiB |\n|---|---|---|---|---|---|")
    for count in arguments.files:
        with tempfile.TemporaryDirectory() as name:
            write_headers(Path(name, "set"), count)
            write_headers(Path(name, "warm"), 2)
            for kind in kinds:
                command = [sys.executable, __file__, "--kind", kind, "--workers", str(arguments.workers)]
                command += ["--one", str(Path(name, "set")), str(Path(name, kind))]
                done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
                result = json.loads(done.stdout.splitlines()[-1])
                figures = " | ".join(f"{result[word]:.2f}" for word in ("first_ms", "first_cpu_ms", "again_cpu_ms"))
                figures += f" | {result['rss_mib']:.0f}"
                print(f"| {kind} | {count:,} | {figures} |", flush=True)


if __name__ == "__main__":
    main()
