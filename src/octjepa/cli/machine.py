"""Verbs about the machine: doctor."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from octjepa.cli.options import Json, Quiet
from octjepa.cli.root import app
from octjepa.console import say_checks
from octjepa.errors import OctjepaError
from octjepa.progress import set_quiet


@app.command()
def doctor(
    store: Annotated[str | None, typer.Option("--store", help="Check that this store can be read, too.")] = None,
    out: Annotated[Path, typer.Option("--out", help="The folder that runs will be written to.")] = Path(),
    recipe: Annotated[
        str | None, typer.Option("--recipe", help="Check memory and disk against the plan of this recipe.")
    ] = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Checks this machine and the installation. With --recipe and --store what a run would need, too."""
    from octjepa.doctor import examine

    set_quiet(quiet)
    found = examine(store, out, recipe)
    say_checks(found, as_json)
    if not found["ok"]:
        failed = [check["name"] for check in found["checks"] if check["state"] == "failed"]
        raise OctjepaError(f"failed: {', '.join(failed)}; what to do stands with each")
