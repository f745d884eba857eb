"""An encoder as a module of one's own training, a store as its data set, and the page that shows both."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader

import octjepa
from octjepa.encoders import PretrainedEncoder
from octjepa.errors import UsageError
from octjepa.ingest import build_store
from octjepa.model import VJEPA3D
from octjepa.phantom import write_cohort
from octjepa.store import Store
from synthetic import MemoryStore, small_recipe


@pytest.fixture
def encoder() -> PretrainedEncoder:
    recipe = small_recipe(tokens={"select": "all", "budget": None})
    torch.manual_seed(0)
    return PretrainedEncoder(VJEPA3D.from_recipe(recipe).target_encoder, recipe, "small")


def test_tokens_are_those_of_the_frozen_encoder(encoder: PretrainedEncoder) -> None:
    store = MemoryStore(encoder.recipe.preprocessing, train=4, val=0)
    images = next(iter(DataLoader(store, batch_size=4, collate_fn=encoder.collate)))
    assert images.shape == (4, 1, *encoder.recipe.preprocessing.image_size)
    tokens, pooled = encoder.module(trainable=False)(images)
    for index, of_image in enumerate(tokens):
        assert torch.allclose(of_image, torch.from_numpy(encoder.tokens(store[index]).features), atol=1e-5)
    assert torch.allclose(pooled, tokens.mean(dim=1))
    assert not pooled.requires_grad


def test_it_is_trained_and_the_encoder_with_it(encoder: PretrainedEncoder) -> None:
    store = MemoryStore(encoder.recipe.preprocessing, train=2, val=0)
    module, before = encoder.module(), encoder.embed(store[0])
    assert sum(parameter.numel() for parameter in module.parameters()) == encoder.parameters
    module(encoder.collate([store[0], store[1]]))[1].square().sum().backward()
    torch.optim.SGD(module.parameters(), lr=0.1).step()
    assert abs(encoder.embed(store[0]) - before).max() > 1e-4
    with pytest.raises(UsageError, match="images of 1 x 1 x 8 x 64 x 32, and this encoder takes B x 1 x 8 x 64 x 64"):
        module(torch.zeros(1, 1, 8, 64, 32))
    assert len(store) == 2
    with pytest.raises(IndexError, match="volume 2 of a store of 2"):
        store[2]


@pytest.mark.slow
def test_the_page_runs(tmp_path: Path, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_cohort(tmp_path / "eyes", 1, 0, ("zeiss_cirrus",))
    build_store([tmp_path / "eyes"], tmp_path / "store", octjepa.load_encoder("phantom-tiny").recipe.preprocessing, 1)
    assert len(Store.open(tmp_path / "store")) == 2
    code, *_ = re.findall(r"```python\n(.*?)```", (root / "docs" / "python.md").read_text(), re.DOTALL)
    monkeypatch.chdir(tmp_path)
    names: dict[str, object] = {}
    exec(compile(code, "docs/python.md", "exec"), names)
    assert torch.isfinite(names["loss"])  # type: ignore[arg-type]
