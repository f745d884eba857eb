"""What a tuned network states is what its test measured: at which class shares, and over the scans of a case."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from octjepa.encoders import load_encoder
from octjepa.evaluate.calibration import calibrated_predictions, class_shares, class_weights
from octjepa.evaluate.cases import PreparedTarget
from octjepa.evaluate.features import Selection
from octjepa.evaluate.targets import Target
from octjepa.tasks.finetune.evaluation import case_predictions
from octjepa.tasks.finetune.folder import HeadSpec
from octjepa.tasks.finetune.network import TunedNetwork
from octjepa.tasks.finetune.predict import TunedModel, validation_loss
from octjepa.tasks.finetune.tuning_data import TrainingLabels

TRUTH = np.array([0] * 90 + [1] * 10)
NOBODY = Selection("fixed", np.arange(0))


def target(val: np.ndarray, test: np.ndarray) -> Target:
    values = {"train": TRUTH, "val": val, "test": test}
    rows = {"train": np.arange(100), "val": 100 + np.arange(len(val)), "test": 200 + np.arange(len(test))}
    return Target("mark", "binary", rows, values, ("0", "1"), "h", ())


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("val", [TRUTH[:0], TRUTH[:7]], ids=["nobody in val", "val lacks a class"])
def test_shares_are_counted_once_where_val_cannot_position_the_decision(weighted: bool, val: np.ndarray) -> None:
    """A head that learnt the shares alone says them; brought back to these shares it must say them again."""
    learned = target(val, TRUTH)
    weight = class_weights(TRUTH, 2) if weighted else np.ones(2)
    of_loss = class_shares(learned) * weight  # what the least loss says without a picture
    tuning = TrainingLabels(
        "binary", ("0", "1"), TRUTH.astype(float), torch.from_numpy(weight.astype(np.float32)), (0.0, 1.0)
    )
    scores = np.tile(of_loss / of_loss.sum(), (100, 1))
    one = PreparedTarget(learned, learned, NOBODY, None)
    _, shift = validation_loss(one, tuning, scores[: len(val)])
    message = calibrated_predictions(learned, scores, shift)
    assert message.scores[0] == pytest.approx([0.5, 0.5], abs=1e-6)
    assert message.calibrated[0] == pytest.approx([0.9, 0.1], abs=1e-6)


def test_a_case_of_several_scans_is_stated_as_it_was_measured(planted, source, monkeypatch) -> None:
    scores = np.array([[0.05, 0.95], [0.7, 0.3], [0.9, 0.1]])
    learned = target(TRUTH[:0], np.array([1, 1, 1]))
    shift = np.array([0.3, -0.3])
    case = PreparedTarget(
        learned, target(TRUTH[:0], np.array([1])), NOBODY, [np.arange(0)] * 200 + [np.array([200, 201, 202])]
    )
    measured = case_predictions(case, scores, shift)
    message = iter(torch.from_numpy(scores).log())
    encoder = load_encoder(source / "encoder.safetensors")
    network = TunedNetwork(encoder, [("binary", 2)])
    monkeypatch.setattr(network, "predict", lambda volumes: [next(message)[None]])
    head = HeadSpec(
        "mark", "binary", ("0", "1"), (0.0, 1.0), tuple(shift.tolist()), tuple(class_shares(learned).tolist())
    )
    scan = planted.read(planted.table["volume_id"].iloc[0])
    answer = TunedModel(encoder, network, [head]).predict(scan, scan, scan)["mark"]
    assert list(answer["calibrated"].values()) == pytest.approx(measured.calibrated[0].tolist(), abs=1e-12)
    assert list(answer["balanced"].values()) == pytest.approx(measured.scores[0].tolist(), abs=1e-12)
