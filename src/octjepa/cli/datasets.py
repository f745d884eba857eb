"""The verbs about public data sets: datasets list, show, check, tables."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from octjepa.cli.options import Json, Quiet
from octjepa.cli.output import print_result, print_table
from octjepa.cli.root import app
from octjepa.errors import OctjepaError

datasets = typer.Typer(no_args_is_help=True, rich_markup_mode=None)
app.add_typer(datasets, name="datasets", help="Lists public data sets, and checks a local copy.")
_Name = Annotated[str, typer.Argument(help="Name of a data set; see `octjepa datasets list`.")]
_Folder = Annotated[Path, typer.Argument(help="The folder of the unpacked data set.")]


@datasets.command("list")
def list_data_sets(as_json: Json = False, quiet: Quiet = False) -> None:
    """Lists the data sets whose layout is known. Nothing is downloaded."""
    from octjepa.datasets.catalogue import catalogue

    if as_json:
        print_result({"datasets": [entry.model_dump(mode="json") for entry in catalogue()]}, as_json)
    else:
        print_table([(entry.name, entry.content, entry.title) for entry in catalogue()])


@datasets.command()
def show(name: _Name, as_json: Json = False, quiet: Quiet = False) -> None:
    """Shows layout, spacing, split, labels, terms, defects and published results of a data set."""
    from octjepa.datasets.catalogue import find_data_set

    entry = find_data_set(name)
    if as_json:
        print_result(entry.model_dump(mode="json"), as_json)
        return
    facts = entry.model_dump(exclude={"files", "defects", "anchors"})
    print_result({key: text for key, text in facts.items() if text}, as_json)
    for kind in entry.files:
        print(f"{kind.what}: {kind.example}")
    for defect in entry.defects:
        print(f"defect: {defect}")
    for anchor in entry.anchors:
        print(f"published result: {anchor.metric} {anchor.value} ({anchor.setting}; {anchor.source})")
    print("These facts were written from documentation; octjepa has not read the data set itself.", flush=True)


@datasets.command()
def check(name: _Name, folder: _Folder, as_json: Json = False, quiet: Quiet = False) -> None:
    """Compares a local copy with the documented layout. Exit code 1 if a needed file is missing or differs."""
    from octjepa.datasets.catalogue import find_data_set
    from octjepa.datasets.check import check_folder

    checked = check_folder(find_data_set(name), folder)
    if as_json:
        print_result(checked.as_dict(), as_json)
    else:
        lines = [("files", "number", "documented", "people", "groups")]
        for kind in checked.kinds:
            groups = ", ".join(f"{name} {count:,}" for counts in kind.groups.values() for name, count in counts.items())
            documented = "" if kind.documented is None else f"{kind.documented:,}"
            lines.append((kind.what, f"{kind.files:,}", documented, f"{kind.people:,}" if kind.people else "", groups))
        print_table(lines)
    problems = [f"{kind.what}: {kind.problem}" for kind in checked.kinds if kind.problem]
    if problems:
        raise OctjepaError("\n  ".join([f"{folder} is not laid out as {checked.name}", *problems]))


@datasets.command()
def tables(name: _Name, folder: _Folder, as_json: Json = False, quiet: Quiet = False) -> None:
    """Writes manifest.tsv with the person of each scan. Also split and label if the paths state them."""
    from octjepa.datasets.catalogue import find_data_set
    from octjepa.datasets.check import write_tables

    written = write_tables(find_data_set(name), folder)
    summary = {"files": list(written.files), "scans": written.scans, "people": written.people}
    if written.people_in_two_splits:
        summary["people_in_two_splits"] = written.people_in_two_splits
    print_result(summary, as_json)
