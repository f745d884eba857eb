"""Draws people: site, study group, age, and the lesions of each eye with their frequency and size.

Lesions follow a liability model: a person's general burden (higher study group, greater age), a part per lesion shared
by the two eyes, and a part of each eye. An eye has a lesion where its liability exceeds the threshold that gives
the intended prevalence, so eyes of one person agree more often than chance and higher groups have more lesions.

Lesions of difficulty `plain` are what the demo and the tests draw: each in three eyes of ten and over millimetres, so
that a few minutes of training have something to find. `realistic` follows measured sizes: drusen 63-250 um wide and
30-110 high, few of them. Intraretinal cysts of 50-300 um (one in twenty is wider, none above 500) in a small swelling.
Lenses of subretinal fluid and patches of atrophy (300 um across and more) well under a disc diameter. Thin epiretinal
membranes with low folds. Each in 8 to 15 % of eyes. `exam` has the sizes of `realistic`, each in a quarter of eyes, so
that a thousand people with one eye each hold some 250 of every lesion.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import date, timedelta
from typing import Final, Literal

import numpy as np

from octjepa.errors import UsageError
from octjepa.keys import generator
from octjepa.volume import Laterality

LESIONS: Final = ("drusen", "intraretinal_fluid", "subretinal_fluid", "geographic_atrophy", "epiretinal_membrane")
EYES: Final[tuple[Laterality, Laterality]] = ("OD", "OS")
STUDY_GROUPS: Final = (
    "healthy",
    "pre_diabetes_lifestyle_controlled",
    "oral_medication_and_or_non_insulin_injectable_medication_controlled",
    "insulin_dependent",
)
# People with OCT per group in AI-READI version 2.
_GROUP_COUNTS = (369, 242, 321, 129)
_GROUP_BURDEN = (-0.45, -0.10, 0.30, 0.70)
_SITES = {1: "UW", 4: "UCSD", 7: "UAB"}
MAX_PEOPLE: Final = 3 * 999


Difficulty = Literal["plain", "realistic", "exam"]
Linear = tuple[float, float]  # (first, more)


@dataclass(frozen=True)
class LesionSizes:
    """How common and how large lesions are, lengths in the unit of the name; (first, more) is first + more * severity.

    An eye has a lesion where its liability, near a standard normal, is above the threshold, one for each of `LESIONS`.
    `severity_power` 1 leaves severities even over 0.3 to 1; above 1 they spread over 0 to 1 and lean towards mild.
    """

    thresholds: tuple[float, ...]
    severity_power: float
    drusen_count: Linear
    drusen_radius_mm: tuple[float, float, float]  # median, least, most
    drusen_peak_um: tuple[float, float, float]  # for each mm of radius, least, most
    subretinal_radius_mm: Linear
    subretinal_height_um: Linear
    swelling_radius_mm: Linear
    swelling_inl_um: Linear
    swelling_onl_um: Linear
    cysts: Linear
    cyst_half_width_mm: tuple[float, float, float, float]  # median in ONL, in INL, least, most
    atrophy_radius_mm: Linear
    atrophy_patches: int
    epiretinal_reach_mm: Linear
    epiretinal_pull_um: tuple[float, float, float]  # first and more at the pit, more elsewhere
    epiretinal_folds_um: Linear
    epiretinal_um: Linear


LESION_SIZES: Final[dict[Difficulty, LesionSizes]] = {
    "plain": LesionSizes(
        # Prevalence 0.33, 0.29, 0.27, 0.27, 0.31.
        thresholds=(0.44, 0.55, 0.61, 0.61, 0.50),
        severity_power=1.0,
        drusen_count=(10, 30),
        drusen_radius_mm=(0.11, 0.05, 0.24),
        drusen_peak_um=(320, 30, 130),
        subretinal_radius_mm=(0.55, 0.85),
        subretinal_height_um=(70, 170),
        swelling_radius_mm=(0.55, 0.65),
        swelling_inl_um=(25, 55),
        swelling_onl_um=(35, 75),
        cysts=(12, 30),
        cyst_half_width_mm=(0.12, 0.08, 0.04, 0.25),
        atrophy_radius_mm=(0.45, 0.95),
        atrophy_patches=3,
        epiretinal_reach_mm=(1.5, 1.3),
        epiretinal_pull_um=(60, 70, 22),
        epiretinal_folds_um=(7, 8),
        epiretinal_um=(10, 8),
    ),
    "realistic": LesionSizes(
        # Prevalence 0.15, 0.10, 0.08, 0.08, 0.12.
        thresholds=(1.04, 1.28, 1.41, 1.41, 1.17),
        severity_power=1.5,
        drusen_count=(8, 20),
        drusen_radius_mm=(0.07, 0.032, 0.125),
        drusen_peak_um=(700, 30, 110),
        subretinal_radius_mm=(0.25, 0.60),
        subretinal_height_um=(40, 100),
        swelling_radius_mm=(0.35, 0.45),
        swelling_inl_um=(10, 30),
        swelling_onl_um=(15, 40),
        cysts=(6, 18),
        cyst_half_width_mm=(0.085, 0.06, 0.025, 0.25),
        atrophy_radius_mm=(0.20, 0.60),
        atrophy_patches=2,
        epiretinal_reach_mm=(0.8, 1.2),
        epiretinal_pull_um=(20, 45, 12),
        epiretinal_folds_um=(4, 6),
        epiretinal_um=(5, 12),
    ),
}
# Prevalence 0.25 each.
LESION_SIZES["exam"] = replace(LESION_SIZES["realistic"], thresholds=(0.66, 0.68, 0.67, 0.67, 0.67))


@dataclass(frozen=True)
class Person:
    """One participant; `lesions[eye]` maps a lesion's name to its severity in 0..1 (absent lesions are left out).

    `difficulty` names the entry of `LESION_SIZES`. `group_effect` multiplies what the study group adds to the burden.
    """

    index: int
    person_id: str
    clinical_site: str
    study_group: str
    age: int
    study_visit_date: str
    lesions: dict[Laterality, dict[str, float]]
    difficulty: Difficulty = "plain"
    group_effect: float = 1.0


def make_person(seed: int, index: int, difficulty: Difficulty = "plain", group_effect: float = 1.0) -> Person:
    """The person number `index` (from 0) of the cohort `seed`.

    Everything but the lesions is alike for any `difficulty` and `group_effect`; with effect 0 the study group is in no
    pixel. Raises UsageError beyond the 4-digit ids, or for an unknown difficulty.
    """
    if difficulty not in LESION_SIZES:
        raise UsageError(f"phantom difficulty {difficulty!r} is unknown: expected one of {', '.join(LESION_SIZES)}")
    sizes = LESION_SIZES[difficulty]
    if not 0 <= index < MAX_PEOPLE:
        raise UsageError(f"person {index} has no 4-digit id: a phantom cohort holds people 0 to {MAX_PEOPLE - 1}")
    rng = generator("phantom", seed, "person", index)
    # Sites in blocks of three, each block in its own order, so every site gets a third of the people.
    site = int(generator("phantom", seed, "site", index // 3).permutation(list(_SITES))[index % 3])
    group = int(rng.choice(4, p=np.array(_GROUP_COUNTS) / sum(_GROUP_COUNTS)))
    age = int(np.clip(rng.normal(60.0, 11.0), 40, 90))
    visit = date(2023, 7, 19) + timedelta(days=int(rng.integers(0, 365)))
    burden = group_effect * _GROUP_BURDEN[group] + 0.015 * (age - 60) + 0.75 * rng.standard_normal()
    shared = rng.standard_normal(len(LESIONS))
    lesions: dict[Laterality, dict[str, float]] = {}
    for eye in EYES:
        eye_part = rng.standard_normal(len(LESIONS))
        severity = rng.uniform(0.3, 1.0, len(LESIONS))
        if sizes.severity_power != 1:
            severity = ((severity - 0.3) / 0.7) ** sizes.severity_power
        # The weights make the liability's variance about 1 (0.2 burden, 0.4 shared, 0.4 own).
        liability = 0.5 * burden + 0.62 * shared + 0.62 * eye_part
        present = liability > sizes.thresholds
        lesions[eye] = {name: float(severity[k]) for k, name in enumerate(LESIONS) if present[k]}
    return Person(
        index=index,
        person_id=f"{site}{index // 3 + 1:03d}",
        clinical_site=_SITES[site],
        study_group=STUDY_GROUPS[group],
        age=age,
        study_visit_date=visit.isoformat(),
        lesions=lesions,
        difficulty=difficulty,
        group_effect=group_effect,
    )


def at_visit(person: Person, visit: int) -> Person:
    """The same person half a year later for each visit: only the date differs."""
    day = date.fromisoformat(person.study_visit_date) + timedelta(days=182 * visit)
    return replace(person, study_visit_date=day.isoformat())
