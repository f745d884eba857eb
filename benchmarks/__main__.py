"""`make bench`: every measurement of the project by one name: `octjepa bench`'s comparisons and the scripts here.

python -m benchmarks [NAME [ARGUMENT...]]; `all` runs every comparison and writes docs/performance.
"""

from __future__ import annotations

import ast
import runpy
import sys
from pathlib import Path

from octjepa.bench.benchmarks import BENCHMARKS

HERE = Path(__file__).parent


def scripts() -> dict[str, str]:
    """Name -> first line of the docstring, of every script in this folder."""
    listed = {}
    for path in sorted(HERE.glob("*.py")):
        text = path.read_text(encoding="utf-8")
        if path != Path(__file__) and '__name__ == "__main__"' in text:
            listed[path.stem] = (ast.get_docstring(ast.parse(text)) or "").partition("\n")[0]
    return listed


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
        from octjepa.cli import main as octjepa

        sys.argv = ["octjepa", "bench", *arguments]
        octjepa()
        return 0
    sys.argv = [str(HERE / f"{name}.py"), *rest]
    sys.path.insert(0, str(HERE))  # as when the file itself is run
    runpy.run_path(sys.argv[0], run_name="__main__")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
