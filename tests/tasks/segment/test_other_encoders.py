"""Segmentation takes encoders of octjepa alone, and says what reads others."""

from __future__ import annotations

from pathlib import Path

import pytest

from octjepa.errors import UsageError
from octjepa.tasks.segment.fit import segment_store
from octjepa.tasks.segment.recipe import RECIPES
from synthetic import MemoryStore, small_recipe


def test_an_encoder_of_another_project_is_refused_with_what_reads_it(tmp_path: Path) -> None:
    store, recipe = MemoryStore(small_recipe().preprocessing), RECIPES.load("segment_linear", ())
    with pytest.raises(UsageError, match=r"octjepa segment only takes encoders of octjepa .* probe --probe attentive"):
        segment_store(recipe, "retfound:weights.pth", store, tmp_path / "labels", tmp_path / "out")
    assert not (tmp_path / "out").exists()
