"""Verbs from an encoder to results: embed, probe, report."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from octjepa.cli.options import Json, Quiet, StorePath
from octjepa.cli.root import app
from octjepa.console import ready_to_write, say, say_probes
from octjepa.progress import set_quiet


@app.command()
def embed(
    checkpoint: Annotated[str, typer.Argument(help="A run, a step-* folder or a weights file; a url, too.")],
    store: StorePath,
    out: Annotated[Path, typer.Option("--out", help="The parquet file to write.")],
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """A vector for every volume of a store, keyed to person, eye and content."""
    from octjepa.evaluate.embed import embed_store
    from octjepa.store import Store

    set_quiet(quiet)
    ready_to_write(out)
    say(embed_store(checkpoint, Store.open(store), out), as_json)


@app.command()
def probe(
    embeddings: Annotated[list[Path], typer.Argument(help="Embedding tables.")],
    labels: Annotated[Path, typer.Option("--labels", help="TSV or CSV keyed by person_id, and eye if per eye.")],
    target: Annotated[list[str], typer.Option("--target", help="A label column; may be given again.")],
    task: Annotated[str, typer.Option("--task", help="auto, classification or regression.")] = "auto",
    kind: Annotated[list[str] | None, typer.Option("--probe", help="linear or knn; default both.")] = None,
    pool: Annotated[list[str] | None, typer.Option("--pool", help="mean or mean_std_max; default both.")] = None,
    out: Annotated[Path | None, typer.Option("--out", help="Also write the result to this JSON file.")] = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Frozen probes with person-bootstrap intervals, always beside baselines that know nothing."""
    from octjepa.evaluate.probe import run_probes
    from octjepa.evaluate.table import POOLS, read_embeddings
    from octjepa.store.disk import write_json

    set_quiet(quiet)
    if out is not None:
        ready_to_write(out)
    tables = [read_embeddings(path) for path in embeddings]
    payload = run_probes(tables, labels, target, kind or ("linear", "knn"), task, pool or POOLS).payload()
    if out is not None:
        write_json(out, payload)
    say_probes(payload if as_json else {key: payload[key] for key in ("rows", "paired")}, "rows", as_json)


@app.command()
def report(
    source: Annotated[str, typer.Argument(help="A run, a store (also gs:// or s3://), or a folder that holds them.")],
    out: Annotated[Path | None, typer.Option("--out", help="The HTML file; default: report.html in SOURCE.")] = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """One self-contained HTML page of what was read, trained and found."""
    from octjepa.report import write_report

    set_quiet(quiet)
    say({"report": str(write_report(source, out))}, as_json)
