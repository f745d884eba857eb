"""`octjepa predict`: a tuned network on new scans, from files to a table with a line for each case and target.

Scans are ingested into a store in the output folder, so that whatever `octjepa ingest` reads is read and whatever it
refuses is refused with the same reason. A line says next to its prediction what limits the trust in it: that the scan
is unlike those of the tuning, or that the network was trained on it.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pandas as pd
import torch

from octjepa.cohort.recorded_scans import split_recorded, uid_key
from octjepa.embed.embedding import require_same_contract, select_volumes
from octjepa.errors import LINK, TooManyLostError, UsageError
from octjepa.evaluate.cases import case_names, check_level
from octjepa.files import write_atomic
from octjepa.ingest import IngestOptions, build_store
from octjepa.ingest.one_file import Spacing
from octjepa.locks import writer_lock
from octjepa.notes import write_codes
from octjepa.progress import bar
from octjepa.record import Record
from octjepa.store import Store
from octjepa.store.index import text_column
from octjepa.tables import format_table
from octjepa.tasks.finetune.predict import VOLUMES_AT_ONCE, TunedModel, case_prediction, load_tuned

PREDICTIONS, REFUSED, STORE = "predictions.tsv", "refused.tsv", "store"


@dataclass(frozen=True)
class StorePredictions(Record):
    """The table of predictions and what it holds.

    predictions: its file. level: the unit of a case. predicted: cases by target and class. unlike_training: cases by
    what is unlike the scans of the tuning. trained_on: cases that hold a volume which trained the network. refused, by
    reason, and store: of scans that were read for it.
    """

    predictions: str
    cases: int
    volumes: int
    level: str
    predicted: Mapping[str, Mapping[str, int]]
    unlike_training: Mapping[str, int]
    trained_on: int
    refused: Mapping[str, int] | None = None
    store: str | None = None
    OMITTED: ClassVar[tuple[str, ...]] = ("refused", "store")


def predict_scans(
    tuned: str | Path,
    sources: Sequence[str | Path],
    out: Path,
    level: str | None = None,
    workers: int | None = 1,
    max_lost: float = 0.2,
    spacing_mm: Spacing = None,
    images: bool = False,
) -> StorePredictions:
    """Predicts every scan of `sources`, as `octjepa ingest` takes them; returns what `predict_store` does.

    With `images` every picture and one-frame DICOM file is a single B-scan.

    Writes into `out` the store and, next to `predict_store`'s table, `refused.tsv` with the file, reason and detail of
    each scan that was not read. A second call reads new files only.
    Raises UsageError, CheckpointError, ContractError (`out` holds scans prepared for another encoder); after all work
    is done TooManyLostError, its summary as what is returned.
    """
    if (out / STORE).is_symlink():
        raise UsageError(f"{out / STORE} {LINK}")
    model = load_tuned(tuned)
    check_level(level or model.level, model.by_visit)
    with writer_lock(out):
        lost: TooManyLostError | None = None
        try:
            recipe = model.encoder.recipe
            by_reason = build_store(
                sources,
                out / STORE,
                recipe.preprocessing,
                workers,
                max_lost,
                spacing_mm=spacing_mm,
                options=IngestOptions(bscan_slices=recipe.tokens.patch_size[0] if images else 0),
            ).by_reason
        except TooManyLostError as error:
            by_reason, lost = error.summary["by_reason"], error
        store = Store.open(out / STORE)
        refused = pd.DataFrame(store.quarantine, columns=["file", "reason", "detail"])
        write_frame(out / REFUSED, refused)
        if store.table.empty and lost is not None:
            raise lost
        written = replace(_write(model, store, out, level), refused=by_reason, store=str(out / STORE))
    if lost is not None:
        raise TooManyLostError(str(lost), written.to_json())
    return written


def predict_store(tuned: str | Path, store: Store, out: Path, level: str | None = None) -> StorePredictions:
    """Predicts every volume of `store` that the encoder knows the pattern of, and writes `out/predictions.tsv`.

    level: a case is a volume, eye or person, whose scans are averaged; None: as in the tuning. If the labels of the
    tuning were by visit, each visit of an eye is a case, `visit` is a column, and people are refused as cases. Of each
    target a line per case: its keys, `predicted`, the calibrated and the balanced probability of each class (columns
    `calibrated_CLASS`, `balanced_CLASS`) or the `value` of a quantity, the least `quality` of its scans, and
    `unlike_training`: why a scan is unlike those of the tuning ("device", "features"), empty if it is not.
    Raises UsageError (no such volume, another level), ContractError (a store prepared otherwise), CheckpointError.
    """
    model = load_tuned(tuned)
    require_same_contract(model.encoder, store, tuned)
    check_level(level or model.level, model.by_visit)
    with writer_lock(out):
        return _write(model, store, out, level)


def write_frame(path: Path, table: pd.DataFrame) -> None:
    """Writes a table as TSV with guarded cells (`octjepa.tables`). Raises OctjepaError: the disk refuses."""
    text = format_table(list(table.columns), table.itertuples(index=False, name=None))
    write_atomic(path, lambda file: file.write(text.encode()))


def _write(model: TunedModel, store: Store, out: Path, level: str | None) -> StorePredictions:
    level = level or model.level
    volumes = select_volumes(model.encoder, store).reset_index(drop=True)
    outputs, is_far = _outputs(model, store, volumes["volume_id"].tolist())
    is_trained_on = _is_trained_on(volumes, model.encoder.recorded_training)
    volumes = volumes.assign(trained_on=is_trained_on, visit=text_column(volumes["visit"]))
    cases: dict[str, list[int]] = {}
    for index, name in enumerate(case_names(volumes, level, model.by_visit)):
        cases.setdefault(name, []).append(index)
    lines = [
        {**_keys(model, volumes.iloc[indices], is_far[indices], level), **_prediction(model, outputs, number, indices)}
        for indices in cases.values()
        for number in range(len(model.heads))
    ]
    table = pd.DataFrame(lines)
    write_frame(out / PREDICTIONS, table)
    by_case = table[table["target"] == model.heads[0].target]
    classes = table[table["predicted"] != ""] if "predicted" in table else table.iloc[:0]
    return StorePredictions(
        predictions=str(out / PREDICTIONS),
        cases=len(cases),
        volumes=len(volumes),
        level=level,
        predicted={
            str(target): {str(name): int(count) for name, count in rows["predicted"].value_counts().items()}
            for target, rows in classes.groupby("target", sort=False)
        },
        unlike_training={
            why: int(by_case["unlike_training"].str.contains(why).sum()) for why in ("device", "features")
        },
        trained_on=int(by_case["trained_on"].sum()),
    )


def _outputs(model: TunedModel, store: Store, volume_ids: Sequence[str]) -> tuple[list[np.ndarray], np.ndarray]:
    """(of each head [n, outputs], whether each volume is farther from the training volumes than its limit [n])."""
    each, is_far = [], []
    with bar("predict", len(volume_ids), "volume") as progress:
        for start in range(0, len(volume_ids), VOLUMES_AT_ONCE):
            ids = volume_ids[start : start + VOLUMES_AT_ONCE]
            outputs, distances = model.network.predict_with_distance([store.read(name) for name in ids])
            each.append(outputs)
            is_far.append(distances > model.network.reference_limit)
            progress.advance(len(ids))
    heads = [torch.cat(of_head).double().cpu().numpy() for of_head in zip(*each, strict=True)]
    return heads, torch.cat(is_far).cpu().numpy()


def _is_trained_on(volumes: pd.DataFrame, recorded: Collection[str]) -> pd.Series:
    """Of each volume: whether the weights record its content or its SOP instance UID."""
    ids, uid_keys = split_recorded(recorded)
    return volumes["volume_id"].isin(ids) | text_column(volumes["sop_instance_uid"]).map(uid_key).isin(uid_keys)


def _keys(model: TunedModel, scans: pd.DataFrame, is_far: np.ndarray, level: str) -> dict[str, Any]:
    devices = set(scans["device"]) - {""}
    unlike = [
        *(["device"] if model.devices and devices - set(model.devices) else []),
        *(["features"] if is_far.any() else []),
    ]
    return {
        "person_id": scans["person_id"].iloc[0],
        "eye": "" if level == "person" else scans["eye"].iloc[0],
        **({"visit": scans["visit"].iloc[0]} if model.by_visit else {}),
        "volume_id": write_codes(scans["volume_id"]),
        "device": write_codes(sorted(devices)),
        "quality": round(float(scans["quality"].min()), 3),
        "unlike_training": write_codes(unlike),
        "trained_on": bool(scans["trained_on"].any()),
    }


def _prediction(model: TunedModel, outputs: list[np.ndarray], number: int, indices: list[int]) -> dict[str, Any]:
    head = model.heads[number]
    prediction = case_prediction(head, outputs[number][indices])
    if not head.classes:
        return {"target": head.target, "predicted": "", "value": prediction["value"]}
    probabilities = {
        f"{kind}_{name}": value for kind in ("calibrated", "balanced") for name, value in prediction[kind].items()
    }
    return {"target": head.target, "predicted": prediction["predicted"], **probabilities}
