"""Tensors under their published names -> those of `vit.VisionTransformer` and `dinov3.DINOv3`.

Every function takes a state dict and the number of patches that the network will be given along each axis. What the
encoder does not use (decoders, heads, mask tokens) is left out by name; what is left over is refused by its caller.
"""

from __future__ import annotations

import math
import re

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from octjepa.encoders.external.state_dict import StateDict

Grid = tuple[int, ...]
# Of pretraining and of heads: no part of the encoder.
_UNUSED = re.compile(r"(decoder|head|dino_head|ibot_head|mask_token|masked_embed|fc_norm|output_adapters|high_res_)")


def vit_layout(weights: StateDict, grid: Grid) -> StateDict:
    """MAE and DINO: the names are ours; learned positions are resized to `grid`."""
    used = {name: value for name, value in weights.items() if not _UNUSED.match(name)}
    return used | {"pos_embed": resize_positions(weights["pos_embed"], grid, antialias="register_tokens" in weights)}


def dinov3_layout(weights: StateDict, grid: Grid) -> StateDict:
    """DINOv3: rotary frequencies are computed, and the bias of queries, keys and values counts where its mask is 1."""
    used = {name: value for name, value in weights.items() if not _UNUSED.match(name)}
    used["register_tokens"] = used.pop("storage_tokens")
    for name in [name for name in used if name.endswith("attn.qkv.bias_mask")]:
        mask = used.pop(name).nan_to_num(1.0)  # NaN: never initialised, for the mask of keys is applied by name
        used[name.removesuffix("_mask")] = used[name.removesuffix("_mask")] * mask
    unused = ("rope_embed.periods", "local_cls_norm.weight", "local_cls_norm.bias")
    return {name: value for name, value in used.items() if name not in unused}


def mirage_layout(weights: StateDict, grid: Grid) -> StateDict:
    """MIRAGE (a MultiMAE): the adapter of B-scans is the patch embedding, its global token the class token.

    That token has no position, and there is no norm behind the last block.
    """
    names = {"input_adapters.bscan.proj.": "patch_embed.proj.", "encoder.": "blocks.", "global_tokens": "cls_token"}
    used = {}
    for name, value in weights.items():
        prefix = next((prefix for prefix in names if name.startswith(prefix)), None)
        if prefix is not None:
            used[names[prefix] + name.removeprefix(prefix)] = value
    positions = weights["input_adapters.bscan.pos_emb"].flatten(2).transpose(1, 2)  # [1, tokens, width]
    positions = torch.cat([torch.zeros_like(positions[:, :1]), positions], dim=1)
    return used | {"pos_embed": resize_positions(positions, grid)}


def octcube_layout(weights: StateDict, grid: Grid) -> StateDict:
    """OCTCube: positions of slices and within them are added; attention is called as flash_attn or as MAE has it.

    Positions within a slice are those of pictures of twice the size, and are resized as its pretraining does.
    """
    used = {name: value for name, value in weights.items() if not _UNUSED.match(name)}
    spatial, temporal, first = (used.pop(f"pos_embed_{part}") for part in ("spatial", "temporal", "class"))
    within = resize_positions(torch.cat([first, spatial], dim=1), grid[1:])[:, 1:]  # [1, depth * column, width]
    positions = (temporal[:, :, None] + within[:, None]).flatten(1, 2)
    renamed = {
        name.replace(".mixer.Wqkv.", ".attn.qkv.").replace(".mixer.out_proj.", ".attn.proj."): value
        for name, value in used.items()
    }
    for name in [name for name in renamed if ".attn.q." in name]:
        parts = [renamed.pop(name.replace(".attn.q.", f".attn.{part}.")) for part in "qkv"]
        renamed[name.replace(".attn.q.", ".attn.qkv.")] = torch.cat(parts)
    return renamed | {"pos_embed": torch.cat([first, positions], dim=1)}


def resize_positions(
    positions: Float[Tensor, "1 n width"], grid: Grid, antialias: bool = False
) -> Float[Tensor, "1 m width"]:
    """Learned positions, the class token's first, of a square grid -> those of `grid`, by bicubic interpolation.

    Returns them as they are where the numbers agree, and if they are of no square grid, which the caller refuses.
    """
    side = math.isqrt(positions.shape[1] - 1)
    if (side, side) == grid or side * side != positions.shape[1] - 1 or len(grid) != 2:
        return positions
    square = positions[:, 1:].transpose(1, 2).unflatten(2, (side, side))  # [1, width, side, side]
    resized = F.interpolate(square, grid, mode="bicubic", align_corners=False, antialias=antialias)
    return torch.cat([positions[:, :1], resized.flatten(2).transpose(1, 2)], dim=1)
