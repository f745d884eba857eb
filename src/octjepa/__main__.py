"""The console command: loads the command line so that Ctrl-C during its own imports is reported like any other."""

from __future__ import annotations

import sys


def main() -> None:
    """Runs the command line."""
    try:
        from octjepa.cli import main as run
    except KeyboardInterrupt:
        print("octjepa: interrupted before anything started", file=sys.stderr)
        sys.exit(130)
    run()


if __name__ == "__main__":
    main()
