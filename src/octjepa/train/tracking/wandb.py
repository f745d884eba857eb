"""Weights & Biases: runs on its server, or recorded offline for `wandb sync`."""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
from jaxtyping import UInt8

from octjepa.recipe import TRACKERS
from octjepa.train.tracking.base import PICTURE, SECONDS, TrackedRun, in_one_line

_SYNC = "`wandb login`, then `wandb sync` of the folder tracking/wandb/offline-run-* sends it."
_log = logging.getLogger(__name__)


class Wandb:
    """One W&B run. Without a server, or without a login, it is recorded offline for `wandb sync`."""

    def __init__(self, run: TrackedRun, offline: bool) -> None:
        os.environ.setdefault("WANDB_ERROR_REPORTING", "false")
        os.environ.setdefault("WANDB_SILENT", "true")
        import wandb

        self._wandb, self._pictures = wandb, run.pictures
        run_id = run.stored_id("wandb") or secrets.token_hex(4)
        run.store_id("wandb", run_id)
        settings = wandb.Settings(
            silent=True,
            console="off",
            symlink=False,
            host="not sent",
            username="not sent",
            disable_git=True,
            disable_code=True,
            save_code=False,
            program="octjepa",
            program_relpath="octjepa",
            program_abspath="octjepa",
            x_disable_meta=True,
            x_disable_stats=True,
            x_disable_machine_info=True,
            x_disable_viewer=True,
            x_save_requirements=False,
            init_timeout=SECONDS,
            finish_timeout=SECONDS,
        )

        def begin(mode: str) -> Any:
            # An absolute folder: W&B's own process may serve other programs, and have another working folder.
            return wandb.init(
                project=run.project,
                name=run.name,
                id=run_id,
                resume="allow",
                mode=mode,  # type: ignore[arg-type]
                dir=str(run.folder.resolve()),
                config=dict(run.config),
                settings=settings,
                reinit="create_new",
            )

        mode = "offline" if offline else os.environ.get("WANDB_MODE", "online")
        try:
            if mode == "online" and not wandb.login(prompt=False):
                raise wandb.errors.UsageError("no login")
            self._run: Any = begin(mode)
        except wandb.errors.Error as error:
            _log.warning("W&B takes no run now (%s): it is recorded offline. %s", in_one_line(error), _SYNC)
            self._run = begin("offline")
        # We count steps ourselves: W&B drops values for a past step, and a resumed run repeats a few updates.
        self._run.define_metric("update")
        self._run.define_metric("*", step_metric="update")

    def metrics(self, update: int, values: Mapping[str, float]) -> None:
        self._run.log({**values, "update": update})

    def picture(self, update: int, image: UInt8[np.ndarray, "H W 3"]) -> None:
        if self._pictures:
            self._run.log({PICTURE: self._wandb.Image(image), "update": update})

    def checkpoint(self, update: int, address: str) -> None:
        """An artefact that refers to the checkpoint: nothing of it is read or sent but its address."""
        artefact = self._wandb.Artifact(f"checkpoint-{self._run.id}", type="model", metadata={"update": update})
        artefact.add_reference(address, checksum=False)
        self._run.log_artifact(artefact, aliases=["latest", f"update-{update}"])

    def close(self, finished: bool) -> None:
        self._run.finish(exit_code=0 if finished else 1)


TRACKERS.register("wandb")(partial(Wandb, offline=False))
TRACKERS.register("wandb_offline")(partial(Wandb, offline=True))
