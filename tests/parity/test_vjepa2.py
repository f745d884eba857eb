"""Our encoder and transformers' VJEPA2Model give the same features from the same weights, both ways, in fp32."""

from __future__ import annotations

import pytest
import torch

from octjepa.model.encoder import Encoder
from octjepa.model.positions import rope_tables, rotate
from octjepa.model.vjepa2 import adapt_kernel, from_vjepa2, to_vjepa2, vjepa2_config
from octjepa.model.vjepa3d import grid_positions

PATCH, GRID = (2, 8, 8), (3, 4, 4)  # transformers numbers positions on square grids only
TOLERANCE = 1e-5


def ours() -> Encoder:
    torch.manual_seed(0)
    encoder = Encoder(PATCH[0] * PATCH[1] * PATCH[2], 48, 3, 4, "rope_tiled")
    for parameter in encoder.parameters():
        parameter.data += 0.05 * torch.randn_like(parameter)  # biases and norms away from 0 and 1
    return encoder.eval()


def theirs(encoder: Encoder, **changes: object) -> torch.nn.Module:
    from transformers import VJEPA2Config, VJEPA2Model

    config = {**vjepa2_config(encoder, PATCH, GRID), **changes, "pred_hidden_size": 24, "pred_num_attention_heads": 2}
    config |= {"pred_num_hidden_layers": 1, "pred_num_mask_tokens": 1}
    return VJEPA2Model(VJEPA2Config(**config)).eval()


def patches_of(video: torch.Tensor) -> torch.Tensor:
    (p, q, r), (d, h, w) = PATCH, GRID
    cut = video.reshape(-1, d, p, h, q, w, r).permute(0, 1, 3, 5, 2, 4, 6)
    return cut.reshape(len(video), d * h * w, p * q * r)


@torch.no_grad()
def features(encoder: Encoder, model: torch.nn.Module) -> tuple[torch.Tensor, torch.Tensor]:
    video = torch.randn(2, GRID[0] * PATCH[0], GRID[1] * PATCH[1], GRID[2] * PATCH[2])
    mine = encoder(patches_of(video), grid_positions(GRID).expand(2, -1, -1))
    return mine, model(pixel_values_videos=video.unsqueeze(2), skip_predictor=True).last_hidden_state


def test_our_weights_in_their_model_give_our_features() -> None:
    encoder = ours()
    model = theirs(encoder)
    missing = model.load_state_dict(to_vjepa2(encoder, PATCH), strict=False)
    assert not missing.unexpected_keys
    assert all(name.startswith("predictor.") for name in missing.missing_keys)
    mine, other = features(encoder, model)
    assert (mine - other).abs().max() < TOLERANCE


def test_their_weights_in_our_model_give_their_features() -> None:
    encoder = ours()
    model = theirs(encoder)
    torch.manual_seed(3)
    for parameter in model.parameters():
        parameter.data = 0.1 * torch.randn_like(parameter)
    encoder.load_state_dict(from_vjepa2(model.state_dict(), PATCH))
    mine, other = features(encoder, model)
    assert (mine - other).abs().max() < TOLERANCE


def test_the_plain_layout_is_another_function() -> None:
    """The option is needed: with the same weights the two rotary layouts differ."""
    encoder = ours()
    mine, other = features(encoder, theirs_with(encoder))
    encoder.positions = "rope"
    plain, _ = features(encoder, theirs_with(encoder))
    assert (mine - other).abs().max() < TOLERANCE < (mine - plain).abs().max()


def theirs_with(encoder: Encoder) -> torch.nn.Module:
    model = theirs(encoder)
    positions, encoder.positions = encoder.positions, "rope_tiled"
    model.load_state_dict(to_vjepa2(encoder, PATCH), strict=False)
    encoder.positions = positions
    torch.manual_seed(1)
    return model


def test_there_and_back_is_the_same_to_the_bit() -> None:
    encoder = ours()
    back = from_vjepa2(to_vjepa2(encoder, PATCH), PATCH)
    assert back.keys() == encoder.state_dict().keys()
    assert all(torch.equal(back[name], value) for name, value in encoder.state_dict().items())


@pytest.mark.parametrize("slices", [1, 2, 4, 3])
def test_a_still_scan_gives_what_a_still_video_gave(slices: int) -> None:
    kernel = torch.randn(5, 3, 2, 4, 4)
    frame = torch.randn(4, 4)
    expected = (kernel * frame).sum(dim=(1, 2, 3, 4))
    adapted = adapt_kernel(kernel, (slices, 4, 4))
    assert adapted.shape == (5, slices, 4, 4)
    assert torch.allclose((adapted * frame).sum(dim=(1, 2, 3)), expected, atol=1e-4)


def test_what_cannot_be_carried_over_is_reported() -> None:
    with pytest.raises(ValueError, match="16 x 16, the recipe's 8 x 8"):
        adapt_kernel(torch.randn(5, 3, 2, 16, 16), (4, 8, 8))
    with pytest.raises(ValueError, match="no V-JEPA 2 encoder"):
        from_vjepa2({"encoder.weight": torch.zeros(1)}, PATCH)
    encoder = ours()
    encoder.positions = "rope"
    with pytest.raises(ValueError, match="rope_tiled"):
        to_vjepa2(encoder, PATCH)


def test_tiled_tables_turn_the_members_of_a_pair_apart() -> None:
    positions = torch.tensor([[[1.0, 2.0, 3.0]]])
    x = torch.randn(1, 1, 1, 12)
    assert torch.equal(rotate(x, rope_tables(0 * positions, 12, tiled=True)), x)
    assert not torch.allclose(rotate(x, rope_tables(positions, 12, True)), rotate(x, rope_tables(positions, 12, False)))
