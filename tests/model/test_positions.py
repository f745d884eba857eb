import pytest
import torch

from octjepa.model.positions import axis_width, rope_tables, rotate, sincos


def coordinates(tokens=5):
    return torch.rand(2, tokens, 3) * 20


def test_a_rotation_keeps_lengths():
    x = torch.randn(2, 3, 5, 32)
    turned = rotate(x, rope_tables(coordinates(), 32))
    assert torch.allclose(turned.norm(dim=-1), x.norm(dim=-1), atol=1e-5)
    assert not torch.allclose(turned, x)


def test_attention_sees_relative_positions_only():
    q, k, positions = torch.randn(2, 1, 5, 30), torch.randn(2, 1, 5, 30), coordinates()
    scores = []
    for shift in (0.0, torch.tensor([3.0, -7.0, 11.0])):
        tables = rope_tables(positions + shift, 30)
        scores.append(rotate(q, tables) @ rotate(k, tables).transpose(-1, -2))
    assert torch.allclose(scores[0], scores[1], atol=1e-3)


def test_the_rotation_is_the_textbook_one():
    """Pair (2i, 2i+1) of the first axis turns by coordinate times 10000^(-i / pairs)."""
    location = torch.tensor([[[2.0, 0.0, 0.0]]])
    x = torch.zeros(1, 1, 1, 24)
    x[..., 2] = 1.0
    angle = torch.tensor(2.0 * 10_000 ** (-1 / (axis_width(24) / 2)))
    turned = rotate(x, rope_tables(location, 24))[0, 0, 0]
    assert torch.allclose(turned[2:4], torch.stack([angle.cos(), angle.sin()]), atol=1e-6)
    assert turned[4:].abs().max() == 0


@pytest.mark.parametrize("axis", [0, 1, 2])
def test_each_axis_moves_its_own_features(axis):
    here, there = torch.zeros(1, 1, 3), torch.zeros(1, 1, 3)
    there[..., axis] = 1.0
    x = torch.ones(1, 1, 1, 32)
    changed = (rotate(x, rope_tables(here, 32)) != rotate(x, rope_tables(there, 32)))[0, 0, 0]
    width = axis_width(32)
    assert changed[axis * width : (axis + 1) * width].all()
    assert changed.sum() == width


def test_tables_stay_fp32_under_autocast():
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cosine, sine = rope_tables(coordinates(), 32)
    assert cosine.dtype == sine.dtype == torch.float32
    assert rotate(torch.randn(2, 1, 5, 32).bfloat16(), (cosine, sine)).dtype == torch.bfloat16


def test_a_head_too_narrow_is_refused():
    with pytest.raises(ValueError, match="too narrow"):
        rope_tables(coordinates(), 4)


def test_sincos_tells_positions_apart_and_fills_the_width():
    table = sincos(torch.tensor([[[0.0, 1, 2], [2, 1, 0], [0, 1, 2]]]), 100)
    assert table.shape == (1, 3, 100)
    assert torch.equal(table[0, 0], table[0, 2])
    assert not torch.equal(table[0, 0], table[0, 1])
    assert table[..., 96:].abs().max() == 0
