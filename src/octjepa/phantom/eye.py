"""One synthetic eye: pixels as the instrument would give them, and everything that is true about it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Float, UInt8

from octjepa.keys import generator
from octjepa.phantom.anatomy import BM, RPE, make_anatomy
from octjepa.phantom.dialect import Dialect, Size, dialect_of
from octjepa.phantom.extents import EXTENTS, Difficulty
from octjepa.phantom.lesions import Disease, make_disease
from octjepa.phantom.person import LESIONS, Person, make_person
from octjepa.phantom.render import render
from octjepa.volume import Laterality


@dataclass(frozen=True, eq=False)
class Truth:
    """What is known of an eye because it was drawn.

    `surfaces_px` `[11, D, W]` float32: fractional row of each of `SURFACES` (row r covers r - 0.5 to r + 0.5; values
    outside the scan are kept). `masks`: lesion -> bool `[D, H, W]`, only lesions that have a voxel in the scan.
    `fovea_mm`: (slice, column) from the centre of the first voxel, in stored order.
    """

    surfaces_px: Float[np.ndarray, "K D W"]
    masks: dict[str, Bool[np.ndarray, "D H W"]]
    fovea_mm: tuple[float, float]

    @property
    def labels(self) -> dict[str, bool]:
        return {name: name in self.masks for name in LESIONS}


@dataclass(frozen=True, eq=False)
class Eye:
    """`pixels` `[D, H, W]` uint8, vitreous at the top; `spacing_mm` (slice, depth, column)."""

    person: Person
    eye: Laterality
    device: str
    size: Size
    pixels: UInt8[np.ndarray, "D H W"]
    spacing_mm: tuple[float, float, float]
    truth: Truth


def make_eye(
    seed: int,
    person: int,
    eye: Laterality,
    device: str,
    size: Size = "small",
    difficulty: Difficulty = "plain",
    group_effect: float = 1.0,
) -> Eye:
    """The eye `eye` of person number `person` of the cohort `seed`, as `device` sees it.

    A pure function: equal arguments give equal bytes. The two eyes of a person share anatomy and disease to the degree
    that real ones do. Raises UsageError for an unknown device, size or difficulty, or a person beyond
    the 4-digit ids.
    """
    dialect = dialect_of(device)
    return assemble_eye(seed, make_person(seed, person, difficulty, group_effect), eye, dialect, size)


def assemble_eye(seed: int, person: Person, eye: Laterality, dialect: Dialect, size: Size) -> Eye:
    """`make_eye` for a given person, whose lesions may have been chosen rather than drawn."""
    grid, index = dialect.grid(size), person.index
    anatomy = make_anatomy(seed, index, eye, dialect, size)
    draws = generator("phantom", seed, "lesions", index, eye)
    disease = make_disease(anatomy, person.lesions[eye], draws, EXTENTS[person.difficulty])
    light = generator("phantom", seed, "light", index, eye, dialect.device, size)
    pixels = render(anatomy, disease, dialect, grid, light)
    row_um = grid.spacing_mm[1] * 1000
    truth = Truth(disease.surfaces_um / row_um, _masks(disease, grid.shape, row_um), anatomy.fovea_mm)
    return Eye(person, eye, dialect.device, size, pixels, grid.spacing_mm, truth)


def _masks(disease: Disease, shape: tuple[int, int, int], row_um: float) -> dict[str, Bool[np.ndarray, "D H W"]]:
    surfaces = disease.surfaces_um
    row = np.arange(shape[1], dtype=np.float32)[None, :, None]

    def between(top_um: np.ndarray, bottom_um: np.ndarray) -> np.ndarray:
        """Voxels whose centre lies in [top, bottom)."""
        return (row >= top_um[:, None] / row_um) & (row < bottom_um[:, None] / row_um)

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
    if disease.membrane_um.any():
        masks["epiretinal_membrane"] = between(surfaces[0] - disease.membrane_um, surfaces[0])
    return {name: mask for name, mask in masks.items() if mask.any()}
