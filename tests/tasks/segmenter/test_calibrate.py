"""Calibration: the temperature that makes the truth most probable, and truth that fits the images of an eye."""

from __future__ import annotations

import numpy as np
import torch

from octjepa.phantom.random_scene import AS_IS, STRONG, draw_scene
from octjepa.tasks.segmenter.calibrate import (
    DISPLAYS,
    EyeOutputs,
    boundary_temperatures,
    fitted_class_temperature,
    phantom_eye,
)
from octjepa.tasks.segmenter.image_formation import SIZE, Draws


def test_overconfident_logits_get_a_temperature_above_one() -> None:
    torch.manual_seed(0)
    rows = torch.randint(60, 200, (6, 8, 40)).float()
    guess = rows + 3 * torch.randn_like(rows)  # the network misses by three rows
    row = torch.arange(SIZE).view(1, 1, SIZE, 1)
    layers = -0.5 * ((row - guess[:, :, None]) / 1.5) ** 2  # but is sure to 1.5 rows
    classes = torch.randint(0, 4, (6, SIZE, 40))
    voxels = 6.0 * torch.nn.functional.one_hot((classes + (torch.rand(classes.shape) < 0.3)) % 4, 4)
    outputs = EyeOutputs(torch.cat([layers, voxels.permute(0, 3, 1, 2)], 1), rows, classes)
    temperatures = np.array(boundary_temperatures(outputs))
    assert (temperatures > 2.5).all()  # (3 / 1.5) squared is 4
    assert fitted_class_temperature(outputs) > 1.5


def test_every_bscan_of_an_eye_has_its_own_truth() -> None:
    scene = draw_scene(3, 2, AS_IS, 5)
    eye = phantom_eye(scene, Draws(1, torch.device("cpu")), "as_formed")
    assert eye.images.shape == (5, SIZE, SIZE)
    spans = scene.boundaries_px[:, 7, 32:288] - scene.boundaries_px[:, 0, 32:288]
    assert np.allclose((eye.boundaries[:, 7] - eye.boundaries[:, 0]).numpy(), spans, atol=1e-3)
    rows = torch.arange(SIZE).view(1, SIZE, 1)
    retina = (rows > eye.boundaries[:, :1] + 1) & (rows < eye.boundaries[:, 7:] - 1)
    vitreous = rows < eye.boundaries[:, :1] - 40
    for k in range(5):
        assert eye.images[k][retina[k]].mean() > eye.images[k][vitreous[k]].mean() + 0.5


def test_displays_differ_and_keep_the_geometry() -> None:
    scene = draw_scene(3, 1, STRONG, 3)
    images = {name: phantom_eye(scene, Draws(1, torch.device("cpu")), name).images for name in DISPLAYS}
    plain = images["as_formed"].flatten()
    for name, image in images.items():
        correlation = float(torch.corrcoef(torch.stack([plain, image.flatten()]))[0, 1])
        assert 0.3 < correlation <= 1.0001, name
        assert (name == "as_formed") == (correlation > 0.9999)
