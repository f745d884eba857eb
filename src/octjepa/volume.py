"""The two forms of a scan: an `OCTVolume` as it was measured, and a `CanonicalVolume` as models see it.

Axes are always `[D, H, W]` = slice (slow axis, between B-scans), depth (axial), column (fast axis), and
spacing is `(dz, dy, dx)` in millimetres in the same order. Readers in `octjepa.read` return an `OCTVolume`,
`octjepa.canonical` turns it into a `CanonicalVolume`, and nothing downstream reads a source file again.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
from jaxtyping import Float, Int8, Int16, UInt8

from octjepa.notes import Note

Laterality = Literal["OD", "OS"]
Pattern = Literal["raster", "radial", "circle", "line", "unknown"]
AXES = ("slice", "depth", "column")
CANONICAL_VERSION = 3  # counts up whenever the same file gives other pixels, band or measurements


@dataclass(frozen=True, eq=False)
class OCTVolume:
    """A scan in its native geometry.

    `pixels` is 8-bit, `[D, H, W]`, bright tissue on dark vitreous, B-scans in spatial order, the axial axis
    pointing from vitreous to sclera. Deeper or signed sources are converted to 8 bit, with a code in `notes`.

    `provenance` names for each of "slice", "depth", "column" the source of that spacing ("option", "positions",
    "frame_location", "shared", "per_frame", "header", "sidecar", "manifest", "protocol", "scan_pattern"); `uncertain`
    names the axes whose spacing may be wrong. A spacing is never a default: a reader that cannot know it raises
    `VolumeRejected`.

    `visit` is a pseudonym of the session, equal within it. `labels` came in the same file. `personal` names (never
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
    notes: tuple[Note, ...] = ()
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
    for bscan in pixels:  # a reversed scan is not copied as a whole
        digest.update(np.ascontiguousarray(bscan).data)
    return digest.hexdigest()


def volume_id(content_hash: str) -> str:
    """The id of a volume: the first 16 hex digits of its content hash."""
    return content_hash[:16]


@dataclass(frozen=True, eq=False)
class CanonicalVolume:
    """A stored volume. D, H, W are the contract's `stored_size`.

    `band` is (first depth index of tissue at the ILM, last one of the tissue band under Bruch's membrane), -1 in
    padding. `tissue_mean` and `tissue_std` are of the pixels within the band. Canonical depth index i of an A-scan was
    i - `shifts` before flattening, counted in canonical spacing from the top of the native B-scan, as a mean over the
    B-scans that were averaged. `frame_shifts` is the same for each of the N native B-scans, and `frame_mm` its position
    from the scan's centre: `Store.native_map` needs both, `Store.read` leaves them out.

    `half_difference` is half of the difference between the volume from every other B-scan and that from the B-scans
    between them, in stored values; None where a store does not hold it or B-scans are too far apart. `bscan_slices`: it
    is a single B-scan, which fills so many slices; 0 for a volume.
    """

    volume_id: str
    pixels: UInt8[np.ndarray, "D H W"]
    band: Int16[np.ndarray, "2 D W"]
    tissue_mean: float
    tissue_std: float
    shifts: Int16[np.ndarray, "D W"]
    frame_shifts: Int16[np.ndarray, "N W"] | None = None
    frame_mm: Float[np.ndarray, " N"] | None = None
    half_difference: Int8[np.ndarray, "D H W"] | None = None
    bscan_slices: int = 0

    @property
    def halves(self) -> tuple[UInt8[np.ndarray, "D H W"], UInt8[np.ndarray, "D H W"]] | None:
        """The volume from every other B-scan, and from those between: one anatomy, independent speckle."""
        if self.half_difference is None:
            return None
        mean, difference = self.pixels.astype(np.int16), self.half_difference.astype(np.int16)
        first, second = (np.clip(mean + sign * difference, 0, 255).astype(np.uint8) for sign in (1, -1))
        return first, second

    def geometry(self) -> dict[str, np.ndarray]:
        """The arrays of geometry.npz by name."""
        arrays = {
            "band": self.band,
            "shifts": self.shifts,
            "frame_shifts": self.frame_shifts,
            "frame_mm": self.frame_mm,
            "half_difference": self.half_difference,
        }
        return {name: array for name, array in arrays.items() if array is not None}
