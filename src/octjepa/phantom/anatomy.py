"""The healthy eye as smooth surfaces over the scanned field: layer boundaries, foveal pit, vessels, tilt, curvature.

Everything is a map `[D, W]` over (slice, column); depths are micrometres below the top of the scan. Coordinates are
anatomical: `u` mm towards the nose, `v` mm upwards, both from the fovea, so that a left eye mirrors a right one.
Thicknesses are fitted to ILM-Bruch distances of macular OCT: 218 um in the fovea, about 370 at 1 mm, 284 temporally and
319 nasally at 2.6 mm.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
from jaxtyping import Float
from scipy.ndimage import gaussian_filter1d, map_coordinates

from octjepa.keys import generator
from octjepa.phantom.dialect import Dialect, Size
from octjepa.phantom.scan import ScanDraws, ScanGeometry, draw_scan, scan_geometry
from octjepa.volume import Laterality

SURFACES: Final = (
    "ilm",
    "rnfl_gcl",
    "gcl_ipl",
    "ipl_inl",
    "inl_opl",
    "opl_onl",
    "elm",
    "ez",
    "rpe",
    "bm",
    "choroid_sclera",
)
ILM, RNFL_GCL, GCL_IPL, IPL_INL, INL_OPL, OPL_ONL, ELM, EZ, RPE, BM, SCLERA = range(len(SURFACES))
BRUCH_RADIUS_MM: Final = 38.0
Map = Float[np.ndarray, "D W"]


@dataclass(frozen=True, eq=False)
class Anatomy:
    """A healthy eye as one scan images it. `surfaces_um` is `[11, D, W]`, in the order of `SURFACES`.

    `home` is the scan of visit 0. Random maps are drawn on it, so that the eye is the same at every visit.
    """

    surfaces_um: Float[np.ndarray, "K D W"]
    u_mm: Map
    v_mm: Map
    vessel: Map  # 0 none .. 1 middle of a large vessel
    fovea_mm: tuple[float, float]  # (slice, column) from the first frame's first column
    scan: ScanGeometry
    home: ScanGeometry

    def eye_map(
        self, rng: np.random.Generator, sigma: tuple[float, float], leading: tuple[int, ...] = ()
    ) -> np.ndarray:
        """`smooth_map` `[*leading, D, W]` of the eye: drawn on the scan of visit 0 and read where this scan is.

        `sigma` counts voxels of visit 0. A map that is not blurred from slice to slice is read at the nearest slice.
        """
        field = smooth_map(rng, (*leading, *self.home.shape), sigma)
        if self.scan is self.home:
            return field
        home = self.home
        rows = (home.upward * self.v_mm - home.z_mm[0]) / (home.z_mm[1] - home.z_mm[0])
        columns = (home.nasal * self.u_mm - home.x_mm[0]) / (home.x_mm[1] - home.x_mm[0])
        where = np.stack([rows if sigma[0] > 0 else np.rint(rows), columns])
        flat = field.reshape(-1, *home.shape)
        read = [map_coordinates(values, where, order=1, mode="nearest") for values in flat]
        return np.stack(read).reshape(*leading, *self.u_mm.shape)


def make_anatomy(
    seed: int,
    person: int,
    laterality: Laterality,
    dialect: Dialect,
    size: Size,
    visit: int = 0,
    home_dialect: Dialect | None = None,
) -> Anatomy:
    """Draws the person (shared by both eyes), then the eye, then the position of the scan on it.

    At a `visit` above 0 only the position, tilt, motion and saccades of the scan are new. What chance decided about
    the eye is as in the scan of visit 0 by `home_dialect` (default: the same instrument).
    """
    shared = generator("phantom", seed, "anatomy", person)
    person_rng = generator("phantom", seed, "anatomy", person, laterality)
    # A draw of a person's traits, with a third of the standard deviation left to the single eye.
    traits = shared.standard_normal(16) * 0.94 + person_rng.standard_normal(16) * 0.34
    grid = dialect.grid(size)
    (slices, depth, columns), (dz, dy, dx) = grid.shape, grid.spacing_mm
    draws = first = draw_scan(seed, person, laterality, dialect, slices, visit)
    scan = home = scan_geometry(draws, laterality, dialect, size)
    if visit:
        home_dialect = home_dialect or dialect
        first = draw_scan(seed, person, laterality, home_dialect, home_dialect.grid(size).shape[0], 0)
        home = scan_geometry(first, laterality, home_dialect, size)
    off_z, off_x = map(float, draws.offset_mm)
    fovea = ((slices - 1) * dz / 2 + off_z, (columns - 1) * dx / 2 + off_x)
    u = (scan.nasal * (scan.x_mm[None, :] + draws.saccade_mm[:, None])).astype(np.float32)
    v = np.broadcast_to((scan.upward * scan.z_mm)[:, None], u.shape).astype(np.float32)
    layers = layer_thicknesses_um(u, v, traits)
    # Bruch's membrane follows the scan's own axes of visit 0: where z ran downwards then, it still does.
    turned = scan.upward * home.upward * scan.z_mm
    ripple = first.bruch_ripple.at(scan.x_mm[None, :], turned[:, None])
    bruch = _bruch_depth(scan, layers.sum(axis=0).max(), 1000 * depth * dy, draws, ripple, traits)
    choroid = 250 * (1 + 0.22 * traits[8]) - 22 * u * (u > 0) - 6 * np.abs(u) + 14 * first.choroid_ripple.at(u, v)
    surfaces = np.empty((len(SURFACES), slices, columns), np.float32)
    surfaces[BM] = bruch
    surfaces[:BM] = bruch - np.cumsum(layers[::-1], axis=0)[::-1]
    surfaces[SCLERA] = bruch + np.maximum(choroid, 90)
    return Anatomy(surfaces, u, v, draw_vessels(u, v, traits, person_rng), fovea, scan, home)


def layer_thicknesses_um(u: Map, v: Map, traits: np.ndarray) -> Float[np.ndarray, "9 D W"]:
    """Thickness in um of RNFL, GCL, IPL, INL, OPL, ONL, ELM-EZ, EZ-RPE, RPE-Bruch."""
    r2 = u * u + v * v
    pit = 1 + 0.12 * float(np.clip(traits[0], -2, 2))

    def fill(radius_mm: float) -> Map:
        return 1 - np.exp(-r2 / (radius_mm * pit) ** 2)

    def hump(radius_mm: float) -> Map:
        return np.exp(-r2 / radius_mm**2)

    def scale(k: int) -> float:
        return float(1 + 0.06 * np.clip(traits[k], -2.2, 2.2))

    nasal = np.log1p(np.exp(2.2 * (u - 0.4))) / 2.2  # a smooth ramp towards the disc
    arcs = np.abs(v) ** 1.3 * np.exp(-(((u - 1.2) / 4.0) ** 2))
    rnfl = fill(0.75) * (14 + 14.5 * nasal + 6.5 * arcs) * scale(1)
    ganglion = fill(0.62) * (50 + 80 * hump(1.65)) * scale(2)
    inl = fill(0.55) * (30 + 13 * hump(1.4)) * scale(3)
    opl = fill(0.40) * (24 + 12 * hump(1.6)) * scale(4)
    onl = (80 + 45 * hump(1.3)) * scale(5)
    elm_ez = 24 + 6 * hump(0.35)
    ez_rpe = 32 + 8 * hump(0.35)
    rpe = np.full_like(u, 22.0)
    share = 0.52 - 0.03 * hump(1.2)
    return np.stack([rnfl, ganglion * share, ganglion * (1 - share), inl, opl, onl, elm_ez, ez_rpe, rpe])


def _bruch_depth(
    scan: ScanGeometry, retina_um: float, window_um: float, draws: ScanDraws, ripple: Map, traits: np.ndarray
) -> Map:
    """Depth of Bruch's membrane in um: a sphere of about 38 mm radius, tilted 0-10 degrees, in the scan's window."""
    x, z = scan.x_mm, scan.z_mm
    radius = BRUCH_RADIUS_MM * (1 + 0.08 * traits[9])
    bowl = -1000 * (x[None, :] ** 2 + z[:, None] ** 2) / (2 * radius)
    slope_x, slope_z = draws.slopes
    plane = 1000 * (slope_x * x[None, :] + slope_z * z[:, None])
    motion = draws.motion_um[:, None]
    # Operators keep the retina in the window: the tilt is reduced where the bowl and the retina leave no room.
    room = window_um - retina_um - np.ptp(bowl) - np.ptp(motion) - 220
    plane = plane * min(1.0, max(room, 0.0) / max(float(np.ptp(plane)), 1e-6))
    shape = (bowl + plane + motion + 3 * ripple).astype(np.float32)
    lowest, highest = window_um - 140 - shape.max(), retina_um + 70 - shape.min()
    return shape + float(
        np.clip(draws.depth_share * window_um - shape.mean(), min(lowest, highest), max(lowest, highest))
    )


def draw_vessels(u: Map, v: Map, traits: np.ndarray, generator: np.random.Generator) -> Map:
    """Large retinal vessels: two arcades from the disc (about 4.2 mm nasal) and their branches towards the fovea."""
    out = np.zeros_like(u)
    disc_u, disc_v = 4.2 + 0.2 * float(traits[10]), 0.4
    for side in (1.0, -1.0):
        for k in range(2):  # an artery and a vein
            reach = 2.75 + 0.3 * float(traits[11 + k]) + 0.35 * k
            run = np.maximum(disc_u - u, 0)
            arc = (
                disc_v * np.exp(-run)
                + side * reach * (1 - np.exp(-run / 1.5))
                - side * 0.035 * np.maximum(run - 4, 0) ** 2
            )
            arc = arc + 0.05 * np.sin(u * generator.uniform(3, 6) + generator.uniform(0, 6))
            _draw(out, v - arc, np.gradient(arc, axis=1) / _pitch(u), generator.uniform(0.10, 0.15))
            for _ in range(3):
                start = generator.uniform(-2.0, 3.0)
                fall = generator.uniform(0.6, 1.3)
                fan = np.maximum(start - u, 0)
                branch = (
                    arc - side * fall * fan**0.85 + 0.06 * np.sin(u * generator.uniform(4, 9) + generator.uniform(0, 6))
                )
                visible = (fan > 0) & (side * branch > 0.45)
                slope = np.gradient(branch, axis=1) / _pitch(u)
                _draw(out, np.where(visible, v - branch, 9.0), slope, generator.uniform(0.05, 0.09))
                rise = generator.uniform(-0.5, 0.5)
                stem = start - 0.3 + rise * (np.abs(v) - reach) + 0.05 * np.sin(v * generator.uniform(4, 8))
                outside = (side * v > 0.9) & (side * v < side * arc)
                _draw(out, np.where(outside, u - stem, 9.0), 0.0, generator.uniform(0.05, 0.09))
    return np.minimum(out, 1)


def _pitch(u: Map) -> float:
    """Signed mm between columns."""
    return float(abs(u[0, 1] - u[0, 0])) * (1 if u[0, 1] > u[0, 0] else -1)


def _draw(out: Map, offset_mm: Map, slope: Map | float, width_mm: float) -> None:
    """Adds a line of full width `width_mm` at zero `offset_mm`, measured square to its slope."""
    distance2 = offset_mm * offset_mm / (1 + np.square(slope))
    out += np.exp(-distance2 * (4 / width_mm**2)).astype(np.float32)


def smooth_map(rng: np.random.Generator, shape: tuple[int, ...], sigma: tuple[float, float]) -> np.ndarray:
    """Unit-variance Gaussian maps over the last two axes, blurred by `sigma` voxels (slow, fast)."""
    field = rng.standard_normal(shape, dtype=np.float32)
    for axis, width in zip((-2, -1), sigma, strict=True):
        if width > 0:
            field = gaussian_filter1d(field, width, axis=axis, mode="reflect", truncate=3)
    return field / max(float(field.std()), 1e-6)
