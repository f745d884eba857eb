"""The second loss of a combined run: an objective of pretraining on volumes of a store, on the same encoder.

In: an encoder's recipe, the name of an objective and a store. Out: batches of views and the terms of their loss, which
`octjepa.tasks.truth.training` adds to those of the phantoms. Views, masks, predictor, EMA target and loss are those of
`octjepa pretrain` (`octjepa.views`, `octjepa.model`, `octjepa.train.step`), and the context encoder is the encoder
that learns the truth. A batch depends on the number of the update only.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from copy import deepcopy
from typing import Final

from torch import Tensor

from octjepa.config import PRETRAINING, science_hash
from octjepa.distributed.runtime import Runtime
from octjepa.errors import UsageError
from octjepa.model import VJEPA3D, Encoder
from octjepa.objectives.base import get_objective
from octjepa.objectives.loss import recipe_at_update
from octjepa.recipe import Recipe
from octjepa.store import Store
from octjepa.store.contract import contract_differences
from octjepa.train.optimizer import momentum, update_target
from octjepa.train.run_folder import chunks_hash, data_hash
from octjepa.train.step import batch_losses
from octjepa.views.loader import Batch, TrainingDataset, select_volumes, training_batches

# Keys of a recipe that the second loss uses. The others are settings of the encoder, or options of the command.
_OF_THE_LOSS: Final = (
    *("objective", "masks", "views", "data", "tokens.budget", "tokens.select"),
    *("model.predictor_width", "model.predictor_depth", "model.predictor_heads"),
)


def unlabelled_recipe(
    recipe: Recipe, objective: str, batch: int, overrides: Sequence[str] = (), seed: int | None = None
) -> Recipe:
    """The encoder's `recipe` with another objective and its defaults, `batch` volumes an update, and the overrides.

    seed: of the order of volumes, views and masks; None: that of the encoder's recipe.

    Raises UsageError: no such objective, or an override of a key that is not of the second loss; RecipeError: an
    unknown, unused or ill-typed key.
    """
    halves = get_objective(objective).needs_halves
    data = recipe.model_dump(mode="json")
    data["objective"] = {"name": objective}
    data["views"]["halves"] = halves
    data["train"]["global_batch"] = batch
    data["train"]["seed"] = recipe.train.seed if seed is None else seed
    combined = PRETRAINING.changed(data, overrides, f"of {objective} next to the truth")
    for override in overrides:
        key = override.partition("=")[0].strip()
        if not f"{key}.".startswith(tuple(f"{used}." for used in _OF_THE_LOSS)):
            raise UsageError(
                f"{override} does not change the loss of {objective}: the encoder and the options of this command fix "
                f"{key}. Leave it out, or use keys of {', '.join(_OF_THE_LOSS)}"
            )
    if combined.objective.teacher is not None:
        raise UsageError("objective.teacher is not possible next to the truth: --keep has a teacher for both")
    return combined


class Unlabelled:
    """An objective of pretraining on the training volumes of a store.

    weight: of its loss; that of the truth is 1. Raises UsageError: the store has another grid than the encoder, no
    halves although the objective needs them, or no volume that `recipe` selects.
    """

    def __init__(self, recipe: Recipe, store: Store, encoder: Encoder, weight: float = 1.0) -> None:
        if differences := contract_differences(store.preprocessing, recipe.preprocessing):
            raise UsageError(
                f"two sources with different grids: store {store.location} was made with another preprocessing than "
                f"the encoder reads ({'; '.join(differences)}): ingest the files into a store with the encoder's recipe"
            )
        if not weight > 0 or weight == float("inf"):
            raise UsageError(f"a weight of {weight} for {recipe.objective.name}: expected a positive number")
        selection = select_volumes(store, recipe, "train")
        self.recipe, self.store, self.weight = recipe, store, weight
        self.volume_ids = selection.volume_ids
        self._dataset = TrainingDataset(store, recipe, selection.volume_ids, selection.domains)
        self.model = VJEPA3D.from_recipe(recipe)
        self.model.context_encoder = encoder
        self.model.target_encoder = deepcopy(encoder).requires_grad_(False)

    @property
    def fingerprint(self) -> str:
        """Names what decides its part of the result: settings, weight, volumes and their form in the store."""
        volumes = data_hash(self.store, self.volume_ids), chunks_hash(self.store, self.volume_ids, self.recipe)
        return f"{science_hash(self.recipe)} {self.weight} {' '.join(volumes)}"

    def batches(self, start: int, updates: int) -> Iterator[Batch]:
        """The batches of updates start .. updates - 1."""
        yield from training_batches(self._dataset, start, updates, workers=0)

    def losses(self, batch: Batch, update: int, updates: int, micro_batch: int, runtime: Runtime) -> Iterator[Tensor]:
        """The weighted loss of the batch, in parts of at most `micro_batch` volumes."""
        recipe = recipe_at_update(self.recipe, update, updates)
        for part in batch_losses(self.model, batch, recipe, runtime, update, micro_batch):
            yield self.weight * part.loss

    def follow(self, update: int, updates: int) -> None:
        """Moves the EMA target after update `update` (from 0)."""
        update_target(
            self.model.target_encoder, self.model.context_encoder, momentum(update, updates, self.recipe.objective)
        )
