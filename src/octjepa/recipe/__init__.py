"""The recipe: every setting of a run, typed, frozen, and refused when unknown or unused.

A recipe is data. Its fields are *science* (they change the result, and enter the hash that names the run)
or *machine* (where and how fast it runs; marked with `machine()`). `octjepa.config` reads and overrides them.
Sizes are `[D, H, W]`: slice, depth, column.
"""

from octjepa.recipe.base import DEVICES, Section
from octjepa.recipe.data import DataRecipe, MaskRecipe, Preprocessing, TokenRecipe, ViewRecipe
from octjepa.recipe.objectives import OBJECTIVES, ObjectiveFacts, objective_facts
from octjepa.recipe.running import (
    TRACKERS,
    CheckpointRecipe,
    MachineRecipe,
    MonitorRecipe,
    Recipe,
    TrackingRecipe,
    ValidationRecipe,
)
from octjepa.recipe.training import (
    ROPE_BASE,
    SIZES,
    SUB_PATCH,
    ModelRecipe,
    ModelSize,
    ObjectiveRecipe,
    TrainRecipe,
)

__all__ = [
    "DEVICES",
    "OBJECTIVES",
    "ROPE_BASE",
    "SIZES",
    "SUB_PATCH",
    "TRACKERS",
    "CheckpointRecipe",
    "DataRecipe",
    "MachineRecipe",
    "MaskRecipe",
    "ModelRecipe",
    "ModelSize",
    "MonitorRecipe",
    "ObjectiveFacts",
    "ObjectiveRecipe",
    "Preprocessing",
    "Recipe",
    "Section",
    "TokenRecipe",
    "TrackingRecipe",
    "TrainRecipe",
    "ValidationRecipe",
    "ViewRecipe",
    "objective_facts",
]
