"""Sections of what learns: model, objective, optimizer and schedule."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, model_validator

from octjepa.recipe.base import Directory, Positive, Precision, Section, Share
from octjepa.registry import Registry, modules_of

# Names come from the folder's file names and from entry points: reading a recipe imports no objective, and no torch.
OBJECTIVES: Registry[Any] = Registry("objective", "octjepa.objectives", modules_of("octjepa.objective.methods"))


@dataclass(frozen=True)
class ModelSize:
    """Width, depth and attention heads of the encoder, and of the transformer predictor that goes with it."""

    width: int
    depth: int
    heads: int
    predictor_width: int
    predictor_depth: int
    predictor_heads: int


SIZES: dict[str, ModelSize] = {
    "test": ModelSize(192, 6, 6, 96, 3, 3),
    "reference": ModelSize(384, 6, 6, 192, 4, 6),
    "small": ModelSize(384, 12, 6, 192, 6, 6),
    "base": ModelSize(768, 12, 12, 384, 12, 12),
    "large": ModelSize(1024, 24, 16, 384, 12, 12),
}


class ModelRecipe(Section):
    """The encoder: a preset `size`, of which `width`, `depth` and `heads` replace single numbers (null: the preset's).

    `predictor_*` replace what the objective asks for, or else the preset's.
    """

    size: Literal["test", "reference", "small", "base", "large"] = "test"
    width: Positive | None = None
    depth: Positive | None = None
    heads: Positive | None = None
    positions: Literal["rope", "rope_tiled", "sincos"] = "rope"  # tiled: as the released V-JEPA 2 weights
    position_unit: Literal["index", "mm"] = "index"
    predictor_width: Positive | None = None
    predictor_depth: Positive | None = None
    predictor_heads: Positive | None = None
    warm_start: Directory = None  # weights of V-JEPA 2 in Hugging Face form, or of ours; null: from scratch

    @model_validator(mode="after")
    def _heads_divide_the_width(self) -> ModelRecipe:
        check_heads(self.encoder_size.width, self.encoder_size.heads, "")
        return self

    @property
    def encoder_size(self) -> ModelSize:
        """The preset with the numbers that the recipe replaces, the predictor's heads among them."""
        names = ("width", "depth", "heads", "predictor_heads")
        return replace(
            SIZES[self.size], **{name: value for name in names if (value := getattr(self, name)) is not None}
        )


def check_heads(width: int, heads: int, prefix: str) -> None:
    """Raises ValueError where attention cannot split `width` over `heads`: each needs an even number, 6 at least."""
    if width % heads or (width // heads) % 2 or width // heads < 6:
        raise ValueError(
            f"model.{prefix}width {width} over model.{prefix}heads {heads}: a head needs a whole, even number of "
            "features, 6 at least (three rotary axes)"
        )


def _known_objective(name: str) -> str:
    if name not in OBJECTIVES:
        raise ValueError(f"unknown objective: one of {', '.join(OBJECTIVES.names())}")
    return name


class ObjectiveRecipe(Section):
    """The objective by name, and the EMA target: momentum rises from ema_base to ema_final along half a cosine.

    `visible_weight` is that of the loss at visible tokens (vjepa_dense, 0.5 unless given). A regulariser is off when
    null, only measured at weight 0, and a term of the loss above.
    """

    name: Annotated[str, AfterValidator(_known_objective)] = "vjepa"
    visible_weight: Annotated[float, Field(ge=0)] | None = None
    variance_covariance: Annotated[float, Field(ge=0)] | None = None
    sigreg: Annotated[float, Field(ge=0)] | None = None
    ema_base: Annotated[float, Field(ge=0, lt=1)] = 0.996
    ema_final: Annotated[float, Field(ge=0, le=1)] = 1.0

    @model_validator(mode="after")
    def _momentum_does_not_fall(self) -> ObjectiveRecipe:
        if self.ema_final < self.ema_base:
            raise ValueError(f"ema_final {self.ema_final} is below ema_base {self.ema_base}: momentum must not fall")
        return self

    @model_validator(mode="after")
    def _visible_weight_is_used(self) -> ObjectiveRecipe:
        if self.visible_weight is not None and not OBJECTIVES.get(self.name).supervises_visible:
            raise ValueError(f"objective.visible_weight is unused by {self.name}: drop it, or say vjepa_dense")
        return self

    @property
    def regulariser(self) -> str | None:
        """A regulariser with a weight: it measures the spread within a batch, so a batch in parts, on several
        processes or in micro-batches, would have another objective."""
        weights = {"variance_covariance": self.variance_covariance, "sigreg": self.sigreg}
        return next((name for name, weight in weights.items() if weight), None)

    @property
    def weight_of_visible(self) -> float:
        """The weight of the loss at visible tokens."""
        return 0.5 if self.visible_weight is None else self.visible_weight


class TrainRecipe(Section):
    """Optimizer, schedule (in optimizer updates) and batch. Exactly one of max_updates and epochs is given."""

    max_updates: Positive | None = None
    epochs: Positive | None = None
    global_batch: Positive = 32
    base_lr: Annotated[float, Field(gt=0, le=1)] = 1e-4
    min_lr_ratio: Share = 0.1
    warmup_share: Annotated[float, Field(ge=0, lt=1)] = 0.03
    schedule: Literal["cosine", "constant"] = "cosine"
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (0.9, 0.95)
    weight_decay: Annotated[float, Field(ge=0)] = 0.05
    clip_norm: Annotated[float, Field(gt=0)] | None = 1.0
    spike_factor: Annotated[float, Field(gt=1)] | None = 10.0  # norms so far above the median are skipped; null: none
    precision: Precision = "auto"
    seed: Annotated[int, Field(ge=0)] = 0

    @model_validator(mode="after")
    def _one_length(self) -> TrainRecipe:
        if (self.max_updates is None) == (self.epochs is None):
            raise ValueError("give exactly one of train.max_updates and train.epochs (the other null)")
        return self
