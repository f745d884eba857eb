"""Corrections for many comparisons: by hand, against scipy, and by counting false claims."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import false_discovery_control

from octjepa.errors import UsageError
from octjepa.metrics.comparisons import benjamini_hochberg, holm


def test_holm_by_hand() -> None:
    # Sorted 0.01, 0.02, 0.03, 0.04 times 4, 3, 2, 1, never falling: 0.04, 0.06, 0.06, 0.06.
    assert holm([0.04, 0.01, 0.03, 0.02]) == pytest.approx([0.06, 0.04, 0.06, 0.06])
    assert holm([0.6, 0.9]) == [1.0, 1.0]


def test_benjamini_hochberg_equals_scipy() -> None:
    p = np.random.default_rng(0).random(40) ** 2
    assert benjamini_hochberg(p.tolist()) == pytest.approx(false_discovery_control(p, method="bh").tolist())


def test_what_has_no_p_value_is_not_in_the_family() -> None:
    assert holm([0.02, None, 0.04]) == pytest.approx([0.04, None, 0.04])
    assert benjamini_hochberg([None, 0.02]) == [None, 0.02]
    assert holm([]) == []
    for wrong in ([1.2], [float("nan")]):
        with pytest.raises(UsageError, match=r"outside 0\.\.1"):
            holm(wrong)


@pytest.mark.slow
def test_false_claims_are_as_rare_as_promised() -> None:
    """1,000 families of 20 with 15 true nulls: Holm's chance of any false claim, BH's share of false claims, <= 5 %."""
    rng = np.random.default_rng(1)
    any_false, shares, uncorrected = 0, [], 0
    for _ in range(1000):
        p = np.r_[rng.random(15), rng.random(5) * 1e-3]
        any_false += min(holm(p.tolist())[:15]) < 0.05
        uncorrected += p[:15].min() < 0.05
        claimed = np.array(benjamini_hochberg(p.tolist())) < 0.05
        shares.append(claimed[:15].sum() / max(1, claimed.sum()))
    assert any_false / 1000 < 0.07
    assert np.mean(shares) < 0.055
    assert uncorrected / 1000 > 0.4
