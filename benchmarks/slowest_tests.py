"""The slowest tests of a run, as the table in CONTRIBUTING.md, and those over 1.5 s that are not marked slow.

make test-all ARGS="--junitxml=tests.xml"
.venv/bin/python benchmarks/slowest_tests.py tests.xml [--write]
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path
from xml.etree import ElementTree

sys.path.insert(0, str(Path(__file__).resolve().parent))

from marked_tables import replace_marked, table

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "CONTRIBUTING.md"
SLOW_SECONDS = 1.5
SHOWN = 12


def seconds_by_test(report: Path) -> dict[tuple[str, str], float]:
    """(file, test function) -> seconds of all its cases together, with set-up, from a JUnit report."""
    seconds: dict[tuple[str, str], float] = {}
    for case in ElementTree.parse(report).iter("testcase"):
        file = case.get("classname", "").replace(".", "/") + ".py"
        name = case.get("name", "").partition("[")[0]
        seconds[file, name] = seconds.get((file, name), 0.0) + float(case.get("time", "0"))
    return seconds


def is_marked_slow(file: str, name: str) -> bool:
    """Whether the test or its whole file carries the mark."""
    path = ROOT / file
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    decorators = re.search(rf"((?:^@.*\n(?:^[ )\]].*\n)*)*)^def {name}\(", text, re.MULTILINE)
    module_mark = re.search(r"^pytestmark = .*slow", text, re.MULTILINE)
    return bool(module_mark) or (decorators is not None and "mark.slow" in decorators[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("report", type=Path, help="a JUnit report of pytest")
    parser.add_argument("--write", action="store_true", help="put the table into CONTRIBUTING.md")
    arguments = parser.parse_args()
    seconds = seconds_by_test(arguments.report)
    slowest = sorted(seconds.items(), key=lambda item: -item[1])[:SHOWN]
    lines = table(("seconds", "test"), [(f"{value:.0f}", f"`{file}::{name}`") for (file, name), value in slowest])
    print(lines)
    unmarked = [(key, value) for key, value in seconds.items() if value > SLOW_SECONDS and not is_marked_slow(*key)]
    for (file, name), value in sorted(unmarked, key=lambda item: -item[1]):
        print(f"not marked slow: {value:6.1f} s {file}::{name}")
    fast = sum(value for key, value in seconds.items() if not is_marked_slow(*key))
    print(f"all {sum(seconds.values()):.0f} s, not marked slow {fast:.0f} s, in {len(seconds)} test functions")
    if arguments.write:
        replace_marked(PAGE, "slowest tests", lines)


if __name__ == "__main__":
    main()
