"""Where a run's metrics and pictures go: metrics.jsonl always, and W&B, TensorBoard or MLflow when the recipe asks.

Enter: the recipe's section `tracking`, metrics by name, batches. Leave: lines in the run folder, and copies elsewhere.
A tracker that fails is logged once and dropped: it never stops a run, and never makes an update wait.
"""

from octjepa.recipe import TRACKERS
from octjepa.train.tracking.logger import RunLogger, open_logger

TRACKERS.locate(
    {
        "wandb": "octjepa.train.tracking.wandb",
        "wandb_offline": "octjepa.train.tracking.wandb",
        "tensorboard": "octjepa.train.tracking.tensorboard",
        "mlflow": "octjepa.train.tracking.mlflow",
    }
)

__all__ = ["RunLogger", "open_logger"]
