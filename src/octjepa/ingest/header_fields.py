"""What a format's reader hands on: grey pixels in stored order, and everything the source says, nothing decided yet.

A reader knows its format and no more. Which spacing, order, eye and person are believed is decided in one place for
all formats, `octjepa.ingest.assemble`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np
from jaxtyping import UInt8

from octjepa.ingest.frames import FrameFacts
from octjepa.volume import Pattern

Pair = tuple[float, float]
Triple = tuple[float | None, float | None, float | None]


@dataclass(frozen=True)
class Said:
    """What a source says of whose eye it is and how it was scanned, word by word; "" where it is silent.

    `person_name` and `birth_date` serve only to see whether another text repeats them; they are kept nowhere.
    `visit` names the session (a study UID, a date); only its hash goes further.
    """

    person_id: str = ""
    person_name: str = ""
    birth_date: str = ""
    laterality: str = ""
    frame_laterality: str = ""
    manufacturer: str = ""
    model: str = ""
    protocol: str = ""
    region: str = ""
    site: str = ""
    visit: str = ""
    uid: str = ""
    burned_in: bool = False


@dataclass(frozen=True, eq=False)
class RawScan:
    """One scan as its file holds it. Axis 0 are the frames as stored, rows run from vitreous to sclera.

    `pair_mm` (depth, column) and `thickness_mm` are those of DICOM's shared Pixel Measures; `spacing_mm` (slice, depth,
    column) is what another format's header says, None per axis where it is silent; `spacing_from` is "sidecar" where
    the JSON beside the scan says it. `pattern` is given where the format
    names it. `uncertain` are the axes whose spacing the format can only estimate. `labels` came with the scan (a
    diagnosis in the same archive). `personal` names, never quotes, the fields of personal data that the source holds.
    """

    format: str
    pixels: UInt8[np.ndarray, "F H W"]
    facts: FrameFacts
    said: Said = Said()
    pair_mm: Pair | None = None
    thickness_mm: float | None = None
    spacing_mm: Triple = (None, None, None)
    spacing_from: str = "header"
    pattern: Pattern | None = None
    uncertain: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    labels: Mapping[str, float | str] = field(default_factory=dict)
    personal: tuple[str, ...] = ()
