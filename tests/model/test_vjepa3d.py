import pytest
import torch

from octjepa.config import load_recipe
from octjepa.model import VJEPA3D
from octjepa.model.blocks import attend
from octjepa.model.vjepa3d import grid_positions
from octjepa.recipe import SIZES


def test_forward_takes_two_views_and_a_mask():
    model = VJEPA3D()
    view = torch.randn(2, 8, 64, 64)
    mask = torch.zeros(2, 32, dtype=torch.bool)
    mask[0, :19] = True
    mask[1, -19:] = True
    outcome = model(view, view, mask)
    assert outcome.predicted.shape == outcome.target.shape == (2, 19, 192)
    assert outcome.all_targets.shape == (2, 32, 192)
    assert torch.equal(outcome.target[0], outcome.all_targets[0, :19])
    assert torch.equal(outcome.target[1], outcome.all_targets[1, -19:])


@pytest.mark.parametrize("fill", ["uneven", "none", "all"])
def test_masks_that_break_static_shapes_are_refused(fill):
    mask = torch.zeros(2, 32, dtype=torch.bool)
    if fill == "uneven":
        mask[0, :3] = True
        mask[1, :4] = True
    elif fill == "all":
        mask[:] = True
    view = torch.randn(2, 8, 64, 64)
    with pytest.raises(ValueError, match="same number of patches"):
        VJEPA3D()(view, view, mask)


def test_targets_are_layer_normed_fp32_under_autocast():
    model = VJEPA3D()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        targets = model.targets(torch.randn(2, 32, 1024), grid_positions((2, 4, 4)).expand(2, -1, -1))
    assert targets.dtype == torch.float32
    assert targets.mean(-1).abs().max() < 1e-4
    assert torch.allclose(targets.var(-1, unbiased=False), torch.ones(2, 32), atol=1e-3)


def test_patches_are_in_raster_order():
    model = VJEPA3D()
    view = torch.zeros(1, 8, 64, 64)
    view[0, 5, 20, 50] = 1.0  # slice group 1, depth group 1, width group 3
    patches = model.patches(view)
    assert patches.shape == (1, 32, 1024)
    assert patches[0].sum(1).nonzero().item() == 1 * 16 + 1 * 4 + 3
    assert patches[0, 23].nonzero().item() == (5 - 4) * 256 + (20 - 16) * 16 + (50 - 48)
    assert grid_positions((2, 4, 4))[23].tolist() == [1.0, 1.0, 3.0]


@pytest.mark.parametrize(
    ("size", "objective", "millions"), [("test", "normalized_mse", 5.8), ("reference", "normalized_mse", 22.4)]
)
def test_reference_sizes(size, objective, millions):
    """5.8 M is the reference test model. The 29.4 M counts two tables of positions, 9,216 x 384 each."""
    with torch.device("meta"):
        model = VJEPA3D(objective=objective, size=size)
    count = sum(p.numel() for p in model.parameters())
    assert count / 1e6 == pytest.approx(millions, abs=0.06)
    if size == "reference":
        assert (count + 2 * 9216 * 384) / 1e6 == pytest.approx(29.4, abs=0.1)


def test_any_width_depth_and_heads_replace_single_numbers_of_a_preset():
    recipe = load_recipe(
        "tiny_cpu_vjepa", ["model.width=240", "model.depth=2", "model.heads=10", "model.predictor_heads=6"]
    )
    model = VJEPA3D.from_recipe(recipe)
    assert (model.context_encoder.width, len(model.context_encoder.blocks), model.context_encoder.heads) == (240, 2, 10)
    assert (model.predictor.width, len(model.predictor.blocks), model.predictor.heads) == (96, 3, 6)


@pytest.mark.parametrize("size", list(SIZES))
def test_every_size_builds(size):
    with torch.device("meta"):
        model = VJEPA3D(size=size)
    assert model.context_encoder.width == SIZES[size].width
    assert len(model.context_encoder.blocks) == SIZES[size].depth


def test_initialisation_shrinks_output_layers_with_depth():
    blocks = VJEPA3D().context_encoder.blocks
    spread = [float(block.mlp[2].weight.detach().std()) for block in blocks]
    assert spread[0] == pytest.approx(0.02 / 2**0.5, rel=0.05)
    assert spread[5] == pytest.approx(0.02 / 12**0.5, rel=0.05)


@pytest.mark.parametrize("positions", ["rope", "sincos"])
def test_order_of_tokens_does_not_matter_their_positions_do(positions):
    recipe = load_recipe("tiny_cpu", [f"model.positions={positions}"])
    encoder = VJEPA3D.from_recipe(recipe).context_encoder
    patches, coordinates = torch.randn(1, 10, 1024), torch.rand(1, 10, 3) * 8
    order = torch.randperm(10)
    features = encoder(patches, coordinates)
    assert torch.allclose(encoder(patches[:, order], coordinates[:, order]), features[:, order], atol=1e-5)
    assert not torch.allclose(encoder(patches, coordinates[:, order]), features, atol=1e-3)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 0.05)])
def test_attention_is_torchs_own_in_value_and_gradient(dtype, tolerance):
    torch.manual_seed(0)
    shape = (2, 3, 40, 16)
    start = [torch.randn(shape, dtype=dtype) for _ in range(3)]
    results = []
    for function in (attend, torch.nn.functional.scaled_dot_product_attention):
        inputs = [x.clone().requires_grad_() for x in start]
        out = function(*inputs)
        out.float().square().sum().backward()
        results.append([out.detach(), *(x.grad for x in inputs)])
    for ours, theirs in zip(*results, strict=True):
        assert ours.dtype == dtype
        scale = theirs.float().abs().max()
        assert (ours.float() - theirs.float()).abs().max() < tolerance * scale
    with torch.no_grad():
        assert torch.equal(attend(*start), torch.nn.functional.scaled_dot_product_attention(*start))
