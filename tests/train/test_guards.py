"""What counts as unfit, and when a run goes back; the run itself is tests/resume/test_return.py."""

from __future__ import annotations

import math

import pytest

from octjepa.train.guards import SKIPPED_IN_A_ROW, SPIKES_FROM_UPDATE, SpikeGuard


def test_a_spike_is_far_above_the_median_of_healthy_norms_known_by_then():
    guard, first = SpikeGuard(10.0), SPIKES_FROM_UPDATE
    for update in range(first - 15, first + 30):
        assert guard.limit(update) == (math.inf if update < first + 6 else pytest.approx(10.0))
        guard.follow(update, True, 1.0)
    guard.follow(first + 30, True, 1000.0)
    assert guard.limit(first + 31) == pytest.approx(10.0)  # the last norm is still on its way when a limit is needed


def test_nothing_is_a_spike_while_a_run_is_young():
    guard = SpikeGuard(10.0)
    for update in range(SPIKES_FROM_UPDATE):
        assert guard.limit(update) == math.inf
        guard.follow(update, True, 1.0)
    assert guard.limit(SPIKES_FROM_UPDATE) == pytest.approx(10.0)


def test_the_limit_follows_the_run_and_forgets_its_beginning():
    guard = SpikeGuard(2.0)
    for update in range(300):
        guard.follow(update, True, 100.0 if update < 150 else 1.0)
    assert guard.limit(302) == pytest.approx(2.0)


def test_skipped_norms_do_not_raise_the_limit():
    guard = SpikeGuard(10.0)
    for update in range(300):
        guard.follow(update, update % 2 == 0, 1.0 if update % 2 == 0 else 1e9)
    assert guard.limit(302) == pytest.approx(10.0)


def test_without_a_factor_nothing_is_a_spike():
    guard = SpikeGuard(None)
    for update in range(300):
        guard.follow(update, True, 1.0)
    assert guard.limit(301) == math.inf


def test_it_goes_back_after_so_many_in_a_row_and_not_for_as_many_apart():
    guard = SpikeGuard(10.0)
    for update in range(40):
        assert not guard.follow(update, update % SKIPPED_IN_A_ROW == 0, 1.0)
    guard = SpikeGuard(10.0)
    outputs = [guard.follow(update, False, math.nan) for update in range(SKIPPED_IN_A_ROW)]
    assert outputs == [False] * (SKIPPED_IN_A_ROW - 1) + [True]
    assert guard.skipped == list(range(SKIPPED_IN_A_ROW))


def test_a_journal_gives_the_same_guard():
    guard, again, lines = SpikeGuard(3.0), SpikeGuard(3.0), []
    for update in range(257):
        healthy = update % 7 != 3
        guard.follow(update, healthy, 1.0 + update / 50)
        line = {"update": update + 1, "train/grad_norm": 1.0 + update / 50}
        lines.append(line if healthy else {**line, "skipped": ["a"]})
        lines.append({"update": update + 1, "monitor/x": 1.0})
    again.restore(lines)
    assert [again.limit(update) for update in (257, 258, 259)] == [guard.limit(update) for update in (257, 258, 259)]
    assert again.skipped == guard.skipped
