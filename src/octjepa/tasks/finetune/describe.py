"""What `octjepa inspect` says of the folder of a fine-tuning: of whom and what, how far, and what the test gave."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from octjepa.checkpoint.encoder import TUNED
from octjepa.checkpoint.folder import list_folders, update_of
from octjepa.probe.results import differences_by_name
from octjepa.tasks.finetune.evaluation import TUNED as PROBE
from octjepa.tasks.finetune.recipe import FinetuneRecipe, load_settings
from octjepa.tasks.finetune.run_folder import read_about, read_results
from octjepa.tasks.finetune.training import STATES
from octjepa.train.run_folder import reached_update

_TARGET = ("target", "task", "classes")


def describe(out: Path) -> dict[str, Any]:
    """`finished`, and then figures of the test people with intervals, else where it is and where it would go on.

    Raises OctjepaError: a file of the folder is damaged, or its recipe.
    """
    about, results = read_about(out), read_results(out)
    found: dict[str, Any] = {
        **{key: about[key] for key in ("kind", "name", "encoder")},
        "targets": [{key: one[key] for key in _TARGET} for one in about.get("targets", ())],
        "level": about.get("level"),
        "volumes": {split: about["volumes"][split] for split in ("train", "val", "test")},
    }
    if results is None:
        found |= {"finished": False, **_where(out, load_settings(out / "recipe.yaml"))}
    else:
        kept = next(one for one in results["choices"] if one["probe"] == PROBE)
        found |= {
            "finished": True,
            "faults": [fault["what"] for fault in results["faults"]],
            "metrics": results["metrics"],
            "tuned_minus": _tuned_minus(results["paired"]),
            "weights_of_update": kept["update"],
            "chosen_by": kept["by"],
            "updates": kept["of"],
            "checkpoint": results["checkpoint"],
        }
    return found | {key: value for key, value in about.items() if key not in found}


def _tuned_minus(paired: list[dict[str, Any]]) -> dict[str, Any]:
    several = len({pair["target"] for pair in paired}) > 1
    return differences_by_name(
        paired, lambda pair: f"{pair['target']} {pair['against']}" if several else str(pair["against"])
    )


def _where(out: Path, settings: FinetuneRecipe) -> dict[str, Any]:
    """The part at work, or stopped; its last update, and the one after which --resume would go on."""
    part, folder = "tuned", out
    if settings.scratch and list_folders(out / TUNED):
        part, folder = "tuned from first weights", out / "scratch"
    if list_folders(folder / TUNED):
        return {"stopped_in": "the test"}
    states = list_folders(folder / STATES)
    return {
        "stopped_in": part,
        "last_update": reached_update(folder),
        "resumes_after_update": update_of(states[-1]) if states else 0,
        "updates": settings.stages.updates,
    }
