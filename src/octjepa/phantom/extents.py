"""How common and how large lesions are: `plain`, easy to see and frequent, or `realistic`, as the clinic meets them.

`plain` is what the demo and the tests draw: every lesion in three eyes of ten and over millimetres, so that a few
minutes of training have something to find. `realistic` follows the measured sizes: drusen 63-250 um wide and 30-110
high, few of them; intraretinal cysts of 50-300 um (one in twenty is wider, none above 500) in a small swelling; lenses
of subretinal fluid and patches of atrophy (300 um across and more) well under a disc diameter; thin membranes with low
folds; each in 8 to 15 % of eyes.
Between severity 0 and 1 a figure (first, more) is first + more * severity.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

Difficulty = Literal["plain", "realistic"]
Figure = tuple[float, float]


@dataclass(frozen=True)
class Extents:
    """Lengths in the unit of the name.

    thresholds: an eye has a lesion where its liability, near a standard normal, is above. severity_power: 1 leaves
    severities even over 0.3 to 1; above 1 they spread over 0 to 1 and lean towards mild.
    """

    thresholds: Mapping[str, float]
    severity_power: float
    drusen_count: Figure
    drusen_radius_mm: tuple[float, float, float]  # median, least, most
    drusen_peak_um: tuple[float, float, float]  # for each mm of radius, least, most
    subretinal_radius_mm: Figure
    subretinal_height_um: Figure
    swelling_radius_mm: Figure
    swelling_inl_um: Figure
    swelling_onl_um: Figure
    cysts: Figure
    cyst_half_width_mm: tuple[float, float, float, float]  # median in ONL, in INL, least, most
    atrophy_radius_mm: Figure
    atrophy_patches: int
    membrane_reach_mm: Figure
    membrane_pull_um: tuple[float, float, float]  # first and more at the pit, more elsewhere
    membrane_folds_um: Figure
    membrane_um: Figure


EXTENTS: Final[dict[Difficulty, Extents]] = {
    "plain": Extents(
        # Prevalence 0.33, 0.29, 0.27, 0.27, 0.31.
        thresholds={
            "drusen": 0.44,
            "intraretinal_fluid": 0.55,
            "subretinal_fluid": 0.61,
            "geographic_atrophy": 0.61,
            "epiretinal_membrane": 0.50,
        },
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
        membrane_reach_mm=(1.5, 1.3),
        membrane_pull_um=(60, 70, 22),
        membrane_folds_um=(7, 8),
        membrane_um=(10, 8),
    ),
    "realistic": Extents(
        # Prevalence 0.15, 0.10, 0.08, 0.08, 0.12.
        thresholds={
            "drusen": 1.04,
            "intraretinal_fluid": 1.28,
            "subretinal_fluid": 1.41,
            "geographic_atrophy": 1.41,
            "epiretinal_membrane": 1.17,
        },
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
        membrane_reach_mm=(0.8, 1.2),
        membrane_pull_um=(20, 45, 12),
        membrane_folds_um=(4, 6),
        membrane_um=(5, 12),
    ),
}


def at(figure: Figure, severity: float) -> float:
    """The figure at `severity`."""
    first, more = figure
    return first + more * severity
