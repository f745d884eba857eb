"""Train the segmentation network on a stream of randomised phantoms: `python -m octjepa.tasks.segmenter.train`.

Worker processes draw scenes into a pool on the training device; every step draws a batch of new images from the pool.
The learning rate follows the share of the time budget that has passed, so a run ends on time on any machine. A killed
run continues from its last checkpoint when the same command is given again. No real image is read.

`Trainer.run` is the loop. Its optimizer step, spike guard and late metrics are those of `octjepa.train.engine`, as in
pretraining: a step whose loss or gradient is not finite, or whose gradient is a spike, is skipped.

Out, in `--out`: `segmenter.safetensors` (float16 weights, renewed at every validation), `segmenter.json` (settings,
progress, validation metrics) and `log.jsonl`. The checkpoint (weights, optimizer, progress) is in `--checkpoints`, by
default the same folder.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save

from octjepa.distributed.adamw import adamw
from octjepa.distributed.precision import AUTO, choose_precision
from octjepa.distributed.runtime import Runtime, best_device
from octjepa.distributed.signals import stop_request
from octjepa.errors import OctjepaError
from octjepa.files import write_atomic
from octjepa.keys import key
from octjepa.model.boundary_unet import BoundaryUNet, segmentation_loss
from octjepa.phantom.scene_stream import SceneStream
from octjepa.tasks.segmenter.image_formation import Draws, form_batch
from octjepa.tasks.segmenter.scene_pool import ScenePool
from octjepa.tasks.segmenter.validation import validate, validation_batches
from octjepa.train.engine import LateMetrics, MicroLoss, accumulate_gradients, take_step
from octjepa.train.guards import SKIPPED_IN_A_ROW
from octjepa.train.learner import Learner
from octjepa.train.optimizer import set_learning_rate

_SLICES: Final = 6  # B-scans of a scene
_CHECKPOINT: Final = "checkpoint.safetensors"
_CLIP_NORM: Final = 1.0


@dataclass(frozen=True)
class TrainingSettings:
    """Settings of a run; the defaults fit two CPU cores."""

    seconds: float = 1200.0
    workers: int = 1
    seed: int = 1
    batch: int = 8
    learning_rate: float = 2.5e-3
    weight_decay: float = 0.02
    spike_factor: float | None = 10.0  # times the median gradient norm; steps above it are skipped, as in pretraining
    pool_scenes: int = 400
    first_scenes: int = 60
    scenes_per_step: int = 8
    validation_scenes: int = 48
    validate_seconds: float = 300.0
    checkpoint_seconds: float = 60.0


@dataclass
class _Progress:
    """How far a run is; stored in the checkpoint."""

    step: int = 0
    seconds: float = 0.0
    scenes: int = 0
    samples: int = 0
    skipped: int = 0  # steps that were not taken


class _Losses(LateMetrics):
    """The losses since the last report. Tells the spike guard of each step, one step late."""

    def __init__(self, learner: Learner, runtime: Runtime) -> None:
        super().__init__(runtime)
        self._learner = learner
        self._taken: list[tuple[float, float]] = []

    def write(self, update: int, steps: list[dict[str, float]], about: None) -> None:
        """Raises OctjepaError: too many steps in a row were skipped."""
        (step,) = steps
        healthy = bool(step["healthy"])
        if self._learner.follow_update(update, healthy, step["grad_norm"]):
            raise OctjepaError(
                f"{SKIPPED_IN_A_ROW} steps in a row until step {update + 1} had a gradient that is not finite or a "
                "spike: lower --learning-rate and start again, or continue from the last checkpoint"
            )
        if healthy:
            self._taken.append((step["layers"], step["fluid"]))

    def take_mean(self) -> tuple[float, float]:
        """The mean (layer loss, class loss) since the last call; NaN without a step."""
        self.flush()
        taken, self._taken = self._taken, []
        return tuple(np.mean(taken, axis=0).tolist()) if taken else (math.nan, math.nan)


def learning_rate(settings: TrainingSettings, share: float) -> float:
    """Warm-up over the first 4 % of the run, then half a cosine down to 0.5 % of the peak."""
    share = min(max(share, 0.0), 1.0)
    rise = min(1.0, (share + 1e-3) / 0.04)
    return settings.learning_rate * rise * (0.005 + 0.995 * 0.5 * (1 + math.cos(math.pi * share)))


class Trainer:
    """One run: network, optimizer and progress, in `out`."""

    def __init__(
        self,
        settings: TrainingSettings,
        out: Path,
        checkpoints: Path,
        device: torch.device,
        init: Path | None = None,
    ) -> None:
        torch.manual_seed(settings.seed)
        self.settings, self.out, self.device = settings, out, device
        self.runtime = Runtime(choose_precision(AUTO, device)[0])
        self.runtime.device = device
        self.checkpoint = checkpoints / _CHECKPOINT
        self.network = BoundaryUNet().to(device).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        self.earlier: dict[str, object] = {}
        if init is not None:
            record = init.with_suffix(".json")  # how the weights to start from were trained
            self.earlier = json.loads(record.read_text()) if record.is_file() else {"weights": init.name}
            self.network.load_state_dict({k: v.float() for k, v in load_file(init).items()})
        self.optimizer = adamw(
            self.network.parameters(), device, lr=settings.learning_rate, weight_decay=settings.weight_decay
        )
        self.progress = _Progress()
        if self.checkpoint.is_file():
            self._restore()
        self.learner = Learner(
            "segmenter", self.network, self.optimizer, sys.maxsize, spike_factor=settings.spike_factor
        )  # the time budget ends the run, not a number of updates
        self.learner.skipped = self.progress.skipped
        self.losses = _Losses(self.learner, self.runtime)

    def run(self, stream: SceneStream) -> int:
        """Trains until the budget is used up or a signal arrives; returns the signal's number or 0."""
        settings, progress = self.settings, self.progress
        pool = ScenePool(settings.pool_scenes, _SLICES, self.device)
        validation = validation_batches(settings.validation_scenes, self.device)
        while len(pool) < min(settings.first_scenes, settings.pool_scenes):
            pool.add(stream.take())
            time.sleep(0.02)
        draws = Draws(key("segmenter", settings.seed, progress.step) % 2**31, self.device)
        rng = np.random.default_rng([settings.seed, progress.step])
        before, received = progress.seconds, progress.scenes
        start = time.monotonic()
        saved, validated = start, start
        self.network.train()
        with stop_request() as request, self.losses:
            while progress.seconds < settings.seconds and not request.signal_number:
                pool.add(stream.take(settings.scenes_per_step))
                progress.scenes = received + pool.received
                self.step(pool, rng, draws)
                now = time.monotonic()
                progress.seconds = before + now - start
                if now - validated > settings.validate_seconds:
                    result = validate(self.network, validation).as_dict()
                    self._report(result)
                    self._export(result)
                    validated = time.monotonic()
                if now - saved > settings.checkpoint_seconds:
                    self.save()
                    saved = time.monotonic()
        progress.seconds = before + time.monotonic() - start
        self.save()
        if request.signal_number:
            self._report({})
            return request.signal_number
        result = validate(self.network, validation).as_dict()
        self._report(result)
        self._export(result)
        return 0

    def step(self, pool: ScenePool, rng: np.random.Generator, draws: Draws) -> None:
        """One step on a batch of new images. Raises OctjepaError: too many steps in a row were skipped."""
        settings, progress = self.settings, self.progress
        set_learning_rate(self.optimizer, learning_rate(settings, progress.seconds / settings.seconds))
        with torch.no_grad():
            batch = form_batch(pool.sample(rng, settings.batch), draws)
        images = batch.images.contiguous(memory_format=torch.channels_last)
        with self.runtime.autocast():
            logits = self.network(images)
        layers, fluid = segmentation_loss(logits, batch.boundaries, batch.classes, batch.graded)
        loss = MicroLoss(layers + 2 * fluid, {"layers": layers.detach(), "fluid": fluid.detach()})
        sums = accumulate_gradients(self.network, [loss])
        limit = self.learner.norm_limit(progress.step)
        taken = take_step(self.network, self.optimizer, sums, self.runtime, _CLIP_NORM, limit)
        self.losses.push(progress.step, [taken], None)
        progress.step += 1
        progress.samples += settings.batch

    def _report(self, result: dict[str, object]) -> None:
        progress, losses = self.progress, self.losses.take_mean()
        line = {
            "step": progress.step,
            "seconds": round(progress.seconds, 1),
            "scenes": progress.scenes,
            "samples": progress.samples,
            "layer_loss": round(losses[0], 4),
            "class_loss": round(losses[1], 4),
            **result,
        }
        text = json.dumps(line)
        print(text, file=sys.stderr, flush=True)
        with (self.out / "log.jsonl").open("a") as file:
            file.write(text + "\n")

    def save(self) -> None:
        """Writes the checkpoint; the previous one stays until the new one is complete."""
        self.losses.flush()
        self.progress.skipped = self.learner.skipped
        tensors = {f"network.{k}": v.contiguous() for k, v in self.network.state_dict().items()}
        for k, parameter in enumerate(self.network.parameters()):
            for name, value in self.optimizer.state.get(parameter, {}).items():
                tensors[f"optimizer.{k}.{name}"] = value.contiguous()
        data = save(tensors, {"progress": json.dumps(vars(self.progress))})
        write_atomic(self.checkpoint, lambda file: file.write(data))

    def _restore(self) -> None:
        with safe_open(self.checkpoint, "pt") as file:
            self.progress = _Progress(**json.loads(file.metadata()["progress"]))
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dictionary
        network = {k.removeprefix("network."): v for k, v in tensors.items() if k.startswith("network.")}
        self.network.load_state_dict(network)
        for k, parameter in enumerate(self.network.parameters()):
            names = [name for name in tensors if name.startswith(f"optimizer.{k}.")]
            for name in names:
                value = tensors[name] if name.endswith(".step") else tensors[name].to(self.device)
                if value.ndim == 4:
                    value = value.contiguous(memory_format=torch.channels_last)
                if name.endswith(".step") and self.device.type == "cuda":
                    value = value.to(self.device)
                self.optimizer.state[parameter][name.split(".")[-1]] = value

    def _export(self, result: dict[str, object]) -> None:
        tensors = {
            name: (value.half() if value.is_floating_point() else value).contiguous().cpu()
            for name, value in self.network.state_dict().items()
        }
        data = save(tensors)
        write_atomic(self.out / "segmenter.safetensors", lambda file: file.write(data))
        record = {
            "settings": vars(self.settings),
            "progress": vars(self.progress),
            "validation": result,
            "device": torch.cuda.get_device_name() if self.device.type == "cuda" else platform.processor() or "cpu",
            "precision": self.runtime.precision,
            "torch": torch.__version__,
            "continued_from": self.earlier,
        }
        text = json.dumps(record, indent=1).encode()
        write_atomic(self.out / "segmenter.json", lambda file: file.write(text))


def _settings(arguments: argparse.Namespace, cuda: bool) -> TrainingSettings:
    """Settings from the command line; a GPU gets a larger batch and pool."""
    return TrainingSettings(
        seconds=arguments.seconds,
        workers=arguments.workers,
        seed=arguments.seed,
        batch=arguments.batch or (64 if cuda else 8),
        learning_rate=arguments.learning_rate,
        pool_scenes=arguments.pool or (24_000 if cuda else 400),
        first_scenes=400 if cuda else 60,
        scenes_per_step=arguments.scenes_per_step,
        validation_scenes=arguments.validation_scenes or (160 if cuda else 48),
        validate_seconds=arguments.validate_seconds or (30.0 if cuda else 300.0),
        checkpoint_seconds=45.0 if cuda else 60.0,
    )


def main() -> int:
    """Reads the command line and trains; the exit code is 0, or 128 plus the number of a signal."""
    parser = argparse.ArgumentParser(prog="python -m octjepa.tasks.segmenter.train", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder of the weights and the log")
    parser.add_argument("--checkpoints", type=Path, help="folder of the checkpoint; default: the folder of --out")
    parser.add_argument("--seconds", type=float, default=1200.0, help="time budget, over all resumed parts of a run")
    parser.add_argument("--workers", type=int, default=1, help="processes that draw phantoms")
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    parser.add_argument("--init", type=Path, help="weights to start from (safetensors)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--batch", type=int, default=0, help="0: 64 on a GPU, 8 on a CPU")
    parser.add_argument("--learning-rate", type=float, default=2.5e-3)
    parser.add_argument("--pool", type=int, default=0, help="scenes in memory; 0: 24,000 on a GPU, 400 on a CPU")
    parser.add_argument("--scenes-per-step", type=int, default=8, help="new scenes taken in each step at most")
    parser.add_argument("--validation-scenes", type=int, default=0)
    parser.add_argument("--validate-seconds", type=float, default=0.0)
    parser.add_argument("--threads", type=int, default=1, help="threads of torch on a CPU")
    arguments = parser.parse_args()
    checkpoints: Path = arguments.checkpoints or arguments.out
    for folder in (arguments.out, checkpoints):
        folder.mkdir(parents=True, exist_ok=True)
    progress = checkpoints / _CHECKPOINT
    start = 0
    if progress.is_file():
        with safe_open(progress, "pt") as file:
            start = _Progress(**json.loads(file.metadata()["progress"])).scenes
    try:
        # The workers are forked before torch starts a thread or a CUDA context.
        with SceneStream(arguments.seed, arguments.workers, _SLICES, start) as stream:
            torch.set_num_threads(arguments.threads)
            cuda = arguments.device == "cuda" or (arguments.device == "auto" and best_device().type == "cuda")
            if cuda:
                torch.backends.cudnn.benchmark = True
                torch.backends.cuda.matmul.allow_tf32 = True
            device = torch.device("cuda" if cuda else "cpu")
            settings = _settings(arguments, cuda)
            number = Trainer(settings, arguments.out, checkpoints, device, arguments.init).run(stream)
    except OctjepaError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 128 + number if number else 0


if __name__ == "__main__":
    sys.exit(main())
