"""`make bench`: which scripts measure what, a line each; with a name, runs that one.

python -m benchmarks [NAME [ARGUMENT...]]
"""

from __future__ import annotations

import ast
import runpy
import sys
from pathlib import Path

HERE = Path(__file__).parent


def scripts() -> dict[str, str]:
    """Name and first line of what each says of itself."""
    found = {}
    for path in sorted(HERE.glob("*.py")):
        text = path.read_text(encoding="utf-8")
        if path != Path(__file__) and '__name__ == "__main__"' in text:
            found[path.stem] = (ast.get_docstring(ast.parse(text)) or "").partition("\n")[0]
    return found


def main(arguments: list[str]) -> int:
    """The exit code; that of the script is its own."""
    known = scripts()
    if not arguments:
        width = max(map(len, known))
        print("\n".join(f"{name:{width}}  {said}" for name, said in known.items()))
        return 0
    name, *rest = arguments
    if name not in known:
        print(f"bench: no script {name!r}: there are {', '.join(known)}", file=sys.stderr)
        return 2
    sys.argv = [str(HERE / f"{name}.py"), *rest]
    sys.path.insert(0, str(HERE))  # as when the file itself is run
    runpy.run_path(sys.argv[0], run_name="__main__")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
