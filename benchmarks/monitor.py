"""What the monitor costs beside the updates it watches, in one run.

    .venv/bin/python benchmarks/monitor.py [RECIPE] [UPDATES]

Makes a small phantom store, trains UPDATES updates in the order of `octjepa pretrain` and runs the monitor
after every tenth of them. Prints the median seconds of both and the share at the recipe's `monitor.every_updates`.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from pathlib import Path

import torch

from octjepa.config import load_recipe
from octjepa.distributed.runtime import Runtime
from octjepa.ingest import build_store
from octjepa.model import VJEPA3D
from octjepa.phantom import write_cohort
from octjepa.store import Store
from octjepa.train.data import choose_cohort
from octjepa.train.monitor import MonitorSet, run_monitor
from octjepa.train.optimizer import build_optimizer, update_target
from octjepa.train.step import accumulate
from octjepa.views.loader import training_batches

PEOPLE = 40


def main(name: str, updates: int) -> None:
    recipe = load_recipe(name)
    with tempfile.TemporaryDirectory() as folder:
        phantom, location = Path(folder) / "phantom", Path(folder) / "store"
        write_cohort(phantom, PEOPLE, 1)
        build_store([phantom], location, recipe.preprocessing)
        store = Store.open(location)
        cohort, stream = choose_cohort(store, recipe)
        runtime = Runtime(recipe.train.precision)
        model = VJEPA3D.from_recipe(recipe).to(runtime.device)
        optimizer = build_optimizer(model, recipe.train)
        ids = (cohort.val.volume_ids + cohort.train.volume_ids)[: recipe.monitor.volumes]
        monitor_set = MonitorSet.choose(store, recipe, ids, recipe.monitor.volumes)
        trained, monitored = [], []
        for update, batch in enumerate(training_batches(stream, 0, updates, 0)):
            start = time.perf_counter()
            accumulate(model, batch, recipe, runtime, update)
            optimizer.step()
            update_target(model.target_encoder, model.context_encoder, 0.996)
            optimizer.zero_grad(set_to_none=True)
            trained.append(time.perf_counter() - start)
            if update % max(updates // 10, 1) == 0:
                start = time.perf_counter()
                run_monitor(model, runtime, monitor_set, update)
                monitored.append(time.perf_counter() - start)
    update_seconds, monitor_seconds = statistics.median(trained[2:]), statistics.median(monitored[1:])
    every = recipe.monitor.every_updates or updates
    share = monitor_seconds / (monitor_seconds + every * update_seconds)
    print(f"{name}, {torch.get_num_threads()} threads, torch {torch.__version__}, {len(ids)} volumes monitored at")
    print(
        f"an update {update_seconds:.3f} s, the monitor {monitor_seconds:.3f} s: {100 * share:.2f} % "
        f"at every {every} updates"
    )


if __name__ == "__main__":
    main(sys.argv[1] if len(sys.argv) > 1 else "tiny_cpu_vjepa", int(sys.argv[2]) if len(sys.argv) > 2 else 40)
