"""Makes a run of the study the encoder that comes with the package: weights in 16 bit, a card with its figures.

    python -m benchmarks.study.ship RUN [--work DIR]

RUN is a key of docs/study/runs.json whose folder is in the work folder.
"""

from __future__ import annotations

import argparse
import hashlib
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from octjepa.checkpoint.export import CARD, SUMS, WEIGHTS, export
from octjepa.cli.failures import exit_with_message
from octjepa.errors import UsageError
from octjepa.files import write_json, writer_lock

from .frozen import OF_VAL
from .plan import SHIPPED
from .results import Results

ROOT = Path(__file__).resolve().parents[2]
_SHOWN = (
    "lesion_auroc_macro",
    "lesion_dice",
    "layer_dice",
    "fovea_error_mm",
    "leave_vendor_out_drop",
    "vendor_accuracy",
)


def ship(run: str, work: Path, results: Results, target: Path) -> None:
    """Writes `target` anew. Raises UsageError: no such run, or its folder is gone."""
    if run not in results.runs:
        raise UsageError(f"no run {run} in {results.folder}/runs.json")
    source = work / "runs" / run / "run"
    if not source.is_dir():
        raise UsageError(f"{source} is not there: weights are taken from the folder of a run that ended here")
    about = results.runs[run]
    figures = [row for row in results.rows if row["run"] == run]
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder) / "weights"
        export(source, "safetensors", made)
        with safe_open(made / WEIGHTS, "pt") as file:
            metadata = file.metadata()
            halves = {name: file.get_tensor(name).to(torch.float16) for name in file.keys()}  # noqa: SIM118
        save_file(halves, made / WEIGHTS, metadata)
        card = (
            (made / CARD)
            .read_text(encoding="utf-8")
            .replace("octjepa.load_encoder(folder)", f'octjepa.load_encoder("{SHIPPED}")')
        )
        card = card.replace(card.partition("\n")[0], f"# {SHIPPED}", 1)
        text = _figures(run, about, figures, _rank(run, results))
        (made / CARD).write_text(f"{card.rstrip()}\n\n{text}", encoding="utf-8")
        write_json(made / "run.json", {"run": run, **about, "figures": figures})
        sums = [
            f"{hashlib.sha256((made / name).read_bytes()).hexdigest()}  {name}\n"
            for name in (WEIGHTS, CARD, "run.json")
        ]
        (made / SUMS).write_text("".join(sums), encoding="utf-8")
        beside = target.with_name(f".{target.name}.new")
        shutil.rmtree(beside, ignore_errors=True)
        shutil.copytree(made, beside)
        (beside / WEIGHTS).chmod(0o644)
        shutil.rmtree(target, ignore_errors=True)
        beside.rename(target)


def _rank(run: str, results: Results) -> str:
    """Where the run stands among the seeds of its arm on validation people, who may choose."""
    known = {row["run"]: row for row in results.rows if row["metric"] == f"lesion_auroc_macro{OF_VAL}"}
    if run not in known:
        raise UsageError(f"{run} has no figure of validation people: only runs of the study that ended can be shipped")
    arm = known[run]["arm"]
    values = sorted((row["value"] for row in known.values() if row["arm"] == arm), reverse=True)
    place = values.index(known[run]["value"]) + 1
    shown = ", ".join(f"{value:.3f}" for value in values)
    return f"On validation people (macro lesion AUROC) it is number {place} of `{arm}`'s {len(values)} seeds ({shown})."


def _figures(run: str, about: dict[str, Any], figures: list[dict[str, Any]], rank: str) -> str:
    shown = {row["metric"]: row for row in figures if row["metric"] in _SHOWN}
    lines = [[_number(shown[name][key]) for key in ("value", "low", "high")] for name in shown]
    table = [f"| {name} | {value} | {low} to {high} |" for name, (value, low, high) in zip(shown, lines, strict=True)]
    cohort = about["cohort"]
    return f"""## The run

`{run}`, with the settings of the study (`make study`) and the code of its day: {about["updates"]} updates,
{about["cpu_seconds"]:.0f} CPU-seconds, on phantom eyes of {cohort["people"]} synthetic people
({cohort["difficulty"]}, seed {cohort["seed"]}), split train. {rank}
Weights are kept in 16 bit. Everything that is known of the run is in run.json.

It has seen no human eye. It shows how a pretrained encoder is used, and is a start for small trials; it is no
foundation model.

Held-out phantom people, frozen, as measured then (docs/study measures these weights anew whenever its code changes):

| figure | value | 95 % interval |
|---|---|---|
""" + "\n".join([*table, ""])


def _number(value: float | None) -> str:
    return "none" if value is None else f"{value:.3f}"


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run")
    parser.add_argument("--work", type=Path, default=ROOT / "study")
    given = parser.parse_args()
    with exit_with_message(lambda: None):
        if not given.work.is_dir():
            raise UsageError(f"{given.work} is not there: --work names the folder in which `make study` ran")
        with writer_lock(given.work):  # a study that runs meanwhile would measure other weights than it names
            ship(
                given.run, given.work, Results(ROOT / "docs" / "study"), ROOT / "src" / "octjepa" / "weights" / SHIPPED
            )
    print(f"{SHIPPED} is now {given.run}")
