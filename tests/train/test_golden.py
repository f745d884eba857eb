"""The loss curve of a fixed recipe on a fixed store of phantom eyes, held against the one in golden.json.

It says that nothing between a stored volume and an update has changed what is learned: views, masks, model, objective,
optimizer, EMA. The store itself is kept (golden_store.zip): NumPy's vector instructions differ from CPU to CPU, so that
eyes drawn anew differ in some voxels, and the first loss by 8e-4. Where a change is meant, make the figures anew
and say why in the commit; with `--store` the store as well:

    OMP_NUM_THREADS=1 .venv/bin/python tests/train/test_golden.py [--store]
"""

from __future__ import annotations

import json
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from octjepa.config import PRETRAINING
from octjepa.files import read_json_lines
from octjepa.ingest import build_store
from octjepa.model import VJEPA3D
from octjepa.objectives.jepa import VJEPA
from octjepa.phantom import write_cohort
from octjepa.recipe import Recipe, TrainRecipe
from octjepa.store import Store
from octjepa.train import loop, setup
from octjepa.train.loop import pretrain
from octjepa.views import masks

GOLDEN = Path(__file__).with_name("golden.json")
STORE = Path(__file__).with_name("golden_store.zip")
OBJECTIVES = {
    "vjepa": {"name": "vjepa", "ema_base": 0.9},
    "dense_regularised": {
        "name": "vjepa_dense",
        "ema_base": 0.9,
        "variance_covariance": 0.1,
        "sigreg": 0.1,
    },
    "mae": {"name": "mae_patch_norm", "ema_base": 0.996},
    "levjepa": {"name": "levjepa"},
}
UPDATES = 24
# Of each figure, relative. Other CPUs add in another order: the kernels without AVX, those of AVX2 instead of AVX-512
# and MKL's most compatible ones moved no figure by more than 1.2e-5 (ATEN_CPU_CAPABILITY, MKL_CBWR).
TOLERANCE = 1e-4


def recipe_of(objective: dict[str, Any]) -> Recipe:
    return PRETRAINING.read(
        {
            "name": "golden",
            "data": {"strategy": "multi_domain"},
            "preprocessing": {"image_size": [8, 64, 64], "margin": [0, 4, 4], "target_spacing_mm": [0.4, 0.016, 0.1]},
            "tokens": {"patch_size": [4, 16, 16], "select": "tissue", "budget": 24},
            "views": {"gain": 0.15, "gamma": 0.15, "speckle": 0.15, "blur": 0.2},
            "model": {"rope_base": 10_000.0},
            "objective": objective,
            "train": {
                "max_updates": UPDATES,
                "global_batch": 4,
                "base_lr": 3e-4,
                "min_lr_ratio": 0.1,
                "precision": "fp32",
            },
            "validation": {"max_samples": 4},
            "monitor": {"every_updates": None},
            "checkpoint": {"dir": None},
            "tracking": {"pictures_every_updates": None},
        },
        "of the golden curve",
    )


def curve(store: Store, objective: dict[str, Any], out: Path) -> dict[str, list[float]]:
    """Every train/ figure that the objective decides, update by update."""
    pretrain(recipe_of(objective), store, out)
    lines = [line for line in read_json_lines(out / "metrics.jsonl") if "train/loss" in line]
    names = [name for name in lines[0] if name.startswith(("train/loss", "train/cosine", "train/grad_norm"))]
    return {name: [line[name] for line in lines] for name in names}


def draw_store(folder: Path) -> Store:
    """Phantom eyes drawn and ingested on this machine."""
    write_cohort(folder / "phantom", 8, seed=7)
    build_store([folder / "phantom"], folder / "store", recipe_of(OBJECTIVES["vjepa"]).preprocessing)
    return Store.open(folder / "store")


def unpack_store(folder: Path) -> Store:
    """The eyes that the golden curves were trained on."""
    with zipfile.ZipFile(STORE) as archive:
        archive.extractall(folder)
    return Store.open(folder)


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Store:
    return unpack_store(tmp_path_factory.mktemp("golden"))


@pytest.mark.slow
def test_eyes_drawn_and_ingested_here_are_those_of_the_golden_store(store: Store, tmp_path: Path) -> None:
    drawn = draw_store(tmp_path)
    keys = ["person_id", "eye", "device", "spacing_z_mm", "spacing_y_mm", "spacing_x_mm", "split"]
    pairs = store.table[[*keys, "volume_id"]].merge(drawn.table[[*keys, "volume_id"]], on=keys)
    assert len(pairs) == len(store.table) == len(drawn.table) == 16
    correlations = [
        np.corrcoef(store.read(one).pixels.ravel(), drawn.read(other).pixels.ravel())[0, 1]
        for one, other in zip(pairs["volume_id_x"], pairs["volume_id_y"], strict=True)
    ]
    assert min(correlations) > 0.95
    assert np.median(correlations) > 0.99


@pytest.mark.parametrize("name", OBJECTIVES)
@pytest.mark.slow
def test_the_loss_curve_is_the_golden_one(name: str, store: Store, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    golden = json.loads(GOLDEN.read_text(encoding="utf-8"))[name]
    found = curve(store, OBJECTIVES[name], tmp_path / "run")
    assert found.keys() == golden.keys()
    for figure, values in golden.items():
        assert found[figure] == pytest.approx(values, rel=TOLERANCE), f"{figure} of {name}; see the head of this file"


def lighter_loss(patch: pytest.MonkeyPatch) -> None:
    honest = VJEPA.loss
    patch.setattr(VJEPA, "loss", lambda *given: 0.99 * honest(*given))


def faster_target(patch: pytest.MonkeyPatch) -> None:
    honest = loop.momentum
    patch.setattr(loop, "momentum", lambda *arguments: 0.99 * honest(*arguments))


def other_masks(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(masks, "FAMILIES", masks.FAMILIES[::-1])


def longer_memory(patch: pytest.MonkeyPatch) -> None:
    honest = setup.build_optimizer

    def build(model: VJEPA3D, recipe: TrainRecipe) -> torch.optim.AdamW:
        return honest(model, recipe.model_copy(update={"betas": (0.9, 0.99)}))

    patch.setattr(setup, "build_optimizer", build)


@pytest.mark.slow
@pytest.mark.parametrize("change", [lighter_loss, faster_target, other_masks, longer_memory], ids=lambda f: f.__name__)
def test_a_small_change_of_what_is_learned_is_seen(
    change: Callable[[pytest.MonkeyPatch], None], store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    change(monkeypatch)
    golden = json.loads(GOLDEN.read_text(encoding="utf-8"))["vjepa"]["train/loss"]
    found = curve(store, OBJECTIVES["vjepa"], tmp_path / "run")["train/loss"]
    assert max(abs(one - other) / other for one, other in zip(found, golden, strict=True)) > 3 * TOLERANCE


def test_the_golden_curves_learn() -> None:
    for name, figures in json.loads(GOLDEN.read_text(encoding="utf-8")).items():
        assert len(figures["train/loss"]) == UPDATES
        assert sum(figures["train/loss"][-4:]) < 0.95 * sum(figures["train/loss"][:4]), name


if __name__ == "__main__":
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as location:
        if "--store" in sys.argv:
            folder = Path(draw_store(Path(location) / "drawn").location)
            with zipfile.ZipFile(STORE, "w", zipfile.ZIP_DEFLATED) as archive:
                for path in sorted(folder.rglob("*")):
                    if path.is_file() and path.name != ".lock":
                        archive.write(path, path.relative_to(folder))
        eyes = unpack_store(Path(location) / "store")
        curves = {name: curve(eyes, what, Path(location) / name) for name, what in OBJECTIVES.items()}
    GOLDEN.write_text(json.dumps(curves, indent=1) + "\n", encoding="utf-8")
