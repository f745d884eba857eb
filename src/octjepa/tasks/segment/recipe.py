"""The recipe of a segmentation head, by name (`segment_linear`) or as a YAML file."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, field_validator

from octjepa.config import RecipeKind
from octjepa.recipe import Section, ViewRecipe
from octjepa.recipe.base import machine

Whole = Annotated[int, Field(gt=0)]


class DecoderRecipe(Section):
    """The convolutional decoder and how it is trained. With `encoder_decay` the encoder learns as well.

    Its last block then learns at lr x encoder_decay, each one below at a rate so many times lower.
    """

    width: Whole = 8  # channels at full resolution
    updates: Whole = 400
    batch: Whole = 2  # windows
    lr: Annotated[float, Field(gt=0, le=1)] = 3e-3
    encoder_decay: Annotated[float, Field(gt=0, le=1)] | None = None  # null: frozen
    # how training windows are changed: by crop, flips, gain and gamma
    views: ViewRecipe = ViewRecipe(flip_slow=0.5, flip_fast=0.5, gain=0.2, gamma=0.2)
    save_every: Whole = machine(100)  # updates between two states to resume from

    @field_validator("views")
    @classmethod
    def _only_what_labels_follow(cls, views: ViewRecipe) -> ViewRecipe:
        for key in ("rotation_degrees", "zoom", "speckle", "blur", "halves"):
            if getattr(views, key):
                raise ValueError(f"{key}: a decoder's windows are changed only by crop, flips, gain and gamma")
        return views


class SegmentRecipe(Section):
    """How a head is made and measured; docs/segment.md explains every key. Without `decoder` it is the linear head."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]
    decoder: DecoderRecipe | None = None
    columns: Whole = 4  # stored columns that the linear head and the prior predict together
    centre: Literal["labels", "scan"] = "labels"  # of the ETDRS grid: the fovea where labels know it, or the scan's
    first_bscan: Literal["inferior", "superior"] = "inferior"  # the first B-scan, where a file gives no positions
    seed: Annotated[int, Field(ge=0)] = 0
    resamples: Whole = 2000

    @property
    def head(self) -> str:
        """Its name in results and logs."""
        if self.decoder is None:
            return "linear"
        return "decoder" if self.decoder.encoder_decay is None else "decoder, tuned"

    @property
    def tuned(self) -> bool:
        return self.decoder is not None and self.decoder.encoder_decay is not None


RECIPES = RecipeKind(
    SegmentRecipe,
    Path(__file__).parent / "recipes",
    "segmentation recipe",
    "decoder.updates=100",
    alternative="a head's folder to apply, ",
)


def load_recipe(name_or_path: str | Path, overrides: Iterable[str] = ()) -> SegmentRecipe:
    """A shipped recipe or a YAML file, `key=value` overrides applied. Raises RecipeError."""
    return RECIPES.load(name_or_path, overrides)
