"""Both sides in turn, and the ratio of what they did, by a clock that the test moves."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from benchmarks.peers.alternating_runs import Comparison, rate, run_alternately, summary

from octjepa.progress import is_quiet, set_quiet


class Clock:
    """Stands still unless work moves it."""

    def __init__(self) -> None:
        self.seconds = 100.0

    def __call__(self) -> float:
        return self.seconds

    def work(self, volumes: int, *seconds: float) -> Callable[[], int]:
        """Takes these seconds, one after the other."""
        left = list(seconds)

        def work() -> int:
            self.seconds += left.pop(0)
            return volumes

        return work


def test_the_ratio_is_ours_over_other_in_volumes_a_second() -> None:
    clock = Clock()
    comparison = Comparison(rate(clock.work(8, 1.0), clock), rate(clock.work(8, 4.0), clock), warms_up=False)
    assert run_alternately(comparison, 1) == [{"ours": 8.0, "other": 2.0, "ratio": 4.0}]


def test_the_ratio_reported_is_the_median_of_the_runs_and_not_of_the_sides() -> None:
    clock = Clock()
    ours, other = clock.work(6, 1.0, 2.0, 6.0), clock.work(6, 1.0, 6.0, 3.0)  # rates 6, 3, 1 and 6, 1, 2
    result = summary(run_alternately(Comparison(rate(ours, clock), rate(other, clock), warms_up=False), 3))
    assert [run["ratio"] for run in result["runs"]] == [1.0, 3.0, 0.5]
    assert (result["ours"], result["other"], result["ratio"]) == (3.0, 2.0, 1.0)
    assert result["spread"] == [0.5, 3.0]


def test_who_is_first_alternates_and_the_warm_up_does_not_count() -> None:
    called: list[str] = []

    def side(name: str) -> Callable[[], float]:
        def figure() -> float:
            called.append(name)
            return 1000.0 if len(called) <= 2 else 1.0

        return figure

    runs = run_alternately(Comparison(side("ours"), side("other")), 3)
    assert called[2:] == ["ours", "other", "other", "ours", "ours", "other"]
    assert sorted(called[:2]) == ["other", "ours"]
    assert runs == [{"ours": 1.0, "other": 1.0, "ratio": 1.0}] * 3
    called.clear()
    run_alternately(Comparison(side("ours"), side("other"), warms_up=False), 1)
    assert called == ["ours", "other"]


def test_what_is_measured_shows_no_bars_of_its_own() -> None:
    seen: list[bool] = []

    def fails() -> float:
        seen.append(is_quiet())
        raise ValueError("no")

    set_quiet(False)
    with pytest.raises(ValueError, match="no"):
        run_alternately(Comparison(fails, fails), 1)
    assert seen == [True]
    assert not is_quiet()
