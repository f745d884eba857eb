"""Twelve phantom people on two instruments, their store, an encoder that was never trained, and a head made on it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from command_line import call
from octjepa.ingest import build_store
from octjepa.model import VJEPA3D
from octjepa.phantom import write_cohort
from octjepa.recipe import Recipe
from octjepa.store import Store
from synthetic import TEST_SIZE, small_recipe

# Not flattened: the place of a layer then says little, and a head has to look.
RECIPE = small_recipe(
    model=TEST_SIZE,
    preprocessing={
        "image_size": [8, 96, 64],
        "margin": [0, 8, 4],
        "target_spacing_mm": [0.7, 0.012, 0.09],
        "flatten": "none",
    },
    tokens={"patch_size": [2, 16, 16], "select": "tissue", "budget": 80},
)
DEVICES = ("topcon_maestro2", "zeiss_cirrus")  # the first stores its B-scans from superior to inferior


def write_encoder(path: Path, recipe: Recipe, seed: int = 0) -> Path:
    """Weights that were never trained, as a file."""
    torch.manual_seed(seed)
    weights = VJEPA3D.from_recipe(recipe).target_encoder.state_dict()
    about = json.dumps({"schema": 1, "recipe": recipe.model_dump(mode="json"), "trained_on": []})
    save_file({f"target_encoder.{name}": value for name, value in weights.items()}, path, {"octjepa": about})
    return path


@dataclass(frozen=True)
class Line:
    """Where everything lies, and what `octjepa segment` said."""

    root: Path
    store: Store
    encoder: Path
    results: dict[str, Any]

    @property
    def labels(self) -> Path:
        return self.root / "phantom" / "truth"

    @property
    def out(self) -> Path:
        return self.root / "out"

    def scan(self, device: str) -> Path:
        return next(path for path in sorted((self.root / "phantom").rglob("*.dcm")) if device in str(path))


@pytest.fixture(scope="session")
def line(tmp_path_factory: pytest.TempPathFactory) -> Line:
    root = tmp_path_factory.mktemp("segment")
    write_cohort(root / "phantom", 12, 5, DEVICES, split_shares=(0.33, 0.17, 0.5))
    build_store([root / "phantom"], root / "store", RECIPE.preprocessing, workers=1)
    assert call("split", root / "store", "--by", "recommended", "--json").code == 0
    encoder = write_encoder(root / "encoder.safetensors", RECIPE)
    outcome = call(
        "segment",
        "segment_linear",
        "resamples=200",
        "--from",
        encoder,
        "--store",
        root / "store",
        "--labels",
        root / "phantom" / "truth",
        "--out",
        root / "out",
        "--json",
    )
    assert outcome.code == 0, outcome.err
    return Line(root, Store.open(root / "store"), encoder, outcome.json)
