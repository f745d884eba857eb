"""The recipe of a fine-tuning, by name (`study_group`) or as a YAML file."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, StrictBool, field_validator, model_validator

from octjepa.config import RecipeKind
from octjepa.evaluate.label_fractions import MIN_PEOPLE
from octjepa.metrics.scores import METRICS
from octjepa.recipe import Recipe, Section, TrainRecipe, ViewRecipe
from octjepa.recipe.base import Positive, Precision, Share, Word, added, machine

Updates = Annotated[int, Field(ge=0)]
Rate = Annotated[float, Field(gt=0, le=1)]


class Stages(Section):
    """Updates of each stage: the head alone, the encoder's last blocks with it, everything."""

    head: Updates = 100
    last: Updates = 100
    all: Updates = 200

    @property
    def updates(self) -> int:
        return self.head + self.last + self.all

    @model_validator(mode="after")
    def _something_learns(self) -> Stages:
        if not self.updates:
            raise ValueError("every stage has 0 updates: give head, last or all some")
        return self


class Lora(Section):
    """Low-rank adapters in the encoder, which learn in the place of its weights; rank 0: none, the weights learn."""

    rank: Annotated[int, Field(ge=0, le=1024)] = 0
    alpha: Annotated[float, Field(gt=0)] = 16.0  # the product of the adapters is scaled by alpha / rank
    targets: tuple[Word, ...] = ()  # ends of the names of linear layers (qkv, mlp.0); none: all in the encoder's blocks

    @model_validator(mode="after")
    def _nothing_is_unused(self) -> Lora:
        fields = type(self).model_fields
        unused = [name for name in ("alpha", "targets") if getattr(self, name) != fields[name].default]
        if not self.rank and unused:
            raise ValueError(f"lora.{unused[0]} is unused without adapters: give lora.rank, such as 8")
        return self


class FinetuneRecipe(Section):
    """How an encoder is tuned and measured; docs/finetune.md explains every key."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]
    targets: tuple[str, ...] = ()  # columns of the label table; --target takes precedence
    task: Literal["auto", "binary", "multiclass", "ordinal", "multilabel", "regression"] = "auto"
    # use the labels of this many training people and of no validation people; null: all labels
    labelled: Annotated[int, Field(ge=2 * MIN_PEOPLE)] | None = None
    level: Literal["volume", "eye", "person"] = "volume"  # the unit of a case, whose volumes' scores are averaged
    metric: str | None = None  # of the paired differences; null: the task's own
    stages: Stages = Stages()
    last_blocks: Positive = 2  # that learn in stage last
    batch: Positive = 16  # volumes an update, all processes together
    head_lr: Rate = 1e-3
    encoder_lr: Rate = 5e-4  # the last block learns at encoder_lr x layer_decay, each one below at so much less
    layer_decay: Rate = 0.65
    warmup: Updates = 20  # of every part, from its first update on
    min_lr_ratio: Share = 0.05  # of the cosine's end to its begin
    weight_decay: Annotated[float, Field(ge=0)] = 0.05
    clip_norm: Annotated[float, Field(gt=0)] = 1.0
    lora: Lora = added(Lora())
    drop_path: Annotated[float, Field(ge=0, lt=1)] = 0.1  # of the last block; falls to 0 at the first
    label_smoothing: Annotated[float, Field(ge=0, lt=1)] = 0.0
    class_weights: StrictBool = True  # by inverse frequency among the training volumes
    validate_every: Positive = 20  # updates between two validations
    patience: Positive = 5  # validations without a better loss, in the last stage, after which training ends
    scratch: StrictBool = False  # also tune the network from its first weights, as a separate row
    views: ViewRecipe = ViewRecipe()
    precision: Precision = "auto"
    seed: Annotated[int, Field(ge=0)] = 0
    resamples: Positive = 2000
    micro_batch: Positive | None = machine(None)  # volumes that a process takes at once; null: its whole share
    loader_workers: Annotated[int, Field(ge=0)] = machine(0)
    save_every: Positive = machine(100)  # updates between two checkpoints to continue from

    @field_validator("views")
    @classmethod
    def _views_are_whole(cls, views: ViewRecipe) -> ViewRecipe:
        if views.halves:
            raise ValueError("views.halves is unused by fine-tuning, which reads whole volumes: drop it")
        return views

    @field_validator("task", mode="before")
    @classmethod
    def _no_survival(cls, task: object) -> object:
        # Cox's loss compares the volumes of a batch with each other, and this loop adds up losses volume by volume.
        if task == "survival":
            raise ValueError(
                "times to an event are not tuned for: octjepa probe (or leaderboard) --task survival --event COLUMN "
                "reads them from frozen or tuned features"
            )
        return task

    @model_validator(mode="after")
    def _known_metric(self) -> FinetuneRecipe:
        if self.metric is not None and self.metric not in METRICS:
            raise ValueError(f"metric {self.metric!r} is unknown: one of {', '.join(METRICS)}")
        return self

    @model_validator(mode="after")
    def _adapters_learn(self) -> FinetuneRecipe:
        if self.lora.rank and not (self.stages.last or self.stages.all):
            raise ValueError("lora.rank adds adapters that no stage trains: give stages.last or stages.all updates")
        if self.lora.rank and self.scratch:
            raise ValueError(
                "scratch trains all weights, and lora.rank few: tune without lora.rank for that comparison"
            )
        return self

    def sampling(self, encoder: Recipe) -> Recipe:
        """The encoder's recipe with our views, batch, length and seed: what makes and orders the training samples."""
        train = TrainRecipe(
            max_updates=self.stages.updates,
            global_batch=self.batch,
            base_lr=1.0,
            min_lr_ratio=self.min_lr_ratio,
            warmup_share=0.0,
            precision=self.precision,
            seed=self.seed,
        )
        data = encoder.data.model_copy(update={"balance": "none", "balance_power": 0.0})
        return encoder.model_copy(update={"train": train, "views": self.views, "data": data})

    @property
    def starts(self) -> tuple[int, int]:
        """The first updates that train the last blocks and the rest of the encoder."""
        first = self.stages.head
        return first, first + self.stages.last

    @property
    def last_stage(self) -> int:
        """The first update of the last stage that has updates. From there on the training may end early."""
        stages = (self.stages.all, self.stages.last, self.stages.head)
        return self.stages.updates - next(updates for updates in stages if updates)

    def learning_blocks(self, update: int, depth: int) -> int:
        """How many of the encoder's last blocks learn in `update` (from 0); depth + 1 is everything below them as
        well.
        """
        last, everything = self.starts
        return 0 if update < last else min(self.last_blocks, depth) if update < everything else depth + 1


RECIPES = RecipeKind(FinetuneRecipe, Path(__file__).parent / "recipes", "fine-tuning recipe", "stages.all=500")


def load_recipe(name_or_path: str | Path, overrides: Iterable[str] = ()) -> FinetuneRecipe:
    """A shipped recipe or a YAML file, `key=value` overrides applied. Raises RecipeError."""
    return RECIPES.load(name_or_path, overrides)
