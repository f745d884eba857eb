"""Vendor dialects: how four instruments image and store the same eye, in geometry, optics, display and header.

Sizes and spacings of `full` are those of the AI-READI protocols; `small` covers the same central 6 mm with fewer,
coarser voxels, and `dense` is `small` with twice as many B-scans, about as near to each other as those of `full`.
Optics are looks averaged, speckle grain and signal above noise; display is the vendor's compression and 8-bit window.
Headers reproduce those of real files, faults included.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal, get_args

from octjepa.errors import UsageError
from octjepa.recipe import DEVICES

Size = Literal["small", "dense", "full"]


@dataclass(frozen=True)
class Grid:
    """Voxels `(D, H, W)`, spacing `(dz, dy, dx)` in mm, and speckle grain as binomial blur passes (axial, lateral).

    n passes of [1, 1]/2 give a binomial kernel; its field autocorrelation at lag k is C(2n, n+k) / C(2n, n), and that
    of the intensity its square (circular complex Gaussian field).
    """

    shape: tuple[int, int, int]
    spacing_mm: tuple[float, float, float]
    grain: tuple[int, int]


@dataclass(frozen=True)
class Dialect:
    """One vendor. `window` is (display value of the noise floor, display value of a signal 20 dB above it)."""

    device: str
    manufacturer: str
    model: str
    manifest_manufacturer: str
    manifest_model: str
    protocol: str
    small: Grid
    full: Grid
    looks: int
    compression: Literal["fourth_root", "log"]
    window: tuple[float, float]
    axial_resolution_um: float
    choroid_gain_db: float
    axial_motion_um: float
    frame_gain_cv: float
    blinks: bool
    first_frame: Literal["inferior", "superior"]
    codec: Literal["jpeg2000", "jpeg", "rle", "native"]
    region: str = "Macula"
    patient_id_prefix: str = ""
    has_positions: bool = True
    thickness_is_column_spacing: bool = False  # where SliceThickness should hold the pitch

    def grid(self, size: Size) -> Grid:
        """The voxels of scans of `size`. Raises UsageError: another size."""
        if size not in get_args(Size):
            raise UsageError(f"phantom size {size!r} is unknown: expected one of {', '.join(get_args(Size))}")
        if size == "dense":
            (slices, height, columns), (dz, dy, dx) = self.small.shape, self.small.spacing_mm
            dense_dz = dz * (slices - 1) / (2 * slices - 1)  # the same extent
            return Grid((2 * slices, height, columns), (dense_dz, dy, dx), self.small.grain)
        return self.small if size == "small" else self.full


_DEVICES = (
    Dialect(
        device="heidelberg_spectralis",
        manufacturer="Heidelberg Engineering",
        model="Spectralis",
        manifest_manufacturer="Heidelberg",
        manifest_model="Spectralis",
        protocol="spectralis ppol mac hr",
        small=Grid((24, 184, 160), (0.26, 0.0078, 0.0400), (2, 1)),
        full=Grid((61, 496, 768), (0.1285, 0.003872, 0.01206), (12, 16)),
        looks=6,
        compression="fourth_root",
        window=(3.0, 240.0),
        axial_resolution_um=7.0,
        choroid_gain_db=0.0,
        axial_motion_um=0.0,
        frame_gain_cv=0.02,
        blinks=False,
        first_frame="inferior",
        codec="jpeg2000",
    ),
    Dialect(
        device="topcon_maestro2",
        manufacturer="Topcon",
        model="3DOCT-1Maestro2",
        manifest_manufacturer="Topcon",
        manifest_model="Maestro2",
        protocol="maestro2 3d macula",
        small=Grid((28, 188, 168), (6 / 27, 0.0080, 6 / 167), (1, 1)),
        full=Grid((128, 885, 512), (6 / 127, 0.0026, 6 / 511), (14, 5)),
        looks=6,
        compression="log",
        window=(57.0, 134.0),
        axial_resolution_um=6.0,
        choroid_gain_db=-1.0,
        axial_motion_um=17.0,
        frame_gain_cv=0.05,
        blinks=True,
        first_frame="superior",
        codec="jpeg",
        patient_id_prefix="AIREADI-",
    ),
    Dialect(
        device="topcon_triton",
        manufacturer="Topcon",
        model="Triton",
        manifest_manufacturer="Topcon",
        manifest_model="Triton",
        protocol="triton macula 6x6",
        small=Grid((30, 192, 176), (6 / 29, 0.0080, 6 / 175), (2, 1)),
        full=Grid((320, 992, 320), (0.01875, 0.0026, 0.01875), (18, 3)),
        looks=3,
        compression="log",
        window=(42.0, 165.0),
        axial_resolution_um=8.0,
        choroid_gain_db=2.5,
        axial_motion_um=11.0,
        frame_gain_cv=0.06,
        blinks=True,
        first_frame="superior",
        codec="rle",
        region="Macula, 6 x 6",
        has_positions=False,
    ),
    Dialect(
        device="zeiss_cirrus",
        manufacturer="Carl Zeiss Meditec",
        model="CIRRUS HD-OCT 5000",
        manifest_manufacturer="Zeiss",
        manifest_model="Cirrus",
        protocol="cirrus mac",
        small=Grid((32, 200, 168), (6 / 31, 0.0078, 6 / 167), (1, 1)),
        full=Grid((128, 1024, 512), (6 / 127, 0.00195, 6 / 511), (12, 4)),
        looks=2,
        compression="log",
        window=(34.0, 196.0),
        axial_resolution_um=5.0,
        choroid_gain_db=-0.5,
        axial_motion_um=8.0,
        frame_gain_cv=0.04,
        blinks=True,
        first_frame="inferior",
        codec="native",
        thickness_is_column_spacing=True,
    ),
)
DIALECTS: Final = {dialect.device: dialect for dialect in _DEVICES}


def dialect_of(device: str) -> Dialect:
    """The dialect called `device`. Raises UsageError naming the known devices."""
    if device not in DIALECTS:
        raise UsageError(f"device {device!r} is unknown to the phantom: expected one of {', '.join(DEVICES)}")
    return DIALECTS[device]
