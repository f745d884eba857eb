"""The pre-norm transformer block: attention with 3D rotary positions, and an MLP.

The residual stream keeps the dtype of its input (fp32 in training); matrix products run in autocast's dtype.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from octjepa.distributed.runtime import recompute
from octjepa.model.positions import RopeTables, rotate

NORM_EPS = 1e-6
PLAIN_TOKENS = 256


class Attention(nn.Module):
    """Multi-head self-attention; `tables` of `rope_tables` rotate queries and keys."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        if width % heads or (width // heads) % 2:
            raise ValueError(f"width {width} over {heads} heads must give an even number of features a head")
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Float[Tensor, "b t w"], tables: RopeTables | None, first: int = 0) -> Float[Tensor, "b s w"]:
        """The outputs of tokens `first` on (s = t - first), which attend to all t tokens."""
        if first:
            width = x.shape[-1]
            weight, bias = self.qkv.weight, self.qkv.bias
            q = F.linear(x[:, first:], weight[:width], bias[:width]).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            k, v = F.linear(x, weight[width:], bias[width:]).unflatten(-1, (2, self.heads, -1)).permute(2, 0, 3, 1, 4)
        else:
            q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)  # each [b, heads, t, f]
        if tables is not None:
            q, k = rotate(q, tables.from_token(first)), rotate(k, tables)
        return self.out(attend(q, k, v).transpose(1, 2).flatten(-2))


def trains_by_plain_products(dtype: torch.dtype, device: torch.device) -> bool:
    """Whether attention over up to `PLAIN_TOKENS` is plain products while gradients are needed: on a CPU in bf16.

    There the backward pass of torch's own attention is slower, and the `t * t` scores are small
    (`git show 7f034832:benchmarks/attention.py`).
    """
    return dtype == torch.bfloat16 and device.type == "cpu"


def attend(
    q: Float[Tensor, "b h s f"], k: Float[Tensor, "b h t f"], v: Float[Tensor, "b h t f"]
) -> Float[Tensor, "b h s f"]:
    """softmax(q k' / sqrt(f)) v, by torch's own attention or, where training is faster by them, by plain products."""
    plain = torch.is_grad_enabled() and trains_by_plain_products(q.dtype, q.device)
    if plain and k.shape[-2] <= PLAIN_TOKENS:
        scores = (q * q.shape[-1] ** -0.5) @ k.transpose(-2, -1)
        return scores.softmax(dim=-1).to(v.dtype) @ v  # the kernel adds up in fp32
    return F.scaled_dot_product_attention(q, k, v)


class Block(nn.Module):
    """x + attention(norm(x)), then x + MLP(norm(x))."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(width, eps=NORM_EPS)
        self.attention = Attention(width, heads)
        self.norm2 = nn.LayerNorm(width, eps=NORM_EPS)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(
        self,
        x: Float[Tensor, "b t w"],
        tables: RopeTables | None,
        paths: Float[Tensor, "2 b"] | None = None,
        first: int = 0,
    ) -> Float[Tensor, "b s w"]:
        """`paths`: factors of the attention and the MLP of each sample, for drop-path.

        Only tokens `first` on are returned, and computed except for keys and values.
        """
        if paths is None:
            x = x[:, first:] + self.attention(self.norm1(x), tables, first)
            return x + self.mlp(self.norm2(x))
        x = x + paths[0, :, None, None] * self.attention(self.norm1(x), tables)
        return x + paths[1, :, None, None] * self.mlp(self.norm2(x))


@contextmanager
def uncompiled() -> Iterator[None]:
    """Runs compiled blocks eagerly: for evaluation, where every new shape would be compiled."""
    if "torch._dynamo" not in sys.modules:  # nothing is compiled, and its import takes seconds
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield


def initialise(module: nn.Module, output_depths: dict[nn.Linear, int]) -> None:
    """Truncated normal of 0.02, zero biases; output layers of block n divided by sqrt(2 n), as in V-JEPA 2."""
    for child in module.modules():
        if isinstance(child, nn.Linear):
            nn.init.trunc_normal_(child.weight, std=0.02)
            if child.bias is not None:
                nn.init.zeros_(child.bias)
    for linear, depth in output_depths.items():
        linear.weight.data.div_((2.0 * depth) ** 0.5)


class Stack(nn.ModuleList):
    """A sequence of blocks.

    `recompute` trades time for memory: activations within a block are not kept for the backward pass. `paths` is
    drop-path (stochastic depth, Huang et al. 2016), for fine-tuning only: 0 for a dropped attention or MLP of a
    sample, 1 / keep probability for the others. It is drawn outside, from the sample's id: the network has no state.
    """

    recompute = False
    paths: Float[Tensor, "depth 2 b"] | None = None

    def __init__(self, width: int, depth: int, heads: int) -> None:
        super().__init__(Block(width, heads) for _ in range(depth))

    def output_layers(self) -> dict[nn.Linear, int]:
        """The last linear layer of each attention and MLP, with the number of its block (from 1)."""
        layers: dict[nn.Linear, int] = {}
        for number, block in enumerate(self, start=1):
            assert isinstance(block, Block)
            last = block.mlp[2]
            assert isinstance(last, nn.Linear)
            layers[block.attention.out] = number
            layers[last] = number
        return layers

    def forward(self, x: Float[Tensor, "b t w"], tables: RopeTables | None, first: int = 0) -> Float[Tensor, "b s w"]:
        """The residual stream after all blocks, of tokens `first` on: the last block computes no others."""
        return self.intermediate_features(x, tables, (len(self),), first)[0]

    def intermediate_features(
        self, x: Float[Tensor, "b t w"], tables: RopeTables | None, depths: Sequence[int], first: int = 0
    ) -> list[Float[Tensor, "b _ w"]]:
        """The residual stream after each of `depths` blocks (ascending, from 1); the last holds tokens `first` on."""
        features = []
        for number, block in enumerate(self, start=1):
            paths = None if self.paths is None else self.paths[number - 1]
            start = first if number == len(self) else 0
            if self.recompute and torch.is_grad_enabled():
                x = recompute(block, x, tables, paths, start)
            else:
                x = block(x, tables, paths, start)
            if number in depths:
                features.append(x)
        return features
