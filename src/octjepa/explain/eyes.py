"""The eyes that are explained, their occlusion, and the scale of its changes.

Of a pretraining held-out eyes are taken, of a fine-tuning test cases that it classified correctly and wrongly. Their
number is limited by the cost, so that a page does not take long.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pandas as pd
import torch

from octjepa.cohort import examples
from octjepa.distributed.runtime import best_device
from octjepa.embed.embedding import require_same_contract
from octjepa.encoders import PretrainedEncoder, load_encoder
from octjepa.errors import OctjepaError, counted
from octjepa.explain.occlusion import (
    POOL,
    Occlusion,
    encoder_occlusion,
    forward_passes,
    median_distance,
    tuned_occlusion,
)
from octjepa.parsing import read_parquet
from octjepa.store import Store
from octjepa.store.index import IndexEntry
from octjepa.tasks.finetune.external import TunableExternal
from octjepa.tasks.finetune.network import TunableEncoder
from octjepa.tasks.finetune.predict import TunedModel, load_tuned
from octjepa.volume import CanonicalVolume

MAX_EYES = 4
MAX_CASES = 8
SCALE_EYES = 16
FLOP_PER_THREAD = 1e12  # that all maps of a page may cost: about 10 s of one core; 0.08e12 took 0.8 s
_FLOP_ACCELERATOR = 1e15


@dataclass(frozen=True)
class OccludedVolume:
    """A volume to draw: its entry in the store's index, its occlusion, and the caption of its prediction."""

    row: IndexEntry
    volume: CanonicalVolume
    occlusion: Occlusion
    caption: str = ""


@dataclass(frozen=True)
class ExplainedEyes:
    """The eyes to map, and the network that they are mapped by. tuned: of a fine-tuning, else None."""

    encoder: TunableEncoder
    eyes: list[OccludedVolume]
    tuned: TunedModel | None = None


def explain_encoder(store: Store, path: str | Path) -> ExplainedEyes:
    """Held-out eyes of `store` by the pretrained encoder at `path`. Raises as `occluded_eyes`; ContractError."""
    encoder = load_encoder(path).to(best_device())
    require_same_contract(encoder, store, path)
    return ExplainedEyes(encoder, occluded_eyes(store, encoder))


def explain_tuning(store: Store, path: Path) -> ExplainedEyes:
    """Test cases by the fine-tuning in the folder `path`. Raises as `occluded_cases` and `load_tuned`."""
    tuned = load_tuned(path, best_device())
    return ExplainedEyes(tuned.encoder, occluded_cases(store, path, tuned), tuned)


@dataclass(frozen=True)
class ChangeScale:
    """The scale of the changes of all eyes.

    unit: every change is divided by it. great: a great change, before the division. people: how many eyes, each of
    another person, gave the unit; 0 for a prediction, which has a unit.
    """

    unit: float
    great: float
    people: int = 0


def change_scale(store: Store, explained: ExplainedEyes) -> ChangeScale:
    """Of an embedding the median distance between the first `SCALE_EYES` held-out people; of a prediction its own unit.

    A great change of a quantity is its standard deviation, of a probability 1. Raises OctjepaError: fewer than two
    held-out people.
    """
    if explained.tuned is not None:
        head = explained.tuned.heads[0]
        return ChangeScale(1.0, 1.0 if head.classes else head.scale[1])
    held_out = store.table[(store.table["pattern"] == "raster") & store.table["split"].isin(["test", "val"])]
    first_of_person = held_out.sort_values("volume_id").drop_duplicates("person_id")["volume_id"]
    volume_ids = [str(volume_id) for volume_id in first_of_person[:SCALE_EYES]]
    unit = median_distance(np.stack([explained.encoder.embed(store.read(volume_id), POOL) for volume_id in volume_ids]))
    if not unit > 0:
        raise OctjepaError(
            "the map scale is the median distance between eyes of held-out people, which needs at least two people "
            f"with different embeddings: found {counted(len(volume_ids), 'held-out person')}"
        )
    return ChangeScale(unit, unit, len(volume_ids))


def occluded_eyes(store: Store, encoder: PretrainedEncoder) -> list[OccludedVolume]:
    """The held-out eyes of the token maps with the change of their embedding; none where the store holds none.

    Raises OctjepaError: too costly for a page.
    """
    entries = examples.one_per_device(store.table, splits=("test", "val"))[:MAX_EYES]
    occluded = []
    for entry in entries[: affordable_eyes(encoder)] if entries else []:
        volume = store.read(entry.volume_id)
        occluded.append(OccludedVolume(entry, volume, encoder_occlusion(encoder, volume)))
    return occluded


def occluded_cases(store: Store, path: Path, tuned: TunedModel) -> list[OccludedVolume]:
    """Test volumes of a fine-tuning with the change of the prediction of its first target; none without a label.

    Raises OctjepaError: a store of another contract as well costly for a page, damaged predictions, another project's
    encoder.
    """

    if isinstance(tuned.encoder, TunableExternal):
        raise OctjepaError(
            f"{tuned.encoder.name} is an encoder of another project, which reads whole images: maps leave tokens out"
        )
    require_same_contract(tuned.encoder, store, path)
    head = tuned.heads[0]
    cases = select_test_cases(_read_predictions(path / "predictions.parquet"), head.target, head.classes)
    occluded = []
    for case in cases[: affordable_eyes(tuned.encoder)] if cases else []:
        volume = store.read(case["volume_id"])
        result = tuned_occlusion(tuned, volume, 0, case["prediction"] if head.classes else None)
        occluded.append(OccludedVolume(store.entry(case["volume_id"]), volume, result, case["caption"]))
    return occluded


def select_test_cases(frame: pd.DataFrame, target: str, classes: Sequence[str]) -> list[dict[str, str]]:
    """Test volumes {volume_id, prediction, caption} to show, `MAX_CASES` at most.

    Of each class the first by id that was recognised and the first that was not; of a quantity the volume of median
    error and that of the greatest.
    """
    wanted = (frame["level"] == "volume") & (frame["target"] == target) & (frame["split"] == "test")
    rows = frame[wanted & (frame["truth"] != "")].sort_values("volume_id", kind="stable").to_dict("records")
    cases = []
    if not classes and rows:
        rows.sort(key=lambda row: abs(float(row["predicted"]) - float(row["truth"])))
        chosen = {"median error": rows[(len(rows) - 1) // 2], "greatest error": rows[-1]}
        for kind, row in list(chosen.items())[: len(rows)]:
            caption = f"{kind}: predicted {float(row['predicted']):.3g}, true {float(row['truth']):.3g}"
            cases.append((row, caption))
    for name in classes:
        for correct in (True, False):
            for row in [row for row in rows if row["truth"] == name and (row["predicted"] == name) == correct][:1]:
                probability = float(row["scores"][list(classes).index(row["predicted"])])
                verdict = "correct" if correct else f"wrong, it is {name}"
                cases.append((row, f"predicted {row['predicted']} with {probability:.2f}: {verdict}"))
    return [
        {"volume_id": str(row["volume_id"]), "prediction": str(row["predicted"]), "caption": caption}
        for row, caption in cases[:MAX_CASES]
    ]


def _read_predictions(path: Path) -> pd.DataFrame:
    try:
        return read_parquet(path, columns=["level", "target", "split", "volume_id", "truth", "predicted", "scores"])
    except (OSError, ValueError) as error:
        raise OctjepaError(f"{path.name} cannot be read ({str(error).splitlines()[0]})") from None


def affordable_eyes(encoder: TunableEncoder) -> int:
    """How many eyes a page may map with `encoder`. Raises OctjepaError: none."""
    on_cpu = next(encoder.encoder.parameters()).device.type == "cpu"
    most = FLOP_PER_THREAD * torch.get_num_threads() if on_cpu else _FLOP_ACCELERATOR
    recipe = encoder.recipe
    flop = 2.0 * encoder.parameters * recipe.token_count * forward_passes(recipe.grid)
    if flop > most:
        raise OctjepaError(
            f"the map of an eye costs {flop / 1e12:.0f} TFLOP, more than the {most / 1e12:.0f} that a page may take on "
            "this machine: make the report on one with an accelerator, or call octjepa.explain.occlusion"
        )
    return int(most / flop)
