"""A planted effect, an encoder that was never trained, and what tuning it gave."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from octjepa.tasks.finetune.fit import FinetuneInputs, finetune_store
from octjepa.tasks.finetune.recipe import FinetuneRecipe, load_recipe
from planted import QUICK, PlantedStore, write_encoder, write_labels
from synthetic import TEST_SIZE, small_recipe


def quick(*overrides: str, name: str = "finetune") -> FinetuneRecipe:
    return load_recipe(name, (*QUICK, *overrides))


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def planted() -> PlantedStore:
    return PlantedStore()


@pytest.fixture(scope="session")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with encoder.safetensors and labels.tsv."""
    folder = tmp_path_factory.mktemp("source")
    write_encoder(folder / "encoder.safetensors")
    write_labels(folder / "labels.tsv")
    return folder


@pytest.fixture(scope="session")
def tune(planted: PlantedStore, source: Path) -> Callable[..., dict[str, Any]]:
    """tune(out, *overrides, target=..., ...) -> the results.

    The embeddings of the encoder before tuning are made once and shared, except by a tuning that is resumed or that has
    another encoder or store.
    """

    def run(
        out: Path, *overrides: str, target: str | tuple[str, ...] = "mark", name: str = "finetune", **more: Any
    ) -> dict[str, Any]:
        resume = more.pop("resume", False)
        given = {
            "checkpoint": source / "encoder.safetensors",
            "store": planted,
            "labels": source / "labels.tsv",
            "ledger_folder": out.parent / "looks",  # many tests that look make a fault of it
            "targets": (target,) if isinstance(target, str) else target,
            **more,
        }
        if not resume and not more.keys() & {"checkpoint", "store"}:
            given["frozen"] = source / "frozen.parquet"
        return finetune_store(quick(*overrides, name=name), FinetuneInputs(**given), out, resume).to_json()

    return run


@pytest.fixture(scope="session")
def able_encoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An encoder of the preset `test`, which learns the planted effect; the narrow one of the other tests does not."""
    return write_encoder(tmp_path_factory.mktemp("able") / "encoder.safetensors", small_recipe(model=TEST_SIZE))


@pytest.fixture(scope="session")
def done(
    tune: Callable[..., dict[str, Any]], able_encoder: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, dict[str, Any]]:
    """(folder, results) of one tuning, a person at a time, next to one from scratch."""
    out = tmp_path_factory.mktemp("done") / "out"
    return out, tune(out, "level=person", "scratch=true", checkpoint=able_encoder)
