"""Weights to and from the V-JEPA 2 encoder of Hugging Face's transformers (`VJEPA2Model`).

Both compute the same function under other names: theirs has separate query, key and value layers, embeds patches by a
3D convolution, and tiles its rotary tables (`positions: rope_tiled` here). RGB kernels are summed to one channel, and a
kernel of another tubelet length is resampled so that a still image gives the same features.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from octjepa.model.encoder import Encoder
from octjepa.recipe import ROPE_BASE

_PAIRS = {
    "norm1": "norm1",
    "attention.out": "attention.proj",
    "norm2": "norm2",
    "mlp.0": "mlp.fc1",
    "mlp.2": "mlp.fc2",
}
_QKV = ("query", "key", "value")
_KERNEL = "embeddings.patch_embeddings.proj"
Weights = dict[str, Tensor]


def to_vjepa2(encoder: Encoder, patch_size: tuple[int, int, int]) -> Weights:
    """State of `VJEPA2Model`'s encoder, keys from "encoder.". Raises ValueError where theirs has no such form.

    VJEPA2Model has square patches, one linear layer for them, and tiled rotary positions of base 10,000 only.
    """
    slices, depth, columns = patch_size
    differences = {
        f"patches of {depth} x {columns}": depth != columns,
        f"positions {encoder.positions!r}": encoder.positions != "rope_tiled",
        f"rotary frequencies {encoder.rope}": encoder.rope != ROPE_BASE,
        "a non-linear stem": not isinstance(encoder.embed, nn.Linear),
    }
    difference = next((name for name, differs in differences.items() if differs), None)
    if difference is not None:
        raise ValueError(
            f"{difference}: VJEPA2Model has square patches, a linear stem and rope_tiled of base {ROPE_BASE:g}"
        )
    tensors = encoder.state_dict()
    converted = {
        f"{_KERNEL}.weight": tensors["embed.weight"].reshape(-1, 1, slices, depth, columns),
        f"{_KERNEL}.bias": tensors["embed.bias"],
        "layernorm.weight": tensors["norm.weight"],
        "layernorm.bias": tensors["norm.bias"],
    }
    for number in range(len(encoder.blocks)):
        for kind in ("weight", "bias"):
            for ours, name in _PAIRS.items():
                converted[f"layer.{number}.{name}.{kind}"] = tensors[f"blocks.{number}.{ours}.{kind}"]
            parts = tensors[f"blocks.{number}.attention.qkv.{kind}"].chunk(3)
            converted |= {
                f"layer.{number}.attention.{name}.{kind}": part for name, part in zip(_QKV, parts, strict=True)
            }
    return {f"encoder.{name}": value.clone() for name, value in converted.items()}


def vjepa2_config(encoder: Encoder, patch_size: tuple[int, int, int], grid: tuple[int, int, int]) -> dict[str, Any]:
    """The `config.json` for `to_vjepa2`; VJEPA2Model numbers positions on a square grid of `crop_size`."""
    hidden = encoder.state_dict()["blocks.0.mlp.0.weight"].shape[0]
    return {
        "architectures": ["VJEPA2Model"],
        "model_type": "vjepa2",
        "in_chans": 1,
        "patch_size": patch_size[1],
        "tubelet_size": patch_size[0],
        "crop_size": grid[1] * patch_size[1],
        "frames_per_clip": grid[0] * patch_size[0],
        "hidden_size": encoder.width,
        "num_hidden_layers": len(encoder.blocks),
        "num_attention_heads": encoder.heads,
        "mlp_ratio": hidden / encoder.width,
        "layer_norm_eps": 1e-6,
        "qkv_bias": True,
    }


def from_vjepa2(weights: Mapping[str, Tensor], patch_size: tuple[int, int, int]) -> Weights:
    """State of our `Encoder` from theirs; the predictor's weights are ignored.

    Raises ValueError: no V-JEPA 2 encoder, or patches of another height or width.
    """
    prefix = "encoder." if any(name.startswith("encoder.") for name in weights) else ""
    source = {name.removeprefix(prefix): value for name, value in weights.items() if name.startswith(prefix)}
    if f"{_KERNEL}.weight" not in source or "layernorm.weight" not in source:
        raise ValueError(f"no V-JEPA 2 encoder: {prefix}{_KERNEL}.weight or its final layernorm is absent")
    converted = {
        "embed.weight": adapt_kernel(source[f"{_KERNEL}.weight"], patch_size).flatten(1),
        "embed.bias": source[f"{_KERNEL}.bias"],
        "norm.weight": source["layernorm.weight"],
        "norm.bias": source["layernorm.bias"],
    }
    depth = 1 + max(int(name.split(".")[1]) for name in source if name.startswith("layer."))
    for number in range(depth):
        for kind in ("weight", "bias"):
            for ours, name in _PAIRS.items():
                converted[f"blocks.{number}.{ours}.{kind}"] = source[f"layer.{number}.{name}.{kind}"]
            parts = [source[f"layer.{number}.attention.{name}.{kind}"] for name in _QKV]
            converted[f"blocks.{number}.attention.qkv.{kind}"] = torch.cat(parts)
    return {name: value.float() for name, value in converted.items()}


def adapt_kernel(
    kernel: Float[Tensor, "w channels t p q"], patch_size: tuple[int, int, int]
) -> Float[Tensor, "w d p q"]:
    """A video kernel for one-channel volumes: colours summed (intensity is the same in all three), tubelet resampled.

    Lengthening repeats each step and divides by the repeats, shortening sums steps: a scan that is constant along
    the slice axis gives the same features as a still video.
    """
    slices, depth, columns = patch_size
    _, _, steps, p, q = kernel.shape
    if (p, q) != (depth, columns):
        raise ValueError(f"its patches are {p} x {q}, the recipe's {depth} x {columns}: choose tokens.patch_size alike")
    intensity = kernel.float().sum(dim=1)
    fine = math.lcm(steps, slices)
    spread = intensity.repeat_interleave(fine // steps, dim=1) / (fine // steps)
    return spread.unflatten(1, (slices, -1)).sum(dim=2)
