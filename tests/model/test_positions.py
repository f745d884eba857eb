import pytest
import torch

from octjepa.errors import RecipeError
from octjepa.model import VJEPA3D
from octjepa.model.positions import axis_frequencies, axis_width, rope_tables, rotate, sincos
from octjepa.model.vjepa3d import grid_positions
from octjepa.recipe import Recipe
from synthetic import small_recipe


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


def turns(recipe: Recipe, pairs: int = 5) -> torch.Tensor:
    """Radians that each pair [axis, pair] turns over the grid."""
    frequencies = axis_frequencies(pairs, recipe.rope, torch.device("cpu"))
    steps = torch.tensor([4.0, 16.0, 16.0]) * torch.tensor(recipe.preprocessing.target_spacing_mm)
    unit = steps if recipe.model.position_unit == "mm" else torch.ones(3)
    return frequencies * (unit * torch.tensor(recipe.grid))[:, None]


@pytest.mark.parametrize("unit", ["index", "mm"])
def test_every_pair_turns_over_its_axis(unit):
    """The fastest a radian a token, the slowest a quarter turn over the grid, in steps and in millimetres alike."""
    recipe = small_recipe(
        preprocessing={"image_size": [16, 128, 384]}, tokens={"budget": 64}, model={"position_unit": unit}
    )
    found = turns(recipe)
    assert recipe.grid == (4, 8, 24)
    assert torch.allclose(found[:, 0], torch.tensor([4.0, 8.0, 24.0]))
    assert torch.allclose(found[:, -1], torch.full((3,), torch.pi / 2))
    assert (found.diff(dim=1) < 0).all()
    old = small_recipe(preprocessing={"image_size": [16, 128, 384]}, tokens={"budget": 64}, model={"rope_base": 1e4})
    assert (turns(old).expand(3, -1) < 0.1).sum() >= 5  # pairs that hardly move, what the rule is for


def test_a_model_turns_by_its_recipe():
    """Encoder and predictor; the released V-JEPA 2 order keeps its base; an axis of one token is turned by nothing."""
    model = VJEPA3D.from_recipe(small_recipe())
    assert model.target_encoder.rope == model.predictor.rope == small_recipe().rope
    assert small_recipe(model={"positions": "rope_tiled"}).rope == 10_000.0
    assert small_recipe(model={"rope_base": 100.0}).rope == 100.0
    assert small_recipe(preprocessing={"image_size": [4, 64, 64]}, tokens={"budget": 8}).rope[0] == (1.0, 1.0)
    patches, positions = torch.randn(1, 32, 1024), grid_positions((2, 4, 4))[None]
    before = model.target_encoder(patches, positions)
    model.target_encoder.rope = 10_000.0
    assert not torch.allclose(model.target_encoder(patches, positions), before, atol=1e-4)


def test_a_base_that_nothing_turns_by_is_refused():
    with pytest.raises(RecipeError, match="rope_base is unused by positions sincos"):
        small_recipe(model={"positions": "sincos", "rope_base": 10_000.0})


def test_tables_stay_fp32_under_autocast():
    with torch.autocast("cpu", dtype=torch.bfloat16):
        tables = rope_tables(coordinates(), 32)
    assert tables.cosine.dtype == tables.sine.dtype == torch.float32
    assert rotate(torch.randn(2, 1, 5, 32).bfloat16(), tables).dtype == torch.bfloat16


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_complex_numbers_rotate_to_the_same_bits(dtype):
    tables = rope_tables(coordinates(), 32)
    assert tables.turns is not None
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 3, 5, 32, generator=generator).to(dtype).requires_grad_()
    turned, real = rotate(x, tables), rotate(x, tables._replace(turns=None))
    assert torch.equal(turned, real)
    ours, products = (torch.autograd.grad(y.float().square().sum(), x)[0] for y in (turned, real))
    if dtype == torch.float32:
        assert torch.equal(ours, products)
    # In bf16 a product is rounded twice: up to two steps of the largest term, 4 to 8, whose steps are 1/32.
    assert torch.allclose(ours.float(), products.float(), rtol=1e-2, atol=1 / 16)
    assert rope_tables(coordinates(), 32, tiled=True).turns is None  # two angles a pair are not rotation


def test_a_head_too_narrow_is_refused():
    with pytest.raises(ValueError, match="too narrow"):
        rope_tables(coordinates(), 4)


def test_sincos_tells_positions_apart_and_fills_the_width():
    table = sincos(torch.tensor([[[0.0, 1, 2], [2, 1, 0], [0, 1, 2]]]), 100)
    assert table.shape == (1, 3, 100)
    assert torch.equal(table[0, 0], table[0, 2])
    assert not torch.equal(table[0, 0], table[0, 1])
    assert table[..., 96:].abs().max() == 0
