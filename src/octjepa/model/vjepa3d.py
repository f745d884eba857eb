"""VJEPA3D: context encoder, EMA target encoder and predictor, as one module without any training logic.

Four objectives share it, one recipe and one data order:
`vjepa` (V-JEPA 2, Assran et al. 2025): the context encoder is given visible tokens only, a transformer predicts the
target encoder's features at the hidden ones. `vjepa_dense` (V-JEPA 2.1): the same, supervised at four depths of the
encoder and at visible tokens too. `mae` (He et al. 2022): the same networks, but what is predicted are the pixels of a
hidden patch, normalised patch by patch. `normalized_mse`: the encoder sees every place, hidden
patches replaced by a learned mask token before anything reads them, and an MLP predicts.

The target encoder sees all selected tokens and never gets a gradient; its output is layer-normed per token and depth
without parameters, in fp32.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from octjepa.model.blocks import Block, Stack
from octjepa.model.encoder import Encoder, gather_tokens
from octjepa.model.predictor import MLPPredictor, TransformerPredictor
from octjepa.model.sizes import SIZES
from octjepa.recipe import Recipe

OBJECTIVES = ("vjepa", "vjepa_dense", "normalized_mse", "mae")
DENSE_DEPTHS = 4
_PIXEL_EPS = 1e-6


class Prediction(NamedTuple):
    """What the objective compares: at each hidden token what was predicted and what is there, fp32.

    `context` are the student's features of visible tokens (of all tokens with `normalized_mse`). `visible` holds
    predictions and targets at visible tokens, where the objective supervises them (`vjepa_dense`).
    """

    predicted: Float[Tensor, "b m f"]
    target: Float[Tensor, "b m f"]
    all_targets: Float[Tensor, "b t f"]
    context: Float[Tensor, "b n w"]
    visible: tuple[Float[Tensor, "b n f"], Float[Tensor, "b n f"]] | None = None


class VJEPA3D(nn.Module):
    """Built from a recipe by `VJEPA3D.from_recipe`; sizes are named in `octjepa.model.sizes`."""

    def __init__(
        self,
        objective: str = "vjepa",
        size: str = "test",
        patch_size: tuple[int, int, int] = (4, 16, 16),
        positions: str = "rope",
        predictor_width: int | None = None,
        predictor_depth: int | None = None,
        recompute: bool = False,
    ) -> None:
        super().__init__()
        if objective not in OBJECTIVES:
            raise ValueError(f"unknown objective {objective!r}: one of {', '.join(OBJECTIVES)}")
        named = SIZES[size]
        self.objective, self.size, self.patch_size = objective, size, patch_size
        voxels = math.prod(patch_size)
        self.context_encoder = Encoder(voxels, named.width, named.depth, named.heads, positions)
        self.depths = _depths(named.depth) if objective == "vjepa_dense" else (named.depth,)
        self.predictor: TransformerPredictor | MLPPredictor
        if objective == "normalized_mse":
            self.predictor = MLPPredictor(named.width, predictor_width or named.width)
            self.mask_token = nn.Parameter(torch.zeros(named.width))
            nn.init.trunc_normal_(self.mask_token, std=0.02)
        else:
            enters = len(self.depths) * named.width
            self.predictor = TransformerPredictor(
                enters,
                voxels if objective == "mae" else enters,
                predictor_width or named.predictor_width,
                predictor_depth or named.predictor_depth,
                named.predictor_heads,
                positions,
            )
        self.target_encoder = copy.deepcopy(self.context_encoder).requires_grad_(False)
        for stack in (module for module in self.modules() if isinstance(module, Stack)):
            stack.recompute = recompute

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
            recipe.machine.recompute,
        )

    def compile_blocks(self) -> None:
        """Every block by torch.compile from now on: one compilation for each shape, weights and their names stay.

        Needs a C++ compiler on a CPU.
        """
        for block in (module for module in self.modules() if isinstance(module, Block)):
            block.compile(dynamic=False)

    def predict(
        self,
        context_patches: Float[Tensor, "b t voxels"],
        target_patches: Float[Tensor, "b t voxels"],
        positions: Float[Tensor, "b t 3"],
        context: Int[Tensor, "b n"],
        target: Int[Tensor, "b m"],
    ) -> Prediction:
        """The training path. `context` and `target` index the `t` selected tokens of each sample, disjoint."""
        truth = self.compute_targets(target_patches, positions)
        hidden_truth = gather_tokens(truth, target)
        if not isinstance(self.predictor, TransformerPredictor):
            features = self._masked_features(context_patches, positions, context)
            return Prediction(self.predictor(gather_tokens(features, target)), hidden_truth, truth, features)
        context_positions = gather_tokens(positions, context)
        embedded = self.context_encoder.embed_patches(gather_tokens(context_patches, context))
        features = self.context_encoder.intermediate_features(embedded, context_positions, self.depths)
        seen, hidden = self.predictor(features, context_positions, gather_tokens(positions, target))
        own = features[..., -self.context_encoder.width :]
        visible = (seen, gather_tokens(truth, context)) if self.objective == "vjepa_dense" else None
        return Prediction(hidden, hidden_truth, truth, own, visible)

    def encode(
        self, patches: Float[Tensor, "b t voxels"], positions: Float[Tensor, "b t 3"], student: bool = False
    ) -> Float[Tensor, "b t w"]:
        """Features of the target encoder, or of the student, at every token given."""
        encoder = self.context_encoder if student else self.target_encoder
        features: Tensor = encoder(patches, positions).float()
        return features

    def targets(
        self, patches: Float[Tensor, "b t voxels"], positions: Float[Tensor, "b t 3"]
    ) -> Float[Tensor, "b t f"]:
        """The targets at every token given, for callers outside `predict`: a sharded model needs one entry a call."""
        return self.compute_targets(patches, positions)

    def _masked_features(
        self, patches: Float[Tensor, "b t voxels"], positions: Float[Tensor, "b t 3"], context: Int[Tensor, "b n"]
    ) -> Float[Tensor, "b t w"]:
        """Features of all positions for `normalized_mse`, with a mask token wherever no context is."""
        tokens = self.context_encoder.embed_patches(patches)
        visible = torch.zeros(tokens.shape[:2], dtype=torch.bool, device=tokens.device).scatter(1, context, True)
        # where, not a product: a NaN in a hidden voxel must not reach the loss either
        return self.context_encoder.encode(torch.where(visible.unsqueeze(-1), tokens, self.mask_token), positions)

    @torch.no_grad()
    def compute_targets(
        self, patches: Float[Tensor, "b t voxels"], positions: Float[Tensor, "b t 3"]
    ) -> Float[Tensor, "b t f"]:
        """What is to be predicted at every selected token: fp32, no gradient.

        Features of the target encoder, layer-normed without parameters at each supervised depth; with `mae` the
        patch's own pixels, less their mean, over their spread.
        """
        if self.objective == "mae":
            pixels = patches.float()
            spread = (pixels.var(dim=-1, keepdim=True) + _PIXEL_EPS).sqrt()
            return (pixels - pixels.mean(dim=-1, keepdim=True)) / spread
        return self.target_features(patches, positions, self.depths)

    @torch.no_grad()
    def target_features(
        self, patches: Float[Tensor, "b t voxels"], positions: Float[Tensor, "b t 3"], depths: Sequence[int]
    ) -> Float[Tensor, "b t f"]:
        """The target encoder's features after each of `depths`, each layer-normed without parameters, fp32."""
        width = self.target_encoder.width
        embedded = self.target_encoder.embed_patches(patches)
        features = self.target_encoder.intermediate_features(embedded, positions, depths).float()
        return F.layer_norm(features.unflatten(-1, (-1, width)), (width,)).flatten(-2)

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
        positions = grid_positions(self.grid_of(context_view), context_view.device).expand(len(mask), -1, -1)
        return self.predict(
            self.patches(context_view), self.patches(target_view), positions, order[:, :-hidden], order[:, -hidden:]
        )

    def grid_of(self, view: Float[Tensor, "b d h w"]) -> tuple[int, int, int]:
        d, h, w = (size // patch for size, patch in zip(view.shape[1:], self.patch_size, strict=True))
        return d, h, w

    def patches(self, view: Float[Tensor, "b d h w"]) -> Float[Tensor, "b t voxels"]:
        """Non-overlapping patches in raster order (slice, depth, width), each flattened the same way."""
        (p, q, r), (d, h, w) = self.patch_size, self.grid_of(view)
        cut = view.reshape(-1, d, p, h, q, w, r).permute(0, 1, 3, 5, 2, 4, 6)
        return cut.reshape(view.shape[0], d * h * w, p * q * r)


def _depths(depth: int) -> tuple[int, ...]:
    """Four depths spread evenly over an encoder of `depth` blocks, the last one included; fewer for fewer blocks."""
    return tuple(sorted({math.ceil(depth * share / DENSE_DEPTHS) for share in range(1, DENSE_DEPTHS + 1)}))


def grid_positions(grid: tuple[int, int, int], device: torch.device | None = None) -> Float[Tensor, "t 3"]:
    """Index coordinates of a full grid in raster order."""
    axes = [torch.arange(n, dtype=torch.float32, device=device) for n in grid]
    return torch.stack(torch.meshgrid(*axes, indexing="ij"), dim=-1).reshape(-1, 3)
