"""Inference: any spacing maps back to the scan's own rows, fill is cleaned, and far neighbours are not shown."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from octjepa.errors import OctjepaError
from octjepa.model.bscan_inference import Calibration, near_bscans, spread_bscans, with_statistics
from octjepa.tasks.segmenter.evaluation import pooled_score, score_eye
from octjepa.tasks.segmenter.inference import Segmentation, Segmenter, load_segmenter, without_fill


class BrightRow(nn.Module):
    """Finds the brightest row as every boundary, and calls what is dark by two deviations intraretinal fluid."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[torch.Tensor] = []

    def forward(self, bscans: torch.Tensor) -> torch.Tensor:
        self.seen.append(bscans.abs().sum((2, 3)))
        middle = bscans[:, 1].float()
        layers = (4 * middle)[:, None].expand(-1, 8, -1, -1)
        classes = torch.zeros(len(bscans), 4, *middle.shape[1:])
        classes[:, 1] = -20 * (middle + 2)
        return torch.cat([layers, classes], 1)


def scan(shape: tuple[int, int, int], row: float) -> np.ndarray:
    """A bright band around `row` on grey, and a dark square."""
    rows = np.arange(shape[1])[None, :, None]
    pixels = np.full(shape, 90.0) + 150 * np.exp(-0.5 * ((rows - row) / (shape[1] / 80)) ** 2)
    pixels[:, shape[1] * 3 // 4 : shape[1] * 7 // 8, shape[2] // 4 : shape[2] // 2] = 1
    return pixels.astype(np.uint8)


@pytest.mark.parametrize(
    ("shape", "spacing"),
    [
        ((3, 496, 512), (0.12, 0.0039, 0.0117)),
        ((2, 200, 168), (0.2, 0.0078, 0.036)),
        ((1, 885, 300), (1.0, 0.0026, 0.0195)),
    ],
)
def test_any_spacing_maps_back_to_native_rows(shape: tuple[int, int, int], spacing: tuple[float, float, float]) -> None:
    pixels = scan(shape, shape[1] * 0.4)
    found = Segmenter(BrightRow(), Calibration(flip=False)).predict(pixels, spacing)
    assert found.boundaries_px.shape == (8, shape[0], shape[2])
    assert np.abs(found.boundaries_px - shape[1] * 0.4).max() < 1.0
    assert found.boundaries_um == pytest.approx(found.boundaries_px * spacing[1] * 1000)
    truth = pixels == 1
    marked = found.classes == 1
    assert 2 * (truth & marked).sum() / (truth.sum() + marked.sum()) > 0.9
    assert found.fluid_mm3()["intraretinal_fluid"] == pytest.approx(truth.sum() * np.prod(spacing), rel=0.1)
    assert found.thickness.shape == (shape[0], shape[2])


def test_far_neighbours_are_not_shown() -> None:
    assert near_bscans(3, 0.12, None, sparse=False).tolist() == [[-1, 0, 1], [0, 1, 2], [1, 2, -1]]
    assert near_bscans(3, 0.5, None, sparse=False).tolist() == [[-1, 0, -1], [-1, 1, -1], [-1, 2, -1]]
    assert near_bscans(3, 0.1, None, sparse=True).tolist() == [[-1, 0, -1], [-1, 1, -1], [-1, 2, -1]]
    uneven = near_bscans(3, 0.5, np.array([0.0, 0.1, 1.0]), sparse=False)
    assert uneven.tolist() == [[-1, 0, 1], [0, 1, -1], [-1, 2, -1]]
    network = BrightRow()
    pixels, spacing = scan((2, 200, 168), 80), (0.12, 0.0078, 0.036)
    Segmenter(network, Calibration(flip=False)).predict(pixels, spacing)
    assert (network.seen[0] > 0).tolist() == [[False, True, True], [True, True, False]]


@pytest.mark.parametrize("count", [7, 9, 15, 40])
def test_statistics_of_a_scan_weigh_its_bscans_equally(count: int) -> None:
    images = torch.randn(count, 16, 16) + torch.arange(count)[:, None, None]
    near = near_bscans(count, 0.5, None, sparse=False)
    taken = np.unique(np.linspace(0, count - 1, 16).astype(int))
    network = nn.Sequential(nn.BatchNorm2d(3), nn.Identity())
    with torch.inference_mode(), with_statistics(network, spread_bscans(images, near), 1.0) as adapted:
        mean = adapted[0].running_mean
    expected = images[torch.from_numpy(taken)].mean()
    assert mean.tolist() == pytest.approx([0, float(expected), 0], abs=1e-4)  # no neighbour is near


def test_empty_bscans_do_not_enter_the_statistics_of_a_scan() -> None:
    images = torch.randn(9, 16, 16)
    images[:3] = images[7:] = 0  # a scan that is narrower than the grid
    near = near_bscans(9, 0.5, None, sparse=False)
    shown = torch.cat(list(spread_bscans(images, near)))[:, 1]
    assert torch.equal(shown, images[3:7])
    nothing = torch.zeros(3, 16, 16)
    assert len(torch.cat(list(spread_bscans(nothing, near[:3])))) == 3


def test_registration_fill_is_replaced_and_bright_tissue_is_not() -> None:
    image = np.full((60, 40), 30.0, np.float32)
    image[30:34] = 255  # the RPE
    clean = image.copy()
    for column in range(40):
        image[: 5 + column // 8, column] = 255
        image[-3:, column] = 0
    out = without_fill(image)
    assert out[:3].max() == 30
    assert out[-3:].min() == 30
    assert np.array_equal(out[14:50], clean[14:50])
    assert np.array_equal(without_fill(clean), clean)


def test_scores_count_graded_columns_only() -> None:
    layers = np.full((1, 8, 6), np.nan, np.float32)
    layers[:, :, 2:5] = np.arange(8)[None, :, None] * 4
    fluid = np.zeros((1, 40, 6), bool)
    fluid[:, 10:14, 2:5] = True
    fluid[:, 20:30, 0] = True  # outside of the graded columns
    classes = np.zeros((1, 40, 6), np.uint8)
    classes[:, 10:14, 2:4] = 1
    boundaries = np.broadcast_to(np.arange(8, dtype=np.float32)[:, None, None] * 4 + 2, (8, 1, 6))
    empty = np.zeros((1, 40, 6), np.float32)
    found = Segmentation(boundaries, boundaries * 0, classes, classes.astype(np.float32), empty, (0.1, 0.004, 0.01))
    score = score_eye(found, layers, fluid)
    assert score.absolute_um == pytest.approx(np.full(8, 8.0), rel=1e-5)
    assert score.dice == pytest.approx(2 * 8 / (8 + 12))
    pooled = pooled_score([score, score])
    assert pooled.mean_um == pytest.approx(8.0, abs=1e-3)
    assert pooled.volume_ratio == pytest.approx(2 / 3, abs=1e-3)
    with pytest.raises(OctjepaError, match="do not fit"):
        score_eye(found, layers, fluid[:, :20])


def test_bad_input_is_refused_with_the_reason(tmp_path: Path) -> None:
    segmenter = Segmenter(BrightRow())
    with pytest.raises(OctjepaError, match="three positive lengths"):
        segmenter.predict(scan((1, 64, 64), 20), (0.1, 0.0, 0.01))
    with pytest.raises(OctjepaError, match=r"larger than the network reads"):
        segmenter.predict(scan((1, 64, 64), 20), (0.1, 1.0, 0.01))
    with pytest.raises(OctjepaError, match=r"segmenter\.safetensors"):
        load_segmenter(tmp_path)
