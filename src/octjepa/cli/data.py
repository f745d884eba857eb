"""Commands from files to a store: demo, phantom, expand, ingest, inspect, convert, pack, split."""

from __future__ import annotations

import logging
import shlex
from pathlib import Path
from typing import Annotated, Literal

import typer

from octjepa.cli.options import AllowOutside, Json, MaxLost, Quiet, Spacing, StorePath, Workers, used_options
from octjepa.cli.output import (
    check_lost,
    check_output_folder,
    is_verbose,
    print_converted,
    print_demo,
    print_result,
    print_text,
)
from octjepa.cli.root import app
from octjepa.errors import OctjepaError, TooManyLostError, UsageError, counted

_log = logging.getLogger(__name__)


@app.command()
def demo(
    out: Annotated[Path, typer.Option("--out", help="Folder for all output.")] = Path("demo"),
    minutes: Annotated[
        float, typer.Option("--minutes", min=1.0, max=1440.0, help="Approximate duration in minutes.")
    ] = 5.0,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Runs every stage on synthetic eyes, offline. Applies the packaged models, then pretrains a small encoder."""
    from octjepa.demo import run_demo

    print_demo(run_demo(out, minutes), as_json)


@app.command()
def phantom(
    out: Annotated[Path, typer.Argument(help="Folder for the cohort.")],
    people: Annotated[int, typer.Option("--people", min=1, help="Number of people, with two eyes each.")],
    seed: Annotated[int, typer.Option("--seed", min=0, help="Random seed of the cohort.")] = 0,
    devices: Annotated[
        str | None,
        typer.Option("--devices", help="Comma-separated, such as topcon_triton,zeiss_cirrus; default: all four."),
    ] = None,
    size: Annotated[
        Literal["small", "dense", "full"],
        typer.Option(
            "--size",
            help="small: quick to draw. dense: twice as many B-scans. full: the scan sizes of the instruments.",
        ),
    ] = "small",
    broken: Annotated[int, typer.Option("--broken", min=0, help="Number of broken files to add.")] = 0,
    difficulty: Annotated[
        Literal["plain", "realistic", "exam"],
        typer.Option(
            "--difficulty",
            help="realistic: small and rare lesions; exam: small lesions, each kind in a quarter of the eyes.",
        ),
    ] = "plain",
    group_effect: Annotated[
        float,
        typer.Option("--group-effect", min=0, help="How strongly lesions depend on the study group; 0: not at all."),
    ] = 1.0,
    shares: Annotated[str, typer.Option("--shares", help="Shares of people in train, val and test.")] = "0.7,0.15,0.15",
    workers: Workers = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Draws synthetic eyes with ground truth. They are written as DICOM in the folder layout of AI-READI."""
    from octjepa.cohort.split import read_shares
    from octjepa.ingest.worker_pool import worker_count
    from octjepa.phantom import CohortDesign, write_cohort
    from octjepa.recipe import DEVICES

    chosen = DEVICES if devices is None else tuple(device.strip() for device in devices.split(","))
    unknown = [device for device in chosen if device not in DEVICES]
    if unknown:
        raise UsageError(f"unknown device {', '.join(map(repr, unknown))}: choose from {', '.join(DEVICES)}")
    processes = worker_count(workers)
    design = CohortDesign(broken, difficulty, group_effect)
    written = write_cohort(out, people, seed, chosen, size, read_shares(shares), processes, design)
    print_result(written if as_json else {**written, "next": _ingest_command(out)}, as_json)


def _ingest_command(folder: Path | str) -> str:
    """The command that follows on a folder of scans, to copy into a shell."""
    return f"octjepa ingest {shlex.quote(str(folder))} --store STORE"


@app.command()
def expand(
    source: Annotated[str, typer.Argument(help="A ZIP archive or a folder of them, also gs:// and s3://.")],
    target: Annotated[str, typer.Argument(help="Folder or URL of the tree; may already hold a part of it.")],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Read and check everything, write nothing.")] = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Unpacks ZIP archives into the tree that ingest reads. AI-READI has one archive per device; others work too."""
    from octjepa.ingest.archive import expand as run

    try:
        expanded = run(source, target, dry_run).to_json()
        again = f"octjepa expand {shlex.quote(source)} {shlex.quote(target)}"
        follows = again if dry_run else _ingest_command(target)
        print_result(expanded if as_json else {**expanded, "next": follows}, as_json)
    except TooManyLostError as error:
        print_result(error.summary, as_json)
        raise


@app.command()
def ingest(
    sources: Annotated[
        list[str], typer.Argument(help="Files, folders, globs, lists or manifests, also gs:// and s3://.")
    ],
    store: StorePath,
    recipe: Annotated[
        str, typer.Option("--recipe", help="The recipe whose preprocessing (spacing, size) the store uses.")
    ] = "tiny_cpu",
    workers: Workers = None,
    engine: Annotated[
        Literal["local", "ray"],
        typer.Option("--engine", help="local: processes on this machine; ray: a Ray cluster (RAY_ADDRESS)."),
    ] = "local",
    seconds_per_file: Annotated[
        float, typer.Option("--seconds-per-file", min=1.0, help="Time limit; a file that takes longer is refused.")
    ] = 600.0,
    spacing: Spacing = None,
    halves: Annotated[
        bool,
        typer.Option(
            "--halves",
            help="Also store the volume made of every second B-scan, for recipes with views.halves. This needs one "
            "more byte per voxel.",
        ),
    ] = False,
    images: Annotated[
        bool,
        typer.Option(
            "--images",
            help="Each picture and one-frame DICOM file is a single B-scan. --spacing is then depth,column.",
        ),
    ] = False,
    max_lost: MaxLost = 0.2,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Reads scans into a store. A file that cannot be read correctly is listed in the quarantine with a reason."""
    from octjepa.config import load_recipe
    from octjepa.ingest import IngestOptions, build_store
    from octjepa.ingest.remembered_sources import remember_sources
    from octjepa.read.reader import parse_spacing
    from octjepa.read.single_bscan import parse_image_spacing

    settings = load_recipe(recipe)
    if images and halves:
        raise UsageError("--images and --halves exclude each other: a single B-scan has no halves")
    parse = parse_image_spacing if images else parse_spacing
    options = IngestOptions(
        engine=engine,
        seconds_per_file=seconds_per_file,
        bscan_slices=settings.tokens.patch_size[0] if images else 0,
    )
    remember_sources(store, sources)
    try:
        summary = build_store(
            sources,
            store,
            settings.preprocessing,
            workers,
            max_lost,
            None if spacing is None else parse(spacing),
            halves,
            options,
        )
        print_result(summary.to_json(), as_json)
    except TooManyLostError as error:
        print_result(error.summary, as_json)  # the work is done: its numbers come before the exit code
        raise
    if recipe == "tiny_cpu" and not as_json and not quiet:
        print_fitting_recipe(store)


def print_fitting_recipe(store: str) -> None:
    """One line: the recipe that suits this machine, and the grid that it stores of these scans."""
    from octjepa.config import load_recipe
    from octjepa.machine import gpu_count
    from octjepa.store import Store

    table = Store.open(store).table
    gpus = gpu_count()
    name = "eight_gpus" if gpus >= 8 else "one_gpu" if gpus else "tiny_cpu"
    machine = f"{gpus} GPU{'s' * (gpus > 1)} found" if gpus else "no GPU found"
    native = " x ".join(str(int(table[f"native_{axis}"].median())) for axis in "dhw")
    grid = " x ".join(map(str, load_recipe(name).preprocessing.image_size))
    advice = "" if name == "tiny_cpu" else f"; ingest into another store with --recipe {name}"
    print(f"recipe {name} suits this machine ({machine}): it uses {grid} voxels of scans of {native}{advice}")


@app.command()
def inspect(
    path: Annotated[str, typer.Argument(help="A scan file, store, run or checkpoint, also gs:// and s3://.")],
    verify: Annotated[bool, typer.Option("--verify", help="Read every volume of a store and list damage.")] = False,
    spacing: Spacing = None,
    allow_outside: AllowOutside = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Describes a file, store, run or checkpoint. Also takes the name of a shipped encoder."""
    from octjepa.inspection import describe
    from octjepa.read.reader import parse_spacing

    description = describe(path, None if spacing is None else parse_spacing(spacing), verify)
    flow = {} if as_json else description.pop("flow", {})
    print_result(description, as_json)
    if flow:
        from octjepa.cohort.flow import CohortFlow

        for cohort, stages in flow.items():
            print_text("\n".join([f"{cohort} cohort", *CohortFlow.from_json(stages).lines()]))
    if description.get("damaged"):
        raise OctjepaError(
            f"{len(description['damaged'])} volumes of {path} are damaged. Delete the folder chunks/AA/ID of each, "
            "with AA the first two characters of ID. In a packed store delete the shards that shards.parquet lists for "
            "them. Then run the same ingest again"
        )


@app.command()
def convert(
    scans: Annotated[list[str], typer.Argument(metavar="SCAN...", help="Scans: files, folders, globs or lists.")],
    to: Annotated[Literal["nifti", "dicom", "tiff", "zarr"], typer.Option("--to", help="Format of the files.")],
    out: Annotated[Path, typer.Option("--out", help="Folder for the files, apart from the scans.")],
    layers: Annotated[
        bool, typer.Option("--layers", help="Also write the layers of each scan, with the packaged segmenter.")
    ] = False,
    spacing: Spacing = None,
    max_lost: MaxLost = 0.2,
    allow_outside: AllowOutside = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Writes scans in another format, exactly as octjepa reads them. Each file is read back and compared with its
    scan."""
    from octjepa.convert.scans import convert_sources
    from octjepa.read.reader import parse_spacing

    check_output_folder(out)
    converted = convert_sources(scans, out, to, layers, None if spacing is None else parse_spacing(spacing))
    if as_json:
        print_result(converted.to_json(), as_json)
    else:
        print_converted(converted)
    check_lost(converted, "scan", "converted", max_lost)


@app.command()
def pack(
    store: Annotated[str, typer.Argument(help="The store: a folder, gs://... or s3://...")],
    shard_mb: Annotated[float, typer.Option("--shard-mb", help="Size of a shard in millions of bytes.")] = 256,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Packs the volumes of a store into large files. Use it for buckets, and for disks that are slow with many small
    files."""
    from octjepa.store import Store
    from octjepa.store.shards import pack as pack_store

    packed = pack_store(Store.open(store), shard_mb)
    print_result(packed.to_json(), as_json)
    if packed.damaged:
        raise OctjepaError(
            f"{len(packed.damaged)} volumes of {store} are damaged and were left in place: "
            f"`octjepa inspect {shlex.quote(store)} --verify` says what to do"
        )


@app.command()
def split(
    context: typer.Context,
    store: Annotated[str, typer.Argument(help="The store: a folder, gs://... or s3://...")],
    by: Annotated[
        Literal["recommended", "stratified"],
        typer.Option(
            "--by",
            help="recommended: from participants.tsv; stratified: balanced over device, region, eye and label.",
        ),
    ] = "recommended",
    shares: Annotated[str, typer.Option("--shares", help="Shares of people in train, val and test.")] = "0.8,0.1,0.1",
    seed: Annotated[int, typer.Option("--seed", min=0, help="Random seed of a stratified split.")] = 0,
    assign_rest: Annotated[
        bool, typer.Option("--assign-rest", help="Also assign people who have no recommended split.")
    ] = False,
    labels: Annotated[Path | None, typer.Option("--labels", help="TSV or CSV with person_id and the --target.")] = None,
    target: Annotated[
        str | None, typer.Option("--target", help="Column of --labels to balance over the splits.")
    ] = None,
    against: Annotated[
        str | None,
        typer.Option("--against", help="Only count the people that this run, weights file or other store has seen."),
    ] = None,
    allow_outside: AllowOutside = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Splits a store by person and checks for leaks. With --against it only counts the people that an encoder was
    pretrained on, or that another store holds."""
    from octjepa.cohort.split import apply_split, read_shares
    from octjepa.metrics.findings import FEWEST_TEST_PEOPLE
    from octjepa.store import Store
    from octjepa.store.folder import SPLIT_NAMES

    opened = Store.open(store)
    if against is not None:
        from octjepa.embed.leakage import check_leakage

        if by != "recommended" or used_options(context, "shares", "seed", "assign_rest", "labels", "target"):
            raise UsageError("--against only counts people and splits nothing: leave out the options of a split")
        print_result(check_leakage(opened, against).to_json(), as_json)
        return
    if by == "recommended" and not assign_rest and used_options(context, "seed"):
        raise UsageError("--seed is unused by --by recommended: add --assign-rest, or leave it out")
    values: dict[tuple[str, ...], str] | None = None
    if labels is not None or target is not None:
        from octjepa.evaluate.labels import read_labels

        if labels is None or target is None:
            raise UsageError("--labels and --target belong together: name the file and its column")
        table = read_labels(labels, [target])
        labelled: list[tuple[tuple[str, ...], str]] = [*table.values[target].items()]
        labelled += table.visits.get(target, {}).items()
        values = dict(labelled)
    people = int(opened.table["person_id"].nunique())
    if people < len(SPLIT_NAMES):  # before a refusal that would advise another kind of split
        _log.warning(
            "%s has %s: a split by person needs at least %d people, and a probe %d test people for a conclusion. "
            "Layers and thickness need no split: octjepa segment SCAN... --out DIR",
            *(store, counted(people, "person"), len(SPLIT_NAMES), FEWEST_TEST_PEOPLE),
        )
    wanted = read_shares(shares)
    result = apply_split(opened, by, seed, wanted, assign_rest, values)
    counts = {name: int(getattr(result, name)) for name in SPLIT_NAMES}
    if as_json or is_verbose():
        print_result(result.to_json(), as_json)
    else:  # an empty split is a result, so its zero is printed
        shown = {name: value for name, value in result.to_json().items() if name != "strata"}
        print_result(shown | {name: str(count) for name, count in counts.items()}, as_json)
    is_planned = {name: share > 0 or by == "recommended" for name, share in zip(SPLIT_NAMES, wanted, strict=True)}
    if empty := [name for name in ("val", "test") if not counts[name] and is_planned[name]]:
        if people < len(SPLIT_NAMES):
            remedy = f"Add scans of at least {len(SPLIT_NAMES)} people to the store, then split again"
        else:
            remedy = f"`octjepa split {shlex.quote(store)} --by stratified` assigns people to each split"
        _log.warning(
            "%s: no person is in %s. Without val no pretraining can be validated, and without test no encoder can be "
            "evaluated. %s",
            *(store, " or ".join(empty), remedy),
        )
    elif people >= len(SPLIT_NAMES) and counts["test"] < FEWEST_TEST_PEOPLE:
        _log.warning(
            "%s has %s: a probe needs at least %d of them for a conclusion",
            *(store, counted(counts["test"], "test person"), FEWEST_TEST_PEOPLE),
        )
