"""People with and without stripes in a part of the tissue, as a store in memory, and their label table; for tuning."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from safetensors.torch import save_file

from octjepa.model import VJEPA3D
from octjepa.recipe import Recipe
from synthetic import MemoryStore, small_recipe, volume

RECIPE = small_recipe()
QUICK = (
    "stages.head=6",
    "stages.last=4",
    "stages.all=20",
    "validate_every=5",
    "batch=8",
    "precision=fp32",
    "resamples=200",
    "encoder_lr=1e-3",
    "warmup=4",
)
SPLITS = {"train": 20, "val": 8, "test": 12}  # people, both eyes of each


class PlantedStore(MemoryStore):
    """In an eye of a person with an odd number a box somewhere in the tissue is turned: its layers stand upright.

    No grey level changes, so a histogram knows nothing of it.
    """

    def __init__(self) -> None:
        super().__init__(RECIPE.preprocessing, 2 * sum(SPLITS.values()), 0)
        splits = [split for split, people in SPLITS.items() for _ in range(2 * people)]
        self.table = self.table.assign(
            person_id=[f"{1000 + number // 2}" for number in range(len(splits))],
            eye=["OD", "OS"] * (len(splits) // 2),
            split=splits,
            device="topcon_triton",
            site="UW",
            sop_instance_uid=[f"1.2.{number}" for number in range(len(splits))],
        )
        for number, name in enumerate(self.volumes):
            one = volume(RECIPE.preprocessing, 3 * number)  # of one brightness
            if (number // 2) % 2:
                rng = np.random.default_rng(number)
                w = int(rng.integers(6, 46))
                row = int(one.band[0, 0, w]) + 1
                box = one.pixels[:, row : row + 20, w : w + 20]
                box[...] = box.swapaxes(1, 2).copy()
            self.volumes[name] = replace(one, volume_id=name)


def write_labels(path: Path, **columns: object) -> Path:
    """A row for every person: `mark` (0 or 1), `group` (four names), `grade` (0 to 2), `size` (a quantity)."""
    numbers = range(sum(SPLITS.values()))
    table = pd.DataFrame(
        {
            "person_id": [f"{1000 + number}" for number in numbers],
            "mark": [number % 2 for number in numbers],
            "group": [("healthy", "oral", "injected", "lifestyle")[number % 4] for number in numbers],
            "grade": [number % 3 for number in numbers],
            "size": [1 + 2.5 * (number % 2) + 0.1 * (number % 5) for number in numbers],
            "signs": [
                ";".join(["mark"] * (number % 2) + ["third"] * int(number % 3 == 0)) or "none" for number in numbers
            ],
        }
    )
    table.assign(**columns).to_csv(path, sep="\t", index=False)
    return path


def write_encoder(path: Path, recipe: Recipe = RECIPE, trained_on: tuple[str, ...] = ()) -> Path:
    """Weights that were never trained, as a file."""
    torch.manual_seed(1)
    weights = VJEPA3D.from_recipe(recipe).target_encoder.state_dict()
    about = json.dumps({"schema": 1, "recipe": recipe.model_dump(mode="json"), "trained_on": list(trained_on)})
    save_file({f"target_encoder.{name}": value for name, value in weights.items()}, path, {"octjepa": about})
    return path
