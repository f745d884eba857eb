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


Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout, nothing else.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="No progress bar.", callback=_set_quiet)]
AllowOutside = Annotated[
    bool,
    typer.Option(
        "--allow-outside",
        help="Open what a folder names outside itself: gs://, s3://, absolute paths. Only for folders that you trust.",
        callback=_set_allowed,
    ),
]
StorePath = Annotated[str, typer.Option("--store", help="The store: a folder, gs://... or s3://...")]
Overrides = Annotated[list[str] | None, typer.Argument(help="Keys of the recipe that shall differ, as key=value.")]
Workers = Annotated[int | None, typer.Option("--workers", min=1, help="Processes; default: every core.")]
Spacing = Annotated[
    str | None,
    typer.Option(
        "--spacing", help="Of all files, in mm: slice,depth,column as 0.047,0.0026,0.0117. file: the files' own again."
    ),
]
Labelled = Annotated[
    str | None,
    typer.Option("--labelled", help="Also with labels of so many training people each, such as 10,30,100."),
]
Subgroups = Annotated[
    str | None,
    typer.Option("--subgroups", help="Also by group: columns, bands after a colon, such as sex,age:50,65."),
]
Ledger = Annotated[
    Path | None, typer.Option("--ledger", help="Folder that counts uses of the test set; default by the labels.")
]
MaxLost = Annotated[
    float,
    typer.Option("--max-lost", min=0.0, max=1.0, help="Share of files that may be lost; above it the exit code is 3."),
]
