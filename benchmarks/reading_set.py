"""Lines and files of src by package, and of two reading sets: what one reads to understand the whole path of something.

    .venv/bin/python -m benchmarks reading_set [--json]

One goes from `octjepa pretrain` to the loss of an update, the other from a DICOM file by ingest, store, embedding and
probe to a figure. They are stated here in the order of reading; the command fails where a file of them is missing.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1] / "src" / "octjepa"
READING_SET = (
    "cli/training.py",  # the command
    "train/loop.py",  # the loop over updates
    "train/setup.py",  # what exists before the first update
    "views/loader.py",  # the next batch
    "views/sample.py",  # one sample of it
    "views/masks.py",  # what is hidden
    "train/step.py",  # forward and backward, optimizer step
    "model/vjepa3d.py",
    "model/encoder.py",
    "model/predictor.py",
    "model/blocks.py",
    "objective/base.py",  # what an objective is
    "objective/methods/vjepa.py",  # one: |prediction - target|
    "objective/loss.py",  # what is minimised: that, and regularisers
    "train/optimizer.py",  # learning rate, AdamW, EMA target
)


SCAN_TO_FIGURE = (
    "cli/data.py",  # octjepa ingest
    "ingest/build.py",  # the job
    "ingest/sources.py",  # which files
    "ingest/listing.py",
    "ingest/search.py",
    "read/manifest.py",
    "ingest/source_file.py",
    "ingest/one_file.py",  # what a worker does with one of them
    "read/reader.py",  # a file to a volume
    "read/formats/__init__.py",
    "read/dicom.py",
    "read/frames.py",
    "read/raw_scan.py",
    "read/pixels.py",
    "read/encapsulated.py",
    "read/identity.py",
    "read/orientation.py",
    "read/geometry.py",
    "read/protocols.py",
    "volume.py",
    "canonical/pipeline.py",  # a volume on the canonical grid
    "canonical/fill.py",
    "canonical/resample.py",
    "canonical/surfaces.py",
    "store/storage.py",
    "store/folder.py",
    "store/index.py",
    "cli/results.py",  # octjepa embed, octjepa probe
    "embed/embedding.py",
    "embed/shard.py",
    "encoders/pretrained.py",
    "encoders/pooling.py",
    "embed/table.py",
    "evaluate/probe.py",
    "evaluate/labels.py",
    "evaluate/targets.py",
    "evaluate/cases.py",
    "evaluate/features.py",
    "evaluate/linear_knn.py",
    "evaluate/calibration.py",
    "evaluate/results.py",
    "metrics/scores.py",
    "metrics/bootstrap.py",  # the figure and its interval
    "metrics/intervals.py",
)


def count_lines(path: Path) -> int:
    """Lines of one file."""
    return len(path.read_text(encoding="utf-8").splitlines())


def count_packages(root: Path = ROOT) -> dict[str, tuple[int, int]]:
    """Package (or module at the root) -> (lines, files) of Python, the largest first."""
    lines: Counter[str] = Counter()
    files: Counter[str] = Counter()
    for path in root.rglob("*.py"):
        package = path.relative_to(root).parts[0].removesuffix(".py")
        lines[package] += count_lines(path)
        files[package] += 1
    return {package: (count, files[package]) for package, count in lines.most_common()}


def main(arguments: list[str]) -> int:
    """Prints the tables; exit code 1 where a file of a reading set is missing."""
    missing = [name for name in READING_SET + SCAN_TO_FIGURE if not (ROOT / name).is_file()]
    if missing:
        print(f"reading_set: {', '.join(missing)} is not in {ROOT}: state the new file here", file=sys.stderr)
        return 1
    packages = count_packages()
    sets = {
        name: {file: count_lines(ROOT / file) for file in files}
        for name, files in (("reading_set", READING_SET), ("scan_to_figure", SCAN_TO_FIGURE))
    }
    src = {
        name: sum(column) for name, column in zip(("lines", "files"), zip(*packages.values(), strict=True), strict=True)
    }
    if arguments == ["--json"]:
        named = {package: {"lines": lines, "files": files} for package, (lines, files) in packages.items()}
        counted = {
            name: {"lines": sum(files.values()), "files": len(files), "by_file": files} for name, files in sets.items()
        }
        print(json.dumps({"src": src, "packages": named, **counted}))
        return 0
    for package, (lines, files) in packages.items():
        print(f"{package:28}{lines:7} lines {files:5} files")
    print(f"{'src':28}{src['lines']:7} lines {src['files']:5} files")
    for name, reading in sets.items():
        print()
        for file, lines in reading.items():
            print(f"{file:28}{lines:7} lines")
        print(f"{name:28}{sum(reading.values()):7} lines {len(reading):5} files")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
