"""The cosine of tokens with one of them, as files and the viewer show it."""

from __future__ import annotations

import numpy as np
import pytest

from octjepa.explain.similarity import cosine_with


def test_a_token_is_alike_to_itself_and_to_its_multiples_and_not_to_others() -> None:
    features = np.array([[1, 2, 2], [3, 6, 6], [-1, -2, -2], [2, -1, 0], [0, 0, 0]], np.float32)
    assert cosine_with(features, 0) == pytest.approx([1, 1, -1, 0, 0], abs=1e-6)


def test_no_rounding_takes_a_cosine_beyond_one() -> None:
    rng = np.random.default_rng(0)
    features = rng.normal(size=(200, 37)).astype(np.float32)
    for number in range(200):
        cosine = cosine_with(np.concatenate([features, 3 * features]), number)
        assert cosine[number] == 1.0
        assert np.abs(cosine).max() <= 1.0
