"""A zoo of broken files: every defect that a reader must survive, as data.

A good eye and one of `DEFECTS` give files on disk and what must become of them: accepted with the true geometry,
refused with a reason, or ignored. `docs/zoo.md` has the table, which a test compares with these data. The first six
defects are those of `octjepa phantom --broken` (`octjepa.phantom.broken`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from octjepa.phantom import broken
from octjepa.phantom.broken import Defect, write_broken

from . import files, frames, geometry, headers

__all__ = ["DEFECTS", "Defect", "write_broken"]

_LEVELS: Final = {
    "file": files.DEFECTS,
    "frames": frames.DEFECTS,
    "header": headers.DEFECTS,
    "geometry": geometry.DEFECTS,
    "identity": headers.IDENTITY_DEFECTS,
    "pixels": frames.PIXEL_DEFECTS,
}
DEFECTS: Final[dict[str, Defect]] = broken.DEFECTS | {
    defect.name: replace(defect, level=level) for level, group in _LEVELS.items() for defect in group
}
