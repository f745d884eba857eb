"""The two real eyes of task 8: volumes, graded fluid and graded surfaces on the grid that an encoder reads.

Each eye is 11 B-scans with diabetic macular oedema (Chiu et al. 2015), a sparse and uneven sample of a raster. They are
read with a pitch of 0.36 mm, about their mean distance and the pitch of the exam's volumes, so that each B-scan is one
slice. Five B-scans more, the last ones mirrored, fill the volume up; nothing is tested on them, and only the first of
them is learned from, so that the patches of the last B-scans are whole. Two eyes are two people: every interval of this
task is of B-scans, and says nothing about other people.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from jaxtyping import Bool, Float

from octjepa.cohort.recorded_scans import uid_key
from octjepa.config import science_hash
from octjepa.ingest import build_store
from octjepa.read.reader import read_volume
from octjepa.recipe import Preprocessing
from octjepa.store import Store
from octjepa.volume import CanonicalVolume, OCTVolume, hash_pixels, volume_id

from .truth import COLUMNS, OF_EIGHT, surface_depths, view_voxels

EYES = ("01", "04")
DEVELOPMENT_EYES = (*EYES, "02", "05", "07")
PITCH_MM = (0.36, 0.003872, 0.0117)
BSCANS, GRADED = 11, 12  # slices that are tested, and that are learned from
_REPEATED = 5  # B-scans that fill the volume up
_MACULA = "spectralis_macula_145x496x512_j2k.dcm"  # a third person, ungraded
_SCAN, _FLUID, _LAYERS = "11x496x768.dcm", "fluid.npz", "layers.npz"


@dataclass(frozen=True, eq=False)
class RealEye:
    """One eye on the grid of the centred view.

    fluid: where the grader saw it; graded: voxels that a grader looked at. depths: of
    `truth.BOUNDARIES`, by each of two graders, NaN where ungraded. The first `BSCANS` slices are the eye's own.
    """

    name: str
    volume: CanonicalVolume
    fluid: Bool[np.ndarray, "D H W"]
    graded: Bool[np.ndarray, "D H W"]
    depths: Float[np.ndarray, "graders boundaries D C"]


def data_folder() -> Path:
    """OCTJEPA_DATA, or shared/data beside the repository."""
    named = os.environ.get("OCTJEPA_DATA")
    return Path(named) if named else Path(__file__).resolve().parents[3] / "shared" / "data"


def why_absent(data: Path, names: Sequence[str] = EYES) -> str | None:
    """A sentence that names the first file that is missing; None where all eyes are there with their grades."""
    for eye in names:
        for path in (_file(data, eye, _SCAN), _file(data, eye, _FLUID), _file(data.parent / "labels", eye, _LAYERS)):
            if not path.is_file():
                return f"the real eyes were not read: {path.name} is not in {path.parent.name}/ (set OCTJEPA_DATA)"
    return None


def recorded_real_eyes(data: Path) -> frozenset[str]:
    """What an encoder trained on either eye records of it, as its file is or filled up; nothing without the data."""
    if why_absent(data) is not None:
        return frozenset()
    found = set()
    for eye in EYES:
        scan, frames = _frames(data, eye)
        found |= {volume_id(scan.content_hash), volume_id(hash_pixels(fill_up(frames))), uid_key(scan.sop_instance_uid)}
    return frozenset(found)


def _frames(data: Path, eye: str) -> tuple[OCTVolume, np.ndarray]:
    """The scan of an eye, and its frames in the order of the grades."""
    scan = read_volume(_file(data, eye, _SCAN), spacing_mm=PITCH_MM)
    return scan, scan.pixels[::-1] if "frames_reversed" in scan.notes else scan.pixels


def read_eyes(work: Path, data: Path, preprocessing: Preprocessing, names: Sequence[str] = EYES) -> list[RealEye]:
    """The eyes `names`, prepared by `preprocessing` in a store within `work` that is made once."""
    folder = _folder(work, preprocessing)
    files = _filled_up(folder, data, names)
    build_store(files, folder / "store", preprocessing, spacing_mm=PITCH_MM)
    store = Store.open(folder / "store")
    ids = {Path(row["file"]).stem: row["volume_id"] for row in store.table.to_dict("records")}
    return [_read_eye(store, ids[f"eye{eye}"], data, eye) for eye in names]


def store_folder(work: Path, preprocessing: Preprocessing) -> Path:
    """The store that `read_eyes` makes."""
    return _folder(work, preprocessing) / "store"


def filled_up_frames(work: Path, data: Path, preprocessing: Preprocessing, name: str) -> np.ndarray:
    """The native B-scans of an eye in the order of `read_eyes`, filled up."""
    frames: np.ndarray = np.load(_filled_up(_folder(work, preprocessing), data, (name,))[0])
    return frames


def _folder(work: Path, preprocessing: Preprocessing) -> Path:
    return work / f"real-eyes-{science_hash(preprocessing)[:8]}"


def _filled_up(folder: Path, data: Path, names: Sequence[str] = EYES) -> list[Path]:
    """The scans of the eyes as arrays in `folder`, filled up, each made once."""
    files = [folder / "files" / f"eye{eye}.npy" for eye in names]
    for eye, file in zip(names, files, strict=True):
        if not file.is_file():
            file.parent.mkdir(parents=True, exist_ok=True)
            np.save(file, fill_up(_frames(data, eye)[1]))
    return files


def pretraining_store(work: Path, data: Path, preprocessing: Preprocessing) -> Path:
    """A store of every real volume in the data folder, without grades, all of them for training; made once."""
    folder = _folder(work, preprocessing)
    path = folder / "pretraining"
    build_store(_filled_up(folder, data), path, preprocessing, spacing_mm=PITCH_MM)
    build_store([data / _MACULA], path, preprocessing)
    store = Store.open(path)
    store.set_split({person: "train" for person in set(store.table["person_id"])})
    return path


def fill_up(frames: np.ndarray) -> np.ndarray:
    """The B-scans, or what was graded of each, and the last ones mirrored behind them."""
    return np.concatenate([frames, frames[-2 : -2 - _REPEATED : -1]])


def _file(folder: Path, eye: str, ending: str) -> Path:
    """A file of an eye; eyes other than `EYES` have all their files in one folder."""
    if eye not in EYES:
        folder = folder.parent / "real" / "duke_dme_more"
    return folder / f"duke_dme_eye{eye}_{ending}"


def _read_eye(store: Store, volume_id: str, data: Path, eye: str) -> RealEye:
    native, preprocessing = store.native_map(volume_id), store.preprocessing
    with np.load(_file(data, eye, _FLUID), allow_pickle=False) as file:
        mask = fill_up(file["fluid"] > 0)
    with np.load(_file(data.parent / "labels", eye, _LAYERS), allow_pickle=False) as file:
        graders = [fill_up(file[name])[:, list(OF_EIGHT)] for name in ("layers", "layers2")]  # [frames, 4, columns]
        columns_graded = ~np.isnan(fill_up(file["layers"])[:, 0])
    at, inside = view_voxels(native, preprocessing, 1)
    graded = inside & columns_graded[at[..., 0], at[..., 2]]
    graded[GRADED:] = False
    fluid = mask[at[..., 0], at[..., 1], at[..., 2]] & graded
    depths = np.stack([surface_depths(native, preprocessing, one.swapaxes(0, 1)) for one in graders])
    depths[:, :, GRADED:] = np.nan
    return RealEye(eye, store.read(volume_id), fluid, graded, depths)


def shifted(eye: RealEye, down: int, right: int) -> RealEye:
    """The eye moved within its stored margin, by voxels of depth and of columns (a multiple of `COLUMNS`).

    What comes into view was stored beside it; it has no grade.
    """
    volume = eye.volume
    band = np.where(volume.band >= 0, volume.band + down, -1)
    moved = replace(
        volume, pixels=_moved(volume.pixels, down, right, 0), band=_moved(band, 0, right, -1).astype(volume.band.dtype)
    )
    depths = _moved(eye.depths, 0, right // COLUMNS, np.nan) + down
    depths[(depths < 0) | (depths >= eye.fluid.shape[1])] = np.nan
    fluid, graded = (_moved(part, down, right, False) for part in (eye.fluid, eye.graded))
    return replace(eye, volume=moved, fluid=fluid, graded=graded, depths=depths)


def _moved(values: np.ndarray, down: int, right: int, fill: float) -> np.ndarray:
    """Moved along the last two axes; what comes in is `fill`."""
    found = np.full_like(values, fill)
    height, width = values.shape[-2:]
    rows, columns = slice(max(0, down), height + min(0, down)), slice(max(0, right), width + min(0, right))
    from_rows, from_columns = slice(max(0, -down), height - max(0, down)), slice(max(0, -right), width - max(0, right))
    found[..., rows, columns] = values[..., from_rows, from_columns]
    return found


def disagreement_px(eye: RealEye) -> Float[np.ndarray, "boundaries bscans"]:
    """Mean absolute difference of the two graders in each B-scan, in voxels of the view."""
    mean: np.ndarray = np.nanmean(np.abs(eye.depths[0] - eye.depths[1])[:, :BSCANS], axis=2)
    return mean
