"""DINOv3 by `transformers`, which holds its rotary positions, with the names of the published checkpoints."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from octjepa.encoders.external.state_dict import StateDict
from octjepa.encoders.external.vit import ViTShape
from octjepa.errors import UsageError, install_command

_TOP = {
    "cls_token": "embeddings.cls_token",
    "register_tokens": "embeddings.register_tokens",
    "patch_embed.proj.weight": "embeddings.patch_embeddings.weight",
    "patch_embed.proj.bias": "embeddings.patch_embeddings.bias",
}
_BLOCK = {
    "attn.proj": "attention.o_proj",
    "ls1.gamma": "layer_scale1.lambda1",
    "ls2.gamma": "layer_scale2.lambda1",
    "mlp.fc1": "mlp.up_proj",
    "mlp.fc2": "mlp.down_proj",
    "mlp.w1": "mlp.gate_proj",
    "mlp.w2": "mlp.up_proj",
    "mlp.w3": "mlp.down_proj",
}


class DINOv3(nn.Module):
    """Images `[n, c, h, w]` -> tokens of their patches `[n, t, width]`, without class and register tokens."""

    def __init__(self, shape: ViTShape) -> None:
        super().__init__()
        try:
            from transformers import DINOv3ViTConfig, DINOv3ViTModel
        except ImportError:
            raise UsageError(f"DINOv3 needs transformers from 4.56 on: {install_command('hf')}") from None
        config: Any = DINOv3ViTConfig(
            hidden_size=shape.width,
            num_hidden_layers=shape.depth,
            num_attention_heads=shape.heads,
            intermediate_size=shape.hidden,
            patch_size=shape.patch[0],
            num_channels=shape.channels,
            image_size=shape.patch[0] * shape.grid[0],
            num_register_tokens=shape.registers,
            use_gated_mlp=shape.gated,
            query_bias=shape.qkv_bias,
            value_bias=shape.qkv_bias,
            key_bias=False,
        )
        self.shape, self.network = shape, DINOv3ViTModel(config)

    def forward(self, images: Float[Tensor, "n c h w"]) -> Float[Tensor, "n t width"]:
        tokens: Tensor = self.network(pixel_values=images).last_hidden_state
        return tokens[:, 1 + self.shape.registers :]


def transformers_names(weights: StateDict, network: nn.Module) -> StateDict:
    """Published tensors under the names of the `DINOv3` module `network`: queries, keys and values apart.

    Their bias counts where its mask is 1, and never for keys. The mask token, which no encoding uses, is zero.
    """
    names = network.state_dict().keys()
    layers = (
        "network.model.layer." if any(name.startswith("network.model.layer.") for name in names) else "network.layer."
    )
    renamed = {"network.embeddings.mask_token": torch.zeros(1, 1, weights["cls_token"].shape[-1])}
    for name, value in weights.items():
        if not name.startswith("blocks."):
            renamed[f"network.{_TOP.get(name, name)}"] = value
            continue
        _, number, part = name.split(".", 2)
        if part.startswith("attn.qkv."):
            kind = part.removeprefix("attn.qkv.")
            for letter, third in zip("qkv", value.chunk(3), strict=True):
                if (letter, kind) != ("k", "bias"):
                    renamed[f"{layers}{number}.attention.{letter}_proj.{kind}"] = third
            continue
        prefix = next((prefix for prefix in _BLOCK if part.startswith(prefix)), "")
        renamed[f"{layers}{number}.{_BLOCK.get(prefix, '')}{part.removeprefix(prefix)}"] = value
    return renamed
