"""Do the B-scans of a volume belong together? Neighbours have to be more similar than any two of its B-scans.

Two measures of each B-scan need no alignment: the thickness of the retina along the columns, and the shadows of
vessels across them. In a raster of one eye the thickness changes slowly from line to line. If neighbours differ as
much as any two B-scans, the lines are of many eyes or their order is lost. If all B-scans have the same thickness and
the same shadows, they repeat one position. If shadows agree within groups and not between them, every position
was scanned several times.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from jaxtyping import Float

from octjepa.canonical.surfaces import Surfaces
from octjepa.reasons import rejection

_FEWEST = 6  # B-scans
_SMOOTH_MM = 0.1  # along the columns: finer thickness is noise of the search
_UNEVEN_MM = 0.5  # along the columns: what is narrower counts as uneven
_SHADOW_MM = (0.05, 0.5)  # widths between which shadows are seen
_SHADOW_DEPTH_MM = (-0.03, 0.08)  # below Bruch's membrane
_CLOSE_MM = 0.3  # lines further apart may differ as much as any two
_MANY, _SCRAMBLED = 12, 0.75  # so many lines of one eye have an order even then; disorder of lines that have none
_DISORDER = 0.55  # neighbours above it are noted as none; by chance a shuffle may leave less
_UNRELATED = 0.85  # of the difference of any two B-scans: neighbours that differ by more are none
_UNRELATED_UM = 12.0  # and by more than the search errs
_STEADY, _UNEVEN_UM = 2.4, 35.0  # times the unevenness within a B-scan, and its most: else the search has failed
_TORN = 0.06  # of the A-scans; B-scans of many eyes have up to 0.04
_ONE_POSITION_UM = 8.0  # between any two B-scans
_ONE_POSITION = 0.8  # of that difference: neighbours are no more alike than any two
_SAME_SHADOWS, _SAME_PIT = 0.35, 2.0  # correlation; unevenness over the difference: the same pit in all
_FIELD_MM = 1.0  # less may look like one position
UNLIKE_NOTE, RADIAL_NOTE = "neighbours_unlike", "radial_by_content"
_RADIAL_WIDTH_MM, _CENTRE_MM = 2.0, 0.15  # least width of the B-scans; of the columns about the centre
_STEADY_CENTRE = 0.85  # spread of the intensity at the centre over that at the ends
_HALF_TURN, _APART = 1.5, 1.2  # times the difference of neighbours: the mirrored first from the last; any two
_PROFILE_DEPTHS = 16
_REPEATS, _POSITIONS = range(2, 9), 4  # B-scans of a position, and positions at least
_REPEAT_STEP = 0.25  # correlation of shadows within a group less that between groups


@dataclass(frozen=True)
class Neighbours:
    """Differences of thickness in um: `near` of neighbours, `all` of any two B-scans (medians); `uneven` within one.

    `disorder` is 0 where neighbours are the most similar pairs, 1 if they are no more similar than any two: the mean
    rank of their difference among those of all pairs, which one odd B-scan hardly moves.

    `shadows_near`, `shadows_all`: median correlation of shadows. `repeats`: B-scans of each position, 1 where every
    line is its own.
    """

    near: float
    all: float
    uneven: float
    disorder: float
    shadows_near: float
    shadows_all: float
    repeats: int


def _shadows(image: Float[np.ndarray, "D R C"], surfaces: Surfaces, depth_mm: float, column_mm: float) -> np.ndarray:
    """[D, C] intensity about Bruch's membrane between two widths along the columns, of norm 1 in each B-scan."""
    from scipy.ndimage import gaussian_filter1d

    first, last = (round(mm / depth_mm) for mm in _SHADOW_DEPTH_MM)
    offsets = np.arange(first, max(last, first + 1), 2)
    at = np.rint(surfaces.bm).astype(np.int64)[:, None] + offsets[:, None]  # [D, n, C]
    profile = np.take_along_axis(image, np.clip(at, 0, image.shape[1] - 1), axis=1).mean(axis=1)
    fine, broad = (gaussian_filter1d(profile, mm / column_mm, axis=1) for mm in _SHADOW_MM)
    profile = fine - broad
    profile -= profile.mean(axis=1, keepdims=True)
    return np.asarray(profile / (np.linalg.norm(profile, axis=1, keepdims=True) + 1e-6))


def compare_neighbours(
    image: Float[np.ndarray, "D R C"], surfaces: Surfaces, depth_mm: float, column_mm: float
) -> Neighbours | None:
    """None if there are too few B-scans to tell."""
    count = len(image)
    if count < _FEWEST:
        return None
    from scipy.ndimage import gaussian_filter1d

    thickness = (surfaces.bm - surfaces.ilm)[:, ::2].astype(np.float32) * np.float32(depth_mm * 1000)
    thickness = gaussian_filter1d(thickness, 0.5 * _SMOOTH_MM / column_mm, axis=1, mode="nearest")
    broad = gaussian_filter1d(thickness, 0.5 * _UNEVEN_MM / column_mm, axis=1, mode="nearest")
    uneven = np.sqrt(((thickness - broad) ** 2).mean())
    thickness = thickness.astype(np.float64)
    squares = (thickness**2).mean(axis=1)
    products = thickness @ thickness.T / thickness.shape[1]
    difference = np.sqrt(np.maximum(squares[:, None] + squares - 2 * products, 0))
    shadows = _shadows(image, surfaces, depth_mm, column_mm)
    similarity = shadows @ shadows.T
    pairs = np.triu_indices(count, 1)
    rank = np.zeros((count, count))
    rank[pairs] = difference[pairs].argsort().argsort() / len(pairs[0])
    least = (count - 2) / len(pairs[0])  # twice the mean rank of the count - 1 most similar pairs
    disorder = (2 * float(np.diag(rank, 1).mean()) - least) / (1 - least)
    neighbours = np.diag(similarity, 1)
    return Neighbours(
        float(np.median(np.diag(difference, 1))),
        float(np.median(difference[pairs])),
        float(uneven),
        disorder,
        float(np.median(neighbours)),
        float(np.median(similarity[pairs])),
        _repeats(neighbours),
    )


def _repeats(neighbours: Float[np.ndarray, " n"]) -> int:
    """B-scans of each position, from the correlation of shadows of each B-scan with the next."""
    best, step = 1, _REPEAT_STEP
    for period in _REPEATS:
        last = np.arange(len(neighbours)) % period == period - 1
        if last.sum() < _POSITIONS:
            break
        within, between = neighbours[~last].mean(), neighbours[last].mean()
        if within > _SAME_SHADOWS and within - between > step:
            best, step = period, float(within - between)
    return best


def looks_radial(
    image: Float[np.ndarray, "D R C"], surfaces: Surfaces, torn_share: float, depth_mm: float, column_mm: float
) -> bool:
    """Whether all B-scans cross one centre, though the header says that they are parallel.

    Where the lines cross, every B-scan measures the same place, so the retina varies less there than at the ends. After
    half a turn the first line comes again, mirrored: the last B-scan then differs from the mirrored first one as little
    as from its own neighbour. In a raster these two are the farthest apart. Disease in the centre may hide
    a radial scan.
    """
    count, width = surfaces.bm.shape
    if count < _FEWEST or torn_share >= _TORN or width * column_mm < _RADIAL_WIDTH_MM:
        return False
    from scipy.ndimage import gaussian_filter1d

    step = max(1, round(_SMOOTH_MM / column_mm))
    columns = width // (2 * step) * 2 * step  # an even number of blocks: mirroring keeps them
    inside = slice((width - columns) // 2, (width - columns) // 2 + columns)

    def blocks(values: np.ndarray) -> np.ndarray:
        """[..., C] -> [..., c]"""
        part = values[..., inside]
        return np.asarray(part.reshape(*part.shape[:-1], -1, step).mean(axis=-1))

    def distance(first: np.ndarray, other: np.ndarray) -> float:
        return float(np.sqrt(((first - other) ** 2).mean()))

    thickness = blocks((surfaces.bm - surfaces.ilm) * (depth_mm * 1000))  # [D, c] um
    near = float(np.median([distance(first, other) for first, other in pairwise(thickness)]))
    if distance(thickness[-1], thickness[0, ::-1]) >= _HALF_TURN * near:
        return False
    share = (np.arange(_PROFILE_DEPTHS) + 0.5) / _PROFILE_DEPTHS  # from ILM to Bruch's membrane
    at = surfaces.ilm[:, None] + (surfaces.bm - surfaces.ilm)[:, None] * share[:, None]
    profiles = np.take_along_axis(image, np.clip(np.rint(at), 0, image.shape[1] - 1).astype(np.int64), axis=1)
    profiles = gaussian_filter1d(blocks(profiles), 1, axis=2)  # [D, 16, c]
    near = float(np.median([distance(first, other) for first, other in pairwise(profiles)]))
    subset = profiles[:: max(1, count // 12)]
    pairs = [distance(first, other) for index, first in enumerate(subset) for other in subset[index + 1 :]]
    half_turn = distance(profiles[-1], profiles[0, :, ::-1])
    if half_turn >= _HALF_TURN * near or float(np.median(pairs)) < _APART * near:
        return False
    spread = np.sqrt(((profiles - np.median(profiles, axis=0)) ** 2).mean(axis=(0, 1)))  # [c]
    centre, end = len(spread) // 2, len(spread) // 5
    reach = max(1, round(_CENTRE_MM / (step * column_mm)))
    at_ends = np.concatenate([spread[:end], spread[-end:]]).mean()
    return bool(spread[centre - reach : centre + reach].mean() < _STEADY_CENTRE * at_ends)


def check_neighbours(
    image: Float[np.ndarray, "D R C"],
    surfaces: Surfaces,
    positions_mm: Float[np.ndarray, " D"],
    torn_share: float,
    depth_mm: float,
    column_mm: float,
) -> list[str]:
    """Notes of a raster with B-scans at `positions_mm`: `repeats_per_position=3`, `neighbours_unlike`.

    torn_share: of the A-scans, where the search lost a surface; with many of them thickness tells nothing of eyes.

    Raises VolumeRejected: frames_unrelated, one_position.
    """
    differences = compare_neighbours(image, surfaces, depth_mm, column_mm)
    if differences is None:
        return []
    close = float(np.median(np.abs(np.diff(positions_mm)))) <= _CLOSE_MM
    wide = float(np.ptp(positions_mm)) >= _FIELD_MM
    steady = differences.shadows_all > _SAME_SHADOWS or differences.uneven > _SAME_PIT * differences.all
    if wide and steady and differences.all < _ONE_POSITION_UM and differences.near > _ONE_POSITION * differences.all:
        raise rejection(
            "one_position",
            f"{len(image)} B-scans of one thickness, to {differences.all:.1f} um (shadows of vessels correlate by "
            f"{differences.shadows_all:.2f})",
        )
    found_well = torn_share < _TORN and differences.uneven < _UNEVEN_UM
    # Lines that are far apart may be unlike, but so many of one eye are not in the order of chance.
    comparable = close or (len(image) >= _MANY and differences.disorder > _SCRAMBLED)
    unrelated = comparable and found_well and differences.near > _UNRELATED * differences.all
    if unrelated and differences.near > max(_UNRELATED_UM, _STEADY * differences.uneven):
        raise rejection(
            "frames_unrelated",
            f"neighbouring B-scans differ by {differences.near:.0f} um of retinal thickness, any two by "
            f"{differences.all:.0f} um",
        )
    radial = [RADIAL_NOTE] if looks_radial(image, surfaces, torn_share, depth_mm, column_mm) else []
    if (close or len(image) >= _MANY) and differences.near > _ONE_POSITION_UM and differences.disorder > _DISORDER:
        return [UNLIKE_NOTE, *radial]
    if radial:
        return radial
    return [f"repeats_per_position={differences.repeats}"] if differences.repeats > 1 else []
