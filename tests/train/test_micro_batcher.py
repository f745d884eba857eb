"""Memory that runs out: fewer volumes at once where that is the same run, an end with a message where it is not."""

from __future__ import annotations

import pytest
import torch

from octjepa.errors import OctjepaError
from octjepa.train import loop
from octjepa.train.loop import pretrain
from synthetic import MemoryStore, small_recipe


@pytest.fixture
def crowded(monkeypatch):
    """No more than two volumes fit; the micro-batches that were tried."""
    tried, honest = [], loop.accumulate

    def accumulate(model, batch, recipe, runtime, update, micro):
        tried.append(micro)
        if micro > 2:
            raise torch.OutOfMemoryError("out of memory")
        return honest(model, batch, recipe, runtime, update, micro)

    monkeypatch.setattr(loop, "accumulate", accumulate)
    return tried


@pytest.mark.parametrize("objective", [{}, {"sigreg": 0}])
@pytest.mark.slow
def test_fewer_volumes_at_once_are_the_same_run(tmp_path, crowded, objective):
    recipe = small_recipe(train={"max_updates": 2}, monitor={"every_updates": None}, objective=objective)
    assert pretrain(recipe, MemoryStore(recipe.preprocessing), tmp_path / "run").updates == 2
    assert crowded == [4, 2, 2]


@pytest.mark.slow
def test_a_regulariser_is_given_the_whole_batch_or_nothing(tmp_path, crowded):
    """Of half a batch it is another objective, so the run ends and says what to do."""
    recipe = small_recipe(
        train={"max_updates": 2}, monitor={"every_updates": None}, objective={"variance_covariance": 0.1}
    )
    with pytest.raises(
        OctjepaError, match=r"update 1: 4 volumes .* objective\.variance_covariance needs .* machine\.recompute=true"
    ):
        pretrain(recipe, MemoryStore(recipe.preprocessing), tmp_path / "run")
    assert crowded == [4]
