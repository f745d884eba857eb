"""Sections of what learns: model, objective, optimizer and schedule."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, model_validator

from octjepa.recipe.base import Directory, Positive, Precision, Section, Share, added
from octjepa.recipe.objectives import FACTS, OBJECTIVES, TRUTH, TRUTH_HINT, objective_facts

SUB_PATCH = (2, 4, 4)  # voxels of a sub-patch of the non-linear stem
ROPE_BASE = 10_000.0  # of RoFormer and V-JEPA 2
# Beyond all networks of today: a plan builds the network, and each block takes time.
Width = Annotated[int, Field(gt=0, le=65_536)]
Depth = Annotated[int, Field(gt=0, le=256)]


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
    """The encoder: a preset `size`; `width`, `depth` and `heads` replace single numbers (null: the preset's).

    `predictor_*` replace what the objective asks for, or else the preset's.
    """

    size: Literal["test", "reference", "small", "base", "large"] = "test"
    width: Width | None = None
    depth: Depth | None = None
    heads: Positive | None = None
    positions: Literal["rope", "rope_tiled", "sincos"] = "rope"  # tiled: as the released V-JEPA 2 weights
    position_unit: Literal["index", "mm"] = "index"
    # null: frequencies by axis, from 1 radian a token step to a quarter turn over the grid (of rope_tiled 10,000);
    # a number b: b ** (-i / n) radians a unit of position on every axis
    rope_base: Annotated[float, Field(gt=1)] | None = None
    stem: Literal["linear", "patch_mlp"] = "linear"  # from a patch's voxels to its token; patch_mlp: by its sub-patches
    predictor_width: Width | None = None
    predictor_depth: Depth | None = None
    predictor_heads: Positive | None = None
    warm_start: Directory = None  # weights of V-JEPA 2 in Hugging Face form, or of octjepa; null: random

    @model_validator(mode="after")
    def _rope_base_is_used(self) -> ModelRecipe:
        if self.rope_base is not None and self.positions == "sincos":
            raise ValueError("model.rope_base is unused by positions sincos: drop it")
        return self

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
        if name == TRUTH:
            raise ValueError(TRUTH_HINT)
        raise ValueError(f"unknown objective: one of {', '.join(OBJECTIVES.names())}, or your own module:Class")
    if OBJECTIVES.is_class(name):
        objective_facts(name)  # its UsageError ends the validation, since nothing else of the recipe can be judged
    return name


EMA_HORIZON = 0.01  # of the run; V-JEPA 2's constant 0.99925 averages over 0.5 % of its run
VIEW_SIGREG = 0.05  # weight of SIGReg for objectives that compare views: LeJEPA's lambda


class ObjectiveRecipe(Section):
    """The objective by name, and the EMA target.

    The target averages the student over `ema_horizon` of the run's updates (0.01 unless given). Where `ema_base` or
    `ema_final` is given instead, momentum rises from `ema_base` (0.996) to `ema_final` (1) along half a cosine,
    whatever the length of the run.

    `visible_weight` is that of the loss at visible tokens (of vjepa_dense and noise2noise; default 0.5). A regulariser
    is off when null, only measured at weight 0, and a term of the loss above. With levjepa `sigreg` acts on projections
    of views, and null is its weight of 0.05.
    """

    name: Annotated[str, AfterValidator(_known_objective)] = "vjepa"
    visible_weight: Annotated[float, Field(ge=0)] | None = None
    visible_warmup: Share | None = None  # share of the run over which that weight rises from 0; default 0.1
    variance_covariance: Annotated[float, Field(ge=0)] | None = None
    sigreg: Annotated[float, Field(ge=0)] | None = None
    zone_sigreg: Annotated[float, Field(ge=0)] | None = added(None)  # LeJEPA's loss of pooled zones of several masks
    # a pretrained encoder (run, checkpoint, export, or name in the package) as the target in place of a moving average:
    # it stays as it is, and the student is exported (SALT, Li et al. 2025, arXiv 2509.24317)
    teacher: Directory = added(None)
    ema_horizon: Annotated[float, Field(gt=0, le=0.1)] | None = None
    ema_base: Annotated[float, Field(ge=0, lt=1)] | None = None
    ema_final: Annotated[float, Field(ge=0, le=1)] | None = None

    @model_validator(mode="after")
    def _one_momentum_schedule(self) -> ObjectiveRecipe:
        if self.teacher is not None:
            for key in ("ema_horizon", "ema_base", "ema_final"):
                if getattr(self, key) is not None:
                    raise ValueError(f"objective.{key} is unused with objective.teacher, which never moves: drop it")
        if not self.has_target_encoder:
            for key in ("teacher", "ema_horizon", "ema_base", "ema_final"):
                if getattr(self, key) is not None:
                    raise ValueError(f"objective.{key} is unused by {self.name}, which has no target encoder: drop it")
        base, final = self.momentum_range
        if self.ema_horizon is not None and self.averaging_share is None:
            raise ValueError("ema_horizon is unused with ema_base or ema_final: give one schedule, null for the other")
        if final < base:
            raise ValueError(f"ema_final {final} is below ema_base {base}: momentum must not fall")
        return self

    @model_validator(mode="after")
    def _visible_weight_is_used(self) -> ObjectiveRecipe:
        for key in ("visible_weight", "visible_warmup"):
            if getattr(self, key) is not None and not objective_facts(self.name).supervises_visible:
                users = " or ".join(name for name, facts in FACTS.items() if facts.supervises_visible)
                raise ValueError(f"objective.{key} is unused by {self.name}: drop it, or say {users}")
        return self

    @property
    def has_target_encoder(self) -> bool:
        """Whether a second encoder follows the student; if not, its place in the model holds the same weights."""
        return objective_facts(self.name).predictor != "projector"

    @property
    def averaging_share(self) -> float | None:
        """The share of the run that the EMA target averages over; None where momentum follows `momentum_range`."""
        fixed = self.teacher is not None or not self.has_target_encoder
        if self.ema_base is not None or self.ema_final is not None or fixed:
            return None
        return EMA_HORIZON if self.ema_horizon is None else self.ema_horizon

    @property
    def momentum_range(self) -> tuple[float, float]:
        """Momentum at the first and the last update of the cosine schedule.

        1 with a teacher as the target, 0 without a target encoder.
        """
        if self.teacher is not None:
            return 1.0, 1.0
        if not self.has_target_encoder:
            return 0.0, 0.0
        return 0.996 if self.ema_base is None else self.ema_base, 1.0 if self.ema_final is None else self.ema_final

    @property
    def regulariser(self) -> str | None:
        """A regulariser with a weight that needs the whole batch at once, neither micro-batches nor several processes.

        SIGReg is a function of sums over the batch, which are added over its parts (`octjepa.train.step.BatchSums`).
        Covariances from such sums would lose their precision when features have nearly collapsed.
        """
        return "variance_covariance" if self.variance_covariance else None

    @property
    def regularised_sums(self) -> int:
        """How many regularisers with a weight are functions of sums over the batch: `sigreg` and `zone_sigreg`."""
        return sum(bool(weight) for weight in (self.weight_of_sigreg, self.zone_sigreg))

    @property
    def weight_of_sigreg(self) -> float | None:
        """The weight of SIGReg; 0: only measured, None: off."""
        return VIEW_SIGREG if self.sigreg is None and not self.has_target_encoder else self.sigreg

    @property
    def weight_of_visible(self) -> float:
        """The weight of the loss at visible tokens."""
        return 0.5 if self.visible_weight is None else self.visible_weight

    @property
    def share_of_visible_warmup(self) -> float:
        """The share of the run over which the weight of visible tokens rises."""
        return 0.1 if self.visible_warmup is None else self.visible_warmup


class TrainRecipe(Section):
    """Optimizer, schedule (in optimizer updates) and batch. Exactly one of max_updates and epochs is given."""

    max_updates: Annotated[int, Field(gt=0, le=100_000_000)] | None = None
    epochs: Annotated[int, Field(gt=0, le=1_000_000)] | None = None
    global_batch: Positive = 32
    base_lr: Annotated[float, Field(gt=0, le=1)] = 1e-4
    min_lr_ratio: Share = 0.01  # final learning rate as a share of base_lr
    warmup_share: Annotated[float, Field(ge=0, lt=1)] = 0.03
    schedule: Literal["cosine", "constant"] = "cosine"
    betas: tuple[Annotated[float, Field(ge=0, lt=1)], Annotated[float, Field(ge=0, lt=1)]] = (0.9, 0.95)
    weight_decay: Annotated[float, Field(ge=0)] = 0.05
    clip_norm: Annotated[float, Field(gt=0)] | None = 1.0
    spike_factor: Annotated[float, Field(gt=1)] | None = 10.0  # times the median norm; larger norms are skipped
    precision: Precision = "auto"
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0

    @model_validator(mode="after")
    def _one_length(self) -> TrainRecipe:
        if (self.max_updates is None) == (self.epochs is None):
            raise ValueError("give exactly one of train.max_updates and train.epochs (the other null)")
        return self

    @model_validator(mode="after")
    def _min_lr_ratio_is_used(self) -> TrainRecipe:
        # A stored recipe states every key, so that the default says nothing of what the user wrote.
        if self.schedule == "constant" and self.min_lr_ratio != type(self).model_fields["min_lr_ratio"].default:
            raise ValueError("train.min_lr_ratio is unused by the schedule constant: drop it")
        return self
