"""The console command: loads the command line so that Ctrl-C during its own imports is reported like any other."""

from __future__ import annotations

import sys


def main() -> None:
    """Runs the command line. Exits with 2 and one line where Python is too old for the imports to work."""
    if sys.version_info < (3, 11):  # noqa: UP036 - pip refuses such a Python, a checkout on the path does not
        found = "%d.%d" % sys.version_info[:2]  # noqa: UP031 - what follows has to be readable to an old Python
        print(f"octjepa: Python {found} is too old: use 3.11, 3.12 or 3.13 (docs/install.md)", file=sys.stderr)
        sys.exit(2)
    try:
        from octjepa.cli import main as run
    except KeyboardInterrupt:
        print("octjepa: interrupted before anything started", file=sys.stderr)
        sys.exit(130)
    run()


if __name__ == "__main__":
    main()
