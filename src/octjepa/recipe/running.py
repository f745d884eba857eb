"""The recipe as a whole, and its sections of how a run goes: validation, monitor, checkpoints, trackers, machine."""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, StrictBool, model_validator

from octjepa.recipe.base import Directory, Positive, Section, Word, machine, without_repeats
from octjepa.recipe.data import DataRecipe, MaskRecipe, Preprocessing, TokenRecipe, ViewRecipe
from octjepa.recipe.objectives import objective_facts
from octjepa.recipe.training import (
    ROPE_BASE,
    SUB_PATCH,
    ModelRecipe,
    ObjectiveRecipe,
    TrainRecipe,
    check_heads,
)
from octjepa.registry import Registry


class ValidationRecipe(Section):
    """Held-out people; geometry, tokens and masks fixed by volume. every_updates null: only at the end."""

    every_updates: Positive | None = None
    max_samples: Positive | None = 64


class MonitorRecipe(Section):
    """How often, and on how many held-out volumes, the meters of `octjepa.train.monitor` are taken. null: never."""

    every_updates: Positive | None = machine(200)
    volumes: Positive = machine(32)


class CheckpointRecipe(Section):
    """Where and how often. dir null is off; a relative dir is in the run folder."""

    dir: Directory = machine("checkpoints")
    every_updates: Positive | None = machine(500)  # null: only at the end
    keep_last: Positive = machine(3)
    keep_every_updates: Positive | None = machine(None)  # checkpoints at multiples of this are never removed
    # the encoder that load_encoder and export use; null: the objective's; validation: the better one by the monitor
    export: Literal["target", "student", "validation"] | None = None


TRACKERS: Registry[Any] = Registry(
    "tracker",
    "octjepa.trackers",
    names=("wandb", "wandb_offline", "tensorboard", "mlflow"),
)


def _known_tracker(name: str) -> str:
    if name not in TRACKERS:
        raise ValueError(f"unknown tracker {name!r}: one of {', '.join(TRACKERS.names())}")
    return name


class TrackingRecipe(Section):
    """Where metrics and pictures go next to the run folder; docs/report.md. Nothing leaves the machine by default."""

    backends: Annotated[tuple[Annotated[str, AfterValidator(_known_tracker)], ...], AfterValidator(without_repeats)] = (
        machine(())
    )
    project: Word = machine("octjepa")
    name: Word | None = machine(None)  # null: the name of the recipe
    pictures_every_updates: Positive | None = machine(500)  # also drawn at the start; null: never
    send_pictures: StrictBool = machine(False)  # views of scans to W&B and MLflow as well
    send_addresses: StrictBool = machine(False)  # of checkpoints, to W&B, as artefacts that refer to them

    @model_validator(mode="after")
    def _what_is_sent_is_drawn(self) -> TrackingRecipe:
        if {"wandb", "wandb_offline"} <= set(self.backends):
            raise ValueError("backends wandb and wandb_offline are the same run twice: name one of them")
        servers = set(self.backends) - {"tensorboard"}
        if self.send_pictures and (not servers or self.pictures_every_updates is None):
            raise ValueError("send_pictures is unused without wandb or mlflow, or without pictures_every_updates")
        if self.send_addresses and set(self.backends) <= {"tensorboard", "mlflow"}:
            raise ValueError("send_addresses is unused without wandb or wandb_offline")
        return self


class MachineRecipe(Section):
    """Nothing here changes a result beyond rounding; what would, parts of a batch for a regulariser, is refused."""

    devices: Positive | None = machine(None)  # number of devices that the recipe is meant for; null: any
    # every device holds the whole model, or a shard of it (FSDP2; for models that do not fit on one device)
    parallel: Literal["replicated", "sharded"] = machine("replicated")
    micro_batch: Positive | None = machine(None)  # volumes a device takes at once; null: the whole share
    # processes that make samples; null: 0 on a CPU, else one less than the device's share of cores, at most 16
    loader_workers: Annotated[int, Field(ge=0)] | None = machine(None)
    # where views are made. device: from all stored voxels, which it holds; patches: from those that the host cuts, a
    # byte a voxel; auto: on a GPU the first if they fill a quarter of its memory at most, else the second
    data_on: Literal["auto", "host", "patches", "device"] = machine("auto")
    # each block by torch.compile, faster after a slow first update; null: on a GPU, in runs of 1,000 updates and more
    compile: StrictBool | None = machine(None)
    # activation checkpointing: blocks store only their input for the backward pass (less memory, more time)
    recompute: StrictBool = machine(False)


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
                raise ValueError(f"image_size {size} is not a multiple of patch_size {patch} along {axis}")
        if self.model.stem == "patch_mlp" and any(
            patch % part for patch, part in zip(self.tokens.patch_size, SUB_PATCH, strict=True)
        ):
            raise ValueError(f"model.stem: patch_mlp needs a tokens.patch_size of multiples of {SUB_PATCH}")
        budget = self.tokens.budget
        if budget is not None and budget > self.grid_tokens:
            raise ValueError(f"tokens.budget {budget} is more than the grid's {self.grid_tokens} tokens")
        counts = self.mask_counts
        if min(counts) < 1:
            raise ValueError(f"masks leave {counts[0]} context and {counts[1]} target tokens: each needs one at least")
        if self.masks.per_target > 1 and objective_facts(self.objective.name).predictor == "mlp":
            raise ValueError(
                f"masks.per_target {self.masks.per_target}: with objective {self.objective.name} the student sees "
                "every position, so that sharing a target saves little; set it to 1"
            )
        if self.objective.zone_sigreg and self.masks.per_target == 1:
            raise ValueError(
                "objective.zone_sigreg compares the masks of an eye: set masks.per_target to 2 or more, or the weight "
                "to 0 (measured, not trained)"
            )
        added = self.objective.regulariser
        if added is not None and self.machine.micro_batch is not None:
            raise ValueError(
                f"objective.{added} measures the spread within a batch: machine.micro_batch would change the "
                "result; set it to null, or the regulariser to 0 (measured, not trained)"
            )
        return self

    @model_validator(mode="after")
    def _validation_can_choose(self) -> Recipe:
        if self.objective.teacher is not None and self.checkpoint.export not in (None, "student"):
            raise ValueError(
                f"checkpoint.export: {self.checkpoint.export} is unused with objective.teacher: the target is the "
                "teacher itself, and the student is exported"
            )
        if self.checkpoint.export == "validation" and self.monitor.every_updates is None:
            raise ValueError(
                "checkpoint.export=validation needs the monitor, which monitor.every_updates=null turns off: set a "
                "number of updates, or set checkpoint.export to target or student"
            )
        return self

    @model_validator(mode="after")
    def _predictor_keys_are_used(self) -> Recipe:
        model, size = self.model, self.model.encoder_size
        given_keys = [key for key in ("width", "depth", "heads") if getattr(model, f"predictor_{key}") is not None]
        if not given_keys:
            return self
        kind = objective_facts(self.objective.name).predictor
        network = {"mlp": "a 2-layer MLP", "projector": "a 3-layer MLP"}.get(kind)
        unused = [key for key in given_keys if key != "width" and network is not None]
        if unused:
            raise ValueError(
                f"model.predictor_{unused[0]} is unused by objective {self.objective.name} ({network}); drop it"
            )
        if network is None:
            width = (
                model.predictor_width or objective_facts(self.objective.name).predictor_width or size.predictor_width
            )
            check_heads(width, size.predictor_heads, "predictor_")
        return self

    @property
    def rope(self) -> float | tuple[tuple[float, float], ...]:
        """The base of all rotary frequencies, or by axis the fastest and the slowest, in radians a unit of position.

        By axis the fastest pair turns by 1 radian a token step, so that neighbours differ, and the slowest by a quarter
        turn over the grid, so that its cosine falls all the way: no pair stands still, and none repeats by itself.
        """
        if self.model.rope_base is not None or self.model.positions != "rope":
            return self.model.rope_base or ROPE_BASE
        steps: tuple[float, ...] = (1.0, 1.0, 1.0)
        if self.model.position_unit == "mm":
            sizes = zip(self.tokens.patch_size, self.preprocessing.target_spacing_mm, strict=True)
            steps = tuple(patch * spacing for patch, spacing in sizes)
        quarter_turns = (min(1.0, math.pi / 2 / count) for count in self.grid)
        return tuple((1.0 / step, slowest / step) for step, slowest in zip(steps, quarter_turns, strict=True))

    @property
    def with_whole_views(self) -> Recipe:
        """The recipe with views of whole volumes, as an encoder reads them after training."""
        return self.model_copy(update={"views": self.views.model_copy(update={"halves": False})})

    @property
    def exported_encoder(self) -> str:
        """target, student, or validation: the encoder that the monitor prefers at each checkpoint."""
        if self.objective.teacher is not None:
            return "student"
        exported: str = self.checkpoint.export or objective_facts(self.objective.name).exported_encoder
        return exported

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
        """Tokens of a volume that the encoders see: K."""
        return self.tokens.budget or self.grid_tokens

    @property
    def mask_counts(self) -> tuple[int, int]:
        """(context, target) tokens a volume, the same for every sample."""
        masked = round(self.masks.ratio * self.token_count)
        return self.token_count - masked, round(self.masks.target_share * masked)
