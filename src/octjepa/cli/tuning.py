"""Verbs of tasks that are learned from labels: finetune, predict, segment."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated, Literal

import typer

from octjepa.cli.options import (
    AllowOutside,
    Json,
    Labelled,
    Ledger,
    MaxLost,
    Overrides,
    Quiet,
    Spacing,
    StorePath,
    Subgroups,
    Workers,
    used_options,
)
from octjepa.cli.output import check_output_folder, is_verbose, print_result, print_segmented, print_subgroups
from octjepa.cli.root import app
from octjepa.errors import NothingReadError, TooManyLostError, UsageError, counted


@app.command()
def finetune(
    recipe: Annotated[str, typer.Argument(help="A fine-tuning recipe's name (finetune, study_group) or path.")],
    checkpoint: Annotated[
        str,
        typer.Option(
            "--from", help="The encoder: a run, step-* folder, file or name; or NAME:PATH of another project's."
        ),
    ],
    store: StorePath,
    labels: Annotated[Path, typer.Option("--labels", help="TSV or CSV keyed by person_id, also eye and visit.")],
    out: Annotated[Path, typer.Option("--out", help="A new folder for the tuned encoder and its results.")],
    overrides: Overrides = None,
    target: Annotated[
        list[str] | None, typer.Option("--target", help="A label column. Repeatable. Default: the recipe's.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue from the newest checkpoint.")] = False,
    labelled: Labelled = None,
    subgroups: Subgroups = None,
    ledger: Ledger = None,
    allow_outside: AllowOutside = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Fine-tunes an encoder on labels. It trains in stages, compares with the frozen encoder and can run under
    torchrun."""
    from octjepa.distributed.runtime import distributed_context
    from octjepa.evaluate.label_fractions import parse_counts
    from octjepa.evaluate.subgroups import parse_subgroups
    from octjepa.store import Store
    from octjepa.tasks.finetune.fit import FinetuneInputs, finetune_store, finetune_with_fewer_labels
    from octjepa.tasks.finetune.recipe import load_recipe

    check_output_folder(out, "a new folder, or with --resume the folder of a fine-tuning")
    counts, groups = parse_counts(labelled), parse_subgroups(subgroups)
    settings = load_recipe(recipe, overrides or ())
    inputs = FinetuneInputs(checkpoint, Store.open(store), labels, target or (), ledger, subgroups=groups)
    with distributed_context():  # one for both: processes that leave and join again miss each other
        results = finetune_store(settings, inputs, out, resume)
        if counts:
            results = replace(results, labelled=finetune_with_fewer_labels(settings, counts, inputs, out))
    # The notes were logged while the task ran; -v prints them once more next to the results.
    parts = ("rows", *(("notes",) if is_verbose() else ()), "checkpoint", "predictions")
    parts += ("summary", *(("labelled",) if counts else ()))
    values = results.to_json()
    shown = values if as_json else {key: values[key] for key in parts}
    primary = {pair.metric for pair in results.paired}
    print_result(shown, as_json, "rows", primary)
    if not as_json:
        print_subgroups((((subgroup.name, subgroup.target), subgroup) for subgroup in results.subgroups), primary)


@app.command()
def predict(
    tuned: Annotated[str, typer.Argument(help="Folder of a fine-tuned model or a segmentation head.")],
    out: Annotated[Path, typer.Option("--out", help="Folder for the table of predictions.")],
    sources: Annotated[
        list[str] | None,
        typer.Argument(help="New scans: files, folders, globs, lists or manifests, also gs:// and s3://."),
    ] = None,
    store: Annotated[
        str | None, typer.Option("--store", help="Predict a store instead of new scans: a folder, gs://... or s3://...")
    ] = None,
    checkpoint: Annotated[
        str | None, typer.Option("--from", help="For a segmentation head: its encoder, if that was moved.")
    ] = None,
    level: Annotated[
        Literal["volume", "eye", "person"] | None,
        typer.Option("--level", help="Unit of a case, whose scans are averaged; default: as in the fine-tuning."),
    ] = None,
    workers: Workers = None,
    spacing: Spacing = None,
    images: Annotated[
        bool,
        typer.Option(
            "--images",
            help="Each picture and one-frame DICOM file is a single B-scan. --spacing is then depth,column.",
        ),
    ] = False,
    max_lost: MaxLost = 0.2,
    allow_outside: AllowOutside = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Applies a tuned model to new scans. Writes a table with calibrated probabilities and warnings."""
    from octjepa.tasks.segment.folder import is_head

    check_output_folder(out)
    if (store is None) == (not sources):
        raise UsageError("name either the scans to predict or a --store of them")
    if is_head(tuned):
        options = {"--level": level, "--workers": workers}
        if unused := [name for name, value in options.items() if value is not None]:
            raise UsageError(f"a segmentation head does not take {', '.join(unused)}")
        _segment(tuned, checkpoint, sources, out, spacing, images, as_json)
        return
    if checkpoint is not None:
        raise UsageError("--from is for a segmentation head: a fine-tuning holds its encoder")
    from octjepa.tasks.finetune.inference import predict_scans, predict_store

    if store is not None:
        from octjepa.store import Store

        if spacing is not None:
            raise UsageError("--spacing is for scans that are read: those of a --store have their spacing")
        if images:
            raise UsageError("--images is for scans that are read: a --store knows what it holds")
        print_result(predict_store(tuned, Store.open(store), out, level).to_json(), as_json)
        return
    from octjepa.read.reader import parse_spacing
    from octjepa.read.single_bscan import parse_image_spacing

    parse = parse_image_spacing if images else parse_spacing
    spacing_mm = None if spacing is None else parse(spacing)
    try:
        result = predict_scans(tuned, sources or (), out, level, workers, max_lost, spacing_mm, images)
        print_result(result.to_json(), as_json)
    except TooManyLostError as error:
        print_result(error.summary, as_json)  # the work is done: its numbers come before the exit code
        raise


def _segment(
    head: str,
    checkpoint: str | None,
    sources: list[str] | None,
    out: Path,
    spacing: str | None,
    images: bool,
    as_json: bool,
) -> None:
    """`octjepa predict` with a segmentation head."""
    from octjepa.ingest.sources import discover

    if not sources:
        raise UsageError("a segmentation head is applied to scans, not to a --store: name their files or folders")
    images = images or _are_pictures(sources)
    files = discover(sources, images).files
    if away := [file for file in files if isinstance(file.location, str) or file.member]:
        raise UsageError(
            f"{len(away)} of {len(files)} scans are in a bucket, or share a file with other scans: copy each scan to a "
            "separate local file"
        )
    _apply_head(head, checkpoint, [file.path for file in files], out, ("nifti", "dicom"), spacing, images, as_json)


def _apply_head(
    head: str,
    checkpoint: str | None,
    files: list[Path],
    out: Path,
    forms: tuple[Literal["nifti", "dicom"], ...],
    spacing: str | None,
    images: bool,
    as_json: bool,
) -> None:
    """Applies a head to volumes, which have their own spacing, or to single B-scans."""
    from octjepa.read.single_bscan import SLICE_MM, parse_bscan_spacing
    from octjepa.tasks.segment.predict import SingleBScans, segment_scans

    if spacing is not None and not images:
        raise UsageError("a segmentation head does not take --spacing with volumes: it reads each file as it is")
    stated_mm = None if spacing is None else (SLICE_MM, *parse_bscan_spacing(spacing))
    single_bscans = SingleBScans(stated_mm) if images else None
    print_result(segment_scans(head, checkpoint, files, out, forms, single_bscans).to_json(), as_json)


@app.command()
def segment(
    context: typer.Context,
    scans: Annotated[
        list[str],
        typer.Argument(
            metavar="SCAN...",
            help="Scans: files, folders, globs or lists. Or adapt and labelled scans, or a segmentation recipe with "
            "key=value, or a head's folder.",
        ),
    ],
    out: Annotated[Path, typer.Option("--out", help="Folder for the results.")],
    checkpoint: Annotated[
        str | None,
        typer.Option(
            "--from",
            help="With a recipe: the encoder, a run, step-* folder or file. With a head: its encoder, if moved.",
        ),
    ] = None,
    store: Annotated[
        str | None, typer.Option("--store", help="With a recipe: the store, a folder, gs://... or s3://...")
    ] = None,
    labels: Annotated[
        list[Path] | None,
        typer.Option("--labels", help="With adapt or a recipe: folder of labels; repeatable with adapt."),
    ] = None,
    model: Annotated[
        Path | None, typer.Option("--model", help="Folder of an adapted network; default: the packaged one.")
    ] = None,
    images: Annotated[
        bool,
        typer.Option("--images", help="Every picture or one-frame DICOM file is a single B-scan, not a volume."),
    ] = False,
    baseline: Annotated[
        bool,
        typer.Option("--baseline/--no-baseline", help="With adapt: also train from random weights, to compare."),
    ] = True,
    classes: Annotated[
        str | None, typer.Option("--classes", help="With a recipe: comma-separated; default: all named classes.")
    ] = None,
    scan: Annotated[list[Path] | None, typer.Option("--scan", help="A scan to apply a head to; repeatable.")] = None,
    form: Annotated[
        Literal["nifti", "dicom", "both"],
        typer.Option("--format", help="Format of the segmentations, which have the scan's geometry."),
    ] = "both",
    spacing: Spacing = None,
    max_lost: MaxLost = 0.2,
    ledger: Ledger = None,
    allow_outside: AllowOutside = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Segments layers and fluid of any scan. The packaged network needs no labels. The output folder holds files,
    tables, pictures and an HTML page.

    adapt SCAN... --labels FOLDER --out MODEL trains the network on your labels. --model MODEL uses the result.
    With a recipe instead of scans: trains and evaluates a head on an encoder. With the folder of a head: applies it.
    """
    from octjepa.tasks.segment.folder import is_head

    check_output_folder(out)
    first, *overrides = scans
    forms: tuple[Literal["nifti", "dicom"], ...] = ("nifti", "dicom") if form == "both" else (form,)
    of_recipe = {"--from": checkpoint, "--store": store, "--labels": labels, "--classes": classes, "--ledger": ledger}
    head = is_head(first)
    if first == "adapt":
        unused = [name for name, value in {**of_recipe, "--scan": scan}.items() if value and name != "--labels"]
        if unused := [*unused, *used_options(context, "form", "max_lost")]:
            raise UsageError(f"adapt takes scans and --labels, not {', '.join(unused)}")
        _adapt(overrides, labels, out, model, spacing, baseline, images, as_json)
        return
    if (images and not head) or _are_pictures(scans):
        unused = [name for name, value in {**of_recipe, "--scan": scan}.items() if value]
        if unused := [*unused, *used_options(context, "form", "baseline")]:
            raise UsageError(f"single B-scans do not take {', '.join(unused)}")
        _segment_bscans(scans, out, spacing, max_lost, as_json, model)
        return
    if not head and not _names_recipe(first, any(value is not None for value in of_recipe.values())):
        if scan:
            raise UsageError("--scan is for a head; name the scans as arguments: octjepa segment SCAN... --out DIR")
        if unused := used_options(context, "baseline"):
            raise UsageError(f"{unused[0]} is for octjepa segment adapt: leave it out")
        _segment_scans(scans, out, forms, spacing, max_lost, as_json, model)
        return
    if model is not None:
        raise UsageError("--model is for scans: a head and a recipe bring their networks")
    if spacing is not None and not head:
        raise UsageError("--spacing is for scans; a recipe takes the spacing of its --store")
    if unused := used_options(context, "baseline", "max_lost", *(() if head else ("form",))):
        raise UsageError(f"a {'trained head' if head else 'recipe'} does not take {', '.join(unused)}")
    if head:
        if any(option is not None for option in (store, labels, classes, ledger)) or overrides:
            raise UsageError(
                f"{first} is a trained head, which segments only --scan files: leave out --store, --labels, --classes, "
                "--ledger and further arguments, or name a recipe instead of the folder to train a new head"
            )
        images = images or (bool(scan) and _are_pictures(list(map(str, scan or ()))))
        files = _bscans_in(scan or []) if images else scan or []
        _apply_head(first, checkpoint, files, out, forms, spacing, images, as_json)
        return
    from octjepa.store import Store
    from octjepa.tasks.segment.fit import segment_store
    from octjepa.tasks.segment.recipe import load_recipe

    settings = load_recipe(first, overrides)
    if checkpoint is None or store is None or labels is None:
        lacking = {"--from": checkpoint, "--store": store, "--labels": labels}
        raise UsageError(f"to make a head, give {', '.join(name for name, value in lacking.items() if value is None)}")
    if len(labels) != 1:
        raise UsageError(f"{len(labels)} times --labels: a recipe takes one folder of label volumes")
    if scan:
        raise UsageError("--scan is for a head that is made: name its folder instead of a recipe")
    chosen = [] if classes is None else [name.strip() for name in classes.split(",") if name.strip()]
    result = segment_store(settings, checkpoint, Store.open(store), labels[0], out, chosen, ledger)
    values = result.to_json()
    parts = ("faults", "metrics", "checkpoint", "etdrs", "figure", "notes")
    print_result(values if as_json else {key: values[key] for key in parts}, as_json)


def _bscans_in(sources: list[Path]) -> list[Path]:
    """The files of single B-scans: files, and those below folders."""
    from octjepa.read.single_bscan import find_bscans

    return [file for source in sources for file in find_bscans(source)]


def _are_pictures(sources: list[str]) -> bool:
    """Whether all sources are pictures of one page."""
    if not all(source.lower().endswith((".png", ".jpg", ".jpeg", ".tif", ".tiff", ".bmp")) for source in sources):
        return False  # without loading a reader
    from octjepa.read.single_bscan import is_picture

    return all(is_picture(Path(source)) for source in sources)


def _segment_bscans(
    sources: list[str], out: Path, spacing: str | None, max_lost: float, as_json: bool, model: Path | None
) -> None:
    """`octjepa segment PICTURE...` and `octjepa segment FOLDER --images`."""
    from octjepa.cli.output import print_segmented_bscans
    from octjepa.read.single_bscan import parse_bscan_spacing
    from octjepa.tasks.segmenter.single_bscans import segment_bscans

    segmented = segment_bscans(sources, out, None if spacing is None else parse_bscan_spacing(spacing), model)
    payload = segmented.to_json()
    if as_json:
        print_result(payload, as_json)
    else:
        print_segmented_bscans(segmented)
    if not segmented.images:
        raise NothingReadError(f"none of {counted(len(segmented.refused), 'B-scan')} could be segmented", payload)
    if segmented.lost_share > max_lost:
        raise TooManyLostError(
            f"{segmented.lost_share:.0%} of the B-scans were refused, more than --max-lost {max_lost:.0%}", payload
        )


def _names_recipe(first: str, has_recipe_options: bool) -> bool:
    """Whether the first argument of `segment` is a recipe. Raises UsageError: neither a recipe nor a path."""
    from octjepa import remote
    from octjepa.tasks.segment.recipe import RECIPES

    if first in RECIPES.names() or first.lower().endswith((".yaml", ".yml")):
        return True
    is_path = Path(first).exists() or remote.is_remote(first) or set(first) & set("*?[")
    if has_recipe_options:  # a recipe was meant: `load_recipe` says which there are
        return True
    if not is_path:
        raise UsageError(
            f"no file or folder at {first}, and no segmentation recipe of that name (there are "
            f"{', '.join(RECIPES.names())}): name scans, a folder of scans or a recipe"
        )
    return False


def _adapt(
    sources: list[str],
    labels: list[Path] | None,
    out: Path,
    model: Path | None,
    spacing: str | None,
    baseline: bool,
    images: bool,
    as_json: bool,
) -> None:
    """`octjepa segment adapt SCAN... --labels FOLDER --out MODEL`."""
    from octjepa.cli.output import print_adapted
    from octjepa.progress import bar
    from octjepa.read.reader import parse_spacing
    from octjepa.read.single_bscan import parse_image_spacing
    from octjepa.tasks.segmenter.adapt_scans import AdaptRequest, adapt_sources

    if not sources or not labels:
        raise UsageError("name labelled scans and their labels: octjepa segment adapt SCAN... --labels DIR --out DIR")
    images = images or _are_pictures(sources)
    parse = parse_image_spacing if images else parse_spacing
    request = AdaptRequest(sources, labels, model, None if spacing is None else parse(spacing), baseline, images)
    with bar("adapt", 1, "network") as progress:
        adapted = adapt_sources(request, out, say=progress.say)
        progress.advance()
    print_adapted(adapted, as_json, images)


def _segment_scans(
    sources: list[str],
    out: Path,
    forms: tuple[Literal["nifti", "dicom"], ...],
    spacing: str | None,
    max_lost: float,
    as_json: bool,
    model: Path | None = None,
) -> None:
    """`octjepa segment SCAN...`: the packaged network, or the network in the folder `model`."""
    from octjepa.ingest.remembered_sources import remember_sources
    from octjepa.read.reader import parse_spacing
    from octjepa.report.segmented_scans import write_page
    from octjepa.tasks.segmenter.scan_segmentation import segment_sources

    segmented = segment_sources(sources, out, forms, None if spacing is None else parse_spacing(spacing), model)
    remember_sources(out, sources, model)  # so that `octjepa view OUT` finds the scans
    page = write_page(segmented, out)
    payload = {**segmented.to_json(), "page": str(page)}
    if as_json:
        print_result(payload, as_json)
    else:
        print_segmented(segmented, page)
    lost = segmented.lost_share
    if not segmented.scans:
        raise NothingReadError(
            f"none of {counted(len(segmented.refused), 'scan')} could be segmented: {page} says why", payload
        )
    if lost > max_lost:
        raise TooManyLostError(
            f"{lost:.0%} of the scans were refused, more than --max-lost {max_lost:.0%}: {page} says why", payload
        )
