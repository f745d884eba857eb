"""Checkpoints in the layouts that other projects publish: the names of their tensors, random and narrow."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

Layout = Callable[..., dict[str, Tensor]]


def _draw(shapes: dict[str, tuple[int, ...]]) -> dict[str, Tensor]:
    rng = torch.Generator().manual_seed(0)
    return {name: 0.3 * torch.randn(shape, generator=rng) for name, shape in shapes.items()}


def _block(width: int, hidden: int) -> dict[str, tuple[int, ...]]:
    return {
        "norm1.weight": (width,),
        "norm1.bias": (width,),
        "attn.qkv.weight": (3 * width, width),
        "attn.qkv.bias": (3 * width,),
        "attn.proj.weight": (width, width),
        "attn.proj.bias": (width,),
        "norm2.weight": (width,),
        "norm2.bias": (width,),
        "mlp.fc1.weight": (hidden, width),
        "mlp.fc1.bias": (hidden,),
        "mlp.fc2.weight": (width, hidden),
        "mlp.fc2.bias": (width,),
    }


def vit_shapes(
    width: int = 16, depth: int = 2, patch: tuple[int, ...] = (16, 16), tokens: int = 4, channels: int = 3
) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a timm VisionTransformer without a head: what MAE and DINO publish."""
    shapes: dict[str, tuple[int, ...]] = {
        "cls_token": (1, 1, width),
        "pos_embed": (1, 1 + tokens, width),
        "patch_embed.proj.weight": (width, channels, *patch),
        "patch_embed.proj.bias": (width,),
        "norm.weight": (width,),
        "norm.bias": (width,),
    }
    for number in range(depth):
        shapes |= {f"blocks.{number}.{name}": shape for name, shape in _block(width, 4 * width).items()}
    return shapes


def _retfound(**size: int) -> dict[str, Tensor]:
    """An MAE with its decoder, as github.com/rmaphoh/RETFound_MAE saves it."""
    shapes = vit_shapes(**size)
    decoder = {"mask_token": (1, 1, 8), "decoder_embed.weight": (8, 16), "decoder_blocks.0.norm1.weight": (8,)}
    return _draw(shapes | decoder)


def _visionfm(**size: int) -> dict[str, Tensor]:
    return _draw(vit_shapes(**size) | {"head.last_layer.weight_v": (8, 8), "masked_embed": (1, 16)})


def _dinov2(registers: int = 0, gated: bool = False, **size: int) -> dict[str, Tensor]:
    shapes = vit_shapes(**{"patch": (14, 14), "tokens": 9, **size}) | {"mask_token": (1, 16)}
    if registers:
        shapes["register_tokens"] = (1, registers, 16)
    for number in range(2):
        shapes |= {f"blocks.{number}.ls1.gamma": (16,), f"blocks.{number}.ls2.gamma": (16,)}
        if gated:
            for name in ("fc1", "fc2"):
                del shapes[f"blocks.{number}.mlp.{name}.weight"], shapes[f"blocks.{number}.mlp.{name}.bias"]
            shapes |= {f"blocks.{number}.mlp.w12.weight": (48, 16), f"blocks.{number}.mlp.w12.bias": (48,)}
            shapes |= {f"blocks.{number}.mlp.w3.weight": (16, 24), f"blocks.{number}.mlp.w3.bias": (16,)}
    return _draw(shapes)


def _dinov3() -> dict[str, Tensor]:
    shapes = vit_shapes() | {"mask_token": (1, 16), "storage_tokens": (1, 4, 16), "rope_embed.periods": (2,)}
    del shapes["pos_embed"]
    for number in range(2):
        shapes |= {f"blocks.{number}.ls1.gamma": (16,), f"blocks.{number}.ls2.gamma": (16,)}
    masks = {f"blocks.{n}.attn.qkv.bias_mask": torch.tensor([1.0, 0.0, 1.0]).repeat_interleave(16) for n in range(2)}
    return _draw(shapes) | masks


def _mirage() -> dict[str, Tensor]:
    """A MultiMAE with adapters of three inputs, as github.com/j-morano/MIRAGE saves it."""
    renamed: dict[str, tuple[int, ...]] = {"global_tokens": (1, 1, 16), "output_adapters.slo.mask_token": (1, 1, 8)}
    for name, shape in vit_shapes(patch=(32, 32), channels=1).items():
        if name.startswith("blocks."):
            renamed[f"encoder.{name.removeprefix('blocks.')}"] = shape
    for adapter in ("bscan", "slo"):
        renamed |= {f"input_adapters.{adapter}.pos_emb": (1, 16, 2, 2), f"input_adapters.{adapter}.proj.bias": (16,)}
        renamed[f"input_adapters.{adapter}.proj.weight"] = (16, 1, 32, 32)
    return _draw(renamed)


def _octcube() -> dict[str, Tensor]:
    """A 3D MAE with flash_attn's blocks, as OCTCubeM's pretraining saves it: with positions of larger pictures."""
    renamed: dict[str, tuple[int, ...]] = {}
    for name, shape in vit_shapes(patch=(3, 16, 16), channels=1).items():
        renamed[name.replace(".attn.qkv.", ".mixer.Wqkv.").replace(".attn.proj.", ".mixer.out_proj.")] = shape
    del renamed["pos_embed"]
    renamed |= {"pos_embed_spatial": (1, 16, 16), "pos_embed_temporal": (1, 2, 16), "pos_embed_class": (1, 1, 16)}
    renamed |= {"high_res_patch_embed.proj.weight": (16, 1, 3, 16, 16), "high_res_patch_embed.proj.bias": (16,)}
    return _draw(renamed | {"decoder_cls_token": (1, 1, 8), "mask_token": (1, 1, 8)})


@pytest.fixture
def layouts() -> dict[str, Layout]:
    """Encoder's name -> a function that draws a narrow checkpoint in its published layout."""
    return {
        "retfound": _retfound,
        "visionfm": _visionfm,
        "dinov2": _dinov2,
        "retfound_dinov2": _dinov2,
        "dinov3": _dinov3,
        "mirage": _mirage,
        "octcube": _octcube,
    }
