"""The two predictors: a narrow transformer (V-JEPA 2), and a 2-layer MLP for `normalized_mse`."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn

from octjepa.model.blocks import NORM_EPS, Stack, initialise
from octjepa.model.positions import Rope, rope_tables, sincos
from octjepa.recipe import ROPE_BASE


class TransformerPredictor(nn.Module):
    """Context features and their positions, plus mask tokens at target positions -> the targets there (V-JEPA 2).

    `in_features` and `out_features` are the widths of a context feature and of a prediction: the encoder's width times
    the supervised depths, or a patch's voxels.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        width: int,
        depth: int,
        heads: int,
        positions: str = "rope",
        rope: Rope = ROPE_BASE,
    ) -> None:
        super().__init__()
        self.width, self.heads, self.positions, self.rope = width, heads, positions, rope
        self.enter = nn.Linear(in_features, width)
        self.mask_token = nn.Parameter(torch.zeros(width))
        self.blocks = Stack(width, depth, heads)
        self.norm = nn.LayerNorm(width, eps=NORM_EPS)
        self.leave = nn.Linear(width, out_features)
        initialise(self, self.blocks.output_layers())
        nn.init.trunc_normal_(self.mask_token, std=0.02)

    def forward(
        self,
        context: Float[Tensor, "b n w"],
        context_positions: Float[Tensor, "b n 3"],
        target_positions: Float[Tensor, "b m 3"],
    ) -> tuple[Float[Tensor, "b n f"], Float[Tensor, "b m f"]]:
        """Predictions at the visible and at the hidden positions, fp32."""
        embedded = self.enter(context).float()  # [b, n, w]
        masks = self.mask_token.expand(embedded.shape[0], target_positions.shape[1], -1)
        tokens = torch.cat([embedded, masks], dim=1)  # [b, n + m, w]
        positions = torch.cat([context_positions, target_positions], dim=1)
        if self.positions == "sincos":
            tables = None
            tokens = tokens + sincos(positions, self.width)
        else:
            tables = rope_tables(positions, self.width // self.heads, self.positions == "rope_tiled", self.rope)
        predicted: Tensor = self.leave(self.norm(self.blocks(tokens, tables))).float()
        return predicted[:, : embedded.shape[1]], predicted[:, embedded.shape[1] :]


class MLPPredictor(nn.Module):
    """Two layers applied to each token by itself, with `hidden` units between."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width))
        initialise(self, {})

    def forward(self, features: Float[Tensor, "b m w"]) -> Float[Tensor, "b m w"]:
        predicted: Tensor = self.layers(features).float()
        return predicted
