"""Decide which axis of an array is slice, depth and column: stated, decided by spacing and content, or refused; never
guessed.

If a file states its axes, that order is used. Otherwise the spacing allows some orders: those in which every axis has a
plausible spacing. If the format's own order is one of them and also gives the scan the extent of an OCT scan, and no
allowed order has depth where the content suggests it, the format's own order is used. If the spacing in the header
allows exactly one order with such an extent, and none when the spacing is read backwards, that order is used. The note
`axes_unlike_content` says that the content suggests another axis as depth. In all other cases spacing and content have
to agree, or the scan is refused.

Depth is the axis along which the mean intensity has a profile: dark vitreous, bright layers, fading choroid. Of the
other two, the slow axis has the coarser spacing, and its neighbours share less speckle. Vitreous is at the side where
tissue begins sharply.

Measured on three real scans and eight phantom eyes of four devices: intensity varies 2.9 to 19 times as much along
depth as along any other axis; speckle correlates by 0.22 to 0.75 more between A-scans than between B-scans; tissue
begins 2.0 to 4.5 times as sharply at the inner limiting membrane as at its other end.
`tests/read/formats/test_axes.py` turns these eyes every way.
"""

from __future__ import annotations

import re
from dataclasses import replace
from itertools import permutations

import numpy as np
from jaxtyping import Bool, UInt8

from octjepa.errors import VolumeRejected
from octjepa.read.formats.sequence import MIN_FRAMES
from octjepa.read.geometry import implausible_extents, is_plausible, stated_spacing_fault
from octjepa.read.raw_scan import AxisSpacing, FrameGeometry, RawScan, StoredAxes
from octjepa.reasons import rejection

_ROLES = {"D": "slice", "H": "depth", "W": "column"}
_NAMES = {
    "d": "D",
    "z": "D",
    "slice": "D",
    "slices": "D",
    "frame": "D",
    "frames": "D",
    "bscan": "D",
    "bscans": "D",
    "h": "H",
    "y": "H",
    "depth": "H",
    "row": "H",
    "rows": "H",
    "height": "H",
    "axial": "H",
    "w": "W",
    "x": "W",
    "column": "W",
    "columns": "W",
    "width": "W",
    "ascan": "W",
    "ascans": "W",
}
_PROFILE_RATIO = 2.0  # of depth's intensity profile to that of the runner-up
_SPACING_RATIO = 1.2  # of the slow axis' spacing to the other
_SPECKLE_DIFFERENCE = 0.1  # of correlations
_COUNT_RATIO = 2.0  # of the numbers of samples
_RISE_RATIO = 1.5  # of the rise at one end of the tissue to that at the other
_BLANK_STD = 1.0  # intensity by which an empty B-scan may vary
_SAMPLED = 16  # B-scans measured


def _has_content(pixels: np.ndarray, axis: int) -> Bool[np.ndarray, " N"]:
    """Along `axis`, False for blinks: slices that are as good as constant."""
    others: tuple[int, ...] = tuple({0, 1, 2} - {axis})
    deviation = pixels.std(axis=others)
    return np.asarray(deviation > max(_BLANK_STD, 0.1 * float(np.median(deviation))))


def _depth_by_content(pixels: UInt8[np.ndarray, "A B C"]) -> int | None:
    """The axis whose profile stands out; blank B-scans, which make a profile too, are left out.

    B-scans may be stacked along any axis: one counts where another axis then stands out.
    """
    small = pixels[tuple(slice(None, None, max(1, length // 128)) for length in pixels.shape)]
    candidates = set()
    for axis in range(3):
        content = _has_content(small, axis)
        if not content.all() and content.sum() >= len(content) / 2:
            candidates |= {_layered_axis(np.compress(content, small, axis=axis))} - {axis, None}
    if not candidates:
        return _layered_axis(small)
    return candidates.pop() if len(candidates) == 1 else None


def _layered_axis(small: UInt8[np.ndarray, "A B C"]) -> int | None:
    deviation = [float(small.mean(axis=tuple({0, 1, 2} - {axis})).std()) for axis in range(3)]
    runner_up, best = sorted(deviation)[1:]
    return deviation.index(best) if best > _PROFILE_RATIO * max(runner_up, 1e-3) else None


def _speckle_correlation(pixels: np.ndarray, along: int, depth: int) -> float:
    """Correlation between neighbours along an axis of what varies from voxel to voxel in depth: speckle and edges."""
    first = np.unique(np.linspace(0, pixels.shape[along] - 2, _SAMPLED).astype(int))
    one, other = (
        np.diff(np.take(pixels, index, axis=along).astype(np.float32), axis=depth).ravel()
        for index in (first, first + 1)
    )
    one, other = one - one.mean(), other - other.mean()
    return float(one @ other / (np.linalg.norm(one) * np.linalg.norm(other) + 1e-6))


def _slow_axis(pixels: np.ndarray, spacing_mm: AxisSpacing, depth: int, layouts: list[str]) -> int | None:
    """The slice axis of the two that are not `depth`; `layouts` are those that the spacing allows.

    Raises VolumeRejected axes_ambiguous where spacing and speckle disagree.
    """
    first, second = (axis for axis in range(3) if axis != depth)
    votes: set[int] = set()
    by_limits = {layout.index("D") for layout in layouts if layout.index("H") == depth}
    if len(by_limits) == 1:
        votes |= by_limits
    a, b = spacing_mm[first], spacing_mm[second]
    if layouts and a and b and max(a, b) > _SPACING_RATIO * min(a, b):
        votes.add(first if a > b else second)
    m, n = pixels.shape[first], pixels.shape[second]
    if min(m, n) >= 2:
        difference = _speckle_correlation(pixels, first, depth) - _speckle_correlation(pixels, second, depth)
        if abs(difference) > _SPECKLE_DIFFERENCE:
            votes.add(first if difference < 0 else second)
    if len(votes) > 1:
        raise _ambiguous("spacing and speckle name different axes as the slow one", pixels.shape)
    if not votes and max(m, n) >= _COUNT_RATIO * min(m, n):
        votes.add(first if m < n else second)
    return votes.pop() if votes else None


def _is_stated(spacing_mm: AxisSpacing) -> bool:
    """Whether a spacing is stated along any axis, be it 0."""
    return any(mm is not None for mm in spacing_mm)


def _layouts(shape: tuple[int, ...], axes: StoredAxes, spacing_mm: AxisSpacing) -> tuple[list[str], list[str]]:
    """(orders that the spacing allows; those among them that make a scan of plausible extent along every axis).

    `spacing_mm` is (slice, depth, column) and comes before that in `axes`.
    """
    by_role = dict(zip("DHW", spacing_mm, strict=True))
    orders, whole = [], []
    for word in map("".join, permutations("DHW")):
        stored = [by_role[role] for role in word] if _is_stated(spacing_mm) else axes.spacing_mm
        spacing_of = {role: mm for role, mm in zip(word, stored, strict=True) if mm is not None}
        lengths = (shape[word.index("D")], shape[word.index("H")], shape[word.index("W")])
        plausible = all(is_plausible(_ROLES[role], mm) for role, mm in spacing_of.items())
        if not plausible and _is_stated(spacing_mm) and len(spacing_of) == 3:
            plausible = not stated_spacing_fault((spacing_of["D"], spacing_of["H"], spacing_of["W"]), lengths)
        if not spacing_of or not plausible:
            continue
        orders.append(word)
        if len(spacing_of) == 3 and not implausible_extents(
            lengths, (spacing_of["D"], spacing_of["H"], spacing_of["W"])
        ):
            whole.append(word)
    return orders, whole


def _reads_backwards(shape: tuple[int, ...], axes: StoredAxes) -> bool:
    """Whether the spacing would make a scan in the reverse order as well: libraries differ in which axis is the
    first.
    """
    a, b, c = axes.spacing_mm
    return bool(_layouts(shape, StoredAxes(spacing_mm=(c, b, a)), (None, None, None))[1])


def _stored_layout(
    pixels: UInt8[np.ndarray, "A B C"], axes: StoredAxes, spacing_mm: AxisSpacing
) -> tuple[str, list[str]]:
    """(the stored axes as a word of D, H and W, notes). Raises VolumeRejected axes_ambiguous."""
    by_content = _depth_by_content(pixels)
    layouts, whole = _layouts(pixels.shape, axes, spacing_mm)
    convention, is_stated = axes.convention, _is_stated(spacing_mm)
    if is_stated:  # in no stored order: what is implausible may be the spacing, and then says nothing of the axes
        layouts = whole if convention in whole else []
    depths = {word.index("H") for word in layouts}
    settled = axes.stated
    if not settled and convention in whole and by_content not in depths:
        settled = convention
    elif not settled and not is_stated and len(whole) == 1 and not _reads_backwards(pixels.shape, axes):
        settled = whole[0]
    if settled:
        notes = ["axes_stated"] if axes.stated else ["depth_by_spacing"] if by_content is None else []
        unlike = by_content is not None and by_content != settled.index("H")
        return settled, [*notes, *(["axes_unlike_content"] if unlike else [])]
    if axes.known and convention:
        if by_content is not None and by_content != (expected := convention.index("H")):
            raise _ambiguous(f"axis {by_content + 1} looks like depth, expected axis {expected + 1}", pixels.shape)
        return convention, []
    if by_content is not None and depths and by_content not in depths:
        raise _ambiguous(f"axis {by_content + 1} looks like depth, but not by its spacing", pixels.shape)
    if by_content is None and len(depths) != 1:
        raise _ambiguous("no axis is layered like a retina, and the spacing does not tell depth", pixels.shape)
    notes = []
    if by_content is None:
        notes.append("depth_by_spacing")
    elif len(depths) != 1:
        notes.append("depth_by_content")
    depth = by_content if by_content is not None else depths.pop()
    slow = _slow_axis(pixels, axes.spacing_mm, depth, layouts)
    word = "" if slow is None else "".join("H" if at == depth else "D" if at == slow else "W" for at in range(3))
    if not word or (layouts and word not in layouts):
        if not convention or convention.index("H") != depth:
            raise _ambiguous("neither spacing, speckle nor counts tell B-scans from A-scans", pixels.shape)
        return convention, [*notes, "slow_axis_by_convention"]
    return word, notes


def _ambiguous(found: str, shape: tuple[int, ...]) -> VolumeRejected:
    """The refusal, with what was found, the sizes of the stored axes, and the way out."""
    sizes = " x ".join(map(str, shape))
    return rejection(
        "axes_ambiguous",
        f"{found}; the stored axes have {sizes} samples. State their order in a JSON file next to the scan, such as "
        '{"axes": "slice,depth,column"}, or give a spacing that only one order allows',
    )


def upside_down(pixels: UInt8[np.ndarray, "D H W"]) -> bool | None:
    """True where the sclera is on top, None where the ends of the tissue look alike."""
    from scipy.ndimage import uniform_filter1d

    depth, columns = pixels.shape[1:]
    content = np.flatnonzero(_has_content(pixels[:, ::4, ::4], 0))
    if not len(content):
        return None
    frames = pixels[content[np.unique(np.linspace(0, len(content) - 1, _SAMPLED).astype(int))]]
    image = frames.astype(np.float32)
    fill = frames >= 254  # registration fill is white; so are a few saturated pixels, which do not matter
    image[fill] = np.percentile(image[~fill], 10) if not fill.all() else 0
    across = max(3, columns // 32)
    image = uniform_filter1d(uniform_filter1d(image, across, axis=2)[:, :, ::across], max(3, depth // 60), axis=1)
    a_scans = np.moveaxis(image, 1, -1).reshape(-1, depth)  # [N, H]
    rises = []
    for along in (a_scans, a_scans[:, ::-1]):
        low, high = np.percentile(along, 10, axis=1), along.max(axis=1)
        begin = (along > (low + 0.4 * (high - low))[:, None]).argmax(axis=1)
        reach, each = max(2, depth // 40), np.arange(len(along))
        before, after = np.clip(begin - reach, 0, None), np.clip(begin + reach, None, depth - 1)
        rises.append(float(np.median((along[each, after] - along[each, before]) / np.maximum(high - low, 1))))
    top, bottom = rises
    if max(top, bottom) < _RISE_RATIO * max(min(top, bottom), 0.05):
        return None
    return bottom > top


def oriented(
    pixels: UInt8[np.ndarray, "A B C"],
    axes: StoredAxes,
    notes: list[str],
    spacing_mm: AxisSpacing = (None, None, None),
) -> tuple[UInt8[np.ndarray, "D H W"], AxisSpacing, tuple[str, ...]]:
    """(pixels in slice, depth, column order with the vitreous on top; spacing of `axes` in that order; the names of the
    axes on which it is uncertain); adds `notes`.

    The convention of `axes` decides what spacing and content leave open. If it is known to hold (a stack of B-scan
    images), content may be silent, but not contradict it, unless the spacing speaks for it. `spacing_mm` (slice, depth,
    column) is what was given next to the array, and comes before the spacing of `axes`.
    Raises VolumeRejected axes_ambiguous.
    """
    stored, layout_notes = _stored_layout(pixels, axes, spacing_mm)
    notes.extend(layout_notes)
    order = [stored.index(role) for role in "DHW"]
    if stored != "DHW":
        notes.append(f"axes_stored={stored}")
    pixels = pixels.transpose(order)  # [D, H, W]
    flipped = upside_down(pixels)
    if flipped is None:
        notes.append("depth_direction_unsure")
    elif flipped:
        notes.append("depth_flipped")
        pixels = pixels[:, ::-1]
    dz, dy, dx = (axes.spacing_mm[axis] for axis in order)
    uncertain = tuple(_ROLES[role] for role in "DHW" if stored.index(role) in axes.uncertain)
    return np.ascontiguousarray(pixels), (dz, dy, dx), uncertain


def with_axes(scan: RawScan, spacing_mm: AxisSpacing | None = None) -> RawScan:
    """`scan` in slice, depth, column order; `spacing_mm` is the user's, and comes before that of the scan.

    Raises VolumeRejected: too_few_frames, axes_ambiguous.
    """
    if scan.axes is None:
        return scan
    if min(scan.pixels.shape) < MIN_FRAMES:
        sizes = " x ".join(map(str, scan.pixels.shape))
        raise rejection("too_few_frames", f"an array of {sizes}; a volume needs {MIN_FRAMES} B-scans at least")
    notes = list(scan.notes)
    stated_beside = _is_stated(scan.spacing_mm)
    pixels, stored_mm, uncertain = oriented(scan.pixels, scan.axes, notes, spacing_mm or scan.spacing_mm)
    return replace(
        scan,
        pixels=pixels,
        frame_geometry=FrameGeometry.unknown(len(pixels)),
        notes=tuple(notes),
        spacing_mm=scan.spacing_mm if stated_beside else stored_mm,
        axes=None,
        uncertain=scan.uncertain if stated_beside else tuple(dict.fromkeys([*scan.uncertain, *uncertain])),
    )


def axes_word(text: str) -> str:
    """ "slice,depth,column", "D H W" or "DHW" -> "DHW"; "" for what names not all three."""
    names = [name for name in re.split(r"[^a-z]+", text.lower()) if name]
    letters = list(names[0]) if len(names) == 1 else names
    return word if sorted(word := "".join(_NAMES.get(name, "?") for name in letters)) == ["D", "H", "W"] else ""
