"""Objectives at equal CPU time: each trains the same encoder from random weights on randomised phantoms.

`python -m benchmarks.objectives --work WORK --out benchmarks/records/objectives.json` trains each choice of `CHOICES`
with seed 0 and reads it on validation eyes; the best choice of each objective is trained with two more seeds, and only
then read on test eyes. Results of other choices in the file stay. `mae+truth` and `vjepa+truth` have one setting, that
of their parts, and one seed. `mae_spectral` has the setting of `mae`, and one seed (`benchmarks.spectral`). The command
continues where it stopped, and does not train again what the file has. Take one core: `OMP_NUM_THREADS=1`.

`--longer NAME...` trains `mae`, `vjepa` or `truth` for about half a CPU-hour with AMX, an hour without bf16, with the
setting that was the best of the first sweep; `--seeds` are 0 unless given. Results go to the same file, as `longer`,
and the other results there stay. `truth_longest` is `truth` for the time of the exam's longest runs, `mae_longest` and
`vjepa_longest`, which `make exam` trains on its own phantoms; their stored weights are read on the same eyes. `--store`
also writes the trained encoders in 16 bit next to those of the exam. A machine without the run then reads these.

`--time` measures the CPU-seconds of one update of each tested choice on this machine, and writes them to the same file
as `seconds_of_update`, by objective and setting. The plot of `docs/exam` multiplies updates by these seconds, because
the runs were on several machines.

Objectives without labels learn from a store of 400 randomised volumes, those of longer runs from 1,200. The objective
`truth` draws new volumes of the same ranges, and drawing them is part of its time. A combination takes a batch of each
in every update (`octjepa.tasks.truth.unlabelled`). `noise2noise` is left out: a randomised volume is drawn on the grid
of the encoder, so it has no B-scans between its slices, and no halves.

Values are average precisions by token from 30 labelled eyes, as in `benchmarks.phantom_tokens`: the cohort of the
exam's kind, whose phantoms no objective has seen, and `shifted`.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from benchmarks.exam.settings import RECIPE, ROOT, WORK
from benchmarks.exam.tokens import Featurise, of_encoder
from benchmarks.exam.training import STARTS, Plan, finished_run, read_plans
from benchmarks.packaged_weights import RECORD, write_package
from benchmarks.phantom_tokens import (
    PhantomCohort,
    Value,
    exam_cohort,
    eye_tokens,
    read_tokens,
    shifted_cohort,
    values_of,
)
from benchmarks.spectral import SpectralMAE

from octjepa.config import load_recipe
from octjepa.convert.dicom import write_dicom
from octjepa.distributed.runtime import Runtime
from octjepa.encoders import PretrainedEncoder, load_encoder
from octjepa.encoders.export import export_encoder
from octjepa.errors import UsageError
from octjepa.files import write_json
from octjepa.ingest import build_store
from octjepa.model import VJEPA3D
from octjepa.objectives.base import register_objective
from octjepa.phantom.scene_stream import TRAINING_MIX
from octjepa.recipe import Recipe
from octjepa.store import Store
from octjepa.tasks.truth.network import TruthNetwork
from octjepa.tasks.truth.training import TruthSettings, train_on_truth
from octjepa.tasks.truth.unlabelled import Unlabelled
from octjepa.tasks.truth.volumes import draw_volume
from octjepa.train.loop import pretrain
from octjepa.volume import OCTVolume

STORED_VOLUMES, MORE_STORED_VOLUMES, STORED_SEED = 400, 1200, 31_001
TRUTH = "truth"
EXAM_PATCH = (4, 8, 8)  # voxels; finer tokens are more tokens, for the same share of a volume
USES = 8  # how often a volume of `truth` is used
_UNTIMED, _TIMED = 4, 40  # updates
VALIDATION, TEST = 0, 1  # seeds of the cohorts, added to those of benchmarks.phantom_tokens
_RANDOM_MASKS = ("masks.random=1", "masks.tubes=0", "masks.blocks=0", "masks.runs=0")


@dataclass(frozen=True)
class Choice:
    """One objective with one setting."""

    objective: str
    setting: str
    updates: int
    overrides: tuple[str, ...] = ()
    seeds: tuple[int, ...] = (0, 1, 2)
    is_only_one: bool = False  # of its objective, fixed in advance: nothing is chosen on validation eyes
    stored: int = STORED_VOLUMES  # volumes without labels
    exam_run: str = ""  # a run of the exam with stored weights, which is read and not trained

    @property
    def learns_truth(self) -> bool:
        """Alone, or next to the objective in front of the plus sign."""
        return self.objective.endswith(TRUTH)

    @property
    def without_labels(self) -> str:
        """The objective without labels; empty for the truth alone."""
        return self.objective.removesuffix(TRUTH).removesuffix("+")

    @property
    def name(self) -> str:
        """For folders and JSON."""
        return f"{self.objective}-{self.setting}".replace(" ", "_")


# Four to five CPU-minutes on one core with AMX, 12 to 16 without bf16. A combined update costs what both cost.
UPDATES = {
    "mae": 450,
    "mae_spectral": 450,
    "vjepa": 260,
    "vjepa_dense": 230,
    "levjepa": 104,
    "truth": 170,
    "mae+truth": 130,
    "vjepa+truth": 110,
}
_MAE = (*_RANDOM_MASKS, "masks.target_share=0.25", "model.predictor_width=192", "model.predictor_depth=2")
_VJEPA = ("masks.target_share=0.5", "masks.per_target=4", "train.global_batch=8")
_LEVJEPA = (*_RANDOM_MASKS, "masks.ratio=0.5", "masks.per_target=2", "train.global_batch=16")
_VJEPA_1 = (*_VJEPA, "objective.ema_horizon=0.01")
_DENSE = UPDATES["vjepa_dense"]
CHOICES = (
    Choice("mae", "rate 1e-3", UPDATES["mae"], (*_MAE, "train.base_lr=1e-3")),
    Choice("vjepa", "horizon 0.01", UPDATES["vjepa"], _VJEPA_1),
    Choice("vjepa", "horizon 0.05", UPDATES["vjepa"], (*_VJEPA, "objective.ema_horizon=0.05")),
    Choice("levjepa", "rate 5e-4", UPDATES["levjepa"], _LEVJEPA),
    Choice("levjepa", "rate 1e-3", UPDATES["levjepa"], (*_LEVJEPA, "train.base_lr=1e-3")),
    Choice("truth", "rate 1e-3", UPDATES["truth"], ("train.base_lr=1e-3",)),
    Choice("vjepa_dense", "horizon 0.01", _DENSE, _VJEPA_1, seeds=(0,)),
    Choice("vjepa", "rate 1e-3", UPDATES["vjepa"], (*_VJEPA_1, "train.base_lr=1e-3")),
    Choice("truth", "rate 2e-3", UPDATES["truth"], ("train.base_lr=2e-3",)),
    Choice("vjepa_dense", "rate 1e-3", _DENSE, (*_VJEPA_1, "train.base_lr=1e-3"), seeds=(0,)),
    # An update that costs more: fewer of them in the same time, by updates that were timed first.
    Choice("vjepa", "predictor 192 x 2", 208, (*_VJEPA_1, "model.predictor_width=192", "model.predictor_depth=2")),
    Choice("vjepa", "batch 16", 147, (*_VJEPA_1, "train.global_batch=16")),
    Choice("vjepa", "70 % masked", 225, (*_VJEPA_1, "masks.ratio=0.7")),
    Choice("vjepa", "horizon 0.1", UPDATES["vjepa"], (*_VJEPA, "objective.ema_horizon=0.1")),
    Choice("mae", "75 % masked", 410, (*_MAE, "masks.ratio=0.75", "train.base_lr=1e-3")),
    Choice("levjepa", "batch 32", 52, (*_LEVJEPA, "train.global_batch=32")),
    Choice("mae+truth", "rate 1e-3", UPDATES["mae+truth"], (*_MAE, "train.base_lr=1e-3"), seeds=(0,), is_only_one=True),
    Choice(
        "vjepa+truth",
        "rate 1e-3",
        UPDATES["vjepa+truth"],
        (*_VJEPA_1, "train.base_lr=1e-3"),
        seeds=(0,),
        is_only_one=True,
    ),
    Choice(
        "mae_spectral",
        "rate 1e-3",
        UPDATES["mae_spectral"],
        (*_MAE, "train.base_lr=1e-3"),
        seeds=(0,),
        is_only_one=True,
    ),
)
_MORE_UPDATES = {"vjepa": 1200, "mae": 2100, "truth": 850}
_FIRST_SETTINGS = {"vjepa": "horizon 0.01", "mae": "rate 1e-3", "truth": "rate 1e-3"}
LONGER = {
    choice.objective: replace(
        choice,
        setting=f"{choice.setting} for half an hour",
        updates=_MORE_UPDATES[choice.objective],
        seeds=(0,),
        stored=MORE_STORED_VOLUMES,
    )
    for choice in CHOICES
    if _FIRST_SETTINGS.get(choice.objective) == choice.setting
}


def exam_plans(name: str) -> list[Plan]:
    """The plan of a run of the exam, and those of the runs that it begins with."""
    plan = read_plans(only=[f"{name}:0"])[0]
    return [plan, *(exam_plans(plan.start) if plan.start else [])]


def _of_exam(name: str, objective: str) -> Choice:
    updates = sum(plan.updates for plan in exam_plans(name))
    return Choice(objective, "as in the exam, for five hours", updates, seeds=(0,), exam_run=name)


LONGER |= {
    # As much CPU time as the runs `mae_long` and `mae_longest` of the exam, by `seconds_of_update`; they took five
    # hours without bf16.
    "truth_longest": replace(LONGER[TRUTH], setting="rate 1e-3 for five hours", updates=6900),
    "mae_longest": _of_exam("mae_longest", "mae"),
    "vjepa_longest": _of_exam("vjepa_longest", "vjepa"),
}


@dataclass(frozen=True)
class Run:
    """A trained choice: its CPU time, and its values by cohort and lesion."""

    objective: str
    setting: str
    seed: int
    updates: int
    cpu_seconds: float
    values: dict[str, dict[str, Value]]


def recipe_of(choice: Choice, seed: int) -> Recipe:
    """The exam's recipe with the overrides of a choice."""
    overrides = [*choice.overrides, f"train.seed={seed}", f"train.max_updates={choice.updates}", "train.precision=auto"]
    name = [f"objective.name={choice.without_labels}"] if choice.without_labels else []
    quiet = [
        f"checkpoint.every_updates={min(choice.updates, 500)}",
        "checkpoint.keep_last=1",
        f"monitor.every_updates={choice.updates}",
        "tracking.pictures_every_updates=null",
    ]
    return load_recipe(RECIPE, [*name, *overrides, *quiet])


def randomised_store(work: Path, volumes: int = STORED_VOLUMES) -> Store:
    """Randomised phantoms on the grid of the exam's recipe, written as DICOM and ingested; made once."""
    end = "" if volumes == STORED_VOLUMES else f"_{volumes}"
    path, preprocessing = work / f"store{end}", load_recipe(RECIPE).preprocessing
    if not (work / f"made{end}.json").is_file():
        source = work / f"dicom{end}"
        source.mkdir(parents=True, exist_ok=True)
        for number in range(volumes):
            drawn = draw_volume(STORED_SEED, number, TRAINING_MIX[number % len(TRAINING_MIX)], preprocessing)
            pixels = np.asarray(drawn.volume.pixels)
            volume = OCTVolume(
                pixels,
                preprocessing.target_spacing_mm,
                dict.fromkeys(("slice", "depth", "column"), "header"),
                f"R{number}",
                "phantom",
                "OD",
            )
            write_dicom(source / f"{number}.dcm", volume)
        made = build_store([source], path, preprocessing, workers=1)
        write_json(work / f"made{end}.json", made.to_json())
    return Store.open(path)


def train(choice: Choice, seed: int, work: Path) -> tuple[PretrainedEncoder, float]:
    """The encoder of a choice, and the CPU-seconds of its training. Trained once."""
    if choice.exam_run:
        return _trained_by_exam(choice.exam_run, seed)
    folder, stored = _run_folder(work, choice, seed), stored_folder(choice, seed)
    time_file = folder / "time.json"
    if not folder.is_dir() and stored.is_dir():
        about = json.loads((stored / RECORD).read_text(encoding="utf-8"))
        return load_encoder(stored), float(about["cpu_seconds"])
    recipe = recipe_of(choice, seed)
    if not time_file.is_file():
        torch.manual_seed(seed)
        # An interrupted run goes on later: its CPU time is that of all parts.
        folder.mkdir(parents=True, exist_ok=True)
        part_file = folder / "time_of_parts.json"
        before = float(json.loads(part_file.read_text(encoding="utf-8"))) if part_file.is_file() else 0.0
        if choice.without_labels:
            randomised_store(work, choice.stored)  # made once for all runs: not part of the time of the first
        started = time.process_time()
        try:
            if choice.learns_truth:
                _train_truth(choice, seed, recipe, work, folder)
            else:
                resume = (folder / "run" / "run.json").is_file()
                pretrain(recipe, randomised_store(work, choice.stored), folder / "run", resume=resume)
        finally:
            spent = round(before + time.process_time() - started, 1)
            write_json(part_file, spent)
        write_json(time_file, {"cpu_seconds": spent})
    name = "encoder" if choice.learns_truth else "run"
    return load_encoder(folder / name), float(json.loads(time_file.read_text(encoding="utf-8"))["cpu_seconds"])


def _run_folder(work: Path, choice: Choice, seed: int) -> Path:
    return work / "runs" / f"{choice.name}-{seed}"


def stored_folder(choice: Choice, seed: int) -> Path:
    """Where the encoder of a choice lies in 16 bit, if it was stored."""
    return STARTS / f"{choice.name}-seed{seed}"


def store_encoder(choice: Choice, seed: int, work: Path) -> Path:
    """Writes the trained encoder of a choice in 16 bit, with its CPU time; returns the folder.

    Raises UsageError where the run is not on this machine.
    """
    folder, target = _run_folder(work, choice, seed), stored_folder(choice, seed)
    trained, time_file = folder / ("encoder" if choice.learns_truth else "run"), folder / "time.json"
    if not time_file.is_file():
        raise UsageError(f"{folder} holds no run that has ended: `--longer` without `--store` trains it")
    encoder = load_encoder(trained)
    about = {
        "objective": choice.objective,
        "setting": choice.setting,
        "seed": seed,
        "updates": choice.updates,
        **json.loads(time_file.read_text(encoding="utf-8")),
        "weights": encoder.weights_hash()[:12],
    }
    name = target.relative_to(ROOT).as_posix() if target.is_relative_to(ROOT) else target.name
    target.parent.mkdir(parents=True, exist_ok=True)
    write_package(name, lambda exported: export_encoder(encoder, "safetensors", exported), str, about, target)
    return target


def _trained_by_exam(name: str, seed: int) -> tuple[PretrainedEncoder, float]:
    """The encoder of a run of the exam, and the CPU-seconds of this run and of those that it begins with.

    Raises UsageError where a run is not stored.
    """
    plans = exam_plans(name)
    stored = [finished_run(WORK, plan, seed) for plan in plans]
    for plan, run in zip(plans, stored, strict=True):
        if run is None:
            raise UsageError(
                f'no weights of {plan.name}:{seed} in {STARTS}: `make exam ARGS="--train {plan.name}:{seed}"`, then '
                f'`make exam ARGS="--start {plan.name}:{seed}"` write them'
            )
    runs = [run for run in stored if run is not None]
    return runs[0][0], round(60 * sum(float(about["cpu_minutes"]) for _, about in runs), 1)


def seconds_of_update(choice: Choice, work: Path) -> float:
    """CPU-seconds of one update of a choice on this machine, from two runs that differ by `_TIMED` updates.

    Start, checkpoint and end are in both, so they are not in the result.
    """
    seconds = []
    for updates in (_UNTIMED, _UNTIMED + _TIMED):
        short = replace(choice, setting=f"{choice.setting}, {updates} updates", updates=updates)
        seconds.append(train(short, 0, work / "timing")[1])
    return round((seconds[1] - seconds[0]) / _TIMED, 3)


def _train_truth(choice: Choice, seed: int, recipe: Recipe, work: Path, folder: Path) -> None:
    encoder = PretrainedEncoder(VJEPA3D.from_recipe(recipe).target_encoder, recipe, choice.name)
    unlabelled = None
    if choice.without_labels:
        unlabelled = Unlabelled(recipe, randomised_store(work, choice.stored), encoder.network)
    encoder.network.requires_grad_(True).train()
    network = TruthNetwork(encoder.network, recipe.tokens.patch_size)
    finer = math.prod(EXAM_PATCH) / math.prod(recipe.tokens.patch_size)
    settings = TruthSettings(
        choice.updates,
        uses=USES,
        token_counts=tuple(round(finer * count) for count in TruthSettings.token_counts),
        learning_rate=recipe.train.base_lr,
        seed=1000 + seed,
        validate_every=choice.updates,
        validation_volumes=2,
    )
    folder.mkdir(parents=True, exist_ok=True)
    train_on_truth(network, recipe, settings, Runtime("auto"), folder / "run", choice.name, unlabelled)
    export_encoder(encoder, "safetensors", folder / "encoder")


def read(featurise: Featurise, cohorts: Sequence[PhantomCohort]) -> dict[str, dict[str, Value]]:
    """Cohort -> lesion -> average precision by token."""
    return {cohort.name: values_of(read_tokens(eye_tokens(featurise, cohort), cohort, draws=5)) for cohort in cohorts}


@lru_cache(1)
def cohorts_of(work: Path, which: int, encoder: PretrainedEncoder | None = None) -> list[PhantomCohort]:
    """The two cohorts for validation, or those for the test; other eyes. Labels are by token of `encoder`, those of
    the exam by default."""
    encoder = encoder or load_encoder("phantom-tiny")
    return [
        exam_cohort(work, encoder, test=100, seed=9777 + 11 * (which + 1)),
        shifted_cohort(encoder, test=80, seed=910_001 + 11 * (which + 1)),
    ]


def macro(run: Run) -> float:
    """What a choice is selected by: the mean over both cohorts of the mean over lesions."""
    return float(np.mean([values["with_drusen"].value for values in run.values.values()]))


def main(arguments: Sequence[str] | None = None) -> None:
    """Trains and reads what is missing."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, required=True, help="folder of cohorts, store and runs")
    parser.add_argument("--out", type=Path, required=True, help="JSON file of the results")
    parser.add_argument("--longer", nargs="+", choices=sorted(LONGER), help="train these for longer instead")
    parser.add_argument("--seeds", nargs="+", type=int, default=[0], help="of --longer")
    parser.add_argument("--store", action="store_true", help="store the encoders of --longer in 16 bit")
    parser.add_argument("--time", action="store_true", help="only measure the CPU-seconds of an update")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    register_objective("mae_spectral")(SpectralMAE)  # here, so that importing this module adds no objective
    retained = json.loads(options.out.read_text(encoding="utf-8")) if options.out.is_file() else {}
    known = {kind: {_key(run): run for run in map(_run_of, retained.get(kind, []))} for kind in ("validation", "test")}
    if options.time:
        tested = {(run.objective, run.setting) for run in known["test"].values()}
        seconds: dict[str, dict[str, float]] = {}
        for choice in CHOICES:
            if (choice.objective, choice.setting) in tested:
                seconds.setdefault(choice.objective, {})[choice.setting] = seconds_of_update(choice, options.work)
                print(choice.name, seconds[choice.objective][choice.setting], flush=True)
        write_json(options.out, retained | {"seconds_of_update": seconds})
        return
    if options.longer:
        runs = {_key(run): run for run in map(_run_of, retained.get("longer", []))}
        for seed in options.seeds:
            for name in options.longer:
                run = run_choice(LONGER[name], seed, options.work, TEST, runs)
                runs[_key(run)] = run
                if options.store and not LONGER[name].exam_run:
                    print(store_encoder(LONGER[name], seed, options.work))
        longer = list(runs.values())
        write_json(options.out, retained | {"longer": [asdict(run) for run in longer]})
        _print("longer", longer)
        return
    candidates = [choice for choice in CHOICES if not choice.is_only_one]
    validated = [run_choice(choice, 0, options.work, VALIDATION, known["validation"]) for choice in candidates]
    best: dict[str, tuple[Choice, float]] = {}
    for choice, run in zip(candidates, validated, strict=True):
        if choice.objective not in best or macro(run) > best[choice.objective][1]:
            best[choice.objective] = choice, macro(run)
    chosen = [*(choice for choice, _ in best.values()), *(choice for choice in CHOICES if choice.is_only_one)]
    seeds = sorted({seed for choice in chosen for seed in choice.seeds})
    tested = [
        run_choice(choice, seed, options.work, TEST, known["test"])
        for seed in seeds
        for choice in chosen
        if seed in choice.seeds
    ]
    every = known["test"] | {_key(run): run for run in tested}
    result = {"validation": validated, "test": list(every.values())}
    write_json(options.out, retained | {name: [asdict(run) for run in runs] for name, runs in result.items()})
    for name, runs in result.items():
        _print(name, runs)


def _print(name: str, runs: Sequence[Run]) -> None:
    print(name)
    for run in runs:
        means = "  ".join(f"{cohort} {values['with_drusen'].value:.3f}" for cohort, values in run.values.items())
        print(f"  {run.objective:12} {run.setting:23} seed {run.seed}  {run.cpu_seconds:5.0f} s  {means}")


Known = Mapping[tuple[str, str, int], Run]


def run_choice(choice: Choice, seed: int, work: Path, which: int, known: Known = MappingProxyType({})) -> Run:
    """A trained and read choice; the one that is `known`, or else trained and read once."""
    run = known.get((choice.objective, choice.setting, seed))
    if run is not None:
        return run
    file = work / "read" / f"{choice.name}-{seed}-{which}.json"
    if not file.is_file():
        encoder, cpu_seconds = train(choice, seed, work)
        values = read(of_encoder(encoder), cohorts_of(work, which))
        file.parent.mkdir(parents=True, exist_ok=True)
        run = Run(choice.objective, choice.setting, seed, choice.updates, cpu_seconds, values)
        write_json(file, asdict(run))
        print(f"{choice.name} seed {seed}: {cpu_seconds:.0f} CPU-seconds, {macro(run):.3f}", flush=True)
    return _run_of(json.loads(file.read_text(encoding="utf-8")))


def _run_of(found: dict[str, Any]) -> Run:
    values = {
        cohort: {lesion: Value(**value) for lesion, value in row.items()} for cohort, row in found["values"].items()
    }
    return Run(**{**found, "values": values})


def _key(run: Run) -> tuple[str, str, int]:
    return run.objective, run.setting, run.seed


if __name__ == "__main__":
    main()
