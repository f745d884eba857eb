"""Ours and an encoder of another project behind one protocol."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from octjepa.encoders import load_encoder
from octjepa.encoders.base import FrozenEncoder
from octjepa.encoders.external.base import ModuleEncoder
from octjepa.encoders.locate import open_encoder, prepare_external
from octjepa.encoders.pooling import POOL_WIDTHS
from octjepa.errors import UsageError
from octjepa.recipe import Preprocessing
from octjepa.volume import OCTVolume
from synthetic import MemoryStore

ENCODER = "phantom-tiny"


def theirs(preprocessing: Preprocessing) -> FrozenEncoder:
    def create(path: Path | None) -> nn.Module:
        return nn.Conv3d(1, 6, (4, 16, 16), (4, 16, 16))

    return prepare_external(ModuleEncoder(create(None), create, Path("theirs")), preprocessing)


@pytest.fixture(scope="module")
def preprocessing() -> Preprocessing:
    return load_encoder(ENCODER).preprocessing


@pytest.mark.parametrize("whose", ["ours", "theirs"])
def test_an_encoder_of_any_project_has_the_protocol(whose: str, preprocessing: Preprocessing) -> None:
    encoder = open_encoder(ENCODER) if whose == "ours" else theirs(preprocessing)
    assert isinstance(encoder, FrozenEncoder)
    store = MemoryStore(preprocessing)
    volume = store.read(store.table["volume_id"].iloc[0])
    tokens, twin = encoder.tokens(volume), encoder.untrained()
    assert tokens.features.shape == (len(tokens.grid_index), encoder.dim)
    assert tokens.grid == encoder.grid
    assert tokens.grid_index.max() < np.prod(tokens.grid)
    for pool in encoder.default_pools:
        assert encoder.embed(volume, pool).shape == (POOL_WIDTHS[pool] * encoder.dim,)
    assert np.array_equal(encoder.embed(volume), encoder.pool(volume, tokens, ["mean"]))
    assert (twin.dim, twin.grid, twin.preprocessing) == (encoder.dim, encoder.grid, encoder.preprocessing)
    assert twin.weights_hash() != encoder.weights_hash()
    assert twin.weights_hash() == encoder.untrained().weights_hash()
    assert (encoder.origin is None) == (whose == "ours")
    assert bool(encoder.recorded_training) == (whose == "ours")


@pytest.mark.parametrize("whose", ["ours", "theirs"])
def test_scans_of_another_pattern_are_refused(whose: str, preprocessing: Preprocessing) -> None:
    """As `octjepa embed` leaves them out: slices of a radial scan do not lie next to each other."""
    encoder = open_encoder(ENCODER) if whose == "ours" else theirs(preprocessing)
    spacing = (0.05, 0.004, 0.01)
    about = {"provenance": {}, "person_id": "1", "device": "topcon_triton"}
    scan = OCTVolume(np.zeros((4, 32, 32), np.uint8), spacing, **about, pattern="radial", source="eye.dcm")
    for use in (encoder.prepare, encoder.tokens, encoder.embed):
        with pytest.raises(UsageError, match=r"the pattern of eye\.dcm is radial: the encoder knows raster"):
            use(scan)


def test_a_weight_changes_the_hash(preprocessing: Preprocessing) -> None:
    encoder = theirs(preprocessing)
    before = encoder.weights_hash()
    with torch.no_grad():
        encoder.external.network.bias[0] += 1e-4  # type: ignore[attr-defined]
    assert encoder.weights_hash() != before


def test_poolings_that_need_positions_are_refused_for_another_projects_encoder(preprocessing: Preprocessing) -> None:
    with pytest.raises(UsageError, match="no pool 'zones' of features without positions"):
        theirs(preprocessing).check_pools(["zones"])


@pytest.mark.slow
def test_loading_an_encoder_imports_no_reader_of_scans() -> None:
    code = (
        f"import sys, octjepa; octjepa.load_encoder({ENCODER!r}); "
        "print([name for name in sys.modules if name.startswith(('octjepa.read', 'octjepa.ingest', 'pydicom'))])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
