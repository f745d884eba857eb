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

    found = examine(store, out, recipe)
    print_checks(found, as_json)
    if not found["ok"]:
        failed = [check["name"] for check in found["checks"] if check["state"] == "failed"]
        raise OctjepaError(f"failed: {', '.join(failed)}; what to do is printed with each")


@app.command()
def bench(
    subject: Annotated[
        Literal["step", "ingest", "loader", "embed", "memory", "peak", "scaling"],
        typer.Argument(help="What to measure; described in docs/bench.md."),
    ],
    against: Annotated[
        str | None,
        typer.Option("--against", help="The reference implementation; default: the first one of the subject."),
    ] = None,
    repeats: Annotated[
        int | None, typer.Option("--repeats", min=1, help="Runs of each side; default: one to two minutes in all.")
    ] = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Benchmarks octjepa against a reference. In alternating runs on phantoms; prints the ratio and its spread."""
    from octjepa.bench.benchmarks import run_benchmark

    print_result(run_benchmark(subject, against, repeats), as_json)
