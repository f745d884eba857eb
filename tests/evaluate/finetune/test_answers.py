"""What a tuned network states is what its test measured: at which class shares, and over the scans of a case."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from octjepa.evaluate.asked import Asked
from octjepa.evaluate.decide import class_weights, result, shares
from octjepa.evaluate.finetune.cohort import Tuning
from octjepa.evaluate.finetune.scores import held_out
from octjepa.evaluate.labels import Target
from octjepa.evaluate.space import Choosing

TRUTH = np.array([0] * 90 + [1] * 10)
NOBODY = Choosing("fixed", np.arange(0))


def target(val: np.ndarray, test: np.ndarray) -> Target:
    values = {"train": TRUTH, "val": val, "test": test}
    rows = {"train": np.arange(100), "val": 100 + np.arange(len(val)), "test": 200 + np.arange(len(test))}
    return Target("mark", "binary", rows, values, ("0", "1"), "h", ())


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("val", [TRUTH[:0], TRUTH[:7]], ids=["nobody in val", "val lacks a class"])
def test_shares_are_counted_once_where_val_cannot_place_the_decision(weighted: bool, val: np.ndarray) -> None:
    """A head that learnt the shares alone says them; brought back to these shares it must say them again."""
    learnt = target(val, TRUTH)
    weight = class_weights(TRUTH, 2) if weighted else np.ones(2)
    of_loss = shares(learnt) * weight  # what the least loss says without a picture
    tuning = Tuning("binary", ("0", "1"), TRUTH.astype(float), torch.from_numpy(weight.astype(np.float32)), (0.0, 1.0))
    scores = np.tile(of_loss / of_loss.sum(), (100, 1))
    one = Asked(learnt, learnt, NOBODY, None)
    _, shift = held_out(one, tuning, scores[: len(val)])
    said = result(learnt, scores, shift)
    assert said.scores[0] == pytest.approx([0.5, 0.5], abs=1e-6)
    assert said.calibrated[0] == pytest.approx([0.9, 0.1], abs=1e-6)
