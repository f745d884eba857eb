"""The two predictors, a narrow transformer (V-JEPA 2) and a 2-layer MLP for `normalized_mse`; LeVJEPA's projector."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn

from octjepa.model.blocks import NORM_EPS, Stack, initialise
from octjepa.model.positions import Rope, encode_positions
from octjepa.recipe import ROPE_BASE

PROJECTION = 64  # features of a projection; SIGReg tests it along as many random directions


@dataclass(frozen=True)
class PredictorSize:
    """Width, depth and heads of a predictor. A predictor without attention (`MLPPredictor`) has only a width."""

    width: int
    depth: int
    heads: int


class TransformerPredictor(nn.Module):
    """Context features and their positions, plus mask tokens at target positions -> the targets there (V-JEPA 2).

    `in_features` and `out_features` are the widths of a context feature and of a prediction: the encoder's width times
    the supervised depths, or a patch's voxels. `fusion` is the width of the hidden layer of an MLP that fuses several
    depths of a context feature; None: one linear layer. `visible_head`: visible positions have a separate last
    layer (both as in V-JEPA 2.1), instead of that of hidden tokens.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        size: PredictorSize,
        positions: str = "rope",
        rope: Rope = ROPE_BASE,
        fusion: int | None = None,
        visible_head: bool = False,
    ) -> None:
        super().__init__()
        width = size.width
        self.width, self.heads, self.positions, self.rope = width, size.heads, positions, rope
        # `enter` and `leave` are names in stored checkpoints; V-JEPA 2 calls them predictor_embed and predictor_proj
        self.enter: nn.Module = nn.Linear(in_features, width)
        if fusion is not None:
            self.enter = nn.Sequential(nn.Linear(in_features, fusion), nn.GELU(), nn.Linear(fusion, width))
        self.mask_token = nn.Parameter(torch.zeros(width))
        self.blocks = Stack(width, size.depth, size.heads)
        self.norm = nn.LayerNorm(width, eps=NORM_EPS)
        self.leave = nn.Linear(width, out_features)
        self.leave_visible = nn.Linear(width, out_features) if visible_head else None
        initialise(self, self.blocks.output_layers())
        nn.init.trunc_normal_(self.mask_token, std=0.02)

    def forward(
        self,
        context: Float[Tensor, "b n w"],
        context_positions: Float[Tensor, "b n 3"],
        target_positions: Float[Tensor, "b m 3"],
    ) -> tuple[Float[Tensor, "b n f"] | None, Float[Tensor, "b m f"]]:
        """Predictions at the visible positions (None without a head for them) and at the hidden tokens, fp32."""
        embedded = self.enter(context).float()  # [b, n, w]
        masks = self.mask_token.expand(embedded.shape[0], target_positions.shape[1], -1)
        tokens = torch.cat([embedded, masks], dim=1)  # [b, n + m, w]
        positions = torch.cat([context_positions, target_positions], dim=1)
        tokens, tables = encode_positions(tokens, positions, self.heads, self.positions, self.rope)
        visible = embedded.shape[1]
        if self.leave_visible is None:
            return None, self.leave(self.norm(self.blocks(tokens, tables, visible))).float()
        outputs = self.norm(self.blocks(tokens, tables))
        return self.leave_visible(outputs[:, :visible]).float(), self.leave(outputs[:, visible:]).float()


class MLPPredictor(nn.Module):
    """Two layers applied to each token by itself, with `hidden` units between."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(width, hidden), nn.GELU(), nn.Linear(hidden, width))
        initialise(self, {})

    def forward(self, features: Float[Tensor, "b m w"]) -> Float[Tensor, "b m w"]:
        predicted: Tensor = self.layers(features).float()
        return predicted


class Projector(nn.Module):
    """Three layers from the mean token of a view to its projection of `PROJECTION` features, with `hidden` units.

    Layer norms between them take the place of LeJEPA's batch norms, which would make a projection depend on the other
    volumes of a micro-batch.
    """

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(width, hidden),
            nn.LayerNorm(hidden, eps=NORM_EPS),
            nn.GELU(),
            nn.Linear(hidden, hidden),
            nn.LayerNorm(hidden, eps=NORM_EPS),
            nn.GELU(),
            nn.Linear(hidden, PROJECTION),
        )

    def forward(self, views: Float[Tensor, "r v w"]) -> Float[Tensor, "r v p"]:
        projected: Tensor = self.layers(views).float()
        return projected
