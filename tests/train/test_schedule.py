import math

import pytest

from octjepa.recipe import TrainRecipe
from octjepa.train.schedule import learning_rate, lr_curve, total_updates, warmup_updates

REFERENCE = TrainRecipe(max_updates=1000, base_lr=1e-4)


def test_founding_schedule_by_hand():
    assert warmup_updates(REFERENCE, 1000) == 30
    assert learning_rate(0, 1000, REFERENCE) == pytest.approx(1e-4 / 30)
    assert learning_rate(29, 1000, REFERENCE) == pytest.approx(1e-4)
    assert learning_rate(515, 1000, REFERENCE) == pytest.approx(0.5 * (1e-4 + 1e-5))
    assert learning_rate(1000, 1000, REFERENCE) == pytest.approx(1e-5)
    assert learning_rate(5000, 1000, REFERENCE) == pytest.approx(1e-5)


@pytest.mark.parametrize("total", [1, 2, 10, 333])
@pytest.mark.parametrize("schedule", ["cosine", "constant"])
def test_positive_from_the_first_update_and_never_rising_after_warmup(total, schedule):
    train = TrainRecipe(max_updates=total, schedule=schedule)
    curve = lr_curve(train, total)
    assert len(curve) == total
    assert min(curve) > 0
    after = curve[warmup_updates(train, total) :]
    assert after == sorted(after, reverse=True)


def test_epochs_count_samples_not_files():
    train = TrainRecipe(epochs=120, global_batch=32)
    assert total_updates(train, 1000) == math.ceil(120 * 1000 / 32)
    assert total_updates(train, 1) == 4
