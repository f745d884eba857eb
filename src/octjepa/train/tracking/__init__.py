"""Where a run's figures and pictures go: metrics.jsonl always, and W&B, TensorBoard or MLflow when the recipe asks.

Enter: the recipe's section `tracking`, figures by name, batches. Leave: lines in the run folder, and copies elsewhere.
A tracker that fails is told of once and let go: it never stops a run, and never makes an update wait.
"""

from octjepa.train.tracking.record import Record, open_record

__all__ = ["Record", "open_record"]
