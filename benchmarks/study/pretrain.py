"""One pretraining run within a budget of CPU-seconds: calibrated once, trained, resumed where it was stopped.

The schedule needs the number of updates in advance. It follows from the arm's CPU-seconds an update, measured on this
machine once for each recipe and kept in `calibration.json`; what a run then really used is measured and reported.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from octjepa.config import load_recipe, science_hash
from octjepa.distributed.runtime import Runtime
from octjepa.files import write_json
from octjepa.model import VJEPA3D
from octjepa.objective.ema import update_target
from octjepa.recipe import Recipe
from octjepa.store import Store
from octjepa.train.data import choose_cohort
from octjepa.train.loop import pretrain
from octjepa.train.optimizer import build_optimizer
from octjepa.train.step import accumulate
from octjepa.views.loader import training_batches

_SETTLE = 3  # first updates, not measured: caches fill, kernels are built
_SAME_COST = (
    "objective.ema_", "masks.tubes=", "masks.blocks=", "masks.runs=", "model.position_unit=", "model.warm_start=",
)  # fmt: skip
_CHECKPOINTS = 20  # a run; a kill loses a twentieth at most


@contextmanager
def cpu_clock(folder: Path, every_seconds: float = 2.0) -> Iterator[None]:
    """While open, keeps this process's CPU-seconds in a file of its own in `folder`, so that a kill loses seconds."""
    folder.mkdir(parents=True, exist_ok=True)
    mine = folder / f"{time.time_ns()}.txt"
    started, stop = time.process_time(), threading.Event()

    def write() -> None:
        mine.write_text(f"{time.process_time() - started:.2f}", encoding="utf-8")

    def keep() -> None:
        while not stop.wait(every_seconds):
            write()

    thread = threading.Thread(target=keep, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
        write()


def cpu_used(folder: Path) -> float:
    """CPU-seconds of all tries of a run."""
    return sum(float(path.read_text(encoding="utf-8") or 0) for path in folder.glob("*.txt"))


def calibrated(kept: Path, key: str, budget: float, measure: Callable[[float], tuple[float, int]]) -> float:
    """CPU-seconds an update of what `key` names: from the file `kept`, or by `measure(seconds)` and then kept there."""
    known = calibrations(kept)
    if key not in known:
        seconds, updates = measure(min(max(0.05 * budget, 0.5), 30.0))
        known[key] = {
            "cpu_seconds_per_update": seconds,
            "measured_updates": updates,
            "threads": torch.get_num_threads(),
        }
        write_json(kept, known)
    return float(known[key]["cpu_seconds_per_update"])


def calibrations(kept: Path) -> dict[str, Any]:
    """What the file holds, by key."""
    return json.loads(kept.read_text(encoding="utf-8")) if kept.is_file() else {}


def calibration_key(recipe_name: str, overrides: Sequence[str], threads: int) -> str:
    """Seeds, lengths and what changes no arithmetic cost the same an update: noise is to give them no other lengths."""
    overrides = [one for one in overrides if not one.startswith(_SAME_COST)]
    return f"{science_hash(load_recipe(recipe_name, [*overrides, 'train.seed=0']))[:16]}-{threads}"


def calibrate(store: Store, recipe_name: str, overrides: Sequence[str], budget: float, calibration: Path) -> float:
    """CPU-seconds an update of a recipe on this machine, measured where that is not known yet."""
    key = calibration_key(recipe_name, overrides, torch.get_num_threads())
    recipe = load_recipe(recipe_name, [*overrides, "train.seed=0"])
    return calibrated(calibration, key, budget, lambda seconds: seconds_per_update(recipe, store, seconds))


def seconds_per_update(recipe: Recipe, store: Store, seconds: float) -> tuple[float, int]:
    """(CPU-seconds an update of the training loop without validation and saving, updates it was measured on)."""
    runtime = Runtime(recipe.train.precision)
    _, stream = choose_cohort(store, recipe)
    model = VJEPA3D.from_recipe(recipe).to(runtime.device)
    if recipe.machine.compile:
        model.compile_blocks()
    optimizer = build_optimizer(model, recipe.train)
    started, done = 0.0, 0
    for update, batch in enumerate(training_batches(stream, 0, 10_000, 0)):
        if update == _SETTLE:
            started = time.process_time()
        accumulate(model, batch, recipe, runtime, update)
        torch.nn.utils.clip_grad_norm_(model.parameters(), recipe.train.clip_norm or 1.0)
        optimizer.step()
        update_target(model.target_encoder, model.context_encoder, 0.99)
        optimizer.zero_grad(set_to_none=True)
        done = update + 1 - _SETTLE
        if done >= 3 and time.process_time() - started > seconds:
            break
    return (time.process_time() - started) / done, done


def run(
    folder: Path, store: Store, recipe_name: str, overrides: Sequence[str], seed: int, budget: float, calibration: Path
) -> dict[str, Any]:
    """Trains (or goes on with) the run in `folder`; returns what is to be known of it.

    Raises as `octjepa.train.loop.pretrain`; Interrupted after a signal, with a checkpoint written.
    """
    asked = folder / "study.json"
    if asked.is_file():
        updates = int(json.loads(asked.read_text(encoding="utf-8"))["updates"])
    else:
        each = calibrate(store, recipe_name, overrides, budget, calibration)
        updates = max(4, int(budget / each))
        folder.mkdir(parents=True, exist_ok=True)
        write_json(asked, {"updates": updates, "budget_cpu_seconds": budget, "cpu_seconds_per_update": each})
    often = max(1, updates // _CHECKPOINTS)
    recipe = load_recipe(
        recipe_name,
        [
            *overrides, f"train.seed={seed}", f"train.max_updates={updates}", f"checkpoint.every_updates={often}",
            "checkpoint.keep_last=1", f"monitor.every_updates={max(1, updates // 8)}",
        ],
    )  # fmt: skip
    place = folder / "run"
    with cpu_clock(folder / "cpu"):
        summary = pretrain(recipe, store, place, resume=(place / "run.json").is_file())
    about = json.loads((place / "run.json").read_text(encoding="utf-8"))
    return {
        "recipe": Path(recipe_name).name, "overrides": list(overrides), "updates": updates,
        "budget_cpu_seconds": budget, "cpu_seconds": round(cpu_used(folder / "cpu"), 1),
        **{name: about[name] for name in ("science_hash", "data_hash", "code_hash", "versions", "devices")},
        "continued": about.get("continued", []),
        **{name: summary[name] for name in ("cosine", "baseline_cosine", "loss", "rankme", "alarms")},
    }  # fmt: skip
