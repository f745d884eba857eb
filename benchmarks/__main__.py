"""`make bench`: the comparisons with peers (benchmarks/peers) and the scripts of this folder, by name.

python -m benchmarks lists them; python -m benchmarks NAME [ARGUMENT...] runs one; `all` runs every comparison and
writes docs/performance.
"""

from __future__ import annotations

import argparse
import ast
import runpy
import sys
from pathlib import Path

from benchmarks.peers.benchmarks import BENCHMARKS, run_benchmark

from octjepa.cli.failures import exit_with_message
from octjepa.cli.output import print_result
from octjepa.progress import set_quiet

HERE = Path(__file__).parent


def scripts() -> dict[str, str]:
    """Name -> first line of the docstring, of every script in this folder."""
    listed = {}
    for path in sorted(HERE.glob("*.py")):
        text = path.read_text(encoding="utf-8")
        if path != Path(__file__) and '__name__ == "__main__"' in text:
            listed[path.stem] = (ast.get_docstring(ast.parse(text)) or "").partition("\n")[0]
    return listed


def compare(arguments: list[str]) -> int:
    """Runs one comparison with a peer and prints the ratio and its spread; exit code 2 for bad usage."""
    parser = argparse.ArgumentParser(prog="make bench", description="Compares octjepa with a peer in alternating runs.")
    parser.add_argument("subject", choices=BENCHMARKS, help="what to measure; described in docs/performance/README.md")
    parser.add_argument("--against", help="the peer; default: the first one of the subject")
    parser.add_argument("--repeats", type=int, help="runs of each side; default: one to two minutes in all")
    parser.add_argument("--json", action="store_true", help="print one JSON object: ours, other, ratio, runs")
    parser.add_argument("--quiet", action="store_true", help="no progress bar")
    options = parser.parse_args(arguments)
    if options.repeats is not None and options.repeats < 1:
        parser.error(f"--repeats {options.repeats}: expected 1 or more")
    set_quiet(options.quiet)
    with exit_with_message(lambda: None):
        print_result(run_benchmark(options.subject, options.against, options.repeats), options.json)
    return 0


def main(arguments: list[str]) -> int:
    """The exit code; a script's own where one was named."""
    listed = {name: f"{benchmark.ours}, against a peer" for name, benchmark in BENCHMARKS.items()} | scripts()
    arguments = ["performance", *arguments[1:]] if arguments[:1] == ["all"] else arguments
    if not arguments:
        width = max(map(len, listed))
        print("\n".join(f"{name:{width}}  {description}" for name, description in listed.items()))
        return 0
    name, *rest = arguments
    if name not in listed:
        print(f"bench: no benchmark {name!r}: there are {', '.join(listed)}", file=sys.stderr)
        return 2
    if name in BENCHMARKS:
        return compare(arguments)
    sys.argv = [str(HERE / f"{name}.py"), *rest]
    sys.path.insert(0, str(HERE))  # as when the file itself is run
    runpy.run_path(sys.argv[0], run_name="__main__")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
