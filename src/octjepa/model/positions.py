"""Position encodings: 3D rotary embeddings in attention, or 3D sin-cos vectors added to tokens.

Coordinates are real numbers `[.., 3]` = (slice, depth, column) of the token's centre, in token steps or in
millimetres, so one model serves grids of any shape and unevenly spaced B-scans. Tables are fp32 always:
in bf16 neighbouring positions past 256 would coincide.
Sources: RoFormer (Su et al. 2021) for the rotation; V-JEPA 2 (Assran et al. 2025) for the split of a head
into three axes; the sin-cos form is that of Vaswani et al. 2017, a third of the width per axis.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Complex, Float
from torch import Tensor

from octjepa.recipe import ROPE_BASE

# the base of all frequencies, or by axis the fastest and the slowest, in radians a unit of position (`Recipe.rope`)
Rope = float | tuple[tuple[float, float], ...]


def axis_width(head_width: int) -> int:
    """Features of a head that one axis rotates: an even third; the rest is not rotated."""
    return 2 * (head_width // 3 // 2)


def _frequencies(pairs: int, device: torch.device, base: float = ROPE_BASE) -> Float[Tensor, " pairs"]:
    return base ** -(torch.arange(pairs, dtype=torch.float32, device=device) / pairs)


def axis_frequencies(pairs: int, rope: Rope, device: torch.device) -> Float[Tensor, "axes pairs"]:
    """Radians a unit of position of each pair, the fastest first: for all axes alike (1 axis), or for each of three."""
    if isinstance(rope, int | float):
        return _frequencies(pairs, device, rope)[None]
    along = torch.arange(pairs, dtype=torch.float32, device=device) / max(pairs - 1, 1)  # 0 to 1
    return torch.stack([fastest * (slowest / fastest) ** along for fastest, slowest in rope])


class RopeTables(NamedTuple):
    """Cosine and signed sine of every feature's angle, fp32; `turns` is the same as one complex number a pair.

    `turns` is None where a pair has two angles, and off the CPU: compilers and exporters know real numbers best.
    """

    cosine: Float[Tensor, "batch 1 tokens head"]
    sine: Float[Tensor, "batch 1 tokens head"]
    turns: Complex[Tensor, "batch 1 tokens pairs"] | None = None

    def from_token(self, first: int) -> RopeTables:
        """The tables of tokens `first` on."""
        if not first:
            return self
        turns = None if self.turns is None else self.turns[:, :, first:]
        return RopeTables(self.cosine[:, :, first:], self.sine[:, :, first:], turns)


def rope_tables(
    coordinates: Float[Tensor, "batch tokens 3"], head_width: int, tiled: bool = False, rope: Rope = ROPE_BASE
) -> RopeTables:
    """The tables for `rotate`.

    Features `2i` and `2i+1` of an axis form a pair. The sine carries the sign of its pair's member, so that a
    rotation is two products and a swap of neighbours. `tiled` orders the angles as the released V-JEPA 2 weights
    expect, angle 1 to n and again 1 to n: there the two features of a pair rotate by different angles.
    """
    width = axis_width(head_width)
    if width == 0:
        raise ValueError(f"a head of {head_width} features is too narrow for three rotary axes: at least 6")
    angle = coordinates.float()[..., None] * axis_frequencies(width // 2, rope, coordinates.device)
    angle = torch.cat([angle, angle], dim=-1) if tiled else angle.repeat_interleave(2, dim=-1)
    angle = angle.flatten(-2)  # [b, t, 3 * width]
    rest = head_width - angle.shape[-1]
    angle = torch.nn.functional.pad(angle, (0, rest))
    sign = torch.ones(head_width, device=coordinates.device)
    sign[::2] = -1.0
    cosine, sine = angle.cos().unsqueeze(1), (angle.sin() * sign).unsqueeze(1)
    if tiled or coordinates.device.type != "cpu":
        return RopeTables(cosine, sine)
    return RopeTables(cosine, sine, torch.complex(cosine[..., ::2], sine[..., 1::2]))


def rotate(x: Float[Tensor, "batch heads tokens head"], tables: RopeTables) -> Float[Tensor, "batch heads tokens head"]:
    """Rotates each neighbouring pair of features by its token's angle; keeps the dtype.

    Complex numbers give the same bits as products and a swap (except for bf16 gradients, rounded once less), and are
    faster on a CPU (`git show 7f034832:benchmarks/rotary.py`).
    """
    cosine, sine, turns = tables
    if turns is not None and not torch.compiler.is_compiling():
        pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)).contiguous())
        return torch.view_as_real(pairs * turns).flatten(-2).to(x.dtype)
    swapped = x.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
    return (x * cosine + swapped * sine).to(x.dtype)


def sincos(coordinates: Float[Tensor, "batch tokens 3"], width: int) -> Float[Tensor, "batch tokens width"]:
    """Absolute positions to add to token vectors: per axis sines, then cosines; zeros fill an uneven rest."""
    pairs = width // 6
    angle = coordinates.float()[..., None] * _frequencies(pairs, coordinates.device)
    table = torch.cat([angle.sin(), angle.cos()], dim=-1).flatten(-2)
    return torch.nn.functional.pad(table, (0, width - table.shape[-1]))


def encode_positions(
    tokens: Float[Tensor, "batch tokens width"],
    coordinates: Float[Tensor, "batch tokens 3"],
    heads: int,
    positions: str,
    rope: Rope,
) -> tuple[Float[Tensor, "batch tokens width"], RopeTables | None]:
    """(tokens, the tables for their attention) by "rope", "rope_tiled" or "sincos", which is added to the tokens."""
    width = tokens.shape[-1]
    if positions == "sincos":
        return tokens + sincos(coordinates, width), None
    return tokens, rope_tables(coordinates, width // heads, positions == "rope_tiled", rope)
