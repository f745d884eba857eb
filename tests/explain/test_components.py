"""Colours of tokens: what the components find, and that they do not depend on the order of volumes."""

from __future__ import annotations

import numpy as np
import pytest

from octjepa.explain.components import principal_components


def test_components_find_the_directions_that_vary_and_do_not_depend_on_order() -> None:
    rng = np.random.default_rng(0)
    rows = rng.integers(0, 8, 300)
    features = rng.normal(0, 0.01, (300, 20)).astype(np.float32)
    features[:, 3] += rows  # depth alone
    one = principal_components([features[:100], features[100:]], [rows[:100], rows[100:]])
    assert one.colours(features[:100]).shape == (100, 3)
    assert one.explained > 0.99
    assert one.by_depth > 0.99
    other = principal_components([features[100:], features[:100]], [rows[100:], rows[:100]])
    assert np.abs(other.colours(features[:100]).astype(int) - one.colours(features[:100])).max() <= 1
    free = principal_components([rng.normal(size=(300, 20))], [rows])
    assert free.by_depth < 0.2
    with pytest.raises(ValueError, match="too few"):
        principal_components([features[:3]], [rows[:3]])
