"""Part 3, does it learn: encoders of the exam at a million views, read at three milestones beside untrained twins."""

from __future__ import annotations

import math
import shutil
import signal
import subprocess
import time
from functools import partial
from pathlib import Path

import torch
import yaml
from benchmarks.exam.cohorts import EXAMINED, PRETRAINING, make_cohorts
from benchmarks.exam.openings import code
from benchmarks.exam.reading import Exam
from benchmarks.exam.results import Results, RowName, compare
from benchmarks.exam.settings import RECIPE

from octjepa.checkpoint.folder import update_number
from octjepa.config import load_recipe
from octjepa.encoders import PretrainedEncoder, load_encoder
from octjepa.encoders.export import export
from octjepa.errors import OctjepaError
from octjepa.files import read_json_lines
from octjepa.model import VJEPA3D
from octjepa.recipe import Recipe

from .campaign import Campaign, Figures, Step, Unfinished, kill
from .rule import GAIN, Gain, decide
from .settings import Settings

UNTRAINED = "untrained"


def encoder_recipe(settings: Settings, name: str, updates: int) -> Recipe:
    """The recipe of an encoder; `updates` of 0: until the last milestone, with a checkpoint at each unit of views."""
    recipe = load_recipe(RECIPE, settings.encoders[name])
    each = math.ceil(settings.views / recipe.train.global_batch)
    total = updates or each * settings.milestones[-1]
    return load_recipe(
        RECIPE,
        [
            *settings.encoders[name],
            "train.precision=auto",
            f"train.max_updates={total}",
            "checkpoint.keep_last=1",
            f"checkpoint.every_updates={each}",
            f"checkpoint.keep_every_updates={each}",
            f"monitor.every_updates={max(1, total // 8)}",
            "tracking.pictures_every_updates=null",
        ],
    )


def run_folder(work: Path, name: str) -> Path:
    """Where an encoder is trained."""
    return work / "encoders" / name


def rows_of(settings: Settings) -> list[str]:
    """The rows that are read: intensity, each untrained twin, each encoder at each milestone; `encoder@milestone`."""
    twins = [f"{UNTRAINED}@{name}" for name in settings.encoders]
    trained = [f"{name}@{milestone}" for name in settings.encoders for milestone in settings.milestones]
    return [f"intensity@{next(iter(settings.encoders))}", *twins, *trained]


def row_name(settings: Settings, named: str) -> RowName:
    """The name of a row in the exam's results."""
    kind, _, which = named.partition("@")
    encoder = which if kind in (UNTRAINED, "intensity") else kind
    patch = load_recipe(RECIPE, settings.encoders[encoder]).tokens.patch_size
    if kind == "intensity":
        return RowName("intensity", patch)
    return RowName(f"{UNTRAINED}:{encoder}" if kind == UNTRAINED else f"{encoder}@{which}", patch)


def read_row(settings: Settings, work: Path, named: str) -> None:
    """All figures of a row that are missing, by the exam's own frozen tasks."""
    kind, _, which = named.partition("@")
    encoder_name = which if kind in (UNTRAINED, "intensity") else kind
    folder = make_cohorts(work, settings.exam, (PRETRAINING, *EXAMINED), settings.workers)
    exam = Exam(folder, Results(work / "exam"))
    about = {**code(), "views": 0, "overrides": list(settings.encoders[encoder_name])}
    if kind in (UNTRAINED, "intensity"):
        recipe = encoder_recipe(settings, encoder_name, updates=1)
        torch.manual_seed(recipe.train.seed)
        encoder = PretrainedEncoder(VJEPA3D.from_recipe(recipe).target_encoder, recipe, f"untrained:{encoder_name}")
        exam.read(
            row_name(settings, named),
            encoder,
            "intensity" if kind == "intensity" else "encoder",
            about,
            settings.without,
        )
        return
    path = checkpoint_at(settings, work, encoder_name, int(which))
    about["views"] = update_number(path) * encoder_recipe(settings, encoder_name, 0).train.global_batch
    exam.read(row_name(settings, named), load_encoder(path), "encoder", about, settings.without)


def checkpoint_at(settings: Settings, work: Path, name: str, milestone: int) -> Path:
    """The checkpoint of an encoder at a milestone. Raises OctjepaError where it is not there."""
    every = encoder_recipe(settings, name, updates=0).checkpoint.every_updates or 1
    path = run_folder(work, name) / "checkpoints" / f"step-{every * milestone:08d}"
    if not path.is_dir():
        raise OctjepaError(f"{name} has no checkpoint {path.name}: its training is not done")
    return path


def cohorts(campaign: Campaign) -> Figures:
    """The exam's phantoms and stores, which were begun beside part 1."""
    campaign.begin_cohorts()
    campaign.wait_for_cohorts()
    settings = campaign.settings
    folder = make_cohorts(campaign.work, settings.exam, (PRETRAINING, *EXAMINED), settings.workers)
    return {"folder": folder.name, "pretraining_people": settings.exam.pretraining, "test_people": settings.exam.test}


def train(campaign: Campaign, name: str) -> Figures:
    """Trains an encoder, or goes on with it; stops with a checkpoint at the deadline."""
    settings = campaign.settings
    if name not in settings.encoders:
        return {"left_out": f"not in the settings {settings.name}"}
    store = make_cohorts(campaign.work, settings.exam, (PRETRAINING,), settings.workers) / PRETRAINING / "store"
    recipe, out = encoder_recipe(settings, name, updates=0), run_folder(campaign.work, name)
    path = campaign.work / f"{name}.yaml"
    path.write_text(yaml.safe_dump(recipe.model_dump(mode="json"), sort_keys=False), encoding="utf-8")
    campaign.child("train", str(store), str(out), str(path), seconds=campaign.seconds_left() - 35)
    lines = [line for line in read_json_lines(out / "metrics.jsonl") if "train/loss" in line]
    views = recipe.train.max_updates or 0
    seconds = sum(float(line["seconds"]) for line in lines)
    return {
        "updates": len(lines),
        "views": views * recipe.train.global_batch,
        "update_seconds": seconds,
        "views_per_second": views * recipe.train.global_batch / max(seconds, 1e-9),
        "loss": lines[-1]["train/loss"],
        "precision": load_recipe(str(out / "recipe.yaml")).train.precision,
    }


def read(campaign: Campaign) -> Figures:
    """All rows, several processes at a time; what the exam found so far is kept at the deadline."""
    settings = campaign.settings
    waiting = [row for row in rows_of(settings) if not _is_read(campaign, row)]
    running: dict[str, subprocess.Popen[bytes]] = {}
    failed: dict[str, str] = {}
    if settings.read_processes == 0:
        for row in waiting:
            read_row(settings, campaign.work, row)
        waiting = []
    try:
        while waiting or running:
            while waiting and len(running) < settings.read_processes:
                row = waiting.pop(0)
                running[row] = campaign.child("row", row, wait=False)
            if campaign.seconds_left() < 10:
                raise Unfinished(f"{len(waiting) + len(running)} rows of the exam are still to be read")
            for row in [row for row, process in running.items() if process.poll() is not None]:
                code_of = running.pop(row).returncode
                if code_of:
                    failed[row] = f"ended with code {code_of}, see row.log"
            time.sleep(0.2)
    finally:
        for process in running.values():
            kill(process, signal.SIGKILL)
        _bring_exam_back(campaign)
    return {"rows": len(rows_of(settings)), "failed": failed, "right": not failed}


def _is_read(campaign: Campaign, row: str) -> bool:
    return Results(campaign.work / "exam").has(row_name(campaign.settings, row), "eye_lesion")


def _bring_exam_back(campaign: Campaign) -> None:
    path = campaign.work / "exam" / "results.json"
    if path.is_file():
        shutil.copyfile(path, campaign.out / "exam.json")


def gains(campaign: Campaign) -> dict[tuple[str, int, str], Gain]:
    """Each encoder at each milestone less its untrained twin."""
    settings, results = campaign.settings, Results(campaign.work / "exam")
    found = {}
    for name in settings.encoders:
        twin = row_name(settings, f"{UNTRAINED}@{name}")
        for milestone in settings.milestones:
            row = row_name(settings, f"{name}@{milestone}")
            for figure in GAIN:
                value, apart = results.value(row, figure), compare(results, [row], [twin], figure)
                if value is not None and apart is not None:
                    found[name, milestone, figure] = Gain(value, apart["value"], apart["low"])
    return found


def decision(campaign: Campaign) -> Figures:
    """What the rule says of the figures."""
    found = gains(campaign)
    table = {f"{name}@{at} {figure}": one._asdict() for (name, at, figure), one in found.items()}
    return {"answers": decide(found, campaign.settings.milestones), "gains": table}


def weights(campaign: Campaign) -> Figures:
    """The encoders at their last milestone, as files that `octjepa.load_encoder` reads."""
    files = []
    for name in campaign.settings.encoders:
        last = checkpoint_at(campaign.settings, campaign.work, name, campaign.settings.milestones[-1])
        folder = campaign.work / "exported" / name
        shutil.rmtree(folder, ignore_errors=True)
        export(last, "safetensors", folder)
        files += campaign.bring_back(folder / "model.safetensors", f"{name}.safetensors")
    return {"files": files}


STEPS = (
    Step("learn", "cohorts", 60, cohorts),
    Step("learn", "train_mae", 150, partial(train, name="mae")),
    Step("learn", "train_vjepa", 400, partial(train, name="vjepa")),
    Step("learn", "train_mae_coarse", 120, partial(train, name="mae_coarse")),
    Step("learn", "read", 240, read),
    Step("learn", "decision", 5, decision),
    Step("learn", "weights", 5, weights),
)
SPLITS = {"cohorts", "train_mae", "train_vjepa", "train_mae_coarse", "read", "one_gpu"}  # stop at a deadline and go on
