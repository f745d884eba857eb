"""The boundaries, layers and classes of the retina that octjepa segments, and how they are called.

The eight boundaries are those that the Duke graders draw (Chiu et al. 2015), from the vitreous to the choroid. Files
hold these names, so they stay as they are.
"""

from __future__ import annotations

from typing import Final

BOUNDARIES: Final = ("ilm", "rnfl_gcl", "ipl_inl", "inl_opl", "opl_onl", "ez", "rpe", "bm")
BOUNDARY_NAMES: Final = ("ILM", "RNFL/GCL", "IPL/INL", "INL/OPL", "OPL/ONL", "IS/EZ", "OS/RPE", "BM")  # for people
# Name, upper and lower boundary (index in BOUNDARIES). The first is the total thickness.
LAYERS: Final = (
    ("retina", 0, 7),
    ("rnfl", 0, 1),
    ("gcl_ipl", 1, 2),
    ("inl", 2, 3),
    ("opl", 3, 4),
    ("onl_is", 4, 5),
    ("os", 5, 6),
    ("rpe", 6, 7),
)
CLASSES: Final = ("background", "intraretinal_fluid", "subretinal_fluid", "sub_rpe")
