"""Randomised phantom scenes: repeatable, anatomically ordered, with the fluid that they claim."""

from __future__ import annotations

import numpy as np
import pytest

from octjepa.layers import BOUNDARIES
from octjepa.phantom.random_scene import INTRARETINAL, RANGES, STRONG, SUB_RPE, SUBRETINAL, Scene, draw_scene


@pytest.fixture(scope="module")
def scenes() -> list[Scene]:
    return [draw_scene(4, k, STRONG, 3) for k in range(24)]


def test_equal_arguments_give_equal_scenes() -> None:
    first, second, other = draw_scene(4, 7, STRONG, 3), draw_scene(4, 7, STRONG, 3), draw_scene(4, 8, STRONG, 3)
    assert np.array_equal(first.power, second.power)
    assert np.array_equal(first.classes, second.classes)
    assert np.array_equal(first.boundaries_px, second.boundaries_px, equal_nan=True)
    assert not np.array_equal(first.power, other.power)


@pytest.mark.parametrize("name", RANGES)
def test_boundaries_are_ordered_from_above(name: str) -> None:
    for k in range(6):
        boundaries = draw_scene(2, k, RANGES[name], 3).boundaries_px
        assert boundaries.shape[1] == len(BOUNDARIES)
        steps = np.diff(boundaries, axis=1)
        assert np.nanmin(steps) > -0.01


def test_fluid_and_drusen_lie_in_their_layers(scenes: list[Scene]) -> None:
    ilm, rpe, bm = (BOUNDARIES.index(name) for name in ("ilm", "rpe", "bm"))
    counts = np.zeros(4, int)
    for scene in scenes:
        rows = np.arange(scene.classes.shape[1])[None, :, None]
        line = np.nan_to_num(scene.boundaries_px, nan=-1e3)[:, :, None]
        outside = scene.classes.copy()
        outside[np.broadcast_to(line[:, bm] < -100, outside.shape)] = 0  # inside the optic disc
        assert not (((rows < line[:, ilm] - 1) | (rows > line[:, rpe] + 1)) & (outside == INTRARETINAL)).any()
        assert not (((rows > line[:, rpe] + 1) | (rows < line[:, ilm])) & (outside == SUBRETINAL)).any()
        assert not ((rows > line[:, bm] + 1) & (outside == SUB_RPE)).any()
        counts += [(scene.classes == value).any() for value in range(4)]
    assert counts[INTRARETINAL] >= 8
    assert counts[SUBRETINAL] >= 1
    assert counts[SUB_RPE] >= 1


def test_fluid_is_darker_than_the_retina_around_it(scenes: list[Scene]) -> None:
    differences = []
    for scene in scenes:
        rows = np.arange(scene.classes.shape[1])[None, :, None]
        line = scene.boundaries_px[:, :, None]
        inner = (rows > line[:, 0]) & (rows < line[:, 4]) & (scene.classes == 0)
        fluid = scene.classes == INTRARETINAL
        if fluid.sum() > 200:
            differences.append(float(scene.power[inner].mean()) - float(scene.power[fluid].mean()))
    assert np.mean(np.array(differences) > 10) > 0.8  # 2 dB and more
