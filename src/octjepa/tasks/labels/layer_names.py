"""Names of layers, boundaries and lesions in label files, and what each of them is for the segmentation network.

Names are compared without case, spaces and punctuation. A line of HEYEX is named after the layer above it (`IPL` is the
lower edge of the inner plexiform layer), except `RPE`, which is its upper edge.
"""

from __future__ import annotations

import re
from typing import Final

from octjepa.layers import BOUNDARIES, CLASSES, LAYERS

BACKGROUND: Final = ("background", "other", "none")
NOT_LABELLED: Final = ("unlabelled", "unlabeled", "ignore", "ungraded")
ANY_CLASS: Final = 15  # the set of all four classes: nothing is known
FLUID: Final = 0b0110  # intraretinal or subretinal
SUB_RPE: Final = 0b1000
# One colour a class of any name, in turn; distinct also for the colour-blind (Okabe and Ito 2008).
CLASS_COLOURS: Final = (
    (86, 180, 233),
    (230, 159, 0),
    (0, 158, 115),
    (204, 121, 167),
    (240, 228, 66),
    (213, 94, 0),
    (0, 114, 178),
)

_BOUNDARY_NAMES: Final = (
    ("ilm", "innerlimitingmembrane", "vitreousretina"),
    ("rnfl", "nfl", "nflgcl", "rnflgcl"),
    ("ipl", "iplinl"),
    ("inl", "inlopl"),
    ("opl", "oplonl", "oplhfl"),
    ("ez", "isos", "ismise", "ismez", "myoidez", "pr1", "ellipsoidzone"),
    ("rpe", "osrpe", "izrpe", "irpe", "upperrpe", "rpetop"),
    ("bm", "bruch", "bruchsmembrane", "bruchmembrane", "brm", "rpebm", "rpechoroid", "obrpe"),
)
_LAYER_NAMES: Final[dict[str, tuple[int | None, int | None]]] = {
    **{name.replace("_", ""): (upper, lower) for name, upper, lower in LAYERS},
    "nfl": (0, 1),
    "gcl": (1, None),
    "gcipl": (1, 2),
    "ipl": (None, 2),
    "onl": (4, None),
    "choroid": (7, None),
}
_CLASS_NAMES: Final = {
    FLUID: ("fluid", "retinalfluid", "oedema", "edema"),
    0b0010: ("intraretinalfluid", "irf", "cyst", "cysts", "irc", "intraretinalcyst"),
    0b0100: ("subretinalfluid", "srf"),
    SUB_RPE: ("subrpe", "ped", "drusen", "druse", "pigmentepithelialdetachment", "rpedetachment"),
}
KNOWN_NAMES: Final = (
    "boundaries ilm, rnfl, ipl, inl, opl, ez, rpe, bm; layers rnfl, gcl_ipl, inl, opl, onl_is, os, rpe; "
    f"classes fluid, {', '.join(CLASSES[1:])}, srf, irf, ped, drusen"
)


def plain_name(name: str) -> str:
    """A name without case, spaces and punctuation."""
    return re.sub(r"[^a-z0-9]", "", name.casefold())


def boundary_index(name: str) -> int | None:
    """The place in `BOUNDARIES` of a boundary or line of that name; None for an unknown one."""
    plain = plain_name(name)
    for index, (boundary, names) in enumerate(zip(BOUNDARIES, _BOUNDARY_NAMES, strict=True)):
        if plain in names or plain == plain_name(boundary):
            return index
    return None


def layer_edges(name: str) -> tuple[int | None, int | None]:
    """The boundaries at the upper and lower edge of a layer of that name; None for another edge."""
    return _LAYER_NAMES.get(plain_name(name), (None, None))


def class_set(name: str) -> int:
    """The classes that a voxel of that name may have, bit k for class k; 0 for a name that is none of them."""
    plain = plain_name(name)
    return next((members for members, names in _CLASS_NAMES.items() if plain in names), 0)
