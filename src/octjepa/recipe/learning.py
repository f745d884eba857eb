"""Sections of what learns: model, objective, optimizer and schedule."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from octjepa.recipe.base import Directory, Positive, Section, Share


class ModelRecipe(Section):
    """The encoder by size name; `predictor_*` default to the arm's own (null)."""

    size: Literal["test", "reference", "small", "base", "large"] = "test"
    positions: Literal["rope", "rope_tiled", "sincos"] = "rope"  # tiled: as the released V-JEPA 2 weights
    position_unit: Literal["index", "mm"] = "index"
    predictor_width: Positive | None = None
    predictor_depth: Positive | None = None
    warm_start: Directory = None  # weights of V-JEPA 2 in Hugging Face form, or of ours; null: from scratch


class ObjectiveRecipe(Section):
    """The arm, and the EMA target: momentum rises from ema_base to ema_final along half a cosine.

    `visible_weight` is that of the loss at visible tokens (arm vjepa_dense, 0.5 unless given). A regulariser is off
    when null, a meter at weight 0, a term of the loss above.
    """

    name: Literal["vjepa", "vjepa_dense", "normalized_mse", "mae"] = "vjepa"
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
    def _visible_weight_belongs_to_dense(self) -> ObjectiveRecipe:
        if self.visible_weight is not None and self.name != "vjepa_dense":
            raise ValueError(f"objective.visible_weight is unused by {self.name}: drop it, or say vjepa_dense")
        return self

    @property
    def regulariser(self) -> str | None:
        """A regulariser with a weight: it looks at the spread within what it is given, so a batch in parts, on several
        processes or in micro-batches, would have another objective."""
        weights = {"variance_covariance": self.variance_covariance, "sigreg": self.sigreg}
        return next((name for name, weight in weights.items() if weight), None)

    @property
    def at_visible(self) -> float:
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
    precision: Literal["fp32", "bf16"] = "bf16"
    seed: Annotated[int, Field(ge=0)] = 0

    @model_validator(mode="after")
    def _one_length(self) -> TrainRecipe:
        if (self.max_updates is None) == (self.epochs is None):
            raise ValueError("give exactly one of train.max_updates and train.epochs (the other null)")
        return self
