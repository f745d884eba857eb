"""Pretraining runs of the exam, of as many updates as `encoders.yaml` says; resumed where they stopped."""

from __future__ import annotations

import hashlib
import json
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

import torch
import yaml
from benchmarks.packaged_weights import RECORD

from octjepa.config import load_recipe, science, science_hash
from octjepa.distributed.runtime import Runtime
from octjepa.encoders import PretrainedEncoder, load_encoder
from octjepa.errors import UsageError
from octjepa.files import write_json
from octjepa.model import VJEPA3D
from octjepa.recipe import Recipe
from octjepa.shipped import shipped
from octjepa.store import Store
from octjepa.train.data import choose_cohort
from octjepa.train.loop import pretrain
from octjepa.train.optimizer import build_optimizer
from octjepa.train.step import accumulate
from octjepa.views.loader import training_batches

from .results import READINGS, UNTRAINED
from .settings import RECIPE, RESULTS

STARTS = RESULTS / "starts"  # encoders in 16 bit that other runs begin with, in a folder with the name of their run
ENCODERS = Path(__file__).with_name("encoders.yaml")
NAME = "phantom-tiny"  # the encoder in the package is one of these runs
_WARM_UP, _MEASURED = 3, 12  # updates
_CHECKPOINTS = 20  # a run: a kill loses a twentieth at most


@dataclass(frozen=True)
class Plan:
    """One encoder: overrides of the exam's recipe, updates of a run, seeds.

    about: what it is, for the page. start, teacher: the encoder of this file whose run of the same seed a run begins
    with, or learns from. cohort: whom it is pretrained on; real: the real eyes, without their grades. tasks: those that
    it is read by.
    """

    name: str
    about: str
    overrides: tuple[str, ...]
    updates: int
    seeds: tuple[int, ...]
    start: str | None = None
    teacher: str | None = None
    cohort: Literal["phantoms", "real"] = "phantoms"
    tasks: tuple[str, ...] = tuple(READINGS)

    def recipe(self, seed: int, weights: Sequence[str] = ()) -> Recipe:
        """The recipe of a seed; `weights` are the overrides that say where `start` and `teacher` lie."""
        every = max(1, self.updates // _CHECKPOINTS)
        return load_recipe(
            RECIPE,
            [
                *self.overrides,
                *weights,
                f"train.seed={seed}",
                f"train.max_updates={self.updates}",
                f"checkpoint.every_updates={every}",
                "checkpoint.keep_last=1",
                f"monitor.every_updates={max(1, self.updates // 8)}",
                "tracking.pictures_every_updates=null",
            ],
        )

    @property
    def views(self) -> int:
        """Views of a run, without those of the run that it begins with."""
        return self.updates * self.recipe(0).train.global_batch


def read_plans(path: Path | None = None, only: Sequence[str] | None = None) -> list[Plan]:
    """The runs of `encoders.yaml`, or those of `only` (NAME:SEED). Raises UsageError where it names none."""
    path = path or ENCODERS
    given = _parsed(path.read_text(encoding="utf-8"))
    plans = [
        Plan(
            name=name,
            about=one["about"],
            overrides=_overrides(given, name),
            updates=int(one["updates"]),
            seeds=tuple(one["seeds"]),
            start=one.get("start"),
            teacher=one.get("teacher"),
            cohort=one.get("cohort", "phantoms"),
            tasks=tuple(one.get("tasks", READINGS)),
        )
        for name, one in given.items()
    ]
    if not plans:
        raise UsageError(f"{path} names no encoder")
    if not only:
        return plans
    known = {f"{plan.name}:{seed}": replace(plan, seeds=(seed,)) for plan in plans for seed in plan.seeds}
    unknown = [one for one in only if one not in known]
    if unknown:
        raise UsageError(f"no encoder {unknown[0]} in {path.name}: one of {', '.join(known)}")
    return [known[one] for one in only]


@cache
def _parsed(text: str) -> dict[str, dict[str, Any]]:
    """A page asks for the plans of every cell, so that a text is parsed once."""
    return yaml.safe_load(text) or {}


def _overrides(given: dict[str, dict[str, Any]], name: str) -> tuple[str, ...]:
    """Those of the encoder that `name` is like, then its own, which win."""
    like = given[name].get("like")
    return (_overrides(given, like) if like else ()) + tuple(given[name].get("overrides", ()))


def other_plans(plan: Plan) -> dict[str, Plan]:
    """Key of the recipe -> plan whose run of the same seed has the weights that a run of `plan` takes."""
    named = {"model.warm_start": plan.start, "objective.teacher": plan.teacher}
    known = {one.name: one for one in read_plans()} if plan.start or plan.teacher else {}
    return {key: known[name] for key, name in named.items() if name is not None}


def first_plan(plan: Plan) -> Plan | None:
    """The plan whose weights every run of `plan` begins with."""
    return other_plans(plan).get("model.warm_start")


def twin_name(recipe: Recipe, name: str) -> str:
    """The row of an encoder's untrained twin. Encoders of one architecture and seed have the same one.

    The context encoder is drawn first (`VJEPA3D`), so that neither objective nor predictor changes its weights.
    """
    ours, exams = (science(one.model) for one in (recipe, load_recipe(RECIPE)))
    apart = {key for key in ours if ours[key] != exams[key] and not key.startswith(("predictor_", "warm_start"))}
    return f"{UNTRAINED}:{name}" if apart else UNTRAINED


def untrained(plan: Plan, seed: int) -> PretrainedEncoder:
    """The network of a plan's seed before its first update."""
    recipe = plan.recipe(seed)
    torch.manual_seed(seed)
    return PretrainedEncoder(VJEPA3D.from_recipe(recipe).target_encoder, recipe, twin_name(recipe, plan.name))


def run_folder(work: Path, plan: Plan, seed: int) -> Path:
    """Where a run lies: another recipe, or another run whose weights it takes, is another folder."""
    digest = science_hash(plan.recipe(0))
    for other in other_plans(plan).values():
        digest = hashlib.sha256(f"{digest} {run_folder(work, other, seed).name}".encode()).hexdigest()
    return work / "runs" / f"{plan.name}-{digest[:8]}-seed{seed}"


def is_trained(folder: Path) -> bool:
    """Whether the run in `folder` has ended."""
    return (folder / "trained.json").is_file()


def in_package() -> dict[str, Any] | None:
    """What is known of the run whose encoder is in the package; None where no encoder is."""
    folder = shipped(NAME)
    return None if folder is None else _read_record(folder)


def _read_record(folder: Path) -> dict[str, Any]:
    """The record next to stored weights in 16 bit, on the run that made them."""
    return dict(json.loads((folder / RECORD).read_text(encoding="utf-8")))


def weights_of(work: Path, plan: Plan, seed: int) -> str | None:
    """Where the encoder of a run lies that has ended: in its folder, in the package or in `STARTS`; None: nowhere."""
    folder, about = run_folder(work, plan, seed), in_package()
    if is_trained(folder):
        return str(folder / "run")
    if about is not None and about["run"] == folder.name:
        return NAME
    return str(STARTS / folder.name) if (STARTS / folder.name).is_dir() else None


def finished_run(work: Path, plan: Plan, seed: int) -> tuple[PretrainedEncoder, dict[str, Any]] | None:
    """The encoder of a run that has ended, from where `weights_of` finds it, and what is known of the run."""
    weights = weights_of(work, plan, seed)
    if weights is None:
        return None
    encoder = load_encoder(weights)
    folder = run_folder(work, plan, seed)
    if not is_trained(folder):  # a copy in 16 bit: the hash of the run's own weights is in its record
        about = (in_package() or {}) if weights == NAME else _read_record(Path(weights))
        return encoder, {key: value for key, value in about.items() if key != "alarms"}
    about = json.loads((folder / "trained.json").read_text(encoding="utf-8"))
    return encoder, {**about, "run": folder.name, "weights": encoder.weights_hash()[:12]}


def plan_in_package() -> Plan:
    """Of the encoder in the package, with its one seed. Raises UsageError where none is there."""
    about = in_package()
    if about is None:
        raise UsageError(f'{NAME} is not in the package: `make exam ARGS="--ship NAME:SEED"` writes it')
    return read_plans(only=[f"{about['encoder']}:{about['seed']}"])[0]


def weights_of_others(work: Path, plan: Plan, seed: int) -> list[str]:
    """Overrides that say where the weights lie that a run of `plan` takes.

    Raises UsageError where such a run is neither in its folder nor in the package.
    """
    found = []
    for key, other in other_plans(plan).items():
        weights = weights_of(work, other, seed)
        if weights is None:
            raise UsageError(
                f'{plan.name} takes its weights from {other.name}:{seed}: `make exam ARGS="--train '
                f'{other.name}:{seed}"` trains it'
            )
        found.append(f"{key}={weights}")
    return found


def train(work: Path, plan: Plan, seed: int, store_path: Path) -> Path:
    """Trains a run, or goes on with it; returns its folder. Raises as `octjepa.train.loop.pretrain`."""
    folder = run_folder(work, plan, seed)
    if is_trained(folder):
        return folder
    recipe, out = plan.recipe(seed, weights_of_others(work, plan, seed)), folder / "run"
    resume, starts = (out / "run.json").is_file(), folder / "cpu_minutes.json"
    before = {} if starts.is_file() or not resume else {"earlier": None}  # it began before starts were counted
    with counted_cpu_minutes(starts, before):
        summary = pretrain(recipe, Store.open(store_path), out, resume=resume)
    cpu = cpu_minutes(starts)
    write_json(
        folder / "trained.json",
        {
            "encoder": plan.name,
            "overrides": list(plan.overrides),
            "seed": seed,
            "updates": plan.updates,
            "start": _run(plan.start, seed),
            "teacher": _run(plan.teacher, seed),
            "views": plan.views,
            "eyes": summary.volumes,
            **cpu,
            "loss": summary.loss,
            "rankme": summary.rankme,
        },
    )
    return folder


@contextmanager
def counted_cpu_minutes(
    path: Path, before: Mapping[str, float | None] | None = None, every_seconds: float = 60.0
) -> Iterator[None]:
    """Adds an entry to `path`: the CPU-minutes of this process within the block, also where it is stopped.

    before: earlier starts of a run that has no such file yet; None for what is not known. Written every so often, since
    a kill lets nobody write at the end.
    """
    starts: dict[str, float | None] = dict(before or {})
    if path.is_file():
        starts = json.loads(path.read_text(encoding="utf-8"))
    number, started, ended = f"start {len(starts) + 1}", time.process_time(), threading.Event()

    def write() -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, starts | {number: round((time.process_time() - started) / 60, 2)})

    def write_until_ended() -> None:
        while not ended.wait(every_seconds):
            write()

    writer = threading.Thread(target=write_until_ended, daemon=True)
    write()
    writer.start()
    try:
        yield
    finally:
        ended.set()
        writer.join()
        write()


def cpu_minutes(path: Path) -> dict[str, float]:
    """{cpu_minutes} of all starts in `path`, or {cpu_minutes_of_known_starts} where there were others."""
    minutes = list(json.loads(path.read_text(encoding="utf-8")).values())
    name = "cpu_minutes_of_known_starts" if None in minutes else "cpu_minutes"
    return {name: round(sum(one for one in minutes if one is not None), 2)}


def _run(name: str | None, seed: int) -> str | None:
    return None if name is None else f"{name}:{seed}"


def cpu_seconds(path: Path, plan: Plan, store: Store) -> float:
    """CPU-seconds that a run of `plan` takes on this machine, from a few updates; measured once, then read."""
    recipe = plan.recipe(0)
    known: dict[str, float] = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    key = f"{science_hash(recipe)[:16]}-{torch.get_num_threads()}"
    if key not in known:
        runtime, (_, dataset) = Runtime(recipe.train.precision), choose_cohort(store, recipe)
        model = VJEPA3D.from_recipe(recipe).to(runtime.device)
        optimizer = build_optimizer(model, recipe.train)
        started = 0.0
        for update, batch in enumerate(training_batches(dataset, 0, _WARM_UP + _MEASURED, 0)):
            if update == _WARM_UP:
                started = time.process_time()
            accumulate(model, batch, recipe, runtime, update)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        known[key] = (time.process_time() - started) / _MEASURED
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, known)
    return known[key] * plan.updates
