"""Tables of other projects' encoders, by a name that a package declares."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from command_line import call
from octjepa.embed.embedding import Division, embed_store
from octjepa.embed.table import read_embeddings
from octjepa.embed.token_folder import TokenFolder
from octjepa.encoders.external import load_external
from octjepa.errors import UsageError
from synthetic import MemoryStore, small_recipe

CODE = """
import torch

class Net(torch.nn.Module):
    def __init__(self, path):
        super().__init__()
        self.conv = torch.nn.Conv3d(1, 6, 4, 4)
        if path is not None:
            self.load_state_dict(torch.load(path, weights_only=True))

    def forward(self, images):
        assert images.ndim == 5 and images.min() >= 0 and images.max() <= 1
        return self.conv(images)

class Tokens(Net):
    def forward(self, images):
        return self.conv(images).flatten(2).transpose(1, 2), None

class Placed(Tokens):
    def grid(self, view_shape):
        return [size // 4 for size in view_shape]

class Broken(Net):
    calls = 0

    def forward(self, images):
        Broken.calls += 1
        if Broken.calls == 8:
            raise KeyboardInterrupt
        return self.conv(images)

class Vector(Net):
    def forward(self, images):
        return self.conv(images).flatten(2).mean(dim=2)

class Wrong(Net):
    def forward(self, images):
        return [1.0]

def number(path):
    return 3
"""
NAMES = "\n".join(
    f"{name} = mine:{part}"
    for name, part in {
        "mine": "Net",
        "mine_tokens": "Tokens",
        "mine_vector": "Vector",
        "mine_wrong": "Wrong",
        "mine_number": "number",
        "mine_placed": "Placed",
        "mine_broken": "Broken",
    }.items()
)


@pytest.fixture
def package(install_package):
    """A package of a user with seven encoders."""
    install_package("mine", "octjepa.encoders", NAMES, CODE)


@pytest.fixture
def store():
    return MemoryStore(small_recipe().preprocessing)


def test_a_module_of_a_package_is_embedded_by_its_name(package, store, tmp_path):
    made = embed_store("mine:", store, tmp_path / "mine.parquet", ("mean", "mean_std_max"))
    table = read_embeddings(tmp_path / "mine.parquet")
    assert made.rows == len(store.table) == len(table.frame)
    assert (made.dim, table.vector.shape[1]) == (6, 24)
    assert table.encoder == "mine"
    assert not np.allclose(table.vector, table.untrained)
    assert table.frame["volume_id"].is_monotonic_increasing


def test_maps_tokens_and_vectors_are_taken(package, tmp_path):
    from mine import Net

    torch.save(Net(None).state_dict(), tmp_path / "net.pth")
    view = np.random.default_rng(0).integers(0, 255, (8, 16, 16), dtype=np.uint8)
    found = [load_external(f"{name}:{tmp_path / 'net.pth'}") for name in ("mine", "mine_tokens", "mine_vector")]
    of_map, of_tokens, of_vector = (encoder.tokens(view) for encoder in found)
    assert of_map.shape == (2 * 4 * 4, 6)
    assert np.allclose(of_map, of_tokens)
    assert np.allclose(of_map.mean(axis=0), of_vector[0], atol=1e-6)
    assert found[0].name == "net"


def test_what_is_no_encoder_is_refused_in_one_line(package):
    with pytest.raises(UsageError, match=r"mine_wrong gives list .* expected tokens \[1, T, dim\]"):
        load_external("mine_wrong:").tokens(np.zeros((4, 4, 4), np.uint8))
    with pytest.raises(UsageError, match=r"encoder mine_number makes a int"):
        load_external("mine_number:")


def test_a_package_that_fails_on_import_is_named(install_package):
    install_package("broken", "octjepa.encoders", "broken = broken:Net", "import absent_library")
    with pytest.raises(UsageError, match=r"encoder 'broken' of package broken .*ModuleNotFoundError.*absent_library"):
        load_external("broken:")
    assert load_external.__module__  # others are not touched: names are listed without importing
    with pytest.raises(UsageError, match="no file at"):
        load_external("mirage:absent.pth")


def test_poolings_that_need_positions_are_refused(package, store, tmp_path):
    with pytest.raises(UsageError, match="zones"):
        embed_store("mine:", store, tmp_path / "mine.parquet", ("zones",))


def test_tokens_are_stored_with_their_positions(package: None, store: Any, tmp_path: Path) -> None:
    """Of a feature map and of a module that says its grid; pooled they are the vectors of the table."""
    for name in ("mine:", "mine_placed:"):
        out, folder = tmp_path / f"{name[:-1]}.parquet", tmp_path / name[:-1]
        made = embed_store(name, store, out, ("mean",), tokens=folder, division=Division(part=5))
        table, tokens = read_embeddings(out), TokenFolder.open(folder)
        assert made.tokens == str(folder)
        assert tokens.grid == tuple(size // 4 for size in store.preprocessing.image_size)
        assert (tokens.encoder, tokens.weights, tokens.contract) == (table.encoder, table.weights, table.contract)
        ids = table.frame["volume_id"].tolist()
        read = tokens.read("vector", ids)
        assert read.valid.all()
        assert np.allclose(read.features.astype(np.float32).mean(axis=1), table.vector, atol=1e-3)
        assert np.allclose(tokens.features("untrained", ids[0]).mean(axis=0), table.untrained[0], atol=1e-3)
        assert read.coordinates[0, 0] == pytest.approx([1 / size - 1 for size in tokens.grid])


@pytest.mark.parametrize("name", ["mine_tokens:", "mine_vector:"])
def test_tokens_without_positions_are_refused_before_the_work(
    package: None, store: Any, tmp_path: Path, name: str
) -> None:
    with pytest.raises(UsageError, match="have no positions in the volume"):
        embed_store(name, store, tmp_path / "t.parquet", tokens=tmp_path / "tokens")
    assert not list(tmp_path.glob("*t*.parquet*"))


def test_a_stopped_embedding_goes_on_with_the_next_part(package: None, store: Any, tmp_path: Path) -> None:
    out, tokens = tmp_path / "cut.parquet", tmp_path / "cut"
    torch.manual_seed(0)
    encoder = load_external("mine_broken:")
    with pytest.raises(KeyboardInterrupt):
        embed_store(encoder, store, out, tokens=tokens, division=Division(part=2))
    assert not out.exists()
    made = embed_store(encoder, store, out, tokens=tokens, division=Division(part=2))
    assert 0 < made.resumed < made.rows
    whole = embed_store(
        encoder, store, tmp_path / "whole.parquet", tokens=tmp_path / "whole", division=Division(part=2)
    )
    assert whole.resumed == 0
    first, second = read_embeddings(out), read_embeddings(tmp_path / "whole.parquet")
    assert np.array_equal(first.vector, second.vector)
    assert np.array_equal(first.untrained, second.untrained)
    ids = first.frame["volume_id"].tolist()
    pair = [TokenFolder.open(folder).read("vector", ids).features for folder in (tokens, tmp_path / "whole")]
    assert np.array_equal(*pair)
    assert not list(tmp_path.glob(".*parts"))


def test_the_verb_refuses_what_other_encoders_do_not_give(tmp_path, caplog):
    caplog.set_level(logging.ERROR)
    done = call("embed", "retfound:w.pth", "--store", tmp_path, "--out", tmp_path / "e.parquet", "--per-bscan")
    assert done.code == 2
    assert "work only with encoders of octjepa" in done.err
