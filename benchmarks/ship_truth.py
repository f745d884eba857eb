"""Puts an encoder of `octjepa.tasks.truth.train` into the package as `phantom-truth`: weights in 16 bit, and its card.

`python -m benchmarks.ship_truth RUN --about FILE [--target FOLDER]`. FILE holds the paragraphs of the card on how the
encoder was made and what was measured.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import tempfile
from dataclasses import asdict
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from octjepa.encoders import PretrainedEncoder, load_encoder
from octjepa.encoders.export import CARD, SUMS, WEIGHTS, export_encoder
from octjepa.errors import UsageError
from octjepa.files import read_json_lines, read_json_object, write_json
from octjepa.tasks.truth.training import TruthSettings

NAME = "phantom-truth"
TARGET = Path(__file__).resolve().parents[1] / "src" / "octjepa" / "weights" / NAME


def ship(run: Path, about: str, target: Path = TARGET) -> None:
    """Writes `target` anew. Raises UsageError for a run that has not ended."""
    if not (run / "encoder" / WEIGHTS).is_file():
        raise UsageError(f"{run} has not ended: the command that began it goes on with it")
    trained = load_encoder(run / "encoder")
    named = PretrainedEncoder(
        trained.network,
        trained.recipe.model_copy(update={"name": NAME}),
        NAME,
        trained.recorded_training,
        trained.which,
    )
    lines = [line for line in read_json_lines(run / "metrics.jsonl") if "loss" in line]
    settings = TruthSettings(**read_json_object(run / "settings.json", "run the training again"))
    with tempfile.TemporaryDirectory() as temporary:
        made = Path(temporary) / NAME
        export_encoder(named, "safetensors", made, licence="apache-2.0")
        with safe_open(made / WEIGHTS, "pt") as file:
            metadata = file.metadata()
            halves = {name: file.get_tensor(name).to(torch.float16) for name in file.keys()}  # noqa: SIM118
        save_file(halves, made / WEIGHTS, metadata)
        card = (made / CARD).read_text(encoding="utf-8")
        card = card.replace("octjepa.load_encoder(folder)", f'octjepa.load_encoder("{NAME}")')
        card = card.replace("| Objective | noise2noise |", "| Objective | noise2noise, then the truth of phantoms |")
        (made / CARD).write_text(f"{card.rstrip()}\n\n{about.strip()}\n", encoding="utf-8")
        record = {
            "run": f"truth-seed{settings.seed}",
            "updates": settings.updates,
            "views": settings.updates * settings.batch,
            "start": "phantom-tiny",
            "loss": lines[-1]["loss"],
            "validation": read_json_lines(run / "validation.jsonl")[-1],
            "settings": asdict(settings),
            "alarms": {},
        }
        write_json(made / "run.json", record)
        names = (WEIGHTS, CARD, "run.json")
        sums = [f"{hashlib.sha256((made / name).read_bytes()).hexdigest()}  {name}\n" for name in names]
        (made / SUMS).write_text("".join(sums), encoding="utf-8")
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(made, target, ignore=shutil.ignore_patterns(".*"))
        (target / WEIGHTS).chmod(0o644)
    print(json.dumps(record, indent=1))


def main() -> None:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("--about", type=Path, required=True)
    parser.add_argument("--target", type=Path, default=TARGET)
    options = parser.parse_args()
    ship(options.run, options.about.read_text(encoding="utf-8"), options.target)


if __name__ == "__main__":
    main()
