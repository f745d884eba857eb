"""The verbs finetune and predict."""

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
from octjepa.cli.output import check_output_folder, is_verbose, print_result, print_subgroups
from octjepa.cli.root import app
from octjepa.errors import TooManyLostError, UsageError


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
    context: typer.Context,
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
        from octjepa.cli.segmentation import apply_head

        options = {"--level": level, "--workers": workers}
        if unused := [name for name, value in options.items() if value is not None]:
            raise UsageError(f"a segmentation head does not take {', '.join(unused)}")
        if not sources:
            raise UsageError("a segmentation head is applied to scans, not to a --store: name their files or folders")
        apply_head(tuned, checkpoint, sources, out, ("nifti", "dicom"), spacing, images, max_lost, as_json)
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
        if unused := used_options(context, "workers", "max_lost"):
            raise UsageError(f"{unused[0]} is for scans that are read: a --store holds scans that were read")
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
