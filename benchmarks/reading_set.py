"""Lines and files of src by package, and of the reading set: what one reads from `octjepa pretrain` to the loss.

    .venv/bin/python -m benchmarks reading_set [--json]

The reading set is stated here, in the order of reading; the command fails where a file of it is missing.
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
    """Prints the two tables; exit code 1 where a file of the reading set is missing."""
    missing = [name for name in READING_SET if not (ROOT / name).is_file()]
    if missing:
        print(f"reading_set: {', '.join(missing)} is not in {ROOT}: state the new file here", file=sys.stderr)
        return 1
    packages = count_packages()
    reading = {name: count_lines(ROOT / name) for name in READING_SET}
    src = {
        name: sum(column) for name, column in zip(("lines", "files"), zip(*packages.values(), strict=True), strict=True)
    }
    if arguments == ["--json"]:
        named = {package: {"lines": lines, "files": files} for package, (lines, files) in packages.items()}
        total = {"lines": sum(reading.values()), "files": len(reading)}
        print(json.dumps({"src": src, "packages": named, "reading_set": {**total, "by_file": reading}}))
        return 0
    for package, (lines, files) in packages.items():
        print(f"{package:22}{lines:7} lines {files:5} files")
    print(f"{'src':22}{src['lines']:7} lines {src['files']:5} files\n")
    for name, lines in reading.items():
        print(f"{name:22}{lines:7} lines")
    print(f"{'reading set':22}{sum(reading.values()):7} lines {len(reading):5} files")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
