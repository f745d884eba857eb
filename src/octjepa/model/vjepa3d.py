"""VJEPA3D: context encoder, EMA target encoder and predictor, as one module without any training logic.

Two arms share it. `vjepa`: the context encoder is given visible tokens only and a transformer predicts the rest.
`normalized_mse`, the founding design: the encoder sees every place, hidden patches replaced by a learned mask token
before anything reads them, and an MLP predicts. The target encoder sees all selected tokens, never gets a
gradient, and its output is layer-normed per token without parameters, in fp32 (V-JEPA 2, Assran et al. 2025).
"""

from __future__ import annotations

import copy
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from octjepa.model.encoder import Encoder, take
from octjepa.model.predictor import MLPPredictor, TransformerPredictor
from octjepa.model.sizes import SIZES
from octjepa.recipe import Recipe


class Prediction(NamedTuple):
    """What the objective compares: at each hidden token the predicted and the true target features, fp32."""

    predicted: Float[Tensor, "b m w"]
    target: Float[Tensor, "b m w"]
    all_targets: Float[Tensor, "b t w"]


class VJEPA3D(nn.Module):
    """Built from a recipe by `VJEPA3D.from_recipe`; sizes are named in `octjepa.model.sizes`."""

    def __init__(
        self,
        arm: str = "vjepa",
        size: str = "test",
        patch_size: tuple[int, int, int] = (4, 16, 16),
        positions: str = "rope",
        predictor_width: int | None = None,
        predictor_depth: int | None = None,
    ) -> None:
        super().__init__()
        named = SIZES[size]
        self.arm, self.size, self.patch_size = arm, size, patch_size
        voxels = patch_size[0] * patch_size[1] * patch_size[2]
        self.context_encoder = Encoder(voxels, named.width, named.depth, named.heads, positions)
        self.predictor: TransformerPredictor | MLPPredictor
        if arm == "vjepa":
            width = predictor_width or named.predictor_width
            depth = predictor_depth or named.predictor_depth
            self.predictor = TransformerPredictor(named.width, width, depth, named.predictor_heads, positions)
        elif arm == "normalized_mse":
            self.predictor = MLPPredictor(named.width, predictor_width or named.width)
            self.mask_token = nn.Parameter(torch.zeros(named.width))
            nn.init.trunc_normal_(self.mask_token, std=0.02)
        else:
            raise ValueError(f"unknown arm {arm!r}: vjepa or normalized_mse")
        self.target_encoder = copy.deepcopy(self.context_encoder).requires_grad_(False)

    @classmethod
    def from_recipe(cls, recipe: Recipe) -> VJEPA3D:
        model = recipe.model
        return cls(
            recipe.objective.name,
            model.size,
            recipe.tokens.patch_size,
            model.positions,
            model.predictor_width,
            model.predictor_depth,
        )

    def predict(
        self,
        context_patches: Float[Tensor, "b t voxels"],
        target_patches: Float[Tensor, "b t voxels"],
        places: Float[Tensor, "b t 3"],
        context: Int[Tensor, "b n"],
        target: Int[Tensor, "b m"],
    ) -> Prediction:
        """The training path. `context` and `target` index the `t` selected tokens of each sample, disjoint."""
        truth = self.targets(target_patches, places)
        if isinstance(self.predictor, TransformerPredictor):
            context_places = take(places, context)
            features = self.context_encoder(take(context_patches, context), context_places)
            predicted = self.predictor(features, context_places, take(places, target))
        else:
            tokens = self.context_encoder.embed_patches(context_patches)
            visible = torch.zeros(tokens.shape[:2], dtype=torch.bool, device=tokens.device).scatter(1, context, True)
            # where, not a product: a NaN in a hidden voxel must not reach the loss either
            tokens = torch.where(visible.unsqueeze(-1), tokens, self.mask_token)
            predicted = self.predictor(take(self.context_encoder.encode(tokens, places), target))
        return Prediction(predicted, take(truth, target), truth)

    @torch.no_grad()
    def targets(self, patches: Float[Tensor, "b t voxels"], places: Float[Tensor, "b t 3"]) -> Float[Tensor, "b t w"]:
        """Target features of every selected token: fp32, layer-normed without parameters, no gradient."""
        features = self.target_encoder(patches, places).float()
        return F.layer_norm(features, features.shape[-1:])

    def forward(
        self,
        context_view: Float[Tensor, "b d h w"],
        target_view: Float[Tensor, "b d h w"],
        mask: Bool[Tensor, "b patches"],
    ) -> Prediction:
        """Whole volumes and a mask over their patches in raster order (True is hidden, equally many a sample).

        Raises ValueError when samples hide different numbers of patches: static shapes need equal counts.
        """
        counts = mask.sum(dim=1)
        if int(counts.min()) != int(counts.max()) or int(counts.min()) in (0, mask.shape[1]):
            raise ValueError(f"every sample must hide the same number of patches, not none or all: {counts.tolist()}")
        hidden = int(counts[0])
        order = mask.to(torch.int8).argsort(dim=1, stable=True)
        places = grid_places(self.grid_of(context_view), context_view.device).expand(len(mask), -1, -1)
        return self.predict(
            self.patches(context_view), self.patches(target_view), places, order[:, :-hidden], order[:, -hidden:]
        )

    def grid_of(self, view: Float[Tensor, "b d h w"]) -> tuple[int, int, int]:
        d, h, w = (size // patch for size, patch in zip(view.shape[1:], self.patch_size, strict=True))
        return d, h, w

    def patches(self, view: Float[Tensor, "b d h w"]) -> Float[Tensor, "b t voxels"]:
        """Non-overlapping patches in raster order (slice, depth, width), each flattened the same way."""
        (p, q, r), (d, h, w) = self.patch_size, self.grid_of(view)
        cut = view.reshape(-1, d, p, h, q, w, r).permute(0, 1, 3, 5, 2, 4, 6)
        return cut.reshape(view.shape[0], d * h * w, p * q * r)


def grid_places(grid: tuple[int, int, int], device: torch.device | None = None) -> Float[Tensor, "t 3"]:
    """Index coordinates of a full grid in raster order."""
    axes = [torch.arange(n, dtype=torch.float32, device=device) for n in grid]
    return torch.stack(torch.meshgrid(*axes, indexing="ij"), dim=-1).reshape(-1, 3)
