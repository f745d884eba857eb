"""The encoder: patches of selected tokens and their positions in, one feature vector for each token out.

It receives only the tokens it is given, never a whole volume, so a hidden patch cannot leak into it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from octjepa.model.blocks import NORM_EPS, Stack, initialise
from octjepa.model.positions import Rope, encode_positions
from octjepa.recipe import ROPE_BASE, SUB_PATCH

HIDDEN = 48  # features of a sub-patch in `PatchMLP`


class PatchMLP(nn.Module):
    """The stem `patch_mlp`: voxels of a patch -> its sub-patches -> linear, GELU -> all of them -> linear to `width`.

    A lesion may be a fiftieth of a patch; one linear layer over all its voxels cannot tell where in the patch it is. A
    convolution with overlap could, but would carry voxels of a hidden patch into its visible neighbour.
    """

    def __init__(self, patch_size: tuple[int, int, int], width: int) -> None:
        super().__init__()
        counts = tuple(size // part for size, part in zip(patch_size, SUB_PATCH, strict=True))
        if any(size % part for size, part in zip(patch_size, SUB_PATCH, strict=True)):
            raise ValueError(f"patches of {patch_size} cannot be divided into sub-patches of {SUB_PATCH}")
        self.grid = tuple(size for pair in zip(counts, SUB_PATCH, strict=True) for size in pair)  # [n, 2, n, 4, n, 4]
        self.inner = nn.Linear(math.prod(SUB_PATCH), HIDDEN)
        self.activation = nn.GELU()
        self.outer = nn.Linear(HIDDEN * math.prod(counts), width)

    def initialise(self) -> None:
        """Unit variance before the GELU for voxels of unit variance: at 0.02 it would be all but linear."""
        nn.init.trunc_normal_(self.inner.weight, std=self.inner.in_features**-0.5)

    def forward(self, patches: Float[Tensor, "b t voxels"]) -> Float[Tensor, "b t w"]:
        parts = patches.unflatten(-1, self.grid).permute(0, 1, 2, 4, 6, 3, 5, 7)  # [b, t, n, n, n, 2, 4, 4]
        hidden = self.activation(self.inner(parts.flatten(5).flatten(2, 4)))  # [b, t, sub-patches, hidden]
        embedded: Tensor = self.outer(hidden.flatten(2))
        return embedded


class Encoder(nn.Module):
    """ViT over tokens of a volume. `positions` is "rope", "rope_tiled" or "sincos", `rope` its frequencies.

    `stem` embeds the voxels of a patch; None: one linear layer.
    """

    def __init__(
        self,
        patch_voxels: int,
        width: int,
        depth: int,
        heads: int,
        positions: str = "rope",
        rope: Rope = ROPE_BASE,
        stem: PatchMLP | None = None,
    ) -> None:
        super().__init__()
        self.width, self.heads, self.positions, self.rope = width, heads, positions, rope
        self.embed: nn.Linear | PatchMLP = nn.Linear(patch_voxels, width) if stem is None else stem
        self.blocks = Stack(width, depth, heads)
        self.norm = nn.LayerNorm(width, eps=NORM_EPS)
        initialise(self, self.blocks.output_layers())
        if stem is not None:
            stem.initialise()

    def embed_patches(self, patches: Float[Tensor, "b t voxels"]) -> Float[Tensor, "b t w"]:
        """Voxels -> token vectors by the stem, fp32. Nothing crosses the border of a patch."""
        # fp32 from here on: the residual stream must not lose small updates to bf16
        embedded: Tensor = self.embed(patches).float()
        return embedded

    def encode(self, tokens: Float[Tensor, "b t w"], coordinates: Float[Tensor, "b t 3"]) -> Float[Tensor, "b t w"]:
        """Embedded tokens -> features, after the final norm, fp32."""
        return self.intermediate_features(tokens, coordinates, (len(self.blocks),))

    def intermediate_features(
        self, tokens: Float[Tensor, "b t w"], coordinates: Float[Tensor, "b t 3"], depths: Sequence[int]
    ) -> Float[Tensor, "b t f"]:
        """Features after each of `depths` blocks, concatenated; the last of `depths` is the encoder's full depth.

        The last one passes the final norm, the others a layer norm without parameters, so that an encoder has the
        same weights whatever the number of supervised depths.
        """
        tokens, tables = encode_positions(tokens, coordinates, self.heads, self.positions, self.rope)
        *early, last = self.blocks.intermediate_features(tokens, tables, depths)
        normed = [F.layer_norm(features.float(), (self.width,), eps=NORM_EPS) for features in early]
        return torch.cat([*normed, self.norm(last)], dim=-1)  # [b, t, w * depths]

    def forward(
        self, patches: Float[Tensor, "b t voxels"], coordinates: Float[Tensor, "b t 3"]
    ) -> Float[Tensor, "b t w"]:
        return self.encode(self.embed_patches(patches), coordinates)
