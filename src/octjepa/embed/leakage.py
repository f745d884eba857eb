"""Lists the people that an encoder was pretrained on, so that an evaluation can exclude them."""

from __future__ import annotations

import logging
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd

from octjepa.checkpoint.location import Location, has_file, parse_location
from octjepa.cohort.leaks import PretrainingOverlap, TrainingSet, pretraining_overlap
from octjepa.cohort.recorded_scans import split_recorded
from octjepa.encoders import load_encoder
from octjepa.errors import UsageError
from octjepa.outside import OutsideError, named_by
from octjepa.parsing import read_object
from octjepa.shipped import is_segmenter, packaged_encoders, shipped
from octjepa.store import Store

_log = logging.getLogger(__name__)
_NO_SCANS = TrainingSet(frozenset(), None)  # of packaged weights whose phantoms were drawn during the training


def check_leakage(store: Store, source: str | Path) -> PretrainingOverlap:
    """The people of `store` who are in the pretraining data of `source`.

    Raises UsageError (nothing there, or weights that do not say what they were trained on) and CheckpointError
    (damaged).
    """
    return pretraining_overlap(store.table, training_volumes(source))


def training_volumes(source: str | Path) -> TrainingSet:
    """`source`: a store (its training people), a run, a checkpoint, a weights file or the name of a shipped encoder."""
    if is_segmenter(source):
        return _NO_SCANS
    location = shipped(source) or parse_location(source)
    if isinstance(location, Path) and not location.exists():
        raise UsageError(
            f"nothing at {source}: give --against a run, a checkpoint, a weights file, a store, or the name of an "
            f"encoder of the package ({', '.join(packaged_encoders())})"
        )
    if has_file(location, "store.json"):
        table = Store.open(source).table
        rows = table[table["split"] == "train"]
        return TrainingSet(frozenset(rows["volume_id"]), rows)
    recorded = load_encoder(source).recorded_training
    if not recorded:
        if shipped(source):
            return _NO_SCANS
        raise UsageError(f"the weights of {source} do not say what they were trained on: give the store instead")
    return recorded_training_set(recorded, location)


def recorded_training_set(recorded: Collection[str], location: Location | None) -> TrainingSet:
    """The training record of the weights at `location`, with the rows of their store if the store is available."""
    ids, uid_keys = split_recorded(recorded)
    index = _store_of(location) if isinstance(location, Path) else None
    rows = None if index is None else index[index["volume_id"].isin(ids)]
    return TrainingSet(ids, None if rows is None or rows.empty else rows, uid_keys)


def count_leaked_people(rows: pd.DataFrame, trained: TrainingSet) -> int:
    """How many people of val and test were pretrained on: by person, content or instance; look-alikes do not count."""
    if not (trained.volume_ids or trained.uid_keys):
        return 0
    leaked = {volume for leak in _exact_overlap(rows, trained).leaks for volume in leak.volumes}
    return int(rows.loc[rows["volume_id"].isin(leaked), "person_id"].nunique())


def count_seen_volumes(rows: pd.DataFrame, trained: TrainingSet) -> int:
    """How many volumes of any split are of people that were pretrained on, compared as in `count_leaked_people`."""
    if not (trained.volume_ids or trained.uid_keys):
        return 0
    return sum(of_split.volumes for of_split in _exact_overlap(rows, trained).seen.values())


def _exact_overlap(rows: pd.DataFrame, trained: TrainingSet) -> PretrainingOverlap:
    """`pretraining_overlap` without look-alikes."""
    exact = rows.drop(columns="enface_hash", errors="ignore")
    entries = None if trained.entries is None else trained.entries.drop(columns="enface_hash", errors="ignore")
    return pretraining_overlap(exact, replace(trained, entries=entries))


def warn_of_leaks(leaked: int, trained: str) -> None:
    """Says that probes will refuse a table, before the work that it costs; `trained`: "pretrained" or "fine-tuned"."""
    if leaked:
        _log.warning(
            "the encoder was %s on eyes of people who are now in val or test (%d of them): probes will refuse the "
            "table. Give the store the split that it was trained with, or take another encoder",
            trained,
            leaked,
        )


def _store_of(source: Path) -> Any:
    """The index of the store that the run of `source` names; None if it is gone, or may not be opened."""
    for folder in (source, *source.resolve().parents[:2]):
        about = folder / "run.json"
        if about.is_file():
            try:
                location = named_by(folder, about.name, str(read_object(about)["store"]))
            except OutsideError as error:
                _log.warning("%s. Scans are compared only by content and UID", error)
                return None
            except (OSError, ValueError, KeyError, TypeError):
                return None
            return Store.open(location).table if has_file(location, "store.json") else None
    return None
