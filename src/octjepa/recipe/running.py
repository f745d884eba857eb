"""Sections of how a run goes: validation, monitor, checkpoints, trackers, machine."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field, StrictBool, model_validator

from octjepa.recipe.base import Directory, Positive, Section, Word, _each_once, machine


class ValidationRecipe(Section):
    """Held-out people; geometry, tokens and masks fixed by volume. every_updates null: only at the end."""

    every_updates: Positive | None = None
    max_samples: Positive | None = 64


class MonitorRecipe(Section):
    """How often, and on how many held-out volumes, the meters of `octjepa.train.monitor` are taken. null: never."""

    every_updates: Positive | None = machine(200)
    volumes: Positive = machine(32)


class CheckpointRecipe(Section):
    """Where and how often. dir null is off; a relative dir lies in the run folder."""

    dir: Directory = machine("checkpoints")
    every_updates: Positive | None = machine(500)  # null: only at the end
    keep_last: Positive = machine(3)
    keep_every_updates: Positive | None = machine(None)  # those of every so many updates are never removed


class TrackingRecipe(Section):
    """Where figures and pictures go beside the run folder; docs/tracking.md. Nothing leaves the machine by default."""

    backends: Annotated[
        tuple[Literal["wandb", "wandb_offline", "tensorboard", "mlflow"], ...], AfterValidator(_each_once)
    ] = machine(())
    project: Word = machine("octjepa")
    name: Word | None = machine(None)  # null: the recipe's
    pictures_every_updates: Positive | None = machine(500)  # and at the start; null: never
    send_pictures: StrictBool = machine(False)  # views of scans to W&B and MLflow, too
    send_addresses: StrictBool = machine(False)  # of checkpoints, to W&B, as artefacts that refer to them

    @model_validator(mode="after")
    def _what_is_sent_is_drawn(self) -> TrackingRecipe:
        if {"wandb", "wandb_offline"} <= set(self.backends):
            raise ValueError("backends wandb and wandb_offline are the same run twice: name one of them")
        servers = set(self.backends) - {"tensorboard"}
        if self.send_pictures and (not servers or self.pictures_every_updates is None):
            raise ValueError("send_pictures is unused without wandb or mlflow, or without pictures_every_updates")
        if self.send_addresses and not {"wandb", "wandb_offline"} & set(self.backends):
            raise ValueError("send_addresses is unused without wandb or wandb_offline")
        return self


class MachineRecipe(Section):
    """Nothing here changes a result beyond rounding; what would, parts of a batch for a regulariser, is refused."""

    devices: Positive | None = machine(None)  # the number the recipe is meant for; null: whatever is there
    # every device holds the whole model, or its part of it (FSDP2; for models that do not fit one device)
    parallel: Literal["replicated", "sharded"] = machine("replicated")
    micro_batch: Positive | None = machine(None)  # volumes a device takes at once; null: the whole share
    loader_workers: Annotated[int, Field(ge=0)] = machine(0)
    compile: StrictBool = machine(False)  # each block by torch.compile: faster updates after a slow first one
    # blocks keep their input alone for the backward pass: less memory, more time
    recompute: StrictBool = machine(False)
