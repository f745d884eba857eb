"""The trackers themselves: W&B, TensorBoard, MLflow and a folder of pictures, each a `Tracker`.

What leaves the machine is the recipe's science fields (no paths), the run's hash, metrics and, where the recipe
allows it, pictures. Everything these libraries send of their own accord (host, user, command line, code, console, usage
statistics) is switched off.
"""

from __future__ import annotations

import io
import logging
import os
import re
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from jaxtyping import UInt8

from octjepa.files import write_atomic

_SYNC = "`wandb login`, then `wandb sync` of the folder tracking/wandb/offline-run-* sends it."
_SECONDS = 10  # a library may wait for its server that long, at the start and at the end
_log = logging.getLogger(__name__)
PICTURE = "pictures/views_and_masks"


class Tracker(Protocol):
    """What a tracker can do. Any of it may raise or block: `TrackerThread` handles that."""

    def metrics(self, update: int, values: Mapping[str, float]) -> None: ...

    def picture(self, update: int, image: UInt8[np.ndarray, "H W 3"]) -> None: ...

    def checkpoint(self, update: int, address: str) -> None: ...

    def close(self, finished: bool) -> None: ...


@dataclass(frozen=True)
class TrackedRun:
    """What a tracker receives of a run; `folder` is where it may store what it needs.

    `first` counts the updates done before; `pictures`: whether pictures may be sent to servers.
    """

    folder: Path
    project: str
    name: str
    config: Mapping[str, str | int | float | bool]
    first: int
    pictures: bool

    def stored_id(self, backend: str) -> str | None:
        """The id under which `backend` knows this run from before it was resumed."""
        path = self.folder / f"{backend}.id"
        return path.read_text(encoding="utf-8").strip() if self.first and path.is_file() else None

    def store_id(self, backend: str, run_id: str) -> None:
        """Writes the id under which `backend` knows the run, for a resume."""
        write_atomic(self.folder / f"{backend}.id", lambda file: file.write(run_id.encode()))


def in_one_line(error: BaseException) -> str:
    """A library's error message, cut short, without the credentials that an address may hold."""
    message = re.sub(r"//[^/@\s]+@", "//", " ".join(str(error).split()))
    return f"{type(error).__name__}: {message[:200]}" if message else type(error).__name__


def png(image: UInt8[np.ndarray, "H W 3"]) -> bytes:
    """The image as the content of a PNG file."""
    from PIL import Image

    buffer = io.BytesIO()
    Image.fromarray(image).save(buffer, format="png")
    return buffer.getvalue()


class PictureFolder:
    """`update-00000001.png` and so on, in the run folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir(exist_ok=True)

    def metrics(self, update: int, values: Mapping[str, float]) -> None:
        """Metrics are in metrics.jsonl already."""

    def picture(self, update: int, image: UInt8[np.ndarray, "H W 3"]) -> None:
        write_atomic(self._folder / f"update-{update:08d}.png", lambda file: file.write(png(image)))

    def close(self, finished: bool) -> None:
        """Every picture is written already."""

    def checkpoint(self, update: int, address: str) -> None:
        """Checkpoints are in their folder already."""


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
            silent=True, console="off", symlink=False, host="not sent", username="not sent",
            disable_git=True, disable_code=True, save_code=False,
            program="octjepa", program_relpath="octjepa", program_abspath="octjepa",
            x_disable_meta=True, x_disable_stats=True, x_disable_machine_info=True, x_disable_viewer=True,
            x_save_requirements=False, init_timeout=_SECONDS, finish_timeout=_SECONDS,
        )  # fmt: skip

        def begin(mode: str) -> Any:
            # An absolute folder: W&B's own process may serve other programs, and stand in another place.
            return wandb.init(
                project=run.project, name=run.name, id=run_id, resume="allow", mode=mode,  # type: ignore[arg-type]
                dir=str(run.folder.resolve()), config=dict(run.config), settings=settings, reinit="create_new",
            )  # fmt: skip

        mode = "offline" if offline else os.environ.get("WANDB_MODE", "online")
        try:
            if mode == "online" and not wandb.login(prompt=False):
                raise wandb.errors.UsageError("no login")
            self._run: Any = begin(mode)
        except wandb.errors.Error as error:
            _log.warning("W&B takes no run now (%s): it is recorded offline. %s", in_one_line(error), _SYNC)
            self._run = begin("offline")
        # Steps of our own: W&B drops what it is sent for a step gone by, and a resumed run repeats a few updates.
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


class TensorBoard:
    """Event files in the run folder's tracking/tensorboard."""

    def __init__(self, run: TrackedRun) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # Events of updates that a resumed run will repeat are purged.
        self._writer: Any = SummaryWriter(run.folder / "tensorboard", purge_step=run.first + 1 if run.first else None)
        self._writer.add_text("config", "\n".join(f"    {key}: {value}" for key, value in run.config.items()))

    def metrics(self, update: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, update)

    def picture(self, update: int, image: UInt8[np.ndarray, "H W 3"]) -> None:
        self._writer.add_image(PICTURE, image, update, dataformats="HWC")

    def checkpoint(self, update: int, address: str) -> None:
        """TensorBoard has no artefacts."""

    def close(self, finished: bool) -> None:
        self._writer.close()


class Mlflow:
    """One MLflow run at MLFLOW_TRACKING_URI; without one, files in the run folder's tracking/mlflow."""

    def __init__(self, run: TrackedRun) -> None:
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", str(_SECONDS))
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "2")
        server = os.environ.get("MLFLOW_TRACKING_URI")
        if server is None:
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        from mlflow.entities import Metric, Param
        from mlflow.tracking import MlflowClient

        self._metric, self._pictures, self._folder = Metric, run.pictures, run.folder
        self._client = MlflowClient(tracking_uri=server or (run.folder.resolve() / "mlflow").as_uri())
        run_id = run.stored_id("mlflow")
        if run_id is None:
            known = self._client.get_experiment_by_name(run.project)
            experiment = known.experiment_id if known else self._client.create_experiment(run.project)
            run_id = str(self._client.create_run(experiment, run_name=run.name).info.run_id)
            run.store_id("mlflow", run_id)
            params = [Param(key, str(value)) for key, value in run.config.items()]
            for start in range(0, len(params), 100):  # MLflow's limit a call
                self._client.log_batch(run_id, params=params[start : start + 100])
        else:
            self._client.update_run(run_id, status="RUNNING")
        self._run_id = run_id

    def metrics(self, update: int, values: Mapping[str, float]) -> None:
        now = int(time.time() * 1000)
        self._client.log_batch(self._run_id, [self._metric(key, value, now, update) for key, value in values.items()])

    def picture(self, update: int, image: UInt8[np.ndarray, "H W 3"]) -> None:
        if not self._pictures:
            return
        path = self._folder / f"update-{update:08d}.png"
        path.write_bytes(png(image))
        try:
            self._client.log_artifact(self._run_id, str(path), "pictures")
        finally:
            path.unlink()

    def checkpoint(self, update: int, address: str) -> None:
        """MLflow stores copies of artefacts only, and has no reference to what is stored elsewhere."""

    def close(self, finished: bool) -> None:
        self._client.set_terminated(self._run_id, "FINISHED" if finished else "FAILED")


MAKERS: dict[str, Callable[[TrackedRun], Tracker]] = {
    "wandb": lambda run: Wandb(run, offline=False),
    "wandb_offline": lambda run: Wandb(run, offline=True),
    "tensorboard": TensorBoard,
    "mlflow": Mlflow,
}
NEEDS = {  # what each imports, and the extra that brings it
    "wandb": ("wandb", "wandb"),
    "wandb_offline": ("wandb", "wandb"),
    "tensorboard": ("tensorboard", "tensorboard"),
    "mlflow": ("mlflow", "mlflow"),
}
