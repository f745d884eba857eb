"""The command line: a verb per stage, paths and options only. Everything a verb does lives in its package.

Exit codes: 0 done, 1 failed, 2 bad usage, recipe or input, 3 finished but too much was lost, 130 and 143 after Ctrl-C
and SIGTERM. With --json the last line of stdout is one JSON object and stdout holds nothing else; logs go to stderr.
"""

from __future__ import annotations

import errno
import json
import sys
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn

import typer
from typer.core import TyperGroup

from octjepa.errors import OctjepaError, UsageError
from octjepa.progress import set_quiet


class Verbs(TyperGroup):
    """Turns every foreseeable failure of a verb into one message and the right exit code."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except OctjepaError as error:
            _fail(str(error), error.exit_code)
        except KeyboardInterrupt:
            _fail("interrupted; what was finished is kept, run the same command again to go on", 130)
        except MemoryError:
            _fail("out of memory: use fewer --workers, a smaller machine.micro_batch or a smaller recipe", 1)
        except OSError as error:
            if error.errno == errno.EPIPE:
                raise
            where = f" ({error.filename})" if error.filename else ""
            _fail(f"the system refused: {error.strerror or error}{where}", 1)


app = typer.Typer(
    name="octjepa",
    cls=Verbs,
    help="From a folder of retinal OCT volumes to a 3D foundation model, and from it to results one can trust.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout, nothing else.")]
Quiet = Annotated[bool, typer.Option("--quiet", help="No progress bar.")]
StorePath = Annotated[Path, typer.Option("--store", help="The store folder.")]
Overrides = Annotated[list[str] | None, typer.Argument(help="Overrides such as train.base_lr=1e-4.")]
Workers = Annotated[int | None, typer.Option("--workers", min=1, help="Processes; default: every core.")]
MaxLost = Annotated[float, typer.Option("--max-lost", min=0.0, max=1.0, help="Share of files that may be lost.")]


def main() -> None:
    """The console command. Usage errors exit with 2, as everywhere."""
    app()


def _fail(message: str, code: int) -> NoReturn:
    print(f"octjepa: {message}", file=sys.stderr)
    sys.exit(code)


def _say(payload: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print(json.dumps(payload, allow_nan=False, default=str))
        return
    width = max(len(key) for key in payload)
    for key, value in payload.items():
        print(f"{key:<{width}}  {_shown(value)}")


def _shown(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    if isinstance(value, dict):
        return "  ".join(f"{key} {_shown(item)}" for key, item in value.items()) or "none"
    if isinstance(value, list | tuple):
        return ("\n    " if value and isinstance(value[0], dict) else ", ").join(map(_shown, value)) or "none"
    return str(value)


@app.command()
def demo(
    out: Annotated[Path, typer.Option("--out", help="Folder for everything it makes.")] = Path("demo"),
    minutes: Annotated[float, typer.Option("--minutes", min=1.0, help="About how long it may take.")] = 5.0,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """The whole line on synthetic eyes, offline: phantom, ingest, pretrain, embed, probe, report."""
    from octjepa.demo import run_demo

    set_quiet(quiet)
    _say(run_demo(out, minutes), as_json)


@app.command()
def phantom(
    out: Annotated[Path, typer.Argument(help="Folder for the cohort.")],
    people: Annotated[int, typer.Option("--people", min=1)],
    seed: Annotated[int, typer.Option("--seed", min=0)] = 0,
    devices: Annotated[str | None, typer.Option("--devices", help="Comma-separated; default: all four.")] = None,
    size: Annotated[Literal["small", "full"], typer.Option("--size", help="small, or full vendor sizes.")] = "small",
    broken: Annotated[int, typer.Option("--broken", min=0, help="How many broken files to add.")] = 0,
    workers: Workers = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Synthetic eyes with known truth, as real DICOM in an AI-READI-shaped tree."""
    from octjepa.phantom import write_cohort
    from octjepa.recipe import DEVICES

    set_quiet(quiet)
    chosen = tuple(devices.split(",")) if devices else DEVICES
    unknown = [device for device in chosen if device not in DEVICES]
    if unknown:
        raise UsageError(f"unknown device {', '.join(unknown)}: choose from {', '.join(DEVICES)}")
    _say(write_cohort(out, people, seed, chosen, size, workers=_cores(workers), broken=broken), as_json)


@app.command()
def ingest(
    sources: Annotated[list[str], typer.Argument(help="Files, folders or a manifest.tsv.")],
    store: StorePath,
    recipe: Annotated[str, typer.Option("--recipe", help="Whose preprocessing the store follows.")] = "tiny_cpu",
    workers: Workers = None,
    max_lost: MaxLost = 0.2,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Reads every file into a store of canonical volumes, or into its quarantine with a reason."""
    from octjepa.config import load_recipe
    from octjepa.store import build_store

    set_quiet(quiet)
    preprocessing = load_recipe(recipe).preprocessing
    _say(build_store(sources, store, preprocessing, workers=_cores(workers), max_lost=max_lost), as_json)


@app.command()
def inspect(
    path: Annotated[Path, typer.Argument(help="A scan file, a store, a run or a checkpoint.")], as_json: Json = False
) -> None:
    """Says what a file, store, run or checkpoint is, and whether it can be used."""
    from octjepa.inspection import describe

    _say(describe(path), as_json)


@app.command()
def split(
    store: Annotated[Path, typer.Argument(help="The store folder.")],
    by: Annotated[str, typer.Option("--by", help="recommended or stratified.")] = "recommended",
    seed: Annotated[int, typer.Option("--seed", min=0)] = 0,
    as_json: Json = False,
) -> None:
    """Person-level split of a store, with a leak check."""
    from octjepa.store import Store
    from octjepa.store.split import apply_split

    _say(apply_split(Store.open(store), by, seed), as_json)


@app.command()
def plan(
    recipe: Annotated[str, typer.Argument(help="A recipe's name or path.")],
    overrides: Overrides = None,
    store: Annotated[Path | None, typer.Option("--store", help="Count its training volumes.")] = None,
    as_json: Json = False,
) -> None:
    """All figures of a run before it runs: tokens, parameters, arithmetic, memory, updates, learning rate."""
    from octjepa.config import load_recipe
    from octjepa.train.plan import plan as plan_recipe

    resolved = load_recipe(recipe, overrides or ())
    volumes = None
    if store is not None:
        from octjepa.store import Store
        from octjepa.views.loader import choose_volumes

        volumes = len(choose_volumes(Store.open(store), resolved, "train"))
    _say(plan_recipe(resolved, volumes), as_json)


@app.command()
def pretrain(
    recipe: Annotated[str, typer.Argument(help="A recipe's name or path.")],
    store: StorePath,
    out: Annotated[Path, typer.Option("--out", help="The run folder.")],
    overrides: Overrides = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from the newest checkpoint.")] = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Pretrains an encoder on the training people of a store."""
    from octjepa.config import load_recipe
    from octjepa.store import Store
    from octjepa.train.loop import pretrain as run

    set_quiet(quiet)
    _say(run(load_recipe(recipe, overrides or ()), Store.open(store), out, resume), as_json)


@app.command()
def embed(
    checkpoint: Annotated[Path, typer.Argument(help="A run, a step-* folder or a weights file.")],
    store: StorePath,
    out: Annotated[Path, typer.Option("--out", help="The parquet file to write.")],
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """A vector for every volume of a store, keyed to person, eye and content."""
    from octjepa.evaluate.embed import embed_store
    from octjepa.store import Store

    set_quiet(quiet)
    _say(embed_store(checkpoint, Store.open(store), out), as_json)


@app.command()
def probe(
    embeddings: Annotated[list[Path], typer.Argument(help="Embedding tables.")],
    labels: Annotated[Path, typer.Option("--labels", help="TSV or CSV keyed by person_id, and eye if per eye.")],
    target: Annotated[list[str], typer.Option("--target", help="A label column; may be given again.")],
    task: Annotated[str, typer.Option("--task", help="auto, classification or regression.")] = "auto",
    kind: Annotated[list[str] | None, typer.Option("--probe", help="linear or knn; default both.")] = None,
    out: Annotated[Path | None, typer.Option("--out", help="Also write the result to this JSON file.")] = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Frozen probes with person-bootstrap intervals, always beside baselines that know nothing."""
    from octjepa.evaluate.probe import run_probes
    from octjepa.evaluate.table import read_embeddings

    set_quiet(quiet)
    result = run_probes([read_embeddings(path) for path in embeddings], labels, target, kind or ("linear", "knn"), task)
    payload = result.payload()
    if out is not None:
        out.write_text(json.dumps(payload, indent=1), encoding="utf-8")
    _say(payload, as_json)


@app.command()
def report(
    source: Annotated[Path, typer.Argument(help="A run, a store, or a folder that holds them.")],
    out: Annotated[Path | None, typer.Option("--out", help="The HTML file; default: report.html in SOURCE.")] = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """One self-contained HTML page of what was read, trained and found."""
    from octjepa.report import write_report

    set_quiet(quiet)
    _say({"report": str(write_report(source, out))}, as_json)


def _cores(workers: int | None) -> int:
    import os

    return workers or os.cpu_count() or 1


if __name__ == "__main__":
    main()
