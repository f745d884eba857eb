"""Commands from a store to an encoder: plan, pretrain, export."""

from __future__ import annotations

import logging
import shlex
import sys
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from octjepa.cli.options import AllowOutside, Json, Overrides, Quiet, StorePath
from octjepa.cli.output import check_output_folder, is_verbose, print_result
from octjepa.cli.root import app
from octjepa.errors import ContractError, OctjepaError, UsageError, counted

if TYPE_CHECKING:
    from octjepa.recipe import Recipe
    from octjepa.store import Store
    from octjepa.train.plan import Timing

_log = logging.getLogger(__name__)
_PLAN_COUNTS = ("volumes", "volumes_known", "updates", "epochs", "effective_batch", "tokens", "parameters", "precision")
FEWEST_PEOPLE = 20  # below this `pretrain` warns before it starts


@app.command()
def plan(
    recipe: Annotated[str, typer.Argument(help="A recipe's name or path.")],
    overrides: Overrides = None,
    store: Annotated[str | None, typer.Option("--store", help="Count the training volumes of this store.")] = None,
    masks: Annotated[
        Path | None, typer.Option("--masks", help="Folder for masks.json and masks.png, which show the masks.")
    ] = None,
    measure: Annotated[
        bool | None,
        typer.Option(
            "--measure/--no-measure",
            help="Time a few micro-batches of --store here to estimate the hours. Default: yes, if it takes "
            "only seconds; not with --json.",
        ),
    ] = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Predicts the cost of a run. Prints updates, memory, disk and, with --store, hours; `octjepa -v plan` prints
    every value."""
    from octjepa.config import load_recipe

    resolved = load_recipe(recipe, overrides or ())  # a wrong name or path is refused before torch is imported
    if measure and store is None:
        raise UsageError("--measure times micro-batches of a store: give it by --store")
    about: dict[str, Any] = {}
    opened, ids, stream, other_grid, volumes = None, None, None, "", None
    if store is not None:
        from octjepa.store import Store

        opened = Store.open(store)

        from octjepa.canonical.grid_coverage import cohort_coverage
        from octjepa.train.data import choose_cohort

        try:
            cohort, stream = choose_cohort(opened, resolved)
        except ContractError as error:
            if measure:  # its volumes cannot be read with this recipe
                raise
            other_grid, volumes = str(error), int((opened.table["split"] == "train").sum())
        else:
            cohort.print_flow()
            ids = cohort.train.volume_ids
            volumes = len(ids)
            about = cohort.about() if as_json else {}
            coverage = cohort_coverage(opened.table, ids, opened.preprocessing)
            if as_json:
                about["tissue_outside"] = {} if coverage is None else coverage.to_json()
            elif coverage is not None:
                about["tissue_outside"] = coverage.describe()
    if masks is not None:
        from octjepa.report.figures.masks import report_masks

        about["masks"] = report_masks(resolved, None if other_grid else opened, ids, masks).to_json()
    from octjepa.distributed.runtime import Runtime
    from octjepa.train.plan import FEW_SECONDS, is_quick_to_time, time_run
    from octjepa.train.plan import plan as plan_recipe

    planned, timing, untimed = plan_recipe(resolved, volumes), None, ""
    if measure and stream is not None:
        timing = time_run(resolved, stream, planned.updates)
    elif measure is None and stream is not None and cohort.val.volume_ids and not as_json:
        if is_quick_to_time(planned, Runtime("fp32").device):
            try:
                timing = time_run(resolved, stream, planned.updates, FEW_SECONDS)
            except (OctjepaError, OSError) as error:  # the plan holds without hours
                untimed = f"no hours: {error}"
        else:
            untimed = "no hours: timing this recipe here takes longer than a few seconds; --measure does it"
    values = planned.to_json() | ({} if timing is None else timing.to_json())
    if other_grid and as_json:
        about["other_grid"] = other_grid
    elif other_grid:
        values["volumes_known"] = ""
        print(other_grid, file=sys.stderr)
        about["verdict"] = f"the store has another grid: first ingest into a new store with --recipe {recipe}"
    elif not as_json:
        values["volumes_known"] = "" if ids is not None else _whence(resolved, planned.volumes_known)
        validated = None if opened is None else len(cohort.val.volume_ids)
        people = 0 if opened is None else int(opened.table["person_id"].nunique())
        about["verdict"] = untimed or _verdict(timing, validated, store, people)
    if as_json or is_verbose():
        print_result({**values, **about}, as_json)
    else:
        shown = {"recipe": planned.recipe}
        shown |= {name: values[name] for name in _PLAN_COUNTS if name in values}
        shown |= {"memory": f"{planned.peak_memory_bytes / 1e9:.2f} GB, estimated peak"}
        shown |= {"disk": f"{planned.disk_bytes / 1e9:.2f} GB of checkpoints"}
        print_result({**shown, "hours": None if timing is None else timing.hours, **about}, as_json)


def _verdict(timing: Timing | None, validation_volumes: int | None, store: str | None, people: int) -> str:
    """Whether the run can be validated, and what to do next."""
    if validation_volumes == 0 and people < FEWEST_PEOPLE:
        few = f"{store} has {counted(people, 'person')}, and pretraining needs at least {FEWEST_PEOPLE}"
        return f"the run cannot be validated: {few}. The packaged encoder needs no training: octjepa embed phantom-unet"
    if validation_volumes == 0:
        return f"the run cannot be validated: no validation people; octjepa split {_quoted(store)} --by stratified"
    if timing is not None:
        return f"takes {rough_duration(timing.hours)} on this machine"
    how = "add --store STORE" if store is None else "leave out --no-measure"
    return f"no hours: {how} to time a few updates; all values: octjepa -v plan"


def _quoted(path: object) -> str:
    """A path as a shell takes it, for a command to copy."""
    return shlex.quote(str(path))


def rough_duration(hours: float) -> str:
    """`9 minutes`, `2.1 hours`, `12 days`."""
    if hours < 1:
        return f"about {counted(max(1, round(60 * hours)), 'minute')}"
    return f"about {hours:.2g} hours" if hours < 48 else f"about {hours / 24:.2g} days"


def _whence(recipe: Recipe, is_known: bool) -> str:
    """The source of the number of volumes if no store was counted."""
    if not is_known:
        number = "no, one batch is taken"
    elif recipe.data.max_samples is not None:
        number = "no, at most data.max_samples are taken"
    else:
        number = "no, data.expected_volumes is taken"
    return f"{number}: epochs, and updates counted in epochs, follow it; --store STORE counts a store's"


@app.command()
def pretrain(
    recipe: Annotated[str, typer.Argument(help="A recipe's name or path.")],
    store: StorePath,
    out: Annotated[Path, typer.Option("--out", help="The run folder.")],
    overrides: Overrides = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue from the newest checkpoint.")] = False,
    allow_outside: AllowOutside = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Pretrains an encoder on the training people of a store."""
    from octjepa.checkpoint.location import parse_location
    from octjepa.config import load_recipe
    from octjepa.outside import named_by
    from octjepa.store import Store
    from octjepa.train.loop import pretrain as run

    check_output_folder(out, "a new folder, or with --resume the folder of a run")
    resolved = load_recipe(recipe, overrides or ())
    if resolved.checkpoint.dir is not None and (Path(recipe).parent / "run.json").is_file():
        named_by(Path(recipe).parent, Path(recipe).name, resolved.checkpoint.dir)  # a recipe that came with a run
    opened = Store.open(store)
    _warn_of_few_people(opened)
    summary = run(resolved, opened, out, resume)
    if summary.checkpoint is not None:
        # in the run folder it is relative, to let that move
        summary = replace(summary, checkpoint=str(parse_location(summary.checkpoint, within=out)))
    result = summary.to_json()
    follows = f"octjepa embed {_quoted(out)} --store {_quoted(store)} --out embeddings.parquet"
    print_result(result if as_json else {**result, "next": follows}, as_json)


def _warn_of_few_people(store: Store) -> None:
    """Warns before the training starts if the store has too few people to learn from or to validate with."""
    people = int(store.table["person_id"].nunique())
    if people < FEWEST_PEOPLE:
        _log.warning(
            "%s has %s, and an encoder needs at least %d to learn anything and to be validated. Add scans, or use "
            "the packaged encoder: octjepa embed phantom-unet --store %s --out embeddings.parquet",
            *(store.location, counted(people, "person"), FEWEST_PEOPLE, _quoted(store.location)),
        )


@app.command()
def export(
    checkpoint: Annotated[str, typer.Argument(help="A run, step-* folder, weights file or URL.")],
    form: Annotated[
        Literal["safetensors", "hf", "onnx"],
        typer.Option("--format", help="safetensors: for octjepa. hf: for transformers. onnx: for other runtimes."),
    ],
    out: Annotated[Path, typer.Option("--out", help="A new folder.")],
    licence: Annotated[str | None, typer.Option("--licence", help="Licence for the model card: apache-2.0.")] = None,
    push: Annotated[
        str | None, typer.Option("--push", help="Also upload to this repository (owner/name) of the Hugging Face Hub.")
    ] = None,
    public: Annotated[bool, typer.Option("--public", help="With --push: create a public repository.")] = False,
    allow_outside: AllowOutside = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Exports encoder weights. With their preprocessing contract, a model card and checksums."""
    from octjepa.encoders.export import export as write

    if public and push is None:
        raise UsageError("--public is about a repository: name it with --push, or leave --public out")
    written: dict[str, object] = {"files": [str(out / name) for name in write(checkpoint, form, out, licence)]}
    if push is not None:
        from octjepa.encoders.hub import upload_folder

        written["repository"] = upload_folder(out, push, private=not public)
    print_result(written, as_json)
