"""The exam's cohorts: phantoms written as DICOM, ingested into stores, each made once for its settings.

A folder that a kill left half-made is made again (phantoms) or continued (store). Truth stays in the phantoms' folder:
the store knows nothing of it.
"""

from __future__ import annotations

import csv
import hashlib
import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
from benchmarks.exam.decoys import DECOYS, Decoy, write_decoys
from jaxtyping import Bool, Float, Int

from octjepa.config import load_recipe, science_hash
from octjepa.embed.embedding import add_participants
from octjepa.errors import UsageError
from octjepa.ingest import build_store
from octjepa.locks import writer_lock
from octjepa.metrics import test_set_ledger
from octjepa.phantom import LESIONS, CohortDesign, Truth, read_truth, write_cohort
from octjepa.recipe import Preprocessing, Recipe
from octjepa.store import Store

from .results import Signature
from .settings import RECIPE, Settings

UNFLATTENED = "boundaries"  # the cohort whose store keeps tilt and curvature
SECOND_VISIT = "second_visit"
PRETRAINING = "pretraining"
EXAMINED = ("main", UNFLATTENED, SECOND_VISIT, *DECOYS)  # by each of which a row is read
DENSE = "pretraining_dense"  # the first half of its people with twice as many B-scans, stored with halves
_MEASURES = ("tissue_mean", "tissue_std", "tissue_share", "quality", "retina_score")
_MAX_REFUSED = 0.01  # of a cohort; bright thin sheets look like painted text to ingest now and then


@dataclass(frozen=True, eq=False)
class Cohort:
    """V volumes of a store in the order of their people, with the truth about each.

    Not in the order of volume ids, which are hashes of voxels: processors round a phantom's differently in a few, and
    then the labelled people that are drawn by number, and with them every figure from few labels, would be others.
    """

    name: str
    store: Store
    truth_folder: Path
    ids: list[str]
    people: np.ndarray
    devices: np.ndarray
    splits: np.ndarray
    rows: tuple[dict[str, str], ...]  # of truth/eyes.tsv
    entries: tuple[dict[str, Any], ...]  # of the store's index

    @classmethod
    def open(cls, folder: Path, name: str) -> Cohort:
        """Of a folder of `make_cohorts`. Raises UsageError where a volume has no truth."""
        own = folder / name
        store = Store.open(own / "store")
        phantoms = json.loads((own / "made.json").read_text(encoding="utf-8"))["phantoms"]
        truth = folder / phantoms / "truth"
        with (truth / "eyes.tsv").open(encoding="utf-8") as file:
            known = {row["sop_instance_uid"]: row for row in csv.DictReader(file, delimiter="\t")}
        table = store.table.sort_values("person_id").reset_index(drop=True)  # one eye a person
        unknown = [uid for uid in table["sop_instance_uid"] if uid not in known]
        if unknown:
            raise UsageError(f"{len(unknown)} volumes of {own} have no row in truth/eyes.tsv: delete it, run again")
        people, devices, splits = (table[column].to_numpy(dtype=str) for column in ("person_id", "device", "split"))
        rows = tuple(known[uid] for uid in table["sop_instance_uid"])
        return cls(
            name,
            store,
            truth,
            list(table["volume_id"]),
            people,
            devices,
            splits,
            rows,
            tuple({str(name): value for name, value in entry.items()} for entry in table.to_dict("records")),
        )

    def indices(self, split: str) -> Int[np.ndarray, " n"]:
        """Indices of the volumes of `split`."""
        return np.flatnonzero(self.splits == split)

    @cached_property
    def table(self) -> pd.DataFrame:
        """The cohort as the evaluation protocol reads it: a row for each volume, in this order."""
        rows = pd.DataFrame(list(self.entries)).assign(split=self.splits)
        return add_participants(rows, self.store.participants).assign(sop_instance_uid=rows["sop_instance_uid"])

    @property
    def uses(self) -> Path:
        """The folder in which uses of the test people are counted."""
        return self.truth_folder.parent.parent / test_set_ledger.FOLDER

    @cached_property
    def lesions(self) -> Bool[np.ndarray, "V lesions"]:
        """Whether each eye has each of `LESIONS`."""
        return np.array([[row[name] == "1" for name in LESIONS] for row in self.rows])

    def column(self, name: str) -> Float[np.ndarray, " V"]:
        """A column of numbers of the truth."""
        return np.array([float(row[name]) for row in self.rows])

    def truth(self, index: int) -> Truth:
        """Surfaces and masks of a volume, in its native grid."""
        return read_truth(self.truth_folder / f"{self.entries[index]['sop_instance_uid']}.npz")

    def frames(self, index: int, frame: np.ndarray) -> np.ndarray:
        """Frames of the truth's order for frames of the reader's order."""
        entry = self.entries[index]
        return int(entry["native_d"]) - 1 - frame if "frames_reversed" in str(entry["notes"]) else frame


def phantom_store(work: Path, settings: Settings, recipe: Recipe) -> Path:
    """What a run learns from: phantoms stored with halves of B-scans where its views are of halves.

    Raises what `make_cohorts` raises.
    """
    name = DENSE if recipe.views.halves else PRETRAINING
    return make_cohorts(work, settings, (name,)) / name / "store"


def signature(folder: Path, names: Sequence[str]) -> Signature:
    """What ingest made of the cohorts `names`, in a few numbers each.

    No hash of the voxels: processors round a product of matrices differently, which moves five voxels in a million by
    one stored value and these means by 4e-6 of their size, while a changed ingest moves them by more.
    """
    found: Signature = {}
    for name in names:
        table = Store.open(folder / name / "store").table
        found[name] = {"volumes": len(table), **{measure: float(table[measure].mean()) for measure in _MEASURES}}
    return found


def make_cohorts(work: Path, settings: Settings, names: Sequence[str], workers: int = 2) -> Path:
    """The folder that holds the cohorts `names`, each made where it is not there yet.

    Raises UsageError where ingest refuses more than one phantom in a hundred, or another process makes the same one.
    """
    preprocessing = load_recipe(RECIPE).preprocessing
    digest = hashlib.sha256(json.dumps(settings.as_dict(), sort_keys=True).encode()).hexdigest()[:8]
    folder = work / f"cohorts-{digest}-{science_hash(preprocessing)[:8]}"
    total = settings.people
    shares = (settings.train / total, settings.val / total, settings.test / total)
    decoy_total = settings.decoy_train + settings.decoy_val + settings.decoy_test
    decoy_shares = (
        settings.decoy_train / decoy_total,
        settings.decoy_val / decoy_total,
        settings.decoy_test / decoy_total,
    )
    design = CohortDesign(difficulty="exam", eyes_per_person=1)
    again = replace(design, visit=1, device_offset=1)
    pretraining_shares = 0.96, 0.04, 0.0
    seed = settings.seed

    def write_main(out: Path) -> None:
        write_cohort(out, total, seed, split_shares=shares, workers=workers, design=design)

    def write_second_visit(out: Path) -> None:
        write_cohort(out, settings.second_visit, seed, split_shares=shares, workers=workers, design=again)

    def write_pretraining(out: Path) -> None:
        people, pretraining_seed = settings.pretraining, settings.pretraining_seed
        write_cohort(out, people, pretraining_seed, split_shares=pretraining_shares, workers=workers, design=design)

    def write_dense(out: Path) -> None:
        write_cohort(
            out,
            settings.pretraining // 2,
            settings.pretraining_seed,
            size="dense",
            split_shares=pretraining_shares,
            workers=workers,
            design=design,
        )

    def decoys(kind: Decoy, number: int, people: int, shares: tuple[float, float, float]) -> Callable[[Path], None]:
        def write(out: Path) -> None:
            write_decoys(out, kind, people, seed + number, split_shares=shares, workers=workers)

        return write

    writers: dict[str, Callable[[Path], None]] = {
        "main": write_main,
        SECOND_VISIT: write_second_visit,
        PRETRAINING: write_pretraining,
        DENSE: write_dense,
    }
    for number, kind in enumerate(DECOYS, start=1):
        writers[kind] = decoys(kind, number, decoy_total, decoy_shares)
        writers[f"{kind}_ample"] = decoys(kind, 100 + number, settings.decoy_ample, (0.9, 0.1, 0.0))
    for name in names:
        if (folder / name / "made.json").is_file():
            continue
        with writer_lock(folder / name / "making"):
            if name == UNFLATTENED:
                _make_unflattened(folder, settings, preprocessing, workers)
            else:
                _make(folder, name, writers[name], preprocessing, workers)
    return folder


def _make(folder: Path, name: str, write: Callable[[Path], None], preprocessing: Preprocessing, workers: int) -> None:
    own = folder / name
    if not (own / "phantom").is_dir():
        partial = own / "phantom.partial"
        shutil.rmtree(partial, ignore_errors=True)
        write(partial)
        partial.rename(own / "phantom")
    _ingest([own / "phantom"], own, preprocessing, f"{name}/phantom", workers, halves=name == DENSE)


def _make_unflattened(folder: Path, settings: Settings, preprocessing: Preprocessing, workers: int) -> None:
    """Some people of the main cohort, with tilt and curvature kept."""
    own = folder / UNFLATTENED
    main = Cohort.open(folder, "main")
    wanted = {"train": settings.boundaries_train, "val": 0, "test": settings.boundaries_test}
    files = [
        folder / "main" / "phantom" / main.rows[index]["filepath"].lstrip("/")
        for split, count in wanted.items()
        for index in main.indices(split)[:count]
    ]
    _ingest(files, own, preprocessing.model_copy(update={"flatten": "none"}), "main/phantom", workers)
    store, split_of = Store.open(own / "store"), dict(zip(main.people, main.splits, strict=True))
    store.set_split({person: str(split_of[person]) for person in set(store.table["person_id"])})


def _ingest(
    sources: Sequence[Path], own: Path, preprocessing: Preprocessing, phantoms: str, workers: int, halves: bool = False
) -> None:
    made = build_store(sources, own / "store", preprocessing, workers=workers, halves=halves)
    volumes = made.accepted + made.skipped
    if made.quarantined > _MAX_REFUSED * volumes:
        raise UsageError(f"{made.quarantined} phantom eyes were refused by ingest: {made.by_reason}")
    about = {"phantoms": phantoms, "volumes": volumes, "refused": made.by_reason}
    (own / "made.json").write_text(json.dumps(about), encoding="utf-8")
