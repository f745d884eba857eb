"""Pairs of eyes that intensity hardly distinguishes: one with a lesion, one with a harmless or other look-alike.

| kind | member 1, the lesion | member 0, the decoy |
|---|---|---|
| cyst_or_thinning | intraretinal cysts | smooth bands in the same layers: as many A-scans, as deep, as dark |
| drusen_or_wave | drusen | a smooth wave of the RPE: the same heights over as many A-scans |
| fluid_or_ped | fluid above the RPE | the same lens below it: a serous detachment of the pigment epithelium (PED) |
| membrane_or_hyaloid | membrane on a folded ILM | the same sheet just above a smooth ILM: a detached hyaloid |

Both members of a pair are the same healthy eye in the same scan and light; only what the table names differs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Final, Literal

import numpy as np

from octjepa.errors import UsageError
from octjepa.keys import generator, key
from octjepa.phantom.anatomy import ELM, INL_OPL, IPL_INL, OPL_ONL, RPE, Anatomy, Map, make_anatomy
from octjepa.phantom.cohort import (
    TRUTH_COLUMNS,
    EyeTask,
    check_request,
    participant_rows,
    split_people,
    write_eyes,
    write_tables,
)
from octjepa.phantom.dialect import Size, dialect_of
from octjepa.phantom.eye import Eye, Truth, lesion_masks
from octjepa.phantom.lesions import Cyst, Disease, lift_rpe, make_disease
from octjepa.phantom.person import EYES, LESION_SIZES, LesionSizes, make_person
from octjepa.phantom.render import render
from octjepa.recipe import DEVICES
from octjepa.volume import Laterality

Decoy = Literal["cyst_or_thinning", "drusen_or_wave", "fluid_or_ped", "membrane_or_hyaloid"]
DECOYS: Final[dict[Decoy, str]] = {  # the lesion of member 1
    "cyst_or_thinning": "intraretinal_fluid",
    "drusen_or_wave": "drusen",
    "fluid_or_ped": "subretinal_fluid",
    "membrane_or_hyaloid": "epiretinal_membrane",
}
_SEVERITY: Final = (0.6, 1.0)
# Realistic, but for lower lenses of fluid.
_SIZES: Final = replace(LESION_SIZES["realistic"], subretinal_height_um=(35.0, 40.0))
_HYALOID_GAP_UM: Final = 22.0
_WITHOUT_FOLDS: Final = replace(_SIZES, epiretinal_folds_um=(0.0, 0.0))
_BASAL_UM: Final = 15.0  # of the 22 um of the RPE, what stays on Bruch's membrane below a detachment
DECOY_COLUMNS: Final = (*TRUTH_COLUMNS, "decoy_kind", "decoy_member")


def make_decoy(
    seed: int,
    person: int,
    kind: Decoy,
    member: Literal[0, 1],
    laterality: Laterality,
    device: str,
    size: Size = "small",
) -> Eye:
    """The eye of `person` with the lesion of `kind` (member 1) or its look-alike (member 0).

    A pure function. The two members share everything else, speckle and noise included. The truth of member 0 has no
    mask, and its surfaces are those of the look-alike. Raises UsageError for an unknown kind, member, device or size.
    """
    if kind not in DECOYS or member not in (0, 1):
        raise UsageError(f"decoy {kind!r}, member {member!r}: expected one of {', '.join(DECOYS)}, and 0 or 1")
    dialect, lesion = dialect_of(device), DECOYS[kind]
    grid = dialect.grid(size)
    severity = float(generator("phantom", seed, "decoy", kind, person).uniform(*_SEVERITY))
    lesions: dict[Laterality, dict[str, float]] = {laterality: {lesion: severity} if member else {}}
    whole = replace(make_person(seed, person, "realistic"), lesions=lesions)
    anatomy = make_anatomy(seed, person, laterality, dialect, size)

    def drawn(sizes: LesionSizes = _SIZES) -> Disease:
        draws = generator("phantom", seed, "decoy", kind, person, laterality)
        return make_disease(anatomy, {lesion: severity}, draws, sizes)

    draw = _LESIONS.get(kind, lambda anatomy, drawn: drawn()) if member else _LOOK_ALIKES[kind]
    disease = draw(anatomy, drawn)
    voxel_um = 1000 * grid.spacing_mm[1]
    pixels = render(
        anatomy, disease, dialect, grid, generator("phantom", seed, "light", person, laterality, device, size)
    )
    masks = lesion_masks(disease, grid.shape, voxel_um) if member else {}
    truth = Truth(disease.surfaces_um / voxel_um, masks, anatomy.fovea_mm)
    return Eye(whole, laterality, device, size, pixels, grid.spacing_mm, truth, f"decoy {kind} {member}")


Draw = Callable[..., Disease]


def _like(height: Map, order: np.ndarray) -> Map:
    """The values of `height` moved to where `order` is largest: the largest value to the largest order, and so on."""
    out = np.empty(height.size, height.dtype)
    out[np.argsort(order, axis=None, kind="stable")] = np.sort(height, axis=None)
    return out.reshape(height.shape)


def _filled(cysts: list[Cyst], roof: Map, floor: Map) -> Map:
    """The share of a layer that is inside any of `cysts`, counted at 48 depths of each A-scan."""
    share = np.zeros_like(roof)
    for level in (np.arange(48, dtype=np.float32) + 0.5) / 48:
        inside = np.zeros(roof.shape, bool)
        depth = roof + level * (floor - roof)
        for cyst in cysts:
            here = depth[cyst.slices, cyst.columns]
            inside[cyst.slices, cyst.columns] |= (here >= cyst.top_um) & (here < cyst.bottom_um)
        share += inside / np.float32(48)
    return share


def _bands(anatomy: Anatomy, drawn: Draw) -> Disease:
    """Cysts of each layer become one smooth band along its middle, over as many A-scans and with the same depths."""
    disease = drawn()
    u, v = anatomy.u_mm, anatomy.v_mm
    whole = (slice(0, u.shape[0]), slice(0, u.shape[1]))
    bands: list[Cyst] = []
    for top, bottom in ((OPL_ONL, ELM), (IPL_INL, INL_OPL)):
        roof, floor = disease.surfaces_um[top], disease.surfaces_um[bottom]
        depth = _filled(disease.cysts, roof, floor) * (floor - roof)
        if not depth.any():
            continue
        cu, cv = np.average(u, weights=depth), np.average(v, weights=depth)
        reach = np.sqrt(np.average((u - cu) ** 2 + (v - cv) ** 2, weights=depth) / 2) + 0.1
        # Bands run along the fast axis, a few slices apart.
        order = np.exp(-((u - cu) ** 2 + (v - cv) ** 2) / (2 * (1.2 * reach) ** 2)) * (
            1 + 0.9 * np.cos(2 * np.pi * (v - cv) / 0.6)
        )
        half = 0.5 * np.minimum(_like(depth, order), 0.9 * (floor - roof))
        middle = roof + (0.5 + 0.12 * np.sin(2 * np.pi * (u - cu) / 1.7)) * (floor - roof)
        bands.append(Cyst(*whole, (middle - half).astype(np.float32), (middle + half).astype(np.float32)))
    disease.cysts = bands
    return disease


def _wave(anatomy: Anatomy, drawn: Draw) -> Disease:
    """The heights of the drusen as ridges along the fast axis that rise and fall slowly."""
    height = drawn().drusen_um
    u, v = anatomy.u_mm, anatomy.v_mm
    cu, cv = np.average(u, weights=height), np.average(v, weights=height)
    # Ridges along the fast axis that rise and fall, all about equally high within the reach of the drusen.
    inside = np.exp(-((((u - cu) ** 2 + (v - cv) ** 2) / 1.7**2) ** 4))
    order = inside * (1 + 0.8 * np.cos(2 * np.pi * (v - cv) / 0.6)) * (1 + 0.5 * np.cos(2 * np.pi * (u - cu) / 1.0))
    disease = drawn()
    disease.surfaces_um = anatomy.surfaces_um.copy()
    lift_rpe(disease, _like(height, order))
    return disease


def _detachment(anatomy: Anatomy, drawn: Draw) -> Disease:
    """The lens of fluid below a thin RPE, which rises with the photoreceptors; deposits stay on Bruch's membrane."""
    disease = drawn()
    lens = disease.subretinal_um
    disease.surfaces_um[RPE] -= lens
    basal = np.where(lens > 0, np.float32(_BASAL_UM), np.float32(0))
    disease.drusen_um, disease.below_rpe, disease.basal_um = lens + basal, "fluid", basal
    disease.subretinal_um = np.zeros_like(lens)
    return disease


def _fluid(anatomy: Anatomy, drawn: Draw) -> Disease:
    disease = drawn()
    disease.basal_um = np.zeros_like(anatomy.u_mm)  # as many sheets as the other member, so equal draws
    return disease


def _sheet(anatomy: Anatomy, drawn: Draw) -> Disease:
    disease = drawn()
    disease.sheet_gap_um = np.zeros_like(anatomy.u_mm)  # as above
    return disease


def _hyaloid(anatomy: Anatomy, drawn: Draw) -> Disease:
    """The sheet hangs above an ILM without folds; the retina below is as thick as under the membrane."""
    disease = drawn(_WITHOUT_FOLDS)
    disease.sheet_gap_um = np.where(disease.epiretinal_um > 0, np.float32(_HYALOID_GAP_UM), np.float32(0))
    return disease


# The lesion where `make_disease` alone does not draw it.
_LESIONS: Final[dict[Decoy, Callable[[Anatomy, Draw], Disease]]] = {
    "fluid_or_ped": _fluid,
    "membrane_or_hyaloid": _sheet,
}
_LOOK_ALIKES: Final[dict[Decoy, Callable[[Anatomy, Draw], Disease]]] = {
    "cyst_or_thinning": _bands,
    "drusen_or_wave": _wave,
    "fluid_or_ped": _detachment,
    "membrane_or_hyaloid": _hyaloid,
}


def write_decoys(
    out: Path,
    kind: Decoy,
    people: int,
    seed: int = 0,
    devices: Sequence[str] = DEVICES,
    split_shares: tuple[float, float, float] = (0.7, 0.15, 0.15),
    workers: int = 1,
) -> dict[str, int]:
    """Writes the tree and tables of a cohort with one eye of `people` persons, with the lesion of `kind` or its decoy.

    Both are equally frequent, to one eye, in each split on each device, and right and left eyes take turns.
    truth/eyes.tsv has the columns `decoy_kind` and `decoy_member` (1 the lesion, 0 the decoy) besides.
    Equal arguments give equal bytes, whatever the number of workers.
    Returns {"people", "volumes", "files"}. Raises UsageError as `write_cohort` does, or for an unknown kind.
    """
    check_request(out, people, devices, "small", split_shares, workers, 0)
    if kind not in DECOYS:
        raise UsageError(f"decoy {kind!r} is unknown: expected one of {', '.join(DECOYS)}")
    members = _members(seed, kind, people, len(devices), split_shares)
    tasks = []
    for person in range(people):
        laterality, device = EYES[person // len(devices) % 2], devices[person % len(devices)]
        draw = partial(make_decoy, seed, person, kind, members[person], laterality, device, "small")
        columns = {"decoy_kind": kind, "decoy_member": members[person]}
        tasks.append(EyeTask(out, seed, draw, columns=columns))
    written = write_eyes(out, tasks, workers)
    participants = participant_rows(seed, people, devices, split_shares, "realistic")
    write_tables(out, written, participants, DECOY_COLUMNS)
    return {"people": people, "volumes": people, "files": people}


def _members(
    seed: int, kind: Decoy, people: int, devices: int, shares: tuple[float, float, float]
) -> dict[int, Literal[0, 1]]:
    """Person -> member: they alternate in a random order of the right, then of the left eyes of a split and device."""
    split_of = split_people(seed, people, devices, shares)
    groups: dict[tuple[str, int], list[int]] = {}
    for person in range(people):
        groups.setdefault((split_of[person], person % devices), []).append(person)
    members: dict[int, Literal[0, 1]] = {}
    for number, group in enumerate(groups.values()):
        order = sorted(group, key=lambda person: (person // devices % 2, key("phantom decoy", seed, kind, person)))
        members.update({person: 1 if (turn + number) % 2 else 0 for turn, person in enumerate(order)})
    return members
