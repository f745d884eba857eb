"""Puts `truth_longest` of `benchmarks.objectives` into the package as `phantom-truth`: weights in 16 bit and a card.

`python -m benchmarks.ship_truth --about FILE [--seed 0] [--target FOLDER]` reads the stored weights of the run. FILE
holds the paragraphs of the card on how the encoder was made and what was measured.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from benchmarks.objectives import LONGER, USES, stored_folder
from benchmarks.packaged_weights import PACKAGED, RECORD, write_package

from octjepa.encoders import PretrainedEncoder, load_encoder
from octjepa.encoders.export import OF_THE_RECIPE, WEIGHTS, export_encoder
from octjepa.errors import UsageError
from octjepa.files import read_json_object
from octjepa.tasks.truth.training import TruthSettings

NAME = "phantom-truth"
TARGET = PACKAGED / NAME
CHOICE = LONGER["truth_longest"]


def ship(seed: int, about: str, target: Path = TARGET) -> None:
    """Writes `target` anew. Raises UsageError: no stored weights of this seed."""
    stored = stored_folder(CHOICE, seed)
    if not (stored / WEIGHTS).is_file():
        raise UsageError(
            f"{stored} has no {WEIGHTS}: `python -m benchmarks.objectives --work WORK --out RECORD --longer "
            f"truth_longest --seeds {seed} --store` trains the encoder and stores them"
        )
    # The recipe is that of `octjepa.tasks.truth.train --random`. The benchmark's has the same encoder and input.
    recipe = load_encoder("phantom-tiny").recipe
    train = recipe.train.model_copy(update={"seed": seed})
    recipe = recipe.model_copy(update={"name": NAME, "train": train})
    encoder = PretrainedEncoder(load_encoder(stored).network, recipe, NAME, which="student")
    run = read_json_object(stored / RECORD, "store the run again")
    phantoms = CHOICE.updates * TruthSettings.batch // USES
    record = {
        "run": f"truth_longest-seed{seed}",
        "updates": CHOICE.updates,
        "views": CHOICE.updates * TruthSettings.batch,
        "phantoms": phantoms,
        "start": "random weights",
        "cpu_seconds": run["cpu_seconds"],
        "setting": CHOICE.setting,
        "alarms": {},
    }

    def edit(card: str) -> str:
        for line, ours in {
            "- noise2noise\n": "- phantom-truth\n",
            "| Objective | noise2noise |": "| Objective | the truth of phantoms (`octjepa.tasks.truth`) |",
            "| Trained on | no scan that the weights' metadata name |": (
                f"| Trained on | {phantoms:,} phantoms that were drawn during the run; no scan |"
            ),
            "trained on 512 of 1024 in a volume": "trained on 224 or 384 of 1024 in a volume",
            f"\n{OF_THE_RECIPE}": "",
        }.items():
            if card.count(line) != 1:
                raise ValueError(f"the card has no line {line!r}")
            card = card.replace(line, ours)
        return f"{card.rstrip()}\n\n{about.strip()}\n"

    write_package(
        NAME,
        lambda exported: export_encoder(encoder, "safetensors", exported, licence="apache-2.0"),
        edit,
        record,
        target,
    )
    print(json.dumps(record, indent=1))


def main() -> None:
    """Reads the command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--about", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--target", type=Path, default=TARGET)
    options = parser.parse_args()
    ship(options.seed, options.about.read_text(encoding="utf-8"), options.target)


if __name__ == "__main__":
    main()
