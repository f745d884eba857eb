"""Puts an encoder of `octjepa.tasks.truth.train` into the package as `phantom-truth`: weights in 16 bit, and its card.

`python -m benchmarks.ship_truth RUN --about FILE [--target FOLDER]`. FILE holds the paragraphs of the card on how the
encoder was made and what was measured.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path

from benchmarks.packaged_weights import PACKAGED, write_package

from octjepa.encoders import PretrainedEncoder, load_encoder
from octjepa.encoders.export import WEIGHTS, export_encoder
from octjepa.errors import UsageError
from octjepa.files import read_json_lines, read_json_object
from octjepa.tasks.truth.training import TruthSettings

NAME = "phantom-truth"
TARGET = PACKAGED / NAME


def ship(run: Path, about: str, target: Path = TARGET) -> None:
    """Writes `target` anew. Raises UsageError for a run that has not ended."""
    if not (run / "encoder" / WEIGHTS).is_file():
        raise UsageError(f"{run} has not ended: the command that began it continues it")
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

    def edit(card: str) -> str:
        card = card.replace("| Objective | noise2noise |", "| Objective | noise2noise, then the truth of phantoms |")
        return f"{card.rstrip()}\n\n{about.strip()}\n"

    write_package(
        NAME,
        lambda exported: export_encoder(named, "safetensors", exported, licence="apache-2.0"),
        edit,
        record,
        target,
    )
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
