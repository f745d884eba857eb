"""MLflow: runs on its server, or files in the run folder."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping

import numpy as np
from jaxtyping import UInt8

from octjepa.recipe import TRACKERS
from octjepa.train.tracking.base import SECONDS, TrackedRun, png


@TRACKERS.register("mlflow")
class Mlflow:
    """One MLflow run at MLFLOW_TRACKING_URI; without one, files in the run folder's tracking/mlflow."""

    def __init__(self, run: TrackedRun) -> None:
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", str(SECONDS))
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
            existing = self._client.get_experiment_by_name(run.project)
            experiment = existing.experiment_id if existing else self._client.create_experiment(run.project)
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
