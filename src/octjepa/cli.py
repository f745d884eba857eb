"""The command line: a verb per stage, paths and options only. Everything a verb does lives in its package.

Exit codes: 0 done, 1 failed, 2 bad usage, recipe or input, 3 finished but too much was lost, 130 and 143 after Ctrl-C
and SIGTERM. With --json the last line of stdout is one JSON object and stdout holds nothing else; logs go to stderr.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from typer.core import TyperGroup

from octjepa.console import ready_to_write, say, say_checks, say_probes, told
from octjepa.errors import OctjepaError, TooManyLostError, UsageError
from octjepa.progress import set_quiet


class Verbs(TyperGroup):
    """Turns every foreseeable failure of a verb into one message and the right exit code."""

    def invoke(self, ctx: Any) -> Any:
        with told(lambda: ctx.invoked_subcommand):
            return super().invoke(ctx)


app = typer.Typer(
    name="octjepa",
    cls=Verbs,
    help="From a folder of retinal OCT volumes to a 3D foundation model, and from it to results one can trust.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout, nothing else.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="No progress bar.")]
StorePath = Annotated[str, typer.Option("--store", help="The store: a folder, gs://... or s3://...")]
Overrides = Annotated[list[str] | None, typer.Argument(help="Overrides such as train.base_lr=1e-4.")]
Workers = Annotated[int | None, typer.Option("--workers", min=1, help="Processes; default: every core.")]
Spacing = Annotated[
    str | None, typer.Option("--spacing", help="Slice, row, column in mm, 0.047,0.0026,0.0117, for all files; or file.")
]
MaxLost = Annotated[float, typer.Option("--max-lost", min=0.0, max=1.0, help="Share of files that may be lost.")]


def main() -> None:
    """The console command. Usage errors exit with 2, as everywhere."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")  # a path may hold what the terminal's encoding cannot show
    app(prog_name="octjepa")


def _version(asked: bool) -> None:
    if asked:
        from importlib.metadata import version

        print(f"octjepa {version('octjepa')}")
        raise typer.Exit


@app.callback()
def _octjepa(
    show: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    """From a folder of retinal OCT volumes to a 3D foundation model, and from it to results one can trust."""


@app.command()
def demo(
    out: Annotated[Path, typer.Option("--out", help="Folder for everything it makes.")] = Path("demo"),
    minutes: Annotated[float, typer.Option("--minutes", min=1.0, help="About how long it may take.")] = 5.0,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """The whole line on synthetic eyes, offline: phantom, ingest, pretrain, embed, probe, report."""
    from octjepa.demo import run_demo

    set_quiet(quiet)
    say_probes(run_demo(out, minutes), "probe", as_json)


@app.command()
def phantom(
    out: Annotated[Path, typer.Argument(help="Folder for the cohort.")],
    people: Annotated[int, typer.Option("--people", min=1)],
    seed: Annotated[int, typer.Option("--seed", min=0)] = 0,
    devices: Annotated[str | None, typer.Option("--devices", help="Comma-separated; default: all four.")] = None,
    size: Annotated[Literal["small", "full"], typer.Option("--size", help="small, or full vendor sizes.")] = "small",
    broken: Annotated[int, typer.Option("--broken", min=0, help="How many broken files to add.")] = 0,
    difficulty: Annotated[
        Literal["plain", "realistic"], typer.Option("--difficulty", help="realistic: small and rare lesions.")
    ] = "plain",
    shares: Annotated[str, typer.Option("--shares", help="Of people in train, val and test.")] = "0.7,0.15,0.15",
    workers: Workers = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Synthetic eyes with known truth, as real DICOM in an AI-READI-shaped tree."""
    from octjepa.phantom import write_cohort
    from octjepa.recipe import DEVICES

    set_quiet(quiet)
    chosen = DEVICES if devices is None else tuple(device.strip() for device in devices.split(","))
    unknown = [device for device in chosen if device not in DEVICES]
    if unknown:
        raise UsageError(f"unknown device {', '.join(map(repr, unknown))}: choose from {', '.join(DEVICES)}")
    parts = [share.strip() for share in shares.split(",")]
    if len(parts) != 3 or not all(share.replace(".", "", 1).isdigit() for share in parts):
        raise UsageError(f"--shares {shares!r} is not of the form 0.7,0.15,0.15")
    train, val, test = map(float, parts)
    given = (train, val, test)
    say(write_cohort(out, people, seed, chosen, size, given, _cores(workers), broken, difficulty), as_json)


@app.command()
def expand(
    source: Annotated[str, typer.Argument(help="A ZIP archive, a folder of them, or a gs:// or s3:// address.")],
    target: Annotated[str, typer.Argument(help="Folder or url of the tree; may hold a part of it already.")],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Read and check everything, write nothing.")] = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Expands ZIP archives, one a device or any other, to the tree that ingest reads."""
    from octjepa.ingest.archive import expand as run

    set_quiet(quiet)
    try:
        say(run(source, target, dry_run), as_json)
    except TooManyLostError as error:
        say(error.summary, as_json)
        raise


@app.command()
def ingest(
    sources: Annotated[
        list[str], typer.Argument(help="Files, folders, globs, lists, manifests; also gs:// and s3://.")
    ],
    store: StorePath,
    recipe: Annotated[str, typer.Option("--recipe", help="Whose preprocessing the store follows.")] = "tiny_cpu",
    workers: Workers = None,
    engine: Annotated[
        Literal["local", "ray"], typer.Option("--engine", help="This machine, or the Ray cluster at RAY_ADDRESS.")
    ] = "local",
    seconds_per_file: Annotated[
        float, typer.Option("--seconds-per-file", min=1.0, help="A file that takes longer is given up.")
    ] = 600.0,
    spacing: Spacing = None,
    max_lost: MaxLost = 0.2,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Reads every file into a store of canonical volumes, or into its quarantine with a reason."""
    from octjepa.config import load_recipe
    from octjepa.ingest.reader import parse_spacing
    from octjepa.store import build_store

    set_quiet(quiet)
    preprocessing = load_recipe(recipe).preprocessing
    try:
        made = build_store(
            sources, store, preprocessing, workers, max_lost, engine=engine, seconds_per_file=seconds_per_file,
            spacing_mm=None if spacing is None else parse_spacing(spacing),
        )  # fmt: skip
        say(made, as_json)
    except TooManyLostError as error:
        say(error.summary, as_json)  # the work is done: its figures are told before the exit code complains
        raise


@app.command()
def inspect(
    path: Annotated[str, typer.Argument(help="A scan file, a store, a run or a checkpoint; gs:// and s3://, too.")],
    verify: Annotated[bool, typer.Option("--verify", help="Of a store: read every volume, list damaged ones.")] = False,
    spacing: Spacing = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Says what a file, store, run or checkpoint is, and whether it can be used."""
    from octjepa.ingest.reader import parse_spacing
    from octjepa.inspection import describe

    set_quiet(quiet)
    found = describe(path, None if spacing is None else parse_spacing(spacing), verify)
    say(found, as_json)
    if found.get("damaged"):
        raise OctjepaError(
            f"{len(found['damaged'])} volumes of {path} are not what was written: delete their folders (chunks/aa/ID, "
            "aa being the first two signs of ID) and run the same ingest again"
        )


@app.command()
def split(
    store: Annotated[str, typer.Argument(help="The store: a folder, gs://... or s3://...")],
    by: Annotated[str, typer.Option("--by", help="recommended or stratified.")] = "recommended",
    shares: Annotated[str, typer.Option("--shares", help="Of people in train, val and test.")] = "0.8,0.1,0.1",
    seed: Annotated[int, typer.Option("--seed", min=0)] = 0,
    deal_rest: Annotated[bool, typer.Option("--deal-rest", help="Deal people without a recommendation.")] = False,
    labels: Annotated[Path | None, typer.Option("--labels", help="TSV or CSV whose --target is dealt evenly.")] = None,
    target: Annotated[str | None, typer.Option("--target", help="A label column.")] = None,
    against: Annotated[
        str | None, typer.Option("--against", help="Split nothing; tell whom this run, weights or store has seen.")
    ] = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Person-level split of a store, with a leak check; or a leak check against what an encoder was pretrained on."""
    from octjepa.store import Store
    from octjepa.store.split import apply_split, read_shares

    set_quiet(quiet)
    opened = Store.open(store)
    if against is not None:
        from octjepa.evaluate.seen import check_against

        say(check_against(opened, against), as_json)
        return
    values = None
    if labels is not None or target is not None:
        from octjepa.evaluate.labels import read_labels

        if labels is None or target is None:
            raise UsageError("--labels and --target belong together: name the file and its column")
        values = read_labels(labels, [target]).values[target]
    say(apply_split(opened, by, seed, read_shares(shares), deal_rest, values), as_json)


@app.command()
def plan(
    recipe: Annotated[str, typer.Argument(help="A recipe's name or path.")],
    overrides: Overrides = None,
    store: Annotated[str | None, typer.Option("--store", help="Count its training volumes.")] = None,
    masks: Annotated[Path | None, typer.Option("--masks", help="Folder for a report on what the masks do.")] = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """All figures of a run before it runs: tokens, parameters, arithmetic, memory, updates, learning rate."""
    from octjepa.config import load_recipe
    from octjepa.train.plan import plan as plan_recipe

    set_quiet(quiet)
    resolved = load_recipe(recipe, overrides or ())
    about: dict[str, Any] = {}
    opened, ids = None, None
    if store is not None:
        from octjepa.store import Store
        from octjepa.train.cohort import choose_cohort

        opened = Store.open(store)
        cohort, _ = choose_cohort(opened, resolved)
        cohort.tell()
        ids = cohort.train.volume_ids
        about = cohort.about() if as_json else {}
    if masks is not None:
        from octjepa.report.figures.mask_report import report_masks

        about["masks"] = report_masks(resolved, opened, ids, masks)
    say({**plan_recipe(resolved, None if ids is None else len(ids)), **about}, as_json)


@app.command()
def pretrain(
    recipe: Annotated[str, typer.Argument(help="A recipe's name or path.")],
    store: StorePath,
    out: Annotated[Path, typer.Option("--out", help="The run folder.")],
    overrides: Overrides = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the newest checkpoint.")] = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Pretrains an encoder on the training people of a store."""
    from octjepa.checkpoint.place import place_of
    from octjepa.config import load_recipe
    from octjepa.store import Store
    from octjepa.train.loop import pretrain as run

    set_quiet(quiet)
    if out.exists() and not out.is_dir():
        raise UsageError(f"{out} is a file: give --out a new folder, or with --resume the folder of a run")
    summary = run(load_recipe(recipe, overrides or ()), Store.open(store), out, resume)
    if summary["checkpoint"] is not None:
        # in the run folder it is relative, to let that move
        summary["checkpoint"] = str(place_of(summary["checkpoint"], within=out))
    say(summary, as_json)


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
def export(
    checkpoint: Annotated[str, typer.Argument(help="A run, a step-* folder or a weights file; a url too.")],
    form: Annotated[Literal["safetensors", "hf"], typer.Option("--format", help="hf: for transformers.")],
    out: Annotated[Path, typer.Option("--out", help="A new folder.")],
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Encoder weights for others, with their contract, a card and checksums."""
    from octjepa.checkpoint.export import export as write

    set_quiet(quiet)
    say({"files": [str(out / name) for name in write(checkpoint, form, out)]}, as_json)


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


@app.command()
def doctor(
    store: Annotated[str | None, typer.Option("--store", help="Check that this store can be read, too.")] = None,
    out: Annotated[Path, typer.Option("--out", help="Where runs will be written.")] = Path(),
    recipe: Annotated[str | None, typer.Option("--recipe", help="Check memory and disk against its plan.")] = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Checks the installation, its devices and this machine; with --recipe and --store what a run would need, too."""
    from octjepa.doctor import examine

    set_quiet(quiet)
    found = examine(store, out, recipe)
    say_checks(found, as_json)
    if not found["ok"]:
        failed = [check["name"] for check in found["checks"] if check["state"] == "failed"]
        raise OctjepaError(f"failed: {', '.join(failed)}; what to do stands with each")


def _cores(workers: int | None) -> int:
    return workers or os.cpu_count() or 1
