"""The recipe as a whole, and which of its parts fit each other."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, model_validator

from octjepa.recipe.base import Section
from octjepa.recipe.data import DataRecipe, Preprocessing
from octjepa.recipe.learning import ModelRecipe, ObjectiveRecipe, TrainRecipe
from octjepa.recipe.running import CheckpointRecipe, MachineRecipe, MonitorRecipe, TrackingRecipe, ValidationRecipe
from octjepa.recipe.views import MaskRecipe, TokenRecipe, ViewRecipe


class Recipe(Section):
    """One run. `science()` is what names it."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]
    data: DataRecipe = DataRecipe()
    preprocessing: Preprocessing = Preprocessing()
    tokens: TokenRecipe
    masks: MaskRecipe = MaskRecipe()
    views: ViewRecipe = ViewRecipe()
    model: ModelRecipe = ModelRecipe()
    objective: ObjectiveRecipe = ObjectiveRecipe()
    train: TrainRecipe
    validation: ValidationRecipe = ValidationRecipe()
    monitor: MonitorRecipe = MonitorRecipe()
    checkpoint: CheckpointRecipe = CheckpointRecipe()
    tracking: TrackingRecipe = TrackingRecipe()
    machine: MachineRecipe = MachineRecipe()

    @model_validator(mode="after")
    def _parts_fit(self) -> Recipe:
        for axis, size, patch in zip("DHW", self.preprocessing.image_size, self.tokens.patch_size, strict=True):
            if size % patch:
                raise ValueError(f"image_size {size} is no multiple of patch_size {patch} along {axis}")
        budget = self.tokens.budget
        if budget is not None and budget > self.grid_tokens:
            raise ValueError(f"tokens.budget {budget} is more than the grid's {self.grid_tokens} tokens")
        counts = self.mask_counts
        if min(counts) < 1:
            raise ValueError(f"masks leave {counts[0]} context and {counts[1]} target tokens: each needs one at least")
        added = self.objective.regulariser
        if added is not None and self.machine.micro_batch is not None:
            raise ValueError(
                f"objective.{added} looks at the spread within what it is given: machine.micro_batch would change the "
                "result; set it to null, or the regulariser to 0 (a meter)"
            )
        if self.objective.name == "normalized_mse" and self.model.predictor_depth is not None:
            raise ValueError("model.predictor_depth is unused by objective normalized_mse (a 2-layer MLP); drop it")
        return self

    @property
    def grid(self) -> tuple[int, int, int]:
        """Tokens per axis."""
        (d, h, w), (p, q, r) = self.preprocessing.image_size, self.tokens.patch_size
        return d // p, h // q, w // r

    @property
    def grid_tokens(self) -> int:
        d, h, w = self.grid
        return d * h * w

    @property
    def token_count(self) -> int:
        """Tokens a volume that the encoders see: K."""
        return self.tokens.budget or self.grid_tokens

    @property
    def mask_counts(self) -> tuple[int, int]:
        """(context, target) tokens a volume, the same for every sample."""
        masked = round(self.masks.ratio * self.token_count)
        return self.token_count - masked, round(self.masks.target_share * masked)
