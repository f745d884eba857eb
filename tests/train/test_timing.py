"""What `plan --measure` makes of its stopwatch; the watch itself is replaced, so that no machine decides."""

import itertools

import pytest
import torch

from octjepa.errors import UsageError
from octjepa.train import timing
from octjepa.train.cohort import choose_cohort
from synthetic import MemoryStore, small_recipe

LOAD, WORK, STEP = 0.5, 2.0, 0.25  # seconds that each lap is made to take


@pytest.fixture
def laps(monkeypatch):
    """Each lap reads the watch four times and, once there are enough, once more to see whether time is up."""
    lap = [0.0, LOAD, WORK, STEP]
    times = itertools.accumulate([0.0, *(lap * 5), 0.0])
    monkeypatch.setattr(timing, "_SECONDS", 0.0)  # the least number of laps
    monkeypatch.setattr(timing.time, "perf_counter", lambda: next(times))


def timed(updates=7, **machine):
    recipe = small_recipe(machine=machine)
    _, stream = choose_cohort(MemoryStore(recipe.preprocessing), recipe)
    return timing.time_run(recipe, stream, updates)


@pytest.mark.parametrize(
    ("machine", "seconds"),
    [
        ({}, LOAD + WORK + STEP),
        ({"micro_batch": 1}, 4 * (LOAD + WORK) + STEP),
        ({"micro_batch": 1, "devices": 2}, 2 * (LOAD + WORK) + STEP),
        ({"loader_workers": 1}, WORK + STEP),  # loading goes on beside the arithmetic
    ],
)
def test_seconds_of_an_update_are_those_of_its_parts(laps, machine, seconds):
    found = timed(**machine)
    assert found["seconds_per_update"] == pytest.approx(seconds)
    assert found["hours"] == pytest.approx(7 * seconds / 3600)
    assert found["measured"]["laps"] == 3
    assert found["measured"]["micro_batch"] == machine.get("micro_batch", 4)


def test_a_micro_batch_too_large_for_memory_is_a_clear_error(monkeypatch):
    def full(*arguments):
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr(timing, "accumulate", full)
    with pytest.raises(UsageError, match=r"4 volumes at once do not fit .* lower machine.micro_batch"):
        timed()
