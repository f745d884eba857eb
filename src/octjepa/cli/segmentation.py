"""The verb segment: the packaged network on any scan, an adapted network, and heads on an encoder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import typer

from octjepa.cli.options import AllowOutside, Json, Ledger, MaxLost, Quiet, Spacing, used_options
from octjepa.cli.output import check_lost, check_output_folder, print_result, print_segmented
from octjepa.cli.root import app
from octjepa.errors import UsageError

Forms = tuple[Literal["nifti", "dicom"], ...]


@dataclass(frozen=True)
class _Use:
    """A use of the verb: what it is called in messages, and the parameters that it takes besides `scans` and `out`."""

    name: str
    takes: frozenset[str]


_ADAPT = _Use("adapt", frozenset({"labels", "model", "spacing", "images", "baseline"}))
_BSCANS = _Use("single B-scans", frozenset({"model", "spacing", "images", "max_lost"}))
_SCANS = _Use("scans", frozenset({"model", "spacing", "form", "max_lost"}))
_HEAD = _Use("a trained head", frozenset({"checkpoint", "scan", "spacing", "images", "form", "max_lost"}))
_RECIPE = _Use("a recipe", frozenset({"checkpoint", "store", "labels", "classes", "ledger"}))
_USES = (_SCANS, _BSCANS, _ADAPT, _RECIPE, _HEAD)


def _check_options(context: typer.Context, use: _Use) -> None:
    """Raises UsageError: an option was given that this use would ignore."""
    for name in sorted(frozenset[str]().union(*(each.takes for each in _USES)) - use.takes):
        if used := used_options(context, name):
            *others, last = (each.name for each in _USES if name in each.takes)
            takers = f"{', '.join(others)} and {last}" if others else last
            raise UsageError(f"{used[0]} is for {takers}, not for {use.name}: leave it out")


@app.command()
def segment(
    context: typer.Context,
    scans: Annotated[
        list[str],
        typer.Argument(
            metavar="SCAN...",
            help="Scans: files, folders, globs or lists; in the other forms the words above.",
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
    """Segments layers and fluid of any scan. There are four forms:

    segment SCAN... uses the packaged network, which needs no labels, or the adapted network that --model names.

    segment adapt SCAN... --labels FOLDER adapts the network to your labels. Its --out is a folder for --model.

    segment RECIPE [key=value...] --from ENCODER --store STORE --labels FOLDER trains and tests a head on an encoder.

    segment HEAD SCAN... applies a head, which is the output folder of a recipe.
    """
    from octjepa.tasks.segment.folder import is_head

    check_output_folder(out)
    first, *others = scans
    forms: Forms = ("nifti", "dicom") if form == "both" else (form,)
    if first == "adapt":
        _check_options(context, _ADAPT)
        _adapt(others, labels, out, model, spacing, baseline, images, as_json)
    elif is_head(first):
        _check_options(context, _HEAD)
        apply_head(first, checkpoint, [*others, *map(str, scan or ())], out, forms, spacing, images, max_lost, as_json)
    elif images or are_pictures(scans):
        _check_options(context, _BSCANS)
        _segment_bscans(scans, out, spacing, max_lost, as_json, model)
    elif _names_recipe(first, bool(used_options(context, *(_RECIPE.takes)))):
        _check_options(context, _RECIPE)
        _make_head(first, others, checkpoint, store, labels, out, classes, ledger, as_json)
    else:
        _check_options(context, _SCANS)
        _segment_scans(scans, out, forms, spacing, max_lost, as_json, model)


def _make_head(
    recipe: str,
    overrides: list[str],
    checkpoint: str | None,
    store: str | None,
    labels: list[Path] | None,
    out: Path,
    classes: str | None,
    ledger: Path | None,
    as_json: bool,
) -> None:
    """`octjepa segment RECIPE --from ENCODER --store STORE --labels FOLDER`."""
    from octjepa.store import Store
    from octjepa.tasks.segment.fit import segment_store
    from octjepa.tasks.segment.recipe import load_recipe

    settings = load_recipe(recipe, overrides)
    if checkpoint is None or store is None or labels is None:
        lacking = {"--from": checkpoint, "--store": store, "--labels": labels}
        raise UsageError(f"to make a head, give {', '.join(name for name, value in lacking.items() if value is None)}")
    if len(labels) != 1:
        raise UsageError(f"{len(labels)} times --labels: a recipe takes one folder of label volumes")
    chosen = [] if classes is None else [name.strip() for name in classes.split(",") if name.strip()]
    result = segment_store(settings, checkpoint, Store.open(store), labels[0], out, chosen, ledger)
    values = result.to_json()
    parts = ("faults", "metrics", "checkpoint", "etdrs", "figure", "notes")
    print_result(values if as_json else {key: values[key] for key in parts}, as_json)


def apply_head(
    head: str,
    checkpoint: str | None,
    sources: Sequence[str],
    out: Path,
    forms: Forms,
    spacing: str | None,
    images: bool,
    max_lost: float,
    as_json: bool,
) -> None:
    """`octjepa segment HEAD` and `octjepa predict HEAD`, with scans or single B-scans."""
    from octjepa.read.reader import parse_spacing
    from octjepa.read.single_bscan import parse_image_spacing
    from octjepa.tasks.segment.predict import segment_scans

    if not sources:
        raise UsageError(f"{head} is a trained head: name the scans to segment, octjepa segment {head} SCAN...")
    images = images or are_pictures(sources)
    parse = parse_image_spacing if images else parse_spacing
    spacing_mm = None if spacing is None else parse(spacing)
    segmented = segment_scans(head, checkpoint, sources, out, forms, spacing_mm, images)
    print_result(segmented.to_json(), as_json)
    check_lost(segmented, "B-scan" if images else "scan", "segmented", max_lost)


def are_pictures(sources: Sequence[str]) -> bool:
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
    if as_json:
        print_result(segmented.to_json(), as_json)
    else:
        print_segmented_bscans(segmented)
    check_lost(segmented, "B-scan", "segmented", max_lost)


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
    images = images or are_pictures(sources)
    parse = parse_image_spacing if images else parse_spacing
    request = AdaptRequest(sources, labels, model, None if spacing is None else parse(spacing), baseline, images)
    with bar("adapt", 1, "network") as progress:
        adapted = adapt_sources(request, out, say=progress.say)
        progress.advance()
    print_adapted(adapted, as_json, images)


def _segment_scans(
    sources: list[str],
    out: Path,
    forms: Forms,
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

    spacing_mm = None if spacing is None else parse_spacing(spacing)
    segmented = segment_sources(sources, out, forms, spacing_mm, model)
    remember_sources(out, sources, model, spacing_mm)  # so that `octjepa view OUT` shows the same scans
    page = write_page(segmented, out)
    if as_json:
        print_result({**segmented.to_json(), "page": str(page)}, as_json)
    else:
        print_segmented(segmented, page)
    check_lost(segmented, "scan", "segmented", max_lost, f": {page} says why")
