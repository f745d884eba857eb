import pytest
import torch

from octjepa.objectives.base import cosine, get_objective
from octjepa.train.validate import PositionMeans, copy_nearest

L1, NORMALIZED_MSE = get_objective("vjepa").loss, get_objective("normalized_mse").loss


def test_l1_by_hand():
    assert float(L1(torch.tensor([[[1.0, -1.0]]]), torch.tensor([[[0.0, 1.0]]]))) == 1.5


def test_normalized_mse_sums_over_features():
    """Orthogonal vectors read 2 whatever their width; the mean over features would read 2/D."""
    for width in (2, 768):
        p, t = torch.zeros(1, 1, width), torch.zeros(1, 1, width)
        p[..., 0], t[..., 1] = 3.0, 0.5
        assert float(NORMALIZED_MSE(p, t)) == pytest.approx(2.0)
        assert float(NORMALIZED_MSE(p, -p)) == pytest.approx(4.0)
        assert float(NORMALIZED_MSE(p, 7 * p)) == pytest.approx(0.0, abs=1e-6)
    p, t = torch.randn(3, 4, 8), torch.randn(3, 4, 8)
    assert float(NORMALIZED_MSE(p, t)) == pytest.approx(2 - 2 * float(cosine(p, t)), rel=1e-5)


def test_losses_are_fp32_and_report_bf16_apart():
    p = torch.full((1, 1, 4), 1.0, dtype=torch.bfloat16)
    assert L1(p, torch.full((1, 1, 4), 1.001)).dtype == torch.float32
    assert float(L1(p, torch.full((1, 1, 4), 1.001))) == pytest.approx(0.001, rel=1e-2)


def test_position_means_by_hand():
    means = PositionMeans(grid_tokens=3, width=2)
    means.add(torch.tensor([[[1.0, 0.0], [3.0, 2.0]]]), torch.tensor([[0, 1]]))
    means.add(torch.tensor([[[5.0, 4.0]]]), torch.tensor([[1]]))
    assert means.constant().tolist() == [3.0, 2.0]
    assert means.at(torch.tensor([[1, 0, 2]]))[0].tolist() == [[4.0, 3.0], [1.0, 0.0], [3.0, 2.0]]


def test_copy_nearest_copies_the_nearest_visible_token():
    targets = torch.arange(5.0).reshape(1, 5, 1)
    positions = torch.tensor([[[0.0, 0, 0], [0, 0, 1], [0, 0, 2], [0, 0, 3], [3, 0, 0]]])
    context, target = torch.tensor([[0, 3]]), torch.tensor([[1, 2, 4]])
    assert copy_nearest(targets, positions, context, target)[0, :, 0].tolist() == [0.0, 3.0, 0.0]
