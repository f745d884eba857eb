"""Part 4, the recipe that people with one GPU will use: `one_gpu` trained for what is left, with its report."""

from __future__ import annotations

import json
import subprocess
import sys

import torch
import yaml

from octjepa.encoders.export import export
from octjepa.errors import OctjepaError
from octjepa.files import read_json_lines, write_json
from octjepa.store import Store
from octjepa.train.data import choose_cohort
from octjepa.train.plan import time_run

from .campaign import Campaign, Figures, Step
from .right import resolved


def train(campaign: Campaign) -> Figures:
    """Trains for the settings' seconds; how many updates that is was measured before, and stays over restarts."""
    settings, out = campaign.settings, campaign.work / "runs" / "one_gpu"
    first = campaign.recipe(settings.one_gpu)
    store = campaign.store("one_gpu", first, settings.one_gpu_people)
    chosen = campaign.work / "one_gpu.json"
    if not chosen.is_file():
        recipe = resolved(campaign.recipe(settings.one_gpu, "machine.compile=false"))
        _, dataset = choose_cohort(Store.open(store), recipe)
        seconds = time_run(recipe, dataset, 1, enough_seconds=2.0).seconds_per_update
        write_json(chosen, {"updates": max(10, int(settings.one_gpu_seconds / seconds)), "seconds_per_update": seconds})
        if campaign.device.type != "cpu":
            torch.accelerator.empty_cache()
    known = json.loads(chosen.read_text(encoding="utf-8"))
    updates = known["updates"]
    recipe = campaign.recipe(
        settings.one_gpu,
        f"train.max_updates={updates}",
        "train.epochs=null",
        f"checkpoint.every_updates={max(1, updates // 10)}",
        f"monitor.every_updates={max(1, updates // 8)}",
    )
    path = campaign.work / "one_gpu.yaml"
    path.write_text(yaml.safe_dump(recipe.model_dump(mode="json"), sort_keys=False), encoding="utf-8")
    campaign.child("train", str(store), str(out), str(path), seconds=campaign.seconds_left() - 35)
    summary = json.loads((out / "summary.json").read_text(encoding="utf-8"))
    lines = [line for line in read_json_lines(out / "metrics.jsonl") if "train/loss" in line]
    used = [line["device_utilisation"] for line in lines if "device_utilisation" in line]
    return {
        **known,
        "people": settings.one_gpu_people,
        "loss": summary["loss"],
        "cosine": summary["cosine"],
        "baseline_cosine": summary["baseline_cosine"],
        "rankme": summary["rankme"],
        "volumes_per_second": summary["volumes_per_second"],
        "data_wait_share": summary["data_wait_share"],
        "device_utilisation": sum(used) / len(used) if used else None,
        "device_bytes": max((line.get("memory/device_bytes", 0) for line in lines), default=0),
    }


def report(campaign: Campaign) -> Figures:
    """Its page, its journal and its weights."""
    out = campaign.work / "runs" / "one_gpu"
    page = campaign.work / "one_gpu.html"
    command = [sys.executable, "-m", "octjepa", "report", str(out), "--out", str(page), "--quiet"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise OctjepaError(f"octjepa report: {(done.stderr or 'no message').strip().splitlines()[-1]}")
    folder = campaign.work / "exported" / "one_gpu"
    if not (folder / "model.safetensors").is_file():
        export(out, "safetensors", folder)
    files = campaign.bring_back(page, "one_gpu.html")
    files += campaign.bring_back(folder / "model.safetensors", "one_gpu.safetensors")
    return {"files": files}


STEPS = (Step("recipe", "one_gpu", 330, train), Step("recipe", "report", 20, report))
