"""Meters on features whose figure is known beforehand."""

from __future__ import annotations

import math

import pytest
import torch

from octjepa.objectives.rank_metrics import (
    alpha_req,
    lidar,
    pair_cosine,
    position_share,
    rank_me,
    separability,
    spread,
)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def test_rank_me_counts_directions() -> None:
    assert rank_me(torch.eye(10)) == pytest.approx(10, rel=1e-3)
    assert rank_me(torch.ones(50, 1) @ torch.randn(1, 8)) == pytest.approx(1, abs=1e-2)
    assert 5 < rank_me(torch.randn(500, 10)) <= 10 + 1e-6


@pytest.mark.parametrize("exponent", [0.5, 1.0, 2.0])
def test_alpha_req_reads_the_exponent_of_a_power_law(exponent: float) -> None:
    scale = torch.arange(1, 33).double() ** (-exponent / 2)
    assert alpha_req(torch.randn(20_000, 32).double() * scale) == pytest.approx(exponent, abs=0.05)
    assert alpha_req(torch.ones(9, 1) @ torch.randn(1, 8)) == math.inf


def test_lidar_counts_directions_that_report_volumes_apart() -> None:
    volumes, noise = torch.randn(400, 1, 5), torch.randn(400, 6, 12)
    signal = torch.nn.functional.pad(volumes.expand(-1, 6, -1), (0, 7))
    assert lidar(10 * signal + 0.1 * noise) == pytest.approx(5, abs=0.3)
    # A direction that varies much within a volume tells nothing, however large: whitening takes it out.
    loud = noise.clone()
    loud[..., -1] *= 100
    assert lidar(10 * signal + 0.1 * loud) == pytest.approx(5, abs=0.3)
    assert lidar(signal[:, :, :1].expand(-1, -1, 12) + 0.01 * noise) < 2


@pytest.mark.parametrize("rank", [0, 1, 5, 10])
@pytest.mark.parametrize("uneven", [False, True])
def test_lidar_tells_noise_from_signal_at_the_size_of_the_monitor(rank: int, uneven: bool) -> None:
    """32 volumes x 3 views, width 192: noise alone, which every view draws anew, separates nothing."""
    scale = torch.arange(1, 193) ** -0.5 if uneven else torch.ones(192)
    noise = torch.randn(32, 3, 192) * scale / scale.square().mean().sqrt()
    directions = torch.linalg.qr(torch.randn(192, max(rank, 1)))[0][:, :rank]
    signal = math.sqrt(192 / max(rank, 1)) * torch.randn(32, 1, rank) @ directions.T
    assert rank * 0.75 <= lidar(noise + signal) <= rank + (4 if rank == 0 else 1)
    assert math.isnan(lidar(noise[:1]))
    assert lidar(torch.ones(32, 3, 192)) == 0


def test_spread_and_pair_cosine_of_collapsed_and_of_free_features() -> None:
    same = torch.randn(1, 16).expand(100, -1)
    assert spread(same) == pytest.approx(0, abs=1e-6)
    assert pair_cosine(same) == pytest.approx(1, abs=1e-6)
    free = torch.randn(2000, 16)
    assert spread(free) == pytest.approx(1, abs=0.03)
    assert pair_cosine(free) == pytest.approx(0, abs=0.01)
    pair = torch.tensor([[1.0, 0.0], [0.6, 0.8]])
    assert pair_cosine(pair) == pytest.approx(0.6)


def test_position_share_is_what_the_position_alone_explains() -> None:
    location = torch.arange(20).repeat(30)
    by_position = torch.randn(20, 8)[location]
    assert position_share(by_position, location) == pytest.approx(1)
    assert position_share(torch.randn(600, 8), location) == pytest.approx(0, abs=0.03)
    assert position_share(by_position + torch.randn(600, 8), location) == pytest.approx(0.5, abs=0.1)
    assert math.isnan(position_share(torch.randn(5, 8), torch.arange(5)))


def test_separability_is_chance_for_noise_and_one_for_clear_classes() -> None:
    kind = torch.arange(400) // 2 % 4
    assert separability(torch.randn(400, 8), kind) == pytest.approx(0.25, abs=0.08)
    assert separability(5 * torch.eye(8)[kind] + 0.1 * torch.randn(400, 8), kind) == 1.0
    assert math.isnan(separability(torch.randn(4, 8), torch.zeros(4, dtype=torch.long)))
    kind[7] = 9  # a kind of one row cannot be judged, and takes nothing from the others
    assert separability(5 * torch.eye(16)[kind] + 0.1 * torch.randn(400, 16), kind) > 0.99
