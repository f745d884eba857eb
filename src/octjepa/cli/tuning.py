"""The verb of tuned tasks: finetune."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from octjepa.cli.options import AllowOutside, Json, Labelled, Ledger, Overrides, Quiet, StorePath
from octjepa.cli.output import check_output_folder, print_result
from octjepa.cli.root import app


@app.command()
def finetune(
    recipe: Annotated[str, typer.Argument(help="A fine-tuning recipe's name (finetune, study_group) or path.")],
    checkpoint: Annotated[str, typer.Option("--from", help="The encoder: a run, step-* folder, file or name.")],
    store: StorePath,
    labels: Annotated[Path, typer.Option("--labels", help="TSV or CSV keyed by person_id, and eye if per eye.")],
    out: Annotated[Path, typer.Option("--out", help="A new folder for the tuned encoder and its results.")],
    overrides: Overrides = None,
    target: Annotated[
        list[str] | None, typer.Option("--target", help="A label column; again for more; default: the recipe's.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the newest checkpoint.")] = False,
    labelled: Labelled = None,
    ledger: Ledger = None,
    allow_outside: AllowOutside = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Tunes an encoder to labels. In stages, and evaluated beside itself frozen; runs under torchrun unchanged."""
    from octjepa.probe.label_fractions import parse_counts
    from octjepa.store import Store
    from octjepa.tasks.finetune.fit import finetune_store, finetune_with_fewer_labels
    from octjepa.tasks.finetune.recipe import load_recipe

    check_output_folder(out, "a new folder, or with --resume the folder of a fine-tuning")
    counts = parse_counts(labelled)
    settings = load_recipe(recipe, overrides or ())
    made = finetune_store(settings, checkpoint, Store.open(store), labels, out, target or (), resume, ledger)
    if counts:
        made["labelled"] = finetune_with_fewer_labels(
            settings, counts, checkpoint, Store.open(store), labels, out, target or (), ledger
        )
    parts = ("rows", "notes", "checkpoint", "predictions", "summary", *(("labelled",) if counts else ()))
    shown = made if as_json else {key: made[key] for key in parts}
    print_result(shown, as_json, "rows", {pair["metric"] for pair in made["paired"]})
