"""Finds text, scale bars and frames that a viewer painted into the B-scans, from features that anatomy does not have.

Two signs. What is painted stays: a bright pixel that is the same in all B-scans, speckle and motion notwithstanding.
And glyphs have upright strokes: bright pixels whose neighbour two columns on is dark, over several rows, several such
strokes side by side that begin at one height. A retina is layered along the columns, so a vessel's shadow or a lesion's
rim has one or two at most; a bright sheet that slants, a fold or a detached hyaloid, has one in each column, but each
begins lower than the one before. Text can hold a name: it must not stay legible in a store.
"""

from __future__ import annotations

import numpy as np
from jaxtyping import Bool, UInt8
from numpy.lib.stride_tricks import sliding_window_view

_Mask = Bool[np.ndarray, "H W"]
_STILL_FRAMES = 8  # fewer B-scans than these can be bright at one place by chance
_STILL_BRIGHT = 140
_STILL_RANGE = 24  # intensity levels by which lossy compression moves a painted pixel
_STILL_STEP = 60  # intensity levels between ink and the pixel two columns on
_STILL_ENDS = 2  # places where it does, two rows high: those of a scale bar
_STILL_PIXELS = 12  # painted pixels, at least
_BRIGHT, _DARK = 200, 120  # ink (yellow text has intensity 226) and the pixels next to it
_RUN = 4  # rows of a stroke, at least: capitals of the smallest legible type
_EDGES = 10  # upright edges of one piece of text in one B-scan: five strokes
_ALIGNED, _ALIGNED_ROWS = 7, 3  # so many of them begin within so few rows; of a folded sheet at most 5
_PEAK = 2.0  # times as many as if they began anywhere in the text's height: edges of strong speckle do
_OFTEN = 0.2  # of the B-scans: text that is found there at one place is taken to be there in all
_AT_ONCE = 300_000  # pixels looked at in one go: what fits into a processor's cache
_THIN = 0.05  # share of its box that a piece of text inks, at least
_MARGIN = 3  # pixels around ink: the soft rim of a glyph


def find_text(pixels: UInt8[np.ndarray, "D H W"]) -> Bool[np.ndarray, "D H W"] | None:
    """Voxels of painted text with all between its glyphs, None if there is none."""
    still, lines = _still(pixels)
    mask = _strokes(pixels, lines)
    if mask is None and still is None:
        return None
    if mask is None:
        mask = np.zeros(pixels.shape, bool)
    mask |= mask.mean(axis=0) > _OFTEN
    if still is not None:
        mask |= still
    return mask


def _still(pixels: UInt8[np.ndarray, "D H W"]) -> tuple[_Mask | None, _Mask | None]:
    """(boxes, lines) of bright pixels that all B-scans show alike, where the mean B-scan ends abruptly next to them.

    The lines, those of a viewer's frame, are among the boxes; both None if nothing is still.
    """
    nothing = None, None
    if len(pixels) < _STILL_FRAMES or min(pixels.shape[1:]) < 3:
        return nothing
    low = pixels.min(axis=0)
    if np.count_nonzero(low >= _STILL_BRIGHT) < _STILL_PIXELS:
        return nothing
    ink = (low >= _STILL_BRIGHT) & (pixels.max(axis=0) - low <= _STILL_RANGE)
    if np.count_nonzero(ink) < _STILL_PIXELS:
        return nothing
    from scipy.ndimage import label

    # A layer of the retina can be as still and bright, but it continues along the columns.
    mean = pixels.mean(axis=0, dtype=np.float32)
    ends = np.zeros(ink.shape, bool)
    ends[:, :-2] = ink[:, :-2] & (mean[:, 2:] < low[:, :-2] - _STILL_STEP)
    ends[:, 2:] |= ink[:, 2:] & (mean[:, :-2] < low[:, 2:] - _STILL_STEP)
    ends[1:] &= ends[:-1].copy()
    ends[0] = False
    boxes, lines = _boxes(ink, (4, 8), (_MARGIN, _MARGIN))
    parts, count = label(boxes | lines)
    sizes, abrupt = (np.bincount(parts[which], minlength=count + 1) for which in (ink, ends))
    painted = (sizes >= _STILL_PIXELS) & (abrupt >= _STILL_ENDS)
    painted[0] = False
    return (np.asarray(painted[parts]), lines) if painted.any() else nothing


def _vertical_edges(pixels: UInt8[np.ndarray, "D H W"]) -> Bool[np.ndarray, "D H V"]:
    """Where a bright pixel and a dark one are two columns apart."""
    bright, dark = pixels >= _BRIGHT, pixels <= _DARK
    edges = bright[:, :, :-2] & dark[:, :, 2:]
    edges |= dark[:, :, :-2] & bright[:, :, 2:]
    return np.asarray(edges)


def _runs(edges: Bool[np.ndarray, "D H V"]) -> Bool[np.ndarray, "D R V"]:
    """Where `_RUN` = 4 rows from here on are an upright edge."""
    pairs = edges[:, :-1] & edges[:, 1:]
    return np.asarray(pairs[:, :-2] & pairs[:, 2:])


def _strokes(pixels: UInt8[np.ndarray, "D H W"], lines: _Mask | None) -> Bool[np.ndarray, "D H W"] | None:
    """B-scan by B-scan, the boxes around several strokes near each other; `lines` are not strokes."""
    depth, height, width = pixels.shape
    if height < _RUN or width < 3:
        return None
    mask = None
    step = max(1, _AT_ONCE // (height * width))
    for first in range(0, depth, step):
        block = pixels[first : first + step]
        bright = np.flatnonzero((block.max(axis=2) >= _BRIGHT).any(axis=0))
        if len(bright) < _RUN:
            continue
        rows = slice(int(bright[0]), int(bright[-1]) + 1)  # no edge is above or below
        if rows.stop - rows.start < _RUN:
            continue
        edges = _vertical_edges(block[:, rows])
        if lines is not None:
            edges &= ~lines[rows, 1:-1]
        for index in np.flatnonzero(np.count_nonzero(_runs(edges), axis=(1, 2)) >= _EDGES):
            whole = np.zeros((height, width - 2), bool)
            whole[rows] = edges[index]
            is_text = _lines_of_text(whole, _runs(whole[None])[0], (height, width))
            if is_text is not None:
                if mask is None:
                    mask = np.zeros(pixels.shape, bool)
                mask[first + index] = is_text
    return mask


def _lines_of_text(
    edges: Bool[np.ndarray, "H V"], runs: Bool[np.ndarray, "R V"], shape: tuple[int, int]
) -> Bool[np.ndarray, "H W"] | None:
    """Boxes around what has `_EDGES` strokes, with the glyphs next to them that have none, an S or an 8."""
    from scipy.ndimage import find_objects, label

    starts = runs.copy()
    starts[1:] &= ~runs[:-1]
    if starts.sum() < _EDGES:
        return None
    strokes, heads, ink = (np.zeros(shape, bool) for _ in range(3))
    for row in range(_RUN):
        strokes[row : row + len(runs), 1:-1] |= runs
    heads[: len(starts), 1:-1] = starts
    ink[:, 1:-1] = edges
    tall = min(64, int(strokes.sum(axis=0).max()))
    boxes, _ = _boxes(strokes, (2, tall + 4), (tall // 2, tall))
    while True:
        wider, _ = _boxes(ink & boxes, (2, tall + 4), (_MARGIN, tall))
        wider |= boxes
        if np.array_equal(wider, boxes):
            break
        boxes = wider
    parts, count = label(boxes)
    begins = np.zeros((count + 1, shape[0] + _ALIGNED_ROWS - 1), np.int64)  # of each part, edges by the row they begin
    rows, _ = np.nonzero(heads)
    np.add.at(begins, (parts[heads], rows), 1)
    aligned = sliding_window_view(begins, _ALIGNED_ROWS, axis=1).sum(axis=2).max(axis=1)
    height = np.array([1, *(rows.stop - rows.start for rows, _ in find_objects(parts))])
    begun = begins.sum(axis=1)
    is_line = (begun >= _EDGES) & (aligned >= np.maximum(_ALIGNED, _PEAK * _ALIGNED_ROWS * begun / height))
    is_line[0] = False
    return np.asarray(is_line[parts]) if is_line.any() else None


def _boxes(ink: _Mask, reach: tuple[int, int], margin: tuple[int, int]) -> tuple[_Mask, _Mask]:
    """Upright boxes, `margin` (rows, columns) wider, around the pieces of `ink` within `reach` of each other.

    A piece that inks little of its box, as a viewer's frame does, is not text: only its lines are masked, apart.
    """
    from scipy.ndimage import find_objects, label, maximum_filter

    near = maximum_filter(ink, size=(2 * reach[0] + 1, 2 * reach[1] + 1))
    parts, _ = label(near)
    boxes, lines = np.zeros(ink.shape, bool), np.zeros(ink.shape, bool)
    for number, box in enumerate(find_objects(parts), start=1):
        rows, columns = np.nonzero(ink[box] & (parts[box] == number))
        top, left = box[0].start, box[1].start
        if len(rows) < _THIN * np.ptp(rows) * np.ptp(columns):
            lines |= maximum_filter(ink & (parts == number), size=2 * _MARGIN + 1)
            continue
        boxes[
            max(0, top + rows.min() - margin[0]) : top + rows.max() + 1 + margin[0],
            max(0, left + columns.min() - margin[1]) : left + columns.max() + 1 + margin[1],
        ] = True
    return boxes, lines
