"""Options and arguments that several verbs share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from octjepa.outside import set_allowed
from octjepa.progress import set_quiet


def _set_quiet(quiet: bool) -> bool:
    set_quiet(quiet)
    return quiet


def _set_allowed(allowed: bool) -> bool:
    set_allowed(allowed)
    return allowed


def used_options(context: typer.Context, *names: str) -> list[str]:
    """The options among the parameters `names` that the user gave on the command line, such as `--no-baseline`.

    An option counts even if its value equals the default.
    """
    used = []
    for option in context.command.params:
        source = context.get_parameter_source(option.name or "")
        if option.name in names and source is not None and source.name == "COMMANDLINE":
            is_negated = context.params[option.name] is False and option.secondary_opts
            used.append((option.secondary_opts if is_negated else option.opts)[0])
    return used


Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout, nothing else.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="No progress bar.", callback=_set_quiet)]
AllowOutside = Annotated[
    bool,
    typer.Option(
        "--allow-outside",
        help="Follow references that lead out of a folder (gs://, s3://, absolute paths, Python code that a recipe "
        "names). Only for folders you trust.",
        callback=_set_allowed,
    ),
]
StorePath = Annotated[str, typer.Option("--store", help="The store: a folder, gs://... or s3://...")]
Overrides = Annotated[list[str] | None, typer.Argument(help="Recipe keys to override, as key=value.")]
Workers = Annotated[int | None, typer.Option("--workers", min=1, help="Number of processes; default: one per core.")]
Spacing = Annotated[
    str | None,
    typer.Option(
        "--spacing",
        help="Voxel spacing of all files in mm: slice,depth,column, such as 0.047,0.0026,0.0117. "
        "'file': ignore an earlier --spacing and use the spacing in the files.",
    ),
]
Labelled = Annotated[
    str | None,
    typer.Option("--labelled", help="Also train with the labels of this many people, such as 10,30,100."),
]
Subgroups = Annotated[
    str | None,
    typer.Option(
        "--subgroups",
        help="Also report each group: label columns, with the limits of bands after a colon, such as sex,age:50,65.",
    ),
]
Ledger = Annotated[
    Path | None,
    typer.Option("--ledger", help="Folder where uses of the test set are counted; default: next to the labels."),
]
MaxLost = Annotated[
    float,
    typer.Option("--max-lost", min=0.0, max=1.0, help="Largest allowed share of lost files; above it, exit code 3."),
]
