"""The study's eyes: a phantom cohort made and ingested once per settings, its labels, and its truth on a coarse grid.

`Eyes` gives every volume of the store with its split, labels and fovea, in one order for every run.
"""

from __future__ import annotations

import csv
import hashlib
import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, Int, UInt8

from octjepa.config import load_recipe, science_hash
from octjepa.errors import UsageError
from octjepa.files import write_atomic
from octjepa.phantom import LESIONS, SURFACES, read_truth, write_cohort
from octjepa.recipe import Preprocessing
from octjepa.store import Store, build_store
from octjepa.store.native_mapping import NativeMap

SHARES = (0.6, 0.1, 0.3)
# Coarse columns of the dense truth, in voxels: 4 of 47 um are about a third of a small cyst.
COLUMNS = 4
# Regions between true surfaces, from above: what a dense row is asked for. The last two are not counted in layer_dice.
REGIONS = ("vitreous", "inner", "inl_opl", "onl", "photoreceptors_rpe", "choroid", "below")
LAYERS = REGIONS[1:6]
_EDGES = ("ilm", "ipl_inl", "opl_onl", "elm", "bm", "choroid_sclera")
UNSEEN = 255  # a place outside the scan


def make_cohort(work: Path, cohort: dict[str, Any], recipe: str, workers: int = 1) -> Path:
    """The folder with `phantom/` and `store/` of `cohort`, made where it is not there yet.

    A folder that a kill left half-made is made again (phantom) or continued (store).
    """
    digest = hashlib.sha256(json.dumps(cohort, sort_keys=True).encode()).hexdigest()[:8]
    preprocessing = load_recipe(recipe).preprocessing
    folder = work / f"cohort-{cohort['people']}-{cohort['difficulty']}-{digest}-{science_hash(preprocessing)[:8]}"
    finished = folder / "made.json"
    if finished.is_file():
        return folder
    if not (folder / "phantom").is_dir():
        partial = folder / "phantom.partial"
        shutil.rmtree(partial, ignore_errors=True)
        write_cohort(
            partial, cohort["people"], cohort["seed"], split_shares=SHARES, workers=workers,
            difficulty=cohort["difficulty"],
        )  # fmt: skip
        partial.rename(folder / "phantom")
    made = build_store([folder / "phantom"], folder / "store", preprocessing, workers=workers)
    if made["quarantined"]:
        raise UsageError(f"{made['quarantined']} phantom eyes were refused by ingest: {made['by_reason']}")
    finished.write_text(json.dumps({**cohort, "volumes": made["accepted"] + made["skipped"]}), encoding="utf-8")
    return folder


@dataclass(frozen=True, eq=False)
class Eyes:
    """V volumes in the order of their ids. `fovea_mm` is (slice, column) from the middle of the stored volume."""

    store: Store
    truth: Path
    ids: list[str]
    people: np.ndarray
    devices: np.ndarray
    splits: np.ndarray
    labels: Bool[np.ndarray, "V lesions"]
    fovea_mm: Float[np.ndarray, "V 2"]

    @classmethod
    def open(cls, folder: Path) -> Eyes:
        """Of a folder of `make_cohort`. Raises UsageError where a volume has no truth."""
        store = Store.open(folder / "store")
        table = store.table.sort_values("volume_id").reset_index(drop=True)
        with (folder / "phantom" / "truth" / "eyes.tsv").open(encoding="utf-8") as file:
            known = {row["sop_instance_uid"]: row for row in csv.DictReader(file, delimiter="\t")}
        strangers = [uid for uid in table["sop_instance_uid"] if uid not in known]
        if strangers:
            raise UsageError(f"{len(strangers)} volumes of {folder} have no row in truth/eyes.tsv: make the study anew")
        rows = [known[uid] for uid in table["sop_instance_uid"]]
        labels = np.array([[row[name] == "1" for name in LESIONS] for row in rows])
        pairs = list(zip(table.to_dict("records"), rows, strict=True))
        fovea = _kept(
            folder / "coarse" / "fovea_mm.npz",
            lambda: {"fovea_mm": np.array([_fovea(store, one, row) for one, row in pairs])},
        )["fovea_mm"]
        people, devices, splits = (table[name].to_numpy(dtype=str) for name in ("person_id", "device", "split"))
        return cls(
            store, folder / "phantom" / "truth", list(table["volume_id"]), people, devices, splits, labels, fovea
        )

    def rows(self, split: str) -> Int[np.ndarray, " n"]:
        """Places of the volumes of `split`."""
        return np.flatnonzero(self.splits == split)

    def coarse_truth(self, place: int) -> tuple[UInt8[np.ndarray, "D H C"], UInt8[np.ndarray, "D H C"]]:
        """(regions, lesions as bits in the order of LESIONS) of a volume's centred view; UNSEEN regions lie outside.

        Kept beside the store once made.
        """
        made = _kept(self.store.path.parent / "coarse" / f"{self.ids[place]}.npz", lambda: self._coarse(place))
        return made["regions"], made["lesions"]

    def _coarse(self, place: int) -> dict[str, np.ndarray]:
        volume_id = self.ids[place]
        row = self.store.table.set_index("volume_id").loc[volume_id]
        truth = read_truth(self.truth / f"{row['sop_instance_uid']}.npz")
        where, inside = native_places(NativeMap.from_store(self.store, volume_id), self.store.preprocessing, COLUMNS)
        depth = int(row["native_d"])
        frame = depth - 1 - where[..., 0] if "frames_reversed" in str(row["notes"]) else where[..., 0]
        edges = np.stack([truth.surfaces_px[SURFACES.index(name)] for name in _EDGES])
        regions = (where[..., 1] >= edges[:, frame, where[..., 2]]).sum(axis=0).astype(np.uint8)
        regions[~inside] = UNSEEN
        lesions = np.zeros(regions.shape, np.uint8)
        for bit, name in enumerate(LESIONS):
            if name in truth.masks:
                hit = truth.masks[name][frame, where[..., 1], where[..., 2]] & inside
                lesions |= hit.astype(np.uint8) << bit
        return {"regions": regions, "lesions": lesions}


def _kept(path: Path, make: Callable[[], dict[str, np.ndarray]]) -> dict[str, np.ndarray]:
    """The arrays in `path`, made and written there where it is not there yet."""
    if not path.is_file():
        arrays = make()
        path.parent.mkdir(exist_ok=True)
        write_atomic(path, lambda file: np.savez_compressed(file, allow_pickle=False, **arrays))  # type: ignore[arg-type]
    with np.load(path, allow_pickle=False) as file:
        return {name: file[name] for name in file.files}


def native_places(
    native: NativeMap, preprocessing: Preprocessing, columns: int
) -> tuple[Int[np.ndarray, "D H C 3"], Bool[np.ndarray, "D H C"]]:
    """Nearest native voxel of each place of the centred view (in the middle of `columns`), and whether it is inside."""
    (depth, height, width), margin = preprocessing.image_size, np.array(preprocessing.margin)
    axes = np.arange(depth), np.arange(height), np.arange(width // columns) * columns + (columns - 1) / 2
    grid = np.stack(np.meshgrid(*axes, indexing="ij"), axis=-1) + margin
    place = np.rint(native.to_native(grid.reshape(-1, 3))).astype(np.int64).reshape(grid.shape)
    last = np.array(native.shape) - 1
    inside = ((place >= 0) & (place <= last)).all(axis=-1)
    return np.clip(place, 0, last), inside


def _fovea(store: Store, row: dict[str, Any], truth: dict[str, str]) -> tuple[float, float]:
    """(slice, column) in mm from the middle of the stored volume."""
    slice_index = float(truth["fovea_slice_mm"]) / row["spacing_z_mm"]
    if "frames_reversed" in str(row["notes"]):
        slice_index = row["native_d"] - 1 - slice_index
    column = float(truth["fovea_column_mm"]) / row["spacing_x_mm"]
    place = NativeMap.from_store(store, row["volume_id"]).to_canonical(
        np.array([[slice_index, row["native_h"] / 2, column]])
    )
    preprocessing = store.preprocessing
    middle = (np.array(preprocessing.stored_size) - 1) / 2
    offset = (place[0] - middle) * np.array(preprocessing.target_spacing_mm)
    return float(offset[0]), float(offset[2])
