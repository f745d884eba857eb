"""Synthetic OCT eyes with known truth: in goes a seed, out comes an eye or a whole cohort of real DICOM files.

`make_eye` is a pure function of (seed, person, eye, device, size); `write_cohort` writes an AI-READI-shaped tree with
manifest, participants and truth. What can fail is the request (UsageError) and the disk (OSError).
"""

from __future__ import annotations

from octjepa.phantom.anatomy import SURFACES
from octjepa.phantom.cohort import write_cohort
from octjepa.phantom.dialect import DIALECTS
from octjepa.phantom.eye import Eye, Truth, make_eye
from octjepa.phantom.person import LESIONS
from octjepa.phantom.truth import read_truth
from octjepa.recipe import DEVICES

__all__ = ["DEVICES", "DIALECTS", "LESIONS", "SURFACES", "Eye", "Truth", "make_eye", "read_truth", "write_cohort"]
