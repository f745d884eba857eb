"""VJEPA3D: context encoder, EMA target encoder and predictor as one module, without any training logic.

All objectives (`octjepa.objectives`) share it, with one recipe and one data order. With V-JEPA 2 (Assran et al.
2025) the context encoder E is given only the visible tokens x_C, a narrow transformer P predicts at the positions of
the hidden tokens, and the target is what the EMA encoder E' makes of all tokens of the second view:

    loss = mean | P(E(x_C), positions of mask) - LayerNorm(E'(x'))_mask |

The target encoder never gets a gradient; its output is layer-normed per token and depth without parameters, in fp32.
Shapes: b samples and r masks of them, t selected tokens of each sample (n visible and m hidden), w features, f = w
times the depths predicted.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from octjepa.errors import RecipeError
from octjepa.model.blocks import Block, Stack
from octjepa.model.encoder import Encoder, PatchMLP
from octjepa.model.positions import Rope
from octjepa.model.predictor import MLPPredictor, PredictorSize, Projector, TransformerPredictor
from octjepa.objectives.base import Objective, Prediction, gather_tokens, get_objective
from octjepa.recipe import ROPE_BASE, SIZES, ModelSize, Recipe


def usual_predictor_size(
    objective: Objective, size: ModelSize, width: int | None = None, depth: int | None = None
) -> PredictorSize:
    """The predictor of a model: `width` and `depth` if they are set, else the objective's values, else the size's."""
    by_size = {"mlp": size.width, "projector": 4 * size.width}.get(objective.predictor, size.predictor_width)
    return PredictorSize(
        width or objective.predictor_width or by_size,
        depth or objective.predictor_depth or size.predictor_depth,
        size.predictor_heads,
    )


class VJEPA3D(nn.Module):
    """3D joint-embedding predictive model: context encoder, EMA target encoder and predictor.

    Usually built by `VJEPA3D.from_recipe`. Source: V-JEPA 2 (Assran et al. 2025).

    objective: a name of `octjepa.objectives`. size: a preset of `octjepa.recipe.SIZES` or any `ModelSize`. patch_size:
    voxels of a patch along slice, depth, column. positions: "rope", "rope_tiled" or "sincos". predictor_size: that of
    `usual_predictor_size` by default. recompute: recomputes activations in the backward pass. stem: "linear" or
    "patch_mlp".
    """

    def __init__(
        self,
        objective: str = "vjepa",
        size: str | ModelSize = "test",
        patch_size: tuple[int, int, int] = (4, 16, 16),
        positions: str = "rope",
        predictor_size: PredictorSize | None = None,
        recompute: bool = False,
        rope: Rope = ROPE_BASE,
        stem: str = "linear",
    ) -> None:
        super().__init__()
        size = SIZES[size] if isinstance(size, str) else size
        self.objective: Objective = get_objective(objective)
        self.patch_size = patch_size
        voxels = math.prod(patch_size)
        stem_mlp = PatchMLP(patch_size, size.width) if stem == "patch_mlp" else None
        self.context_encoder = Encoder(voxels, size.width, size.depth, size.heads, positions, rope, stem_mlp)
        self.depths = evenly_spread_depths(size.depth, self.objective.target_depths)
        predictor_size = predictor_size or usual_predictor_size(self.objective, size)
        self.predictor: TransformerPredictor | MLPPredictor | Projector
        if self.objective.predictor == "mlp":
            self.predictor = MLPPredictor(size.width, predictor_size.width)
            self.mask_token = nn.Parameter(torch.zeros(size.width))
            nn.init.trunc_normal_(self.mask_token, std=0.02)
        elif self.objective.predictor == "projector":
            self.predictor = Projector(size.width, predictor_size.width)
        else:
            features = len(self.depths) * size.width
            self.predictor = TransformerPredictor(
                features,
                voxels if self.objective.predicts_pixels else features,
                predictor_size,
                positions,
                rope,
                size.width if len(self.depths) > 1 else None,
                self.objective.supervises_visible,
            )
        self.target_encoder = copy.deepcopy(self.context_encoder).requires_grad_(False)
        for stack in (module for module in self.modules() if isinstance(module, Stack)):
            stack.recompute = recompute

    @classmethod
    def from_recipe(cls, recipe: Recipe) -> VJEPA3D:
        """The untrained model of a recipe, its weights drawn from torch's generator.

        Raises RecipeError where the objective needs another kind of views.
        """
        model = recipe.model
        objective = get_objective(recipe.objective.name)
        if objective.needs_halves and not recipe.views.halves:
            raise RecipeError(
                f"objective {recipe.objective.name} predicts one half of the B-scans from the other: set "
                "views.halves=true, with a store of `octjepa ingest ... --halves`"
            )
        return cls(
            recipe.objective.name,
            model.encoder_size,
            recipe.tokens.patch_size,
            model.positions,
            usual_predictor_size(objective, model.encoder_size, model.predictor_width, model.predictor_depth),
            recipe.machine.recompute,
            recipe.rope,
            model.stem,
        )

    def compile_blocks(self) -> None:
        """Compiles every block by torch.compile, once for each shape; weights and their names stay.

        Needs a C++ compiler on a CPU.
        """
        for block in (module for module in self.modules() if isinstance(module, Block)):
            block.compile(dynamic=False)

    def predict(
        self,
        context_patches: Float[Tensor, "b t voxels"],
        target_patches: Float[Tensor, "b t voxels"],
        positions: Float[Tensor, "b t 3"],
        context: Int[Tensor, "r n"],
        target: Int[Tensor, "r m"],
    ) -> Prediction:
        """The training path. `context` and `target` index the `t` selected tokens of each sample, disjoint.

        With several masks a sample there are r = masks * b rows, row `i * b + j` of mask `i` of sample `j`.
        """
        if isinstance(self.predictor, Projector):
            return self._project_views(self.predictor, context_patches, target_patches, positions, context, target)
        all_targets = self.compute_targets(target_patches, positions)  # [b, t, f]
        hidden_targets = gather_tokens(all_targets, target)  # [r, m, f]
        if not isinstance(self.predictor, TransformerPredictor):
            features = self._masked_features(context_patches, positions, context)  # [b, t, w]
            predicted = self.predictor(gather_tokens(features, target))  # [b, m, w]
            return Prediction(predicted, hidden_targets, all_targets, features)
        context_positions = gather_tokens(positions, context)  # [r, n, 3]
        embedded = self.context_encoder.embed_patches(gather_tokens(context_patches, context))  # [r, n, w]
        features = self.context_encoder.intermediate_features(embedded, context_positions, self.depths)  # [r, n, f]
        at_visible, at_hidden = self.predictor(features, context_positions, gather_tokens(positions, target))
        last = features[..., -self.context_encoder.width :]  # [r, n, w]: of the last depth
        visible = None if at_visible is None else (at_visible, gather_tokens(all_targets, context))
        return Prediction(at_hidden, hidden_targets, all_targets, last, visible)

    def _project_views(
        self,
        projector: Projector,
        context_patches: Float[Tensor, "b t voxels"],
        target_patches: Float[Tensor, "b t voxels"],
        positions: Float[Tensor, "b t 3"],
        context: Int[Tensor, "r n"],
        target: Int[Tensor, "r m"],
    ) -> Prediction:
        """Each mask gives two views of a sample: `context` in the first patches and `target` in the second.

        Their projections [r, 2, p] are compared with the mean projection of the sample, over the views of all masks.
        """
        first, second = (
            self.context_encoder(gather_tokens(patches, index), gather_tokens(positions, index))
            for patches, index in ((context_patches, context), (target_patches, target))
        )  # [r, n, w], [r, m, w]
        projections = projector(torch.stack([first.float().mean(dim=1), second.float().mean(dim=1)], dim=1))
        by_mask = projections.detach().unflatten(0, (-1, len(positions)))  # [masks, b, 2, p]
        centre = by_mask.mean(dim=(0, 2), keepdim=True).expand_as(by_mask).flatten(0, 1)  # [r, 2, p]
        return Prediction(projections, centre, centre, first)

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
        """`compute_targets` for callers outside `predict`: a sharded model gathers its weights once for each entry."""
        return self.compute_targets(patches, positions)

    @torch.no_grad()
    def compute_targets(
        self, patches: Float[Tensor, "b t voxels"], positions: Float[Tensor, "b t 3"]
    ) -> Float[Tensor, "b t f"]:
        """The objective's targets at every selected token: fp32, no gradient."""
        return self.objective.targets(patches, lambda: self.target_features(patches, positions, self.depths))

    @torch.no_grad()
    def target_features(
        self, patches: Float[Tensor, "b t voxels"], positions: Float[Tensor, "b t 3"], depths: Sequence[int]
    ) -> Float[Tensor, "b t f"]:
        """The target encoder's features after each of `depths`, each layer-normed without parameters, fp32."""
        width = self.target_encoder.width
        embedded = self.target_encoder.embed_patches(patches)  # [b, t, w]
        features = self.target_encoder.intermediate_features(embedded, positions, depths).float()  # [b, t, f]
        return F.layer_norm(features.unflatten(-1, (-1, width)), (width,)).flatten(-2)

    def _masked_features(
        self, patches: Float[Tensor, "b t voxels"], positions: Float[Tensor, "b t 3"], context: Int[Tensor, "b n"]
    ) -> Float[Tensor, "b t w"]:
        """Features of all positions, with the mask token wherever a token is not in `context`."""
        tokens = self.context_encoder.embed_patches(patches)  # [b, t, w]
        visible = torch.zeros(tokens.shape[:2], dtype=torch.bool, device=tokens.device).scatter(1, context, True)
        # where, not a product: a NaN in a hidden voxel must not reach the loss either
        return self.context_encoder.encode(torch.where(visible.unsqueeze(-1), tokens, self.mask_token), positions)

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
        order = mask.to(torch.int8).argsort(dim=1, stable=True)  # visible patches first, each part in raster order
        positions = grid_positions(self.grid_of(context_view), context_view.device).expand(len(mask), -1, -1)
        return self.predict(
            self.patches(context_view), self.patches(target_view), positions, order[:, :-hidden], order[:, -hidden:]
        )

    def grid_of(self, view: Float[Tensor, "b d h w"]) -> tuple[int, int, int]:
        """Tokens of a view along (slice, depth, column)."""
        d, h, w = (size // patch for size, patch in zip(view.shape[1:], self.patch_size, strict=True))
        return d, h, w

    def patches(self, view: Float[Tensor, "b d h w"]) -> Float[Tensor, "b t voxels"]:
        """Non-overlapping patches in raster order (slice, depth, column), each flattened the same way."""
        (p, q, r), (d, h, w) = self.patch_size, self.grid_of(view)
        tiles = view.reshape(-1, d, p, h, q, w, r).permute(0, 1, 3, 5, 2, 4, 6)  # [b, d, h, w, p, q, r]
        return tiles.reshape(view.shape[0], d * h * w, p * q * r)


def evenly_spread_depths(depth: int, count: int) -> tuple[int, ...]:
    """`count` depths spread evenly over an encoder of `depth` blocks, the last included; fewer for fewer blocks."""
    return tuple(sorted({math.ceil(depth * share / count) for share in range(1, count + 1)}))


def grid_positions(grid: tuple[int, int, int], device: torch.device | None = None) -> Float[Tensor, "t 3"]:
    """Positions in token steps of a full grid, in raster order."""
    axes = [torch.arange(n, dtype=torch.float32, device=device) for n in grid]
    return torch.stack(torch.meshgrid(*axes, indexing="ij"), dim=-1).reshape(-1, 3)
