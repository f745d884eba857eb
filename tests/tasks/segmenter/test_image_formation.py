"""Image formation: image, boundaries and classes move together; missing neighbours are zero."""

from __future__ import annotations

import numpy as np
import torch

from octjepa.phantom.random_scene import COLUMNS, ROWS
from octjepa.tasks.segmenter.image_formation import Draws, Scenes, form_batch
from octjepa.tasks.segmenter.scene_pool import ScenePool
from octjepa.tasks.segmenter.validation import average_precision, dice_at

CPU = torch.device("cpu")
TOP, BOTTOM = 100, 150


def slab(count: int, optics: int) -> Scenes:
    """A bright slab from row 100 to 150, 35 dB above a dark background, marked as fluid."""
    power = torch.zeros(count, 3, ROWS, COLUMNS, dtype=torch.uint8)
    power[:, :, TOP:BOTTOM] = 47 * 5
    classes = torch.zeros(count, ROWS, COLUMNS, dtype=torch.uint8)
    classes[:, TOP:BOTTOM] = 1
    boundaries = torch.full((count, 8, COLUMNS), TOP - 0.5)
    boundaries[:, 4:] = BOTTOM - 0.5
    present = torch.zeros(count, 3, dtype=torch.bool)
    present[:, 1] = True
    return Scenes(power, boundaries, classes, torch.full((count,), optics), present, present.clone())


def test_image_and_truth_move_together() -> None:
    batch = form_batch(slab(12, 2), Draws(3, CPU))
    rows = torch.arange(256.0)[None, :, None]
    shown = torch.isfinite(batch.boundaries[:, :1]) & (batch.graded > 0)[:, None]
    inside = (rows > batch.boundaries[:, :1] + 2) & (rows < batch.boundaries[:, 4:5] - 2) & shown
    outside = ((rows < batch.boundaries[:, :1] - 4) | (rows > batch.boundaries[:, 4:5] + 4)) & shown
    for k in range(12):
        image = batch.images[k, 1]
        assert image[inside[k]].mean() > image[outside[k]].mean() + 1
        assert (batch.classes[k][inside[k]] == 1).all()
        assert (batch.classes[k][outside[k]] == 0).all()
    tops = batch.boundaries[:, 0].nanmean(1)
    assert tops.std() > 5  # the samples are placed at random


def test_a_missing_neighbour_is_zero_and_a_present_one_is_not() -> None:
    scenes = slab(4, 1)
    scenes.present[1:3] = scenes.formed[1:3] = True
    images = form_batch(scenes, Draws(3, CPU)).images
    energy = images.square().mean((2, 3))
    assert (energy[:, 1] > 0.5).all()
    assert (energy[[0, 3]][:, [0, 2]] == 0).all()
    assert (energy[1:3] > 0.5).all()


def test_validation_images_have_the_geometry_of_the_scene() -> None:
    batch = form_batch(slab(2, 0), Draws(3, CPU), augment=False)
    assert torch.allclose(batch.boundaries[:, 4] - batch.boundaries[:, 0], torch.tensor(50.0), atol=1e-3)


def test_half_of_a_batch_shows_fluid_where_fluid_is_rare() -> None:
    from octjepa.phantom.random_scene import Scene

    pool = ScenePool(8, 3, CPU)
    for k in range(8):
        classes = np.zeros((3, ROWS, COLUMNS), np.uint8)
        classes[:, 50:100] = 1 if k == 0 else 0
        flat = np.zeros((3, 8, COLUMNS), np.float32)
        pool.add([Scene(np.zeros((3, ROWS, COLUMNS), np.uint8), flat, classes, (0.1, 0.0078, 0.0234), k % 3)])
    batch = pool.sample(np.random.default_rng(0), 64)
    with_fluid = (batch.classes == 1).any(dim=1).any(dim=1)
    assert 0.5 <= float(with_fluid.float().mean()) < 0.85
    assert (batch.present.sum(1) == 1).sum() >= 32
    assert batch.formed.sum() == 64 + 2 * 32


def test_metrics() -> None:
    truth = np.array([True, True, False, False])
    score = np.array([0.9, 0.6, 0.4, 0.1])
    assert average_precision(score, truth) == 1.0
    assert dice_at(score, truth, 0.7) == 2 / 3
    mixed = average_precision(np.array([0.9, 0.8, 0.7, 0.1]), np.array([True, False, True, False]))
    assert abs(mixed - (0.5 * 1 + 0.5 * 2 / 3)) < 1e-9
