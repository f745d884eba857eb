"""One synthetic eye: pixels as an instrument gives them, and the truth about it: in memory, in a file, in pictures.

A truth file holds the surfaces in 16 bit (1/64 voxel, 1/16 in deep scans) and the lesion masks as packed bits.
`np.load` reads it without pickle. Zip members have a fixed date, so equal truths are equal bytes.
"""

from __future__ import annotations

import io
import zipfile
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from jaxtyping import Bool, Float, UInt8

from octjepa.errors import UsageError
from octjepa.keys import generator
from octjepa.phantom.anatomy import BM, ILM, RPE, SURFACES, make_anatomy
from octjepa.phantom.dialect import Dialect, Size, dialect_of
from octjepa.phantom.lesions import Disease, make_disease
from octjepa.phantom.person import LESION_SIZES, LESIONS, Difficulty, Person, at_visit, make_person
from octjepa.phantom.render import render
from octjepa.recipe import DEVICES
from octjepa.volume import Laterality

# The columns of truth/eyes.tsv.
MEASURES: Final = (
    "intraretinal_fluid_mm3",
    "subretinal_fluid_mm3",
    "atrophy_mm2",
    "drusen_mm3",
    "central_thickness_um",
)
CENTRAL_SUBFIELD_MM: Final = 0.5  # radius of the middle of the ETDRS grid
# Errors of NumPy for a file that is cut, damaged, or of another kind.
_UNREADABLE: Final = (OSError, EOFError, LookupError, TypeError, ValueError, zipfile.BadZipFile, zlib.error)
_LIMIT: Final = 32767  # of 16 bit: +-511 voxels in 1/64, +-2047 in 1/16


@dataclass(frozen=True, eq=False)
class Truth:
    """Everything that is true about an eye.

    `surfaces_px` `[11, D, W]` float32: fractional depth index of each of `SURFACES` (voxel r covers r - 0.5 to r + 0.5;
    values may be outside the scan). `masks`: lesion -> bool `[D, H, W]`, only lesions that have a voxel in the scan.
    `fovea_mm`: (slice, column) from the centre of the first voxel, in stored order.
    """

    surfaces_px: Float[np.ndarray, "K D W"]
    masks: dict[str, Bool[np.ndarray, "D H W"]]
    fovea_mm: tuple[float, float]

    @property
    def labels(self) -> dict[str, bool]:
        """Whether the scan shows each of `LESIONS`."""
        return {name: name in self.masks for name in LESIONS}


@dataclass(frozen=True, eq=False)
class Eye:
    """`pixels` `[D, H, W]` uint8, vitreous at the top; `spacing_mm` (slice, depth, column), `laterality` OD or OS.

    `variant` tells scans of one eye apart: "" at visit 0. Scans with different variants have different UIDs.
    """

    person: Person
    laterality: Laterality
    device: str
    size: Size
    pixels: UInt8[np.ndarray, "D H W"]
    spacing_mm: tuple[float, float, float]
    truth: Truth
    variant: str = ""


@dataclass(frozen=True)
class Visit:
    """Identifies a scan of an eye: visit `number`, 0 for the first, and the device that scanned the eye at visit 0.

    `home_device` matters only after visit 0; None is the device which `write_cohort` gives the person when it spreads
    people over all devices.
    """

    number: int = 0
    home_device: str | None = None


FIRST_VISIT = Visit()


def make_eye(
    seed: int,
    person: int,
    laterality: Laterality,
    device: str,
    size: Size = "small",
    difficulty: Difficulty = "plain",
    group_effect: float = 1.0,
    visit: Visit = FIRST_VISIT,
) -> Eye:
    """The eye `laterality` of person number `person` of the cohort `seed`, as `device` sees it.

    A pure function: equal arguments give equal bytes. The two eyes of a person share anatomy and disease to the degree
    that real eyes do. At a later `visit` the same eye with the same lesions is scanned on another day: position, tilt,
    motion, speckle and light are new. The eye is then the eye that `visit.home_device` saw at visit 0. Raises
    UsageError for an unknown device, size or difficulty, a negative visit, or a person beyond the 4-digit ids.
    """
    whole = make_person(seed, person, difficulty, group_effect)
    home = dialect_of(visit.home_device or DEVICES[person % len(DEVICES)])
    return assemble_eye(seed, whole, laterality, dialect_of(device), size, visit.number, home)


def assemble_eye(
    seed: int,
    person: Person,
    laterality: Laterality,
    dialect: Dialect,
    size: Size,
    visit: int = 0,
    home_dialect: Dialect | None = None,
) -> Eye:
    """`make_eye` for a given person, whose lesions may have been chosen rather than drawn."""
    if visit < 0:
        raise UsageError(f"visit {visit}: expected 0 for the first scan of an eye, or more")
    grid, index = dialect.grid(size), person.index
    home = home_dialect if visit and home_dialect else dialect
    anatomy = make_anatomy(seed, index, laterality, dialect, size, visit, home)
    draws = generator("phantom", seed, "lesions", index, laterality)
    disease = make_disease(anatomy, person.lesions[laterality], draws, LESION_SIZES[person.difficulty])
    eye_rng = generator("phantom", seed, "light", index, laterality, home.device, size)
    rng, variant = eye_rng, ""
    if visit:
        rng = generator("phantom", seed, "light", index, laterality, dialect.device, size, visit)
        variant = f"visit {visit}, first on {home.device}"
        person = at_visit(person, visit)
    pixels = render(anatomy, disease, dialect, grid, rng, eye_rng)
    voxel_um = grid.spacing_mm[1] * 1000
    truth = Truth(disease.surfaces_um / voxel_um, lesion_masks(disease, grid.shape, voxel_um), anatomy.fovea_mm)
    return Eye(person, laterality, dialect.device, size, pixels, grid.spacing_mm, truth, variant)


def lesion_masks(
    disease: Disease, shape: tuple[int, int, int], voxel_um: float
) -> dict[str, Bool[np.ndarray, "D H W"]]:
    """The voxels of each lesion that has any, in a scan of `shape` with voxels `voxel_um` deep."""
    surfaces = disease.surfaces_um
    depth_index = np.arange(shape[1], dtype=np.float32)[None, :, None]

    def between(top_um: np.ndarray, bottom_um: np.ndarray) -> np.ndarray:
        """Voxels whose centre is in [top, bottom)."""
        return (depth_index >= top_um[:, None] / voxel_um) & (depth_index < bottom_um[:, None] / voxel_um)

    masks: dict[str, np.ndarray] = {}
    if disease.drusen_um.any():
        masks["drusen"] = between(surfaces[BM] - disease.drusen_um, surfaces[BM])
    if disease.cysts:
        mask = np.zeros(shape, bool)
        for cyst in disease.cysts:
            mask[cyst.slices, :, cyst.columns] |= between(cyst.top_um, cyst.bottom_um)
        masks["intraretinal_fluid"] = mask
    if disease.subretinal_um.any():
        masks["subretinal_fluid"] = between(surfaces[RPE] - disease.subretinal_um, surfaces[RPE])
    if disease.atrophy.any():
        # The column from where the RPE should begin (22 um above Bruch's membrane) to Bruch's membrane.
        lost = disease.atrophy > 0.5
        masks["geographic_atrophy"] = between(surfaces[BM] - 22, surfaces[BM]) & lost[:, None]
    if disease.epiretinal_um.any():
        masks["epiretinal_membrane"] = between(surfaces[0] - disease.epiretinal_um, surfaces[0])
    return {name: mask for name, mask in masks.items() if mask.any()}


def write_truth(path: Path, eye: Eye) -> None:
    """Writes the truth of `eye`. Raises OSError where the disk refuses."""
    steps = 64 if eye.pixels.shape[1] <= 256 else 16
    surfaces = np.clip(eye.truth.surfaces_px, -_LIMIT / steps, _LIMIT / steps)
    arrays: dict[str, np.ndarray] = {
        "surfaces": np.round(surfaces * steps).astype(np.int16),
        "surface_steps_per_row": np.array(steps, np.int16),
        "surface_names": np.array(SURFACES),
        "shape": np.array(eye.pixels.shape, np.int32),
        "spacing_mm": np.array(eye.spacing_mm, np.float64),
        "fovea_mm": np.array(eye.truth.fovea_mm, np.float64),
        "laterality": np.array(eye.laterality),
        "device": np.array(eye.device),
    }
    for name, mask in eye.truth.masks.items():
        arrays[f"mask_{name}"] = np.packbits(mask, axis=2)
    buffer = io.BytesIO()
    np.savez_compressed(buffer, allow_pickle=False, **arrays)
    path.write_bytes(buffer.getvalue())


def read_truth(path: Path) -> Truth:
    """The truth in `path`. Raises UsageError where the file is missing or holds something else."""
    try:
        with path.open("rb") as stream, np.load(stream, allow_pickle=False) as file:
            arrays = {name: file[name] for name in file.files}
        columns = int(arrays["shape"][2])
        masks = {
            name.removeprefix("mask_"): np.unpackbits(bits, axis=2, count=columns).astype(bool)
            for name, bits in arrays.items()
            if name.startswith("mask_")
        }
        surfaces = arrays["surfaces"].astype(np.float32) / np.float32(arrays["surface_steps_per_row"])
        fovea = (float(arrays["fovea_mm"][0]), float(arrays["fovea_mm"][1]))
    except _UNREADABLE as error:
        reason = str(error).partition("\n")[0] or type(error).__name__
        raise UsageError(f"{path} is not a truth file of a phantom ({reason}): expected truth/<SOP UID>.npz") from None
    return Truth(surfaces, masks, fovea)


def eye_measures(truth: Truth, spacing_mm: tuple[float, float, float]) -> dict[str, float]:
    """`MEASURES` of a scan with voxels of `spacing_mm` (slice, depth, column).

    A volume is the voxels of a lesion's mask, the area of atrophy its A-scans, and the central thickness the mean from
    the ILM to Bruch's membrane over the A-scans within 0.5 mm of the fovea; 0 if there is no lesion.
    """
    dz, dy, dx = spacing_mm
    voxels = {name: np.count_nonzero(mask) for name, mask in truth.masks.items()}
    atrophy = truth.masks.get("geographic_atrophy")
    volumes = (voxels.get(name, 0) * dz * dy * dx for name in ("intraretinal_fluid", "subretinal_fluid", "drusen"))
    intraretinal, subretinal, drusen = volumes
    area = 0.0 if atrophy is None else np.count_nonzero(atrophy.any(axis=1)) * dz * dx
    thickness = (truth.surfaces_px[BM] - truth.surfaces_px[ILM]) * dy * 1000
    z, x = (np.arange(n) * step for n, step in zip(thickness.shape, (dz, dx), strict=True))
    central = np.hypot(z[:, None] - truth.fovea_mm[0], x[None, :] - truth.fovea_mm[1]) <= CENTRAL_SUBFIELD_MM
    values = (intraretinal, subretinal, area, drusen, float(thickness[central].mean()))
    return dict(zip(MEASURES, values, strict=True))
