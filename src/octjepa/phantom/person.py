"""Who the people are: site, study group, age, and which lesions each eye has. No pixels here.

Lesions follow a liability model: a person's general burden (higher study group, greater age), a part per lesion shared
by the two eyes, and a part of the eye alone. An eye has a lesion where its liability exceeds the threshold that gives
the wanted prevalence, so eyes of one person agree more often than chance and higher groups have more lesions.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import date, timedelta
from typing import Final

import numpy as np

from octjepa.errors import UsageError
from octjepa.keys import generator
from octjepa.phantom.extents import EXTENTS, Difficulty
from octjepa.volume import Laterality

LESIONS: Final = (
    "drusen",
    "intraretinal_fluid",
    "subretinal_fluid",
    "geographic_atrophy",
    "epiretinal_membrane",
)
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


@dataclass(frozen=True)
class Person:
    """One participant; `lesions[eye]` maps a lesion's name to its severity in 0..1 (absent lesions are left out).

    `difficulty` says how common and how large lesions are: `octjepa.phantom.extents`. `group_effect` multiplies what
    the study group adds to the burden.
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
    if difficulty not in EXTENTS:
        raise UsageError(f"phantom difficulty {difficulty!r} is unknown: expected one of {', '.join(EXTENTS)}")
    extents = EXTENTS[difficulty]
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
        own = rng.standard_normal(len(LESIONS))
        severity = rng.uniform(0.3, 1.0, len(LESIONS))
        if extents.severity_power != 1:
            severity = ((severity - 0.3) / 0.7) ** extents.severity_power
        # The weights make the liability's variance about 1 (0.2 burden, 0.4 shared, 0.4 own).
        liability = 0.5 * burden + 0.62 * shared + 0.62 * own
        present = [liability[k] > extents.thresholds[name] for k, name in enumerate(LESIONS)]
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
