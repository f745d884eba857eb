"""Commands from an encoder to results: embed, probe, leaderboard, report, view."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

import typer

from octjepa.cli.options import AllowOutside, Json, Labelled, Ledger, Quiet, Spacing, StorePath, Subgroups
from octjepa.cli.output import check_output_file, check_parquet_file, print_probe, print_result, print_subgroups
from octjepa.cli.root import app
from octjepa.errors import UsageError, counted

Level = Annotated[Literal["volume", "eye", "person"], typer.Option("--level", help="Unit of a case.")]
POOLS = "mean, mean_std_max, mean_std_max_min, tissue_mean, layers, zones, zones_centered, zones_whitened"


@app.command()
def embed(
    checkpoint: Annotated[
        str,
        typer.Argument(help="A run, step-* folder, weights file or URL, NAME:PATH of another encoder, or biomarkers."),
    ],
    store: StorePath,
    out: Annotated[Path, typer.Option("--out", help="The parquet file to write.")],
    scans: Annotated[
        list[str] | None, typer.Option("--scans", help="For biomarkers: the folder that was ingested; repeatable.")
    ] = None,
    pool: Annotated[
        list[str] | None, typer.Option("--pool", help=f"{POOLS}. Default: mean_std_max and zones_whitened. Repeatable.")
    ] = None,
    tokens: Annotated[Path | None, typer.Option("--tokens", help="Folder for the features of every token.")] = None,
    per_bscan: Annotated[
        bool, typer.Option("--per-bscan", help="Also write OUT.bscans.parquet with one row per slice.")
    ] = False,
    engine: Annotated[
        Literal["local", "ray"], typer.Option("--engine", help="local: this process (or torchrun); ray: a Ray cluster.")
    ] = "local",
    workers: Annotated[int | None, typer.Option("--workers", min=1, help="Workers of a local Ray cluster.")] = None,
    allow_outside: AllowOutside = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Writes an embedding for every volume of a store. Each row has person, eye and a hash of the pixels. The same
    command continues an embedding that was stopped."""
    from octjepa.embed.embedding import Division, embed_store, ours_alone
    from octjepa.encoders.external import is_external
    from octjepa.store import Store

    check_parquet_file(out)
    if checkpoint == "biomarkers" and not Path(checkpoint).exists():
        if pool or tokens is not None or per_bscan or engine != "local" or workers is not None:
            raise UsageError(
                "biomarkers are one row of measurements for each scan: leave out --pool, --tokens, --per-bscan, "
                "--engine and --workers"
            )
        print_result(_embed_biomarkers(store, out, scans or []), as_json)
        return
    if scans:
        raise UsageError("only biomarkers read the scans themselves: leave out --scans, the store has their volumes")
    if workers is not None and engine != "ray":
        raise UsageError("--workers is for --engine ray: start other processes by torchrun, or leave it out")
    if (per_bscan or engine != "local") and is_external(checkpoint):
        raise ours_alone(checkpoint)
    embedded = embed_store(checkpoint, Store.open(store), out, pool or (), tokens, per_bscan, Division(engine, workers))
    print_result(embedded.to_json(), as_json)


def _embed_biomarkers(store: str, out: Path, scans: list[str]) -> dict[str, int | str]:
    """`octjepa embed biomarkers`: thickness and fluid of the scans as they came."""
    from octjepa.ingest.native_files import NativeFiles, folders_near
    from octjepa.ingest.remembered_sources import sources_of
    from octjepa.locks import file_lock
    from octjepa.remote import is_remote
    from octjepa.store import Store
    from octjepa.tasks.segmenter.biomarkers import embed_biomarkers

    opened = Store.open(store)
    near = [] if is_remote(store) else folders_near(Path(store))
    with file_lock(out):
        return embed_biomarkers(opened, NativeFiles(scans or sources_of(store), near).read, out)


@app.command()
def visits(
    embeddings: Annotated[Path, typer.Argument(help="An embedding table of scans of several visits.")],
    visit_order: Annotated[
        Path,
        typer.Option("--visit-order", help="TSV with visit and order (a number or date), and person_id if needed."),
    ],
    out: Annotated[Path, typer.Option("--out", help="Parquet file for the changes, an embedding table.")],
    labels: Annotated[
        Path | None, typer.Option("--labels", help="TSV or CSV with a row per person, eye and visit.")
    ] = None,
    target: Annotated[list[str] | None, typer.Option("--target", help="A label column; repeatable.")] = None,
    pairing: Annotated[
        Literal["consecutive", "first"],
        typer.Option("--pairing", help="Each visit with the next one, or the first one with each later one."),
    ] = "consecutive",
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Pairs the visits of each eye. Writes the change of each feature to --out, and of each label to a TSV next to
    it."""
    from octjepa.embed.table import check_split, read_embeddings, relocated_store, write_table
    from octjepa.evaluate.cases import read_visit_order
    from octjepa.evaluate.labels import read_labels
    from octjepa.evaluate.visits import change_labels, pair_visits
    from octjepa.files import write_atomic
    from octjepa.locks import file_lock
    from octjepa.tables import format_table

    table = out.with_suffix(".labels.tsv")
    check_parquet_file(out, embeddings, visit_order, labels)
    if labels is not None:
        check_output_file(table, embeddings, visit_order, labels)
    if (labels is None) == bool(target):
        raise UsageError("--labels and --target belong together: name the file and at least one of its columns")
    with file_lock(out):  # and of the labels next to it
        embedded = read_embeddings(embeddings)
        check_split(embeddings, embedded)
        paired = pair_visits(embedded, read_visit_order(visit_order), pairing)
        payload: dict[str, object] = {"pairs": len(paired.pairs), "changes": str(out), "notes": list(paired.notes)}
        if labels is not None:
            text = format_table(*change_labels(paired.pairs, read_labels(labels, target or []), target or []))
            write_atomic(table, lambda file: file.write(text.encode()))
            payload["labels"] = str(table)
        write_table(out, replace(paired.table, store=relocated_store(embedded, embeddings, out)))
    print_result(payload, as_json)


@app.command()
def probe(
    embeddings: Annotated[list[Path], typer.Argument(help="Embedding tables.")],
    labels: Annotated[Path, typer.Option("--labels", help="TSV or CSV keyed by person_id, also eye and visit.")],
    target: Annotated[list[str], typer.Option("--target", help="A label column; repeatable.")],
    task: Annotated[
        Literal["auto", "classification", "binary", "multiclass", "ordinal", "multilabel", "regression", "survival"],
        typer.Option("--task", help="multilabel: cells such as a;b; survival: see --event."),
    ] = "auto",
    event: Annotated[
        str | None,
        typer.Option("--event", help="With --task survival: the column that says whether the event occurred."),
    ] = None,
    kind: Annotated[
        list[str] | None, typer.Option("--probe", help="linear, knn (default: both), mlp or attentive; repeatable.")
    ] = None,
    pool: Annotated[
        list[str] | None,
        typer.Option("--pool", help=f"{POOLS}. Repeatable. Default: all in the tables."),
    ] = None,
    level: Level = "volume",
    several: Annotated[
        Literal["features", "scores", "best_quality", "first_visit"],
        typer.Option("--several", help="How several volumes of a case are combined."),
    ] = "features",
    visit_order: Annotated[
        Path | None, typer.Option("--visit-order", help="For first_visit: TSV with the columns visit and order.")
    ] = None,
    tokens: Annotated[
        list[Path] | None, typer.Option("--tokens", help="For attentive: the token folder of each table.")
    ] = None,
    label_smoothing: Annotated[float, typer.Option("--label-smoothing", help="For mlp and attentive.")] = 0.0,
    labelled: Labelled = None,
    subgroups: Subgroups = None,
    ledger: Ledger = None,
    out: Annotated[Path | None, typer.Option("--out", help="Also write the result to this JSON file.")] = None,
    predictions: Annotated[
        Path | None, typer.Option("--predictions", help="Also write test predictions case by case: a Parquet file.")
    ] = None,
    attention: Annotated[
        Path | None, typer.Option("--attention", help="Also write where the attentive probe looks: a Parquet file.")
    ] = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Evaluates frozen features on labels. It reports intervals over people and compares with simple baselines."""
    from octjepa.embed.table import check_split, read_embeddings
    from octjepa.embed.token_folder import TokenFolder
    from octjepa.evaluate.case_predictions import write_case_predictions
    from octjepa.evaluate.cases import read_visit_order
    from octjepa.evaluate.label_fractions import parse_counts
    from octjepa.evaluate.probe import ProbeSettings, run_probes
    from octjepa.evaluate.subgroups import parse_subgroups
    from octjepa.evaluate.survival import default_probes
    from octjepa.explain.attention import write_attention
    from octjepa.files import write_json
    from octjepa.locks import file_lock
    from octjepa.metrics.scores import PRIMARY_METRIC

    if out is not None:
        check_output_file(out, *embeddings, labels, visit_order)
    for path in (predictions, attention):
        if path is not None:
            check_parquet_file(path, *embeddings, labels, visit_order)
    outputs = [path.resolve() for path in (out, predictions, attention) if path is not None]
    if len(set(outputs)) < len(outputs):
        raise UsageError("two of --out, --predictions and --attention are the same file: give each its own name")
    if predictions is not None and task == "survival":
        raise UsageError("survival predicts a risk and no value for a case: leave out --predictions")
    order = None if visit_order is None else read_visit_order(visit_order)
    settings = ProbeSettings(
        kind or default_probes(task),
        task,
        pool,
        level=level,
        several=several,
        visit_order=order,
        label_smoothing=label_smoothing,
        labelled=parse_counts(labelled),
        subgroups=parse_subgroups(subgroups),
        event=event,
        attention=attention is not None,
    )
    tables, folders = [read_embeddings(path) for path in embeddings], [TokenFolder.open(path) for path in tokens or ()]
    for path, table in zip(embeddings, tables, strict=True):
        check_split(path, table)
    with nullcontext() if out is None else file_lock(out):
        result = run_probes(tables, labels, target, settings, folders, ledger)
        payload = result.payload()
        if predictions is not None:
            write_case_predictions(predictions, result.case_predictions)
        if attention is not None:
            write_attention(attention, result.attention)
        if out is not None:
            write_json(out, payload)
    shown = {key: payload[key] for key in ("rows", "paired", *(("labelled",) if labelled else ()))}
    if not as_json:
        print_subgroups(
            (((subgroup.name, subgroup.target), subgroup) for subgroup in result.subgroups),
            set(PRIMARY_METRIC.values()),
        )
        if (about := result.protocol) is not None:
            cases, people = counted(about.cases, "case"), counted(about.people, "person")
            print(f"{cases} of {people}; {about.text}", file=sys.stderr)
        used = ", ".join(f"{use.target} {use.looks}" for use in result.uses)
        print(f"uses of the test set, including this one: {used}", file=sys.stderr)
    print_probe(payload if as_json else shown, "rows", as_json, out)


@app.command()
def leaderboard(
    entries: Annotated[
        list[str], typer.Argument(help="PATH or NAME=PATH: runs, checkpoints, weights, other encoders, tables.")
    ],
    labels: Annotated[Path, typer.Option("--labels", help="TSV or CSV keyed by person_id, also eye and visit.")],
    target: Annotated[list[str], typer.Option("--target", help="A label column; repeatable.")],
    store: Annotated[str | None, typer.Option("--store", help="The store; not needed for tables.")] = None,
    out: Annotated[Path, typer.Option("--out", help="Folder for the board and its embeddings.")] = Path("leaderboard"),
    reference: Annotated[
        str | None, typer.Option("--reference", help="The entry that others are compared with; default: untrained.")
    ] = None,
    task: Annotated[
        Literal["auto", "classification", "binary", "multiclass", "ordinal", "regression", "survival"],
        typer.Option("--task", help="As in probe."),
    ] = "auto",
    event: Annotated[
        str | None,
        typer.Option("--event", help="With --task survival: the column that says whether the event occurred."),
    ] = None,
    kind: Annotated[
        list[str] | None,
        typer.Option("--probe", help="Candidates for validation: linear, knn (default: both), mlp or attentive."),
    ] = None,
    level: Level = "volume",
    labelled: Labelled = None,
    subgroups: Subgroups = None,
    ledger: Ledger = None,
    allow_outside: AllowOutside = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Compares encoders side by side. Validation selects, the test set is used once; differences are paired, and
    corrected for multiple comparisons.
    """
    from octjepa.evaluate.label_fractions import parse_counts
    from octjepa.evaluate.leaderboard.board import BoardSettings, run_board
    from octjepa.evaluate.subgroups import parse_subgroups
    from octjepa.evaluate.survival import default_probes
    from octjepa.locks import writer_lock
    from octjepa.record import to_json
    from octjepa.report.leaderboard import prepare_folder, write_leaderboard
    from octjepa.store import Store

    prepare_folder(out)
    opened = None if store is None else Store.open(store)
    with writer_lock(out):
        settings = BoardSettings(
            reference,
            task,
            level=level,
            probes=kind or default_probes(task),
            labelled=parse_counts(labelled),
            subgroups=parse_subgroups(subgroups),
            event=event,
        )
        board = run_board(entries, labels, target, opened, out / "embeddings", settings, ledger)
        files = [str(path) for path in write_leaderboard(board, out)]
    primary = [row for row in board.rows if row.primary]
    shown = board.payload() if as_json else {"faults": to_json(board.faults), "rows": to_json(primary)}
    metrics = {row.metric for row in primary}
    print_result({**shown, "files": files}, as_json, "rows", metrics)
    if not as_json:
        by_group = (((detail.name, detail.target), scored) for detail in board.details for scored in detail.subgroups)
        print_subgroups(by_group, metrics)


@app.command()
def report(
    source: Annotated[
        str, typer.Argument(help="A run, fine-tuning, segmentation, store (also gs://, s3://), or a folder of them.")
    ],
    out: Annotated[Path | None, typer.Option("--out", help="The HTML file; default: report.html in SOURCE.")] = None,
    card: Annotated[Path | None, typer.Option("--card", help="Also write a data card of the store (Markdown).")] = None,
    saliency: Annotated[
        Path | None, typer.Option("--saliency", help="Folder for occlusion and similarity maps as NIfTI and PNG.")
    ] = None,
    attention: Annotated[
        Path | None, typer.Option("--attention", help="With --saliency: also maps of a file of probe --attention.")
    ] = None,
    compare: Annotated[
        list[str] | None, typer.Option("--compare", help="Another pretraining run next to this one; repeatable.")
    ] = None,
    scans: Annotated[
        list[str] | None, typer.Option("--scans", help="For the layers of a store: the ingested folder; repeatable.")
    ] = None,
    allow_outside: AllowOutside = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Writes an HTML report. One self-contained file on the data, the training and the results."""
    from octjepa.report import write_report

    page = write_report(source, out, card, compare or (), saliency, attention, scans or ())
    written = {"report": str(page)}
    print_result(
        written | {name: str(path) for name, path in (("card", card), ("saliency", saliency)) if path is not None},
        as_json,
    )


@app.command()
def view(
    source: Annotated[
        str, typer.Argument(help="A scan, folder of scans, result of segment, store (also gs://, s3://), run, demo.")
    ],
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="0: any free port.")] = 0,
    scans: Annotated[
        list[str] | None, typer.Option("--scans", help="The folder that was ingested; repeatable.")
    ] = None,
    labels: Annotated[Path | None, typer.Option("--labels", help="Folder of label volumes to overlay.")] = None,
    checkpoint: Annotated[
        str | None, typer.Option("--from", help="The encoder to show with a store or a segmentation head.")
    ] = None,
    predictions: Annotated[
        Path | None, typer.Option("--predictions", help="A file of probe --predictions: lists wrongly classified eyes.")
    ] = None,
    embeddings: Annotated[
        Path | None, typer.Option("--embeddings", help="An embedding table: lists each eye's nearest neighbours.")
    ] = None,
    corrections: Annotated[
        Path | None, typer.Option("--corrections", help="Save boundaries corrected by hand here, for segment adapt.")
    ] = None,
    spacing: Spacing = None,
    allow_outside: AllowOutside = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Shows scans with layers and thickness in a local web viewer. For a run it also shows the encoder. Ctrl-C stops
    it."""
    from octjepa.read.reader import parse_spacing
    from octjepa.viewer import ShownWith, serve

    spacing_mm = None if spacing is None else parse_spacing(spacing)
    shown_with = ShownWith(scans or (), labels, checkpoint, predictions, embeddings, corrections, spacing_mm)
    serve(source, port, lambda url: print_result({"url": url}, as_json), shown_with)
