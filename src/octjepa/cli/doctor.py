"""The command `doctor`, which checks the machine."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from octjepa.cli.options import Json, Quiet
from octjepa.cli.output import print_checks
from octjepa.cli.root import app
from octjepa.errors import OctjepaError


@app.command()
def doctor(
    store: Annotated[str | None, typer.Option("--store", help="Also check that this store can be read.")] = None,
    out: Annotated[Path, typer.Option("--out", help="The folder where runs will be written.")] = Path(),
    recipe: Annotated[
        str | None, typer.Option("--recipe", help="Check memory and disk against the plan of this recipe.")
    ] = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Checks this machine and the installation. With --recipe and --store, also what a run needs."""
    from octjepa.doctor import examine

    result = examine(store, out, recipe)
    print_checks(result.to_json(), as_json)
    if not result.ok:
        failed = [check for check in result.checks if check.state == "failed"]
        others = f"; then {', '.join(check.name for check in failed[1:])}" if failed[1:] else ""
        raise OctjepaError(f"not ready. Fix {failed[0].name} first: {failed[0].to_do}{others}")
