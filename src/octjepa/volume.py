"""One eye's OCT scan as it was measured: pixels, geometry with provenance, identity.

Axes are always `[D, H, W]` = slice (slow axis, between B-scans), depth (axial), column (fast axis), and
spacing is `(dz, dy, dx)` in millimetres in the same order. Readers in `octjepa.ingest` make these;
nothing downstream reads a source file again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from jaxtyping import Float, UInt8

Laterality = Literal["OD", "OS"]
Pattern = Literal["raster", "radial", "circle", "line", "unknown"]
AXES = ("slice", "depth", "column")


@dataclass(frozen=True, eq=False)
class OCTVolume:
    """A scan in its native geometry.

    `pixels` is 8-bit, `[D, H, W]`, bright tissue on dark vitreous, B-scans in spatial order, the axial axis
    pointing from vitreous to sclera. Deeper or signed sources are converted to 8 bit, with a code in `notes`.

    `provenance` names for each of "slice", "depth", "column" the source of that spacing ("option", "positions",
    "frame_location", "shared", "per_frame", "header", "sidecar", "manifest", "protocol", "scan_pattern"); `uncertain`
    names the axes whose spacing may be wrong. A spacing is never a default: a reader that cannot know it raises
    `VolumeRejected`.

    `visit` is a pseudonym of the session, equal within it; `labels` came in the same file; `personal` names (never
    quotes) the fields of personal data that the source holds.

    `content_hash` is the SHA-256 of the decoded pixels and their shape, so that one scan stored in two transfer
    syntaxes is one scan. `localizer` is the fundus picture (SLO, infrared) of the same file, for people to look at.
    """

    pixels: UInt8[np.ndarray, "D H W"]
    spacing_mm: tuple[float, float, float]
    provenance: dict[str, str]
    person_id: str
    device: str
    laterality: Laterality | None = None
    laterality_source: str = "unknown"
    pattern: Pattern = "raster"
    uncertain: tuple[str, ...] = ()
    slice_positions_mm: Float[np.ndarray, " D"] | None = None
    sop_instance_uid: str = ""
    protocol: str = ""
    region: str = ""
    visit: str = ""
    site: str = ""
    format: str = "dicom"
    labels: Mapping[str, float | str] = field(default_factory=dict)
    personal: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    source: str = ""
    content_hash: str = field(default="")
    localizer: UInt8[np.ndarray, "h w"] | None = None

    def __post_init__(self) -> None:
        if self.pixels.ndim != 3 or self.pixels.dtype != np.uint8:
            raise TypeError(f"pixels must be uint8 [D, H, W], got {self.pixels.dtype} {self.pixels.shape}")
        if not self.content_hash:
            object.__setattr__(self, "content_hash", hash_pixels(self.pixels))

    @property
    def shape(self) -> tuple[int, int, int]:
        """Slices, depth samples and columns."""
        slices, depth, columns = self.pixels.shape
        return slices, depth, columns


def hash_pixels(pixels: np.ndarray) -> str:
    """SHA-256 (hex) of shape, dtype and values."""
    digest = hashlib.sha256(f"{pixels.dtype.str}{pixels.shape}".encode())
    for one in pixels:  # a reversed scan is not copied as a whole
        digest.update(np.ascontiguousarray(one).data)
    return digest.hexdigest()
