"""The verb of layers and lesions: segment."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

from octjepa.cli.options import AllowOutside, Json, Ledger, Overrides, Quiet
from octjepa.cli.output import check_output_folder, print_result
from octjepa.cli.root import app
from octjepa.errors import UsageError


@app.command()
def segment(
    recipe: Annotated[str, typer.Argument(help="A segmentation recipe's name or path; or a head's folder, to apply.")],
    out: Annotated[Path, typer.Option("--out", help="Folder for the head and its results, or for the segmentations.")],
    overrides: Overrides = None,
    checkpoint: Annotated[str | None, typer.Option("--from", help="The encoder: a run, step-* folder or file.")] = None,
    store: Annotated[str | None, typer.Option("--store", help="The store: a folder, gs://... or s3://...")] = None,
    labels: Annotated[Path | None, typer.Option("--labels", help="Folder of label volumes; docs/segment.md.")] = None,
    classes: Annotated[str | None, typer.Option("--classes", help="Comma-separated; default: all named.")] = None,
    scan: Annotated[
        list[Path] | None, typer.Option("--scan", help="A scan to apply a head to; again for more.")
    ] = None,
    form: Annotated[
        Literal["nifti", "dicom", "both"], typer.Option("--format", help="Of a head's answers, in the scan's geometry.")
    ] = "both",
    ledger: Ledger = None,
    allow_outside: AllowOutside = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Segments layers and lesions. Trains and evaluates a head on an encoder, or applies one to whole scans."""
    from octjepa.tasks.segment.folder import is_head

    check_output_folder(out)
    if is_head(recipe):
        from octjepa.tasks.segment.predict import segment_scans

        if any(one is not None for one in (store, labels, classes, ledger)) or overrides:
            raise UsageError(
                "a head is applied to --scan files as it is: --store, --labels, --classes, --ledger make a new one"
            )
        forms: tuple[Literal["nifti", "dicom"], ...] = ("nifti", "dicom") if form == "both" else (form,)
        print_result(segment_scans(recipe, checkpoint, scan or [], out, forms), as_json)
        return
    from octjepa.store import Store
    from octjepa.tasks.segment.fit import segment_store
    from octjepa.tasks.segment.recipe import load_recipe

    settings = load_recipe(recipe, overrides or ())
    if checkpoint is None or store is None or labels is None:
        lacking = {"--from": checkpoint, "--store": store, "--labels": labels}
        raise UsageError(f"to make a head, give {', '.join(name for name, value in lacking.items() if value is None)}")
    if scan:
        raise UsageError("--scan is for a head that is made: name its folder instead of a recipe")
    chosen = [] if classes is None else [name.strip() for name in classes.split(",") if name.strip()]
    made = segment_store(settings, checkpoint, Store.open(store), labels, out, chosen, ledger)
    shown = (
        made if as_json else {key: made[key] for key in ("faults", "metrics", "checkpoint", "etdrs", "figure", "notes")}
    )
    print_result(shown, as_json)
