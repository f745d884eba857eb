"""The encoder in the package: there, whole, small, and usable by name. What it is worth, the exam measures."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
import torch

import octjepa
from octjepa.checkpoint.warm_start import warm_start
from octjepa.config import load_recipe
from octjepa.errors import WrongCheckpointError
from octjepa.model import VJEPA3D
from octjepa.shipped import shipped, shipped_names
from synthetic import volume

NAME = "phantom-tiny"


@pytest.mark.parametrize("name", shipped_names())
def test_the_files_are_whole_and_small(name: str) -> None:
    folder = shipped(name)
    assert folder is not None
    for line in (folder / "SHA256SUMS").read_text().splitlines():
        expected, file = line.split()
        assert hashlib.sha256((folder / file).read_bytes()).hexdigest() == expected
    assert sum(path.stat().st_size for path in folder.iterdir()) < 15e6
    about = json.loads((folder / "run.json").read_text())
    assert about["run"] in (folder / "README.md").read_text()
    assert about["updates"] > 0
    assert not about["alarms"]


@pytest.mark.parametrize("name", shipped_names())
def test_it_is_loaded_by_name_and_gives_features(name: str) -> None:
    encoder = octjepa.load_encoder(name)
    assert encoder.name == name
    eye = volume(encoder.recipe.preprocessing, 3)
    vector = encoder.embed(eye)
    assert vector.shape == (encoder.dim,)
    assert np.isfinite(vector).all()
    untrained = encoder.untrained()
    spread = [one.tokens(eye).features.std() for one in (encoder, untrained)]
    assert all(value > 0.1 for value in spread)
    assert not np.allclose(vector, untrained.embed(eye))
    assert bool(encoder.trained_on) == (name == NAME)  # the other's phantoms were drawn during the run


def test_a_run_starts_from_it() -> None:
    own = octjepa.load_encoder(NAME)
    patch, stem = list(own.recipe.tokens.patch_size), own.recipe.model.stem
    recipe = load_recipe("tiny_cpu", [f"model.warm_start={NAME}", f"tokens.patch_size={patch}", f"model.stem={stem}"])
    model = VJEPA3D.from_recipe(recipe)
    warm_start(model, recipe)
    for encoder in (model.context_encoder, model.target_encoder):
        assert all(torch.equal(value, own.encoder.state_dict()[name]) for name, value in encoder.state_dict().items())


def test_a_path_of_that_name_comes_first_and_another_name_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / NAME).mkdir()
    assert shipped(NAME) is None
    assert shipped_names() == [NAME, "phantom-truth"]
    with pytest.raises(WrongCheckpointError, match=NAME):
        octjepa.load_encoder("phantom-large")
