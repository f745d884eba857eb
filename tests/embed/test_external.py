"""Tables of other projects' encoders, by a name that a package declares."""

from __future__ import annotations

import logging

import numpy as np
import pytest

from command_line import call
from octjepa.embed.external import embed_external
from octjepa.embed.table import read_embeddings
from octjepa.errors import UsageError
from octjepa.external import load_external
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

class Vector(Net):
    def forward(self, images):
        return self.conv(images).flatten(2).mean(dim=2)

class Wrong(Net):
    def forward(self, images):
        return [1.0]

def number(path):
    return 3
"""
NAMES = "\n".join(f"{name} = mine:{part}" for name, part in {
    "mine": "Net", "mine_tokens": "Tokens", "mine_vector": "Vector", "mine_wrong": "Wrong", "mine_number": "number",
}.items())  # fmt: skip


@pytest.fixture
def package(install_package):
    """A package of a user with five encoders."""
    install_package("mine", "octjepa.encoders", NAMES, CODE)


@pytest.fixture
def store():
    return MemoryStore(small_recipe().preprocessing)


def test_a_module_of_a_package_is_embedded_by_its_name(package, store, tmp_path):
    made = embed_external("mine:", store, tmp_path / "mine.parquet", ("mean", "mean_std_max"))
    table = read_embeddings(tmp_path / "mine.parquet")
    assert made["rows"] == len(store.table) == len(table.frame)
    assert (made["dim"], table.vector.shape[1]) == (6, 24)
    assert table.encoder == "mine"
    assert not np.allclose(table.vector, table.untrained)
    assert table.frame["volume_id"].is_monotonic_increasing


def test_maps_tokens_and_vectors_are_taken(package, tmp_path):
    import torch
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
        embed_external("mine:", store, tmp_path / "mine.parquet", ("zones",))


def test_the_verb_refuses_what_other_encoders_do_not_give(tmp_path, caplog):
    caplog.set_level(logging.ERROR)
    done = call("embed", "retfound:w.pth", "--store", tmp_path, "--out", tmp_path / "e.parquet", "--per-bscan")
    assert done.code == 2
    assert "work with encoders of octjepa alone" in done.err
