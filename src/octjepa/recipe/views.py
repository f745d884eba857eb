"""Sections of the views: tokens, masks, and how a view is drawn."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, StrictBool, model_validator

from octjepa.recipe.base import Positive, Section, Share, Size3


class TokenRecipe(Section):
    """Which patches become tokens. `budget` tokens a volume with select: tissue; every patch with select: all."""

    patch_size: Size3 = (4, 16, 16)
    select: Literal["all", "tissue"] = "tissue"
    budget: Positive | None = None

    @model_validator(mode="after")
    def _budget_belongs_to_tissue(self) -> TokenRecipe:
        if self.select == "tissue" and self.budget is None:
            raise ValueError("tokens.select: tissue needs tokens.budget, the number of tokens a volume")
        if self.select == "all" and self.budget is not None:
            raise ValueError("tokens.budget is unused by tokens.select: all; drop it (tokens.budget=null)")
        return self


class MaskRecipe(Section):
    """How much is hidden, in which shapes, and how much of it is predicted. Shares of families are relative weights."""

    ratio: Annotated[float, Field(gt=0, lt=1)] = 0.6
    target_share: Annotated[float, Field(gt=0, le=1)] = 1.0
    tubes: Annotated[float, Field(ge=0)] = 1.0
    blocks: Annotated[float, Field(ge=0)] = 1.0
    runs: Annotated[float, Field(ge=0)] = 1.0

    @model_validator(mode="after")
    def _one_family_at_least(self) -> MaskRecipe:
        if self.tubes + self.blocks + self.runs == 0:
            raise ValueError("every mask family has weight 0: give tubes, blocks or runs a positive weight")
        return self


class ViewRecipe(Section):
    """What is random. Geometry is shared by the two views; photometric changes differ. 0 switches a change off."""

    flip_slow: Share = 0.5
    flip_fast: Share = 0.0
    crop: StrictBool = True
    rotation_degrees: Annotated[float, Field(ge=0, le=20)] = 0.0
    zoom: Annotated[float, Field(ge=0, lt=0.5)] = 0.0
    gain: Annotated[float, Field(ge=0, le=1)] = 0.15
    gamma: Annotated[float, Field(ge=0, le=1)] = 0.15
    speckle: Annotated[float, Field(ge=0, le=2)] = 0.15
    blur: Share = 0.2
