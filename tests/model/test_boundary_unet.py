"""The segmentation network: shapes, the loss at the truth, and decoding below a row."""

from __future__ import annotations

import pytest
import torch

from octjepa.model.boundary_unet import BoundaryUNet, NetworkSize, decode_boundaries, segmentation_loss

SMALL = NetworkSize(widths=(8, 8, 8, 8, 8))


def logits_of(boundaries: torch.Tensor, classes: torch.Tensor, rows: int) -> torch.Tensor:
    """Logits that say exactly this."""
    row = torch.arange(rows).view(1, 1, rows, 1)
    layers = -0.5 * ((row - boundaries[:, :, None]) / 0.8) ** 2
    voxels = 20.0 * torch.nn.functional.one_hot(classes, 4).permute(0, 3, 1, 2)
    return torch.cat([layers, voxels], 1)


def test_shapes_and_size() -> None:
    network = BoundaryUNet(SMALL).eval()
    assert network(torch.zeros(2, 3, 64, 96)).shape == (2, 12, 64, 96)
    parameters = sum(p.numel() for p in BoundaryUNet().parameters())
    assert 2e6 < parameters < 4e6
    assert parameters * 2 < 10e6  # bytes in float16


def test_decoding_finds_fractions_of_a_row_and_keeps_the_order() -> None:
    truth = torch.linspace(10, 40, 8).view(1, 8, 1).expand(1, 8, 5) + 0.37
    decoded = decode_boundaries(logits_of(truth, torch.zeros(1, 64, 5, dtype=torch.long), 64)[:, :8])
    assert torch.allclose(decoded.rows, truth, atol=0.02)
    assert torch.allclose(decoded.spread_rows, torch.full_like(truth, 0.8), atol=0.05)
    crossed = decode_boundaries(logits_of(truth.flip(1), torch.zeros(1, 64, 5, dtype=torch.long), 64)[:, :8])
    assert (crossed.rows.diff(dim=1) >= 0).all()


def test_the_spread_of_a_sharp_boundary_is_the_same_at_every_depth() -> None:
    rows = torch.arange(1000.0).view(1, 1, -1, 1)
    for sharpness, spread in ((0.4, 0.2843), (0.8, 0.7999)):
        for at in (50.0, 900.0):
            found = decode_boundaries(-0.5 * ((rows - at) / sharpness) ** 2)
            assert float(found.spread_rows) == pytest.approx(spread, abs=1e-3)


def test_loss_is_least_at_the_truth_and_ignores_what_is_unknown() -> None:
    truth = torch.linspace(10, 40, 8).view(1, 8, 1).expand(1, 8, 6).clone()
    classes = torch.zeros(1, 64, 6, dtype=torch.long)
    classes[:, 20:30] = 1
    graded = torch.ones(1, 6)
    right = segmentation_loss(logits_of(truth, classes, 64), truth, classes, graded)
    moved = segmentation_loss(logits_of(truth + 3, classes, 64), truth, classes, graded)
    missed = segmentation_loss(logits_of(truth, torch.zeros_like(classes), 64), truth, classes, graded)
    assert moved[0] > right[0] + 1
    assert missed[1] > right[1] + 0.2
    partly = truth.clone()
    partly[:, 3, :3] = torch.nan
    graded[:, :3] = 0
    wrong = truth.clone()
    wrong[:, 3, :3] += 20
    unknown = segmentation_loss(logits_of(wrong, classes, 64), partly, classes, graded)
    assert unknown[0] == pytest.approx(float(right[0]), abs=1e-3)
