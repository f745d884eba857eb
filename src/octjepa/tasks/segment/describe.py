"""What `octjepa inspect` says of the folder of a segmentation head: what it tells apart, and what the test gave."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from octjepa.checkpoint.folder import read_manifest
from octjepa.errors import OctjepaError
from octjepa.files import read_json_object
from octjepa.probe.results import differences_by_name
from octjepa.tasks.segment.folder import RESULTS, find_head
from octjepa.tasks.segment.recipe import RECIPES

_ANEW = "remove the folder and make the head anew"


def describe(out: Path) -> dict[str, Any]:
    """Classes, recipe and encoder of the head in `out`; `finished`, and then its figures of the test people.

    Raises WrongCheckpointError (no head), OctjepaError (a damaged file).
    """
    folder = find_head(out)
    assert folder is not None  # the caller's own check
    about = read_manifest(folder)
    settings = RECIPES.read(about["settings"], f"of {folder}")
    found = {
        "kind": "segmentation",
        "name": settings.name,
        "head": settings.head,
        "classes": about["classes"],
        "encoder": about["encoder_recipe"]["name"],
        "finished": (out / RESULTS).is_file(),
        "checkpoint": str(folder),
        "contract_hash": about["contract"]["contract_hash"],
    }
    if not found["finished"]:
        return found | {"notes": [f"its figures are not there ({RESULTS}): remove the folder and make the head anew"]}
    results = _read(out / RESULTS)
    of_dice = differences_by_name(results["paired"], lambda pair: str(pair["reference"]))
    faults = [fault["what"] for fault in results.get("faults", ())]
    return found | {"faults": faults, "metrics": results["metrics"], "dice_minus": of_dice, "notes": results["notes"]}


def _read(path: Path) -> dict[str, Any]:
    value = read_json_object(path, _ANEW)
    if not {"metrics", "paired", "notes"} <= value.keys():
        raise OctjepaError(f"{path} is damaged: {_ANEW}")
    return value
