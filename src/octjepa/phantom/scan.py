"""The pose of one scan on an eye: its position, tilt, motion and saccades, all drawn from the visit.

Two gentle ripples, of Bruch's membrane and of the choroid, belong to the eye but come from the draws of visit 0.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from octjepa.keys import generator
from octjepa.phantom.dialect import Dialect, Size
from octjepa.volume import Laterality


@dataclass(frozen=True)
class ScanGeometry:
    """The pose of a scan on the eye: x and z in mm from the fovea, in stored order, and the orientation of both."""

    x_mm: np.ndarray
    z_mm: np.ndarray
    nasal: float  # u grows with x (1) or against it (-1)
    upward: float  # v grows with z (1) or against it (-1)

    @property
    def shape(self) -> tuple[int, int]:
        """Slices and columns."""
        return len(self.z_mm), len(self.x_mm)


@dataclass(frozen=True)
class Ripple:
    """A smooth random map of about unit amplitude: a few long waves (angle, length in mm, phase)."""

    waves: tuple[tuple[float, float, float], ...]

    @classmethod
    def draw(cls, rng: np.random.Generator) -> Ripple:
        """Three waves of 1.5 to 4 mm."""
        return cls(tuple((rng.uniform(0, np.pi), rng.uniform(1.5, 4.0), rng.uniform(0, 2 * np.pi)) for _ in range(3)))

    def at(self, u: np.ndarray, v: np.ndarray) -> Float[np.ndarray, "D W"]:
        """The ripple at `u` and `v`, in mm, which broadcast."""
        out = np.zeros(np.broadcast_shapes(u.shape, v.shape), np.float32)
        for angle, wave, phase in self.waves:
            out += np.sin((np.cos(angle) * u + np.sin(angle) * v) * (2 * np.pi / wave) + phase) / np.sqrt(3)
        return out


@dataclass(frozen=True)
class ScanDraws:
    """The random values of a scan, and the two ripples, which belong to the eye."""

    offset_mm: np.ndarray
    saccade_mm: np.ndarray
    slopes: np.ndarray  # tangents, of columns and of slices
    motion_um: np.ndarray
    bruch_ripple: Ripple
    depth_share: float  # mean depth of Bruch's membrane in the window
    choroid_ripple: Ripple


def draw_scan(seed: int, person: int, laterality: Laterality, dialect: Dialect, slices: int, visit: int) -> ScanDraws:
    """The draws of a scan of `slices` B-scans. At visit 0 they are what they were before there were visits."""
    scan = generator("phantom", seed, "scan", person, laterality, *([visit] if visit else []))
    # The order of the fields is the order of the draws.
    return ScanDraws(
        offset_mm=scan.normal(0.0, 0.18, 2).clip(-0.45, 0.45),
        saccade_mm=_saccades(scan, slices) if dialect.axial_motion_um > 0 else np.zeros(slices, np.float32),
        slopes=np.tan(np.radians(scan.normal(0.0, (3.5, 1.2)).clip(-10, 10))),
        motion_um=_axial_motion(scan, slices, dialect.axial_motion_um),
        bruch_ripple=Ripple.draw(scan),
        depth_share=scan.normal(0.60, 0.04),
        choroid_ripple=Ripple.draw(scan),
    )


def scan_geometry(draws: ScanDraws, laterality: Laterality, dialect: Dialect, size: Size) -> ScanGeometry:
    """The geometry of the scan with these draws."""
    grid = dialect.grid(size)
    (slices, _, columns), (dz, _, dx) = grid.shape, grid.spacing_mm
    off_z, off_x = map(float, draws.offset_mm)
    return ScanGeometry(
        x_mm=np.arange(columns, dtype=np.float32) * dx - ((columns - 1) * dx / 2 + off_x),
        z_mm=np.arange(slices, dtype=np.float32) * dz - ((slices - 1) * dz / 2 + off_z),
        nasal=1.0 if laterality == "OD" else -1.0,
        upward=1.0 if dialect.first_frame == "inferior" else -1.0,
    )


def _axial_motion(scan: np.random.Generator, frames: int, step_um: float) -> np.ndarray:
    """Depth of each frame in um. `step_um` is the standard deviation from frame to frame; it drifts back to rest."""
    steps = scan.normal(0.0, 1.0, frames)
    path = np.zeros(frames, np.float32)
    for i in range(1, frames):
        path[i] = 0.7 * path[i - 1] + steps[i]
    spread = float(np.diff(path).std())
    return path * (step_um / spread) if step_um > 0 else np.zeros(frames, np.float32)


def _saccades(scan: np.random.Generator, frames: int) -> np.ndarray:
    """Sideways jumps in mm of a run of 1-3 frames, in about one scan of five."""
    jump = np.zeros(frames, np.float32)
    if scan.random() < 0.2:
        start, length = int(scan.integers(1, frames - 3)), int(scan.integers(1, 4))
        jump[start : start + length] = scan.normal(0.0, 0.12)
    return jump
