"""A store is packed into shards between two parts of a run: batches, losses and weights stay those of loose files."""

from __future__ import annotations

import os
import shutil
import signal
from pathlib import Path

import pytest

from octjepa.distributed.signals import Interrupted
from octjepa.ingest import build_store
from octjepa.phantom import write_cohort
from octjepa.store import Store
from octjepa.store.shards import pack
from octjepa.train import loop
from octjepa.train.loop import pretrain
from ranks import assert_same, losses_of, recipe_of, weights_of

UPDATES, STOPPED_AFTER = 6, 3
SHARD_MB = 0.2  # several shards


@pytest.mark.slow
def test_a_run_that_goes_on_with_a_packed_store_trains_the_weights_of_loose_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recipe = recipe_of(UPDATES)
    write_cohort(tmp_path / "phantom", 8, 3, ("topcon_triton", "zeiss_cirrus"), split_shares=(0.75, 0.25, 0.0))
    build_store([tmp_path / "phantom"], tmp_path / "loose", recipe.preprocessing)
    shutil.copytree(tmp_path / "loose", tmp_path / "packed")
    pretrain(recipe, Store.open(tmp_path / "loose"), tmp_path / "whole")

    honest = loop.accumulate

    def stopping(model, batch, recipe, runtime, update, micro):
        if update == STOPPED_AFTER - 1:
            os.kill(os.getpid(), signal.SIGTERM)
        return honest(model, batch, recipe, runtime, update, micro)

    with monkeypatch.context() as patch:
        patch.setattr(loop, "accumulate", stopping)
        with pytest.raises(Interrupted):
            pretrain(recipe, Store.open(tmp_path / "packed"), tmp_path / "parts")

    found = pack(Store.open(tmp_path / "packed"), SHARD_MB)
    assert found.packed == found.volumes > found.shards > 1
    assert not list((tmp_path / "packed" / "chunks").rglob("*.np*"))
    summary = pretrain(recipe, Store.open(tmp_path / "packed"), tmp_path / "parts", resume=True)
    assert summary.updates == UPDATES
    assert_same(weights_of(tmp_path / "whole"), weights_of(tmp_path / "parts"))
    assert losses_of(tmp_path / "whole") == losses_of(tmp_path / "parts")
