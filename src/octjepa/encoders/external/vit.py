"""A plain vision transformer whose parameters are called as MAE, DINO and DINOv2 publish them.

`patch_embed.proj`, `cls_token`, `register_tokens`, `pos_embed`, `blocks.N.{norm1, attn.qkv, attn.proj, ls1.gamma,
norm2, mlp, ls2.gamma}`, `norm`: the layout of VisionTransformer in github.com/huggingface/pytorch-image-models and in
github.com/facebookresearch/dinov2. Patches are pixels of a picture or voxels of a volume.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn


@dataclass(frozen=True)
class ViTShape:
    """The facts that the tensors of a checkpoint state about a network, and the number of heads, which they do not.

    patch and grid: of pictures (height, width) or of volumes (slice, depth, column). registers: tokens without a
    position. layer_scale, gated (SwiGLU), qkv_bias and norm: which parts the blocks and the end of the network have.
    closing_residual: whether the last block's own input is added to its output, as in every block before.
    """

    width: int
    depth: int
    heads: int
    hidden: int
    channels: int
    patch: tuple[int, ...]
    grid: tuple[int, ...]
    registers: int = 0
    layer_scale: bool = False
    gated: bool = False
    qkv_bias: bool = True
    norm: bool = True
    closing_residual: bool = True


class VisionTransformer(nn.Module):
    """Images `[n, c, *size]` -> tokens of their patches `[n, t, width]` in raster order, without class token."""

    def __init__(self, shape: ViTShape) -> None:
        super().__init__()
        self.shape = shape
        tokens = 1
        for count in shape.grid:
            tokens *= count
        self.patch_embed = PatchEmbed(shape)
        self.cls_token = nn.Parameter(torch.randn(1, 1, shape.width) * 0.02)
        self.pos_embed = nn.Parameter(torch.randn(1, 1 + tokens, shape.width) * 0.02)
        if shape.registers:
            self.register_tokens = nn.Parameter(torch.randn(1, shape.registers, shape.width) * 0.02)
        self.blocks = nn.ModuleList([Block(shape) for _ in range(shape.depth)])
        self.norm = nn.LayerNorm(shape.width, eps=1e-6) if shape.norm else nn.Identity()

    def forward(self, images: Float[Tensor, "n c ..."]) -> Float[Tensor, "n t width"]:
        patches = self.patch_embed(images)  # [n, t, width]
        x = torch.cat([self.cls_token.expand(len(patches), -1, -1), patches], dim=1) + self.pos_embed
        if self.shape.registers:
            registers = self.register_tokens.expand(len(x), -1, -1)
            x = torch.cat([x[:, :1], registers, x[:, 1:]], dim=1)
        for block in self.blocks[:-1]:
            x = block(x)
        x = self.blocks[-1](x, self.shape.closing_residual)
        normalised: Tensor = self.norm(x)
        return normalised[:, 1 + self.shape.registers :]


class PatchEmbed(nn.Module):
    """Non-overlapping patches -> tokens."""

    def __init__(self, shape: ViTShape) -> None:
        super().__init__()
        convolution: type[nn.Conv2d | nn.Conv3d] = nn.Conv2d if len(shape.patch) == 2 else nn.Conv3d
        self.proj = convolution(shape.channels, shape.width, shape.patch, shape.patch)  # type: ignore[arg-type]

    def forward(self, images: Float[Tensor, "n c ..."]) -> Float[Tensor, "n t width"]:
        tokens: Tensor = self.proj(images).flatten(2).transpose(1, 2)
        return tokens


class Block(nn.Module):
    """Attention and MLP, each behind a LayerNorm, scaled by channel where the checkpoint has layer scale."""

    def __init__(self, shape: ViTShape) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(shape.width, eps=1e-6), nn.LayerNorm(shape.width, eps=1e-6)
        self.attn = Attention(shape.width, shape.heads, shape.qkv_bias)
        self.mlp = SwiGLU(shape.width, shape.hidden) if shape.gated else MLP(shape.width, shape.hidden)
        self.ls1, self.ls2 = (LayerScale(shape.width) if shape.layer_scale else nn.Identity() for _ in range(2))

    def forward(self, x: Float[Tensor, "n t width"], residual: bool = True) -> Float[Tensor, "n t width"]:
        x = x + self.ls1(self.attn(self.norm1(x)))
        output: Tensor = self.ls2(self.mlp(self.norm2(x)))
        return x + output if residual else output


class Attention(nn.Module):
    """Multi-head self-attention with one projection for queries, keys and values."""

    def __init__(self, width: int, heads: int, qkv_bias: bool) -> None:
        super().__init__()
        self.heads, self.proj = heads, nn.Linear(width, width)
        self.qkv = nn.Linear(width, 3 * width, bias=qkv_bias)

    def forward(self, x: Float[Tensor, "n t width"]) -> Float[Tensor, "n t width"]:
        q, k, v = self.qkv(x).unflatten(2, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)  # [n, heads, t, width / heads]
        attended = F.scaled_dot_product_attention(q, k, v)
        mixed: Tensor = self.proj(attended.transpose(1, 2).flatten(2))
        return mixed


class LayerScale(nn.Module):
    """One learned factor for each channel (Touvron et al. 2021)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(width))

    def forward(self, x: Float[Tensor, "n t width"]) -> Float[Tensor, "n t width"]:
        return x * self.gamma


class MLP(nn.Module):
    """Two layers with GELU between them."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: Float[Tensor, "n t width"]) -> Float[Tensor, "n t width"]:
        output: Tensor = self.fc2(F.gelu(self.fc1(x)))
        return output


class SwiGLU(nn.Module):
    """A gated MLP (Shazeer 2020); `w12` holds gate and value, as DINOv2's giant has them."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.w12, self.w3 = nn.Linear(width, 2 * hidden), nn.Linear(hidden, width)

    def forward(self, x: Float[Tensor, "n t width"]) -> Float[Tensor, "n t width"]:
        gate, value = self.w12(x).chunk(2, dim=-1)
        output: Tensor = self.w3(F.silu(gate) * value)
        return output
