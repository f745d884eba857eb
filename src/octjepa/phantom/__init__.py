"""Synthetic OCT eyes with known truth: from a seed, one eye or a whole cohort of real DICOM files.

`make_eye` is a pure function of (seed, person, eye, device, size); `write_cohort` writes an AI-READI-shaped tree with
manifest, participants and truth. Errors are UsageError for the request and OSError for the disk.
"""

from __future__ import annotations

from octjepa.phantom.anatomy import SURFACES
from octjepa.phantom.cohort import CohortDesign, write_cohort
from octjepa.phantom.dialect import DIALECTS
from octjepa.phantom.eye import Eye, Truth, Visit, make_eye, read_truth
from octjepa.phantom.person import LESIONS
from octjepa.recipe import DEVICES

__all__ = [
    "DEVICES",
    "DIALECTS",
    "LESIONS",
    "SURFACES",
    "CohortDesign",
    "Eye",
    "Truth",
    "Visit",
    "make_eye",
    "read_truth",
    "write_cohort",
]
