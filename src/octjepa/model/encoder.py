"""The encoder: patches of selected tokens and their positions in, one feature vector for each token out.

It receives only the tokens it is given, never a whole volume, so a hidden patch cannot leak into it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from octjepa.model.blocks import NORM_EPS, Stack, initialise
from octjepa.model.positions import Rope, rope_tables, sincos
from octjepa.model.stem import PatchMLP
from octjepa.recipe import ROPE_BASE


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
        if self.positions == "sincos":
            tables = None
            tokens = tokens + sincos(coordinates, self.width)
        else:
            tables = rope_tables(coordinates, self.width // self.heads, self.positions == "rope_tiled", self.rope)
        *early, last = self.blocks.intermediate_features(tokens, tables, depths)
        normed = [F.layer_norm(one.float(), (self.width,), eps=NORM_EPS) for one in early]
        return torch.cat([*normed, self.norm(last)], dim=-1)  # [b, t, w * depths]

    def forward(
        self, patches: Float[Tensor, "b t voxels"], coordinates: Float[Tensor, "b t 3"]
    ) -> Float[Tensor, "b t w"]:
        return self.encode(self.embed_patches(patches), coordinates)
