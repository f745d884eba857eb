"""The supervised row: a small 3D convolutional net trained from nothing on the same labels, splits and budget.

What an encoder without labels is to be measured against. Its weights are those of the least validation loss; it sees
the same crops, flips and light as pretraining. A run goes on from its last checkpoint.
"""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from octjepa import keys
from octjepa.config import load_recipe
from octjepa.distributed.runtime import Runtime
from octjepa.distributed.signals import Interrupted, StopRequest, stop_request
from octjepa.files import write_atomic, write_json
from octjepa.metrics.scores import Predictions, measure
from octjepa.phantom import LESIONS
from octjepa.recipe import Recipe
from octjepa.views import geometry, intensity

from .cohort import Eyes
from .frozen import Bench, few, say_lesions, say_vendor_and_fovea
from .pretrain import calibrated, cpu_clock, cpu_used

_BATCH = 16
_LR = 1e-3
_JUDGED = 12  # times a run that the validation loss is taken and a checkpoint written


class SmallNet(nn.Module):
    """Four strided convolutions, then mean and maximum over the volume, then a logit for each lesion."""

    def __init__(self, width: int = 16) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        before = 1
        for after, stride in ((width, (1, 2, 2)), (2 * width, 2), (4 * width, 2), (8 * width, 2)):
            layers += [
                nn.Conv3d(before, after, 3, stride=stride, padding=1, bias=False), nn.BatchNorm3d(after), nn.ReLU(),
            ]  # fmt: skip
            before = after
        self.body = nn.Sequential(*layers)
        self.head = nn.Linear(2 * before, len(LESIONS))

    def features(self, views: Float[Tensor, "b d h w"]) -> Float[Tensor, "b f"]:
        maps = self.body(views[:, None])
        return torch.cat([maps.mean(dim=(2, 3, 4)), maps.amax(dim=(2, 3, 4))], dim=1)

    def forward(self, views: Float[Tensor, "b d h w"]) -> Float[Tensor, "b lesions"]:
        return self.head(self.features(views))


def _view(bench: Bench, recipe: Recipe, place: int, rng: np.random.Generator | None) -> Float[np.ndarray, "d h w"]:
    volume = bench.eyes.store.read(bench.eyes.ids[place])
    shape = (
        geometry.center_crop(recipe.preprocessing)
        if rng is None
        else geometry.sample_geometry(recipe.preprocessing, recipe.views, rng)
    )
    shown = intensity.IntensityAugmentation() if rng is None else intensity.sample_augmentation(recipe.views, rng)
    view = geometry.apply_geometry(volume.pixels, shape, recipe.preprocessing.image_size)
    return intensity.lookup_table(volume.tissue_mean, volume.tissue_std, shown)[view]


def _batch(bench: Bench, recipe: Recipe, places: np.ndarray, draw: tuple[int, int] | None) -> tuple[Tensor, Tensor]:
    rngs = [None if draw is None else keys.generator("study supervised", *draw, int(place)) for place in places]
    views = np.stack([_view(bench, recipe, int(p), rng) for p, rng in zip(places, rngs, strict=True)])
    return torch.from_numpy(views), torch.from_numpy(bench.eyes.labels[places].astype(np.float32))


class _Training:
    """Net, optimizer and the rows it may learn from."""

    def __init__(self, bench: Bench, recipe: Recipe, seed: int, rows: np.ndarray) -> None:
        self.bench, self.recipe, self.seed, self.rows = bench, recipe, seed, rows
        torch.manual_seed(seed)
        self.runtime = Runtime(recipe.train.precision)
        self.device = self.runtime.device
        # this layout and bf16 make an update twice as fast on a CPU: the row gets the most out of its budget
        self.net = SmallNet().to(self.device, memory_format=torch.channels_last_3d)
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=_LR, weight_decay=0.05)
        share = bench.eyes.labels[rows].mean(axis=0)
        weight = np.where(share > 0, (1 - share) / np.maximum(share, 1e-6), 1.0)
        self.loss = nn.BCEWithLogitsLoss(
            pos_weight=torch.tensor(weight.clip(max=20), dtype=torch.float32).to(self.device)
        )

    def step(self, update: int, rate: float) -> None:
        epoch, at = divmod(update * _BATCH, max(len(self.rows), 1))
        order = np.concatenate([
            keys.generator("study order", self.seed, e).permutation(self.rows)
            for e in range(epoch, epoch + 2 + _BATCH // max(len(self.rows), 1))
        ])  # fmt: skip
        views, labels = _batch(self.bench, self.recipe, order[at : at + _BATCH], (self.seed, update))
        for group in self.optimizer.param_groups:
            group["lr"] = rate
        self.net.train()
        with self.runtime.autocast():
            logits = self.net(views.to(self.device))
        self.loss(logits.float(), labels.to(self.device)).backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    @torch.inference_mode()
    def read(self, places: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """(logits, features) of the volumes."""
        self.net.eval()
        with self.runtime.autocast():
            features = [
                self.net.features(_batch(self.bench, self.recipe, places[i : i + _BATCH], None)[0].to(self.device))
                for i in range(0, len(places), _BATCH)
            ]
        together = torch.cat(features).float()
        return self.net.head(together).cpu().numpy(), together.cpu().numpy()

    def validation_loss(self) -> float:
        logits, _ = self.read(self.bench.val)
        wanted = torch.from_numpy(self.bench.eyes.labels[self.bench.val].astype(np.float32))
        return float(nn.functional.binary_cross_entropy_with_logits(torch.from_numpy(logits), wanted))

    def seconds_per_update(self, seconds: float) -> tuple[float, int]:
        state = {name: value.clone() for name, value in self.net.state_dict().items()}
        started, done = time.process_time(), 0
        while done < 3 or time.process_time() - started < seconds:
            self.step(done, 0.0)
            done += 1
        each = (time.process_time() - started) / done
        self.net.load_state_dict(state)
        self.optimizer.state.clear()
        return each, done


def key_of(threads: int) -> str:
    """Under which an update's cost is kept: that of few people is the same."""
    return f"supervised-{threads}"


def calibrate(eyes: Eyes, recipe_name: str, budget: float, calibration: Path) -> float:
    """CPU-seconds an update on this machine, measured where that is not known yet."""
    bench = Bench(eyes, lambda *figure: None)
    training = _Training(bench, load_recipe(recipe_name), 0, bench.train)
    return calibrated(calibration, key_of(torch.get_num_threads()), budget, training.seconds_per_update)


def run(
    folder: Path, bench: Bench, recipe_name: str, seed: int, budget: float, people: int | None, calibration: Path
) -> dict[str, Any]:
    """Trains (or goes on) in `folder` and says its figures; with `people` only the few-label figure.

    Raises Interrupted after a signal, with a checkpoint written.
    """
    recipe = load_recipe(recipe_name)
    rows = bench.train if people is None else _some_people(bench, people, seed)
    training = _Training(bench, recipe, seed, rows)
    folder.mkdir(parents=True, exist_ok=True)
    asked = folder / "study.json"
    if asked.is_file():
        updates = int(json.loads(asked.read_text(encoding="utf-8"))["updates"])
    else:
        each = calibrated(calibration, key_of(torch.get_num_threads()), budget, training.seconds_per_update)
        updates = max(4, int(budget / each))
        write_json(asked, {"updates": updates, "budget_cpu_seconds": budget, "cpu_seconds_per_update": each})
    with cpu_clock(folder / "cpu"), stop_request() as request:
        _train(training, folder / "net.pt", updates, request)
    _measure(training, bench, people)
    return {
        "recipe": Path(recipe_name).name, "updates": updates, "budget_cpu_seconds": budget,
        "cpu_seconds": round(cpu_used(folder / "cpu"), 1), "training_volumes": len(rows),
        "parameters": sum(parameter.numel() for parameter in training.net.parameters()),
    }  # fmt: skip


def _train(training: _Training, kept: Path, updates: int, request: StopRequest) -> None:
    first, least, best = 0, math.inf, None
    if kept.is_file():
        state = torch.load(kept, weights_only=True)
        training.net.load_state_dict(state["net"])
        training.optimizer.load_state_dict(state["optimiser"])
        first, least, best = int(state["update"]), float(state["least"]), state["best"]
    often, warm = max(1, updates // _JUDGED), max(1, round(0.05 * updates))
    for update in range(first, updates):
        share = (update - warm) / max(updates - warm, 1)
        rate = _LR * (update + 1) / warm if update < warm else _LR * (1 + math.cos(math.pi * share)) / 2
        training.step(update, rate)
        done = update + 1
        if done % often == 0 or done == updates or request.signal_number:
            loss = training.validation_loss()
            if loss < least or best is None:
                least, best = loss, {name: value.clone() for name, value in training.net.state_dict().items()}
            state = {
                "net": training.net.state_dict(), "optimiser": training.optimizer.state_dict(), "update": done,
                "least": least, "best": best,
            }  # fmt: skip
            write_atomic(kept, lambda file, state=state: torch.save(state, file))
        if request.signal_number and done < updates:
            raise Interrupted(f"stopped after update {done} of {updates}; run again to go on", request.signal_number)
    if best is not None:
        training.net.load_state_dict(best)


def _some_people(bench: Bench, people: int, seed: int) -> np.ndarray:
    """Volumes of so many training people: of every lesion its `few` draw in turn, until there are enough."""
    rng = keys.generator("study few supervised", people, seed)
    every = np.unique(bench.eyes.people[bench.train])
    wanted: list[str] = []
    for k in bench.lesions():
        rows = few(bench, k, people, 0)
        if rows is not None:
            wanted += rng.permutation(np.unique(bench.eyes.people[rows])).tolist()[: people // 5 + 1]
    wanted += rng.permutation(every).tolist()
    chosen = list(dict.fromkeys(wanted))[:people]
    rows_of: np.ndarray = bench.train[np.isin(bench.eyes.people[bench.train], chosen)]
    return rows_of


def _measure(training: _Training, bench: Bench, people: int | None) -> None:
    eyes = bench.eyes
    everything = np.arange(len(eyes.ids))
    logits, features = training.read(everything)
    chance = 1 / (1 + np.exp(-logits.astype(np.float64)))
    test, val = {}, {}
    for k in bench.lesions():
        both = np.stack([1 - chance[:, k], chance[:, k]], axis=1)
        share = eyes.labels[training.rows, k].mean()
        odds = chance[:, k] * share / (1 - share) if 0 < share < 1 else chance[:, k]  # the loss weighed the classes
        said = odds / (odds + 1 - chance[:, k])
        stated = np.stack([1 - said, said], axis=1)
        test[k] = Predictions(eyes.labels[bench.test, k].astype(int), both[bench.test], stated[bench.test])
        val[k] = (eyes.labels[bench.val, k], chance[bench.val, k])
    if people is not None:
        bench.estimate(
            f"few_label_auroc_{people}",
            lambda weights: np.mean([measure("auroc", one, weights) for one in test.values()], axis=0),
        )
        return
    say_lesions(bench, test, val)
    say_vendor_and_fovea(bench, features)
