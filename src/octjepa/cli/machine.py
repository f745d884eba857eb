"""Verbs about the machine: doctor, bench."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from octjepa.cli.options import Json, Quiet
from octjepa.cli.output import print_checks, print_result
from octjepa.cli.root import app
from octjepa.errors import OctjepaError


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

    found = examine(store, out, recipe)
    print_checks(found, as_json)
    if not found["ok"]:
        failed = [check["name"] for check in found["checks"] if check["state"] == "failed"]
        raise OctjepaError(f"failed: {', '.join(failed)}; what to do is printed with each")


@app.command()
def bench(
    subject: Annotated[
        Literal["step", "ingest", "loader", "embed", "memory", "scaling"],
        typer.Argument(help="What is measured; docs/bench.md says how."),
    ],
    against: Annotated[
        str | None, typer.Option("--against", help="The other way, by name; default: the first of the subject's.")
    ] = None,
    repeats: Annotated[
        int | None, typer.Option("--repeats", min=1, help="Runs, each of both sides; default: a minute or two of them.")
    ] = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Measures octjepa against another way of doing the same. In turns, on phantoms; says a ratio and its spread."""
    from octjepa.bench.benchmarks import run_benchmark

    print_result(run_benchmark(subject, against, repeats), as_json)
