"""Registration fill: what a scanner or a registration program painted where it had no measurement.

White (255) or black (0) areas that grow from a B-scan's border are not tissue. They are set to the B-scan's own
vitreous level before any percentile or tissue search, and the volume gets a note. Registration shifts and turns a
B-scan, so that white fill always reaches its upper or lower border; a saturated pigment epithelium reaches the sides
alone. Lossy compression rings where fill ends: within its 8 x 8 blocks white falls to 180 at quality 60 of JPEG.
White of a deeper scan may be less than 255 here: it is then the largest value of the volume.

Black is fill where a noisy background lies next to it. Where tissue begins right below it, as in scans whose vitreous
was set to zero by a threshold or a mask, it is the vitreous, and nothing black in the volume is fill.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
from jaxtyping import Bool, Int, UInt8

_WHITE = 254
_NEARLY_WHITE = 235  # fill after lossy compression, away from its edge
_RINGING = 160  # fill after lossy compression, at its edge; the vitreous next to it stays below 140
_RINGING_REACH = 4  # pixels from the edge, at most: half a block of JPEG
_LOSSY = 0.05  # of the fill's outline in pixels: so many pixels of a fill that are not white show lossy compression
_MIN_SHARE = 0.002  # of a B-scan's pixels; less is not worth a mask
_BESIDE = 12  # pixels along depth that the level next to a fill is measured on
_FAINT = 4  # a background whose darkest twentieth is not brighter is truly dark
_MIN_RUN = 6  # pixels from the border: the end of a bright A-scan is shorter
_LEAST_WHITE = 100  # the largest value of a volume is not fill below
_TISSUE_BESIDE = 0.3  # from the darkest to the brightest twentieth of what is not black: a background stays below


def _leading_run(full: Bool[np.ndarray, "n m"]) -> Int[np.ndarray, " m"]:
    """How many entries of each column are True before the first False; where runs are short, little is read."""
    run = np.zeros(full.shape[1], np.int64)
    running, start, size = np.flatnonzero(full[0]), 0, 16
    while len(running) and start < len(full):
        ended = ~full[start : start + size].T[running]  # [columns, size], contiguous
        within = ended.argmax(axis=1)
        going_on = ~ended[np.arange(len(running)), within]
        run[running] += np.where(going_on, ended.shape[1], within)
        running, start, size = running[going_on], start + size, 2 * size
    return run


@dataclass(frozen=True)
class _BorderRuns:
    """Lengths of the straight runs of True pixels that begin at each border, 0 for those shorter than `_MIN_RUN`."""

    top: Int[np.ndarray, " W"]
    bottom: Int[np.ndarray, " W"]
    left: Int[np.ndarray, " H"]
    right: Int[np.ndarray, " H"]

    @classmethod
    def of(cls, full: Bool[np.ndarray, "H W"]) -> _BorderRuns:
        """The runs of `full`."""
        runs = [_leading_run(turned) for turned in (full, full[::-1], full.T, full.T[::-1])]
        for run in runs:
            run[run < _MIN_RUN] = 0
        return cls(*runs)

    def add_columns(self, mask: Bool[np.ndarray, "H W"]) -> None:
        """Marks the runs from the upper and the lower border."""
        for run, rows in ((self.top, mask), (self.bottom, mask[::-1])):
            columns = np.flatnonzero(run)
            if len(columns):  # fill is often in the corners only
                part, reach = slice(int(columns[0]), int(columns[-1]) + 1), int(run.max())
                rows[:reach, part] |= np.arange(reach, dtype=np.int32)[:, None] < run[part].astype(np.int32)

    def add_rows(
        self, mask: Bool[np.ndarray, "H W"], left: Bool[np.ndarray, " H"], right: Bool[np.ndarray, " H"]
    ) -> bool:
        """Marks the runs from the left and the right border in these rows; returns whether that changes the mask."""
        changed = False
        for run, chosen, columns in ((self.left, left, mask), (self.right, right, mask[:, ::-1])):
            rows = np.flatnonzero(chosen & (run > 0))
            if len(rows):
                lengths = np.where(chosen, run, 0)[rows[0] : rows[-1] + 1, None]
                part = columns[rows[0] : rows[-1] + 1, : int(lengths.max())]
                added = np.arange(part.shape[1]) < lengths
                changed = changed or bool((added & ~part).any())
                part |= added
        return changed

    def rows_that_reach(self) -> tuple[Bool[np.ndarray, " H"], Bool[np.ndarray, " H"]]:
        """Rows whose run from the (left, right) border is joined to the upper or the lower border.

        Runs in consecutive rows touch each other at the border that they begin at, so the rows of one side fall into
        groups. A group reaches the upper or lower border if one of its runs touches a run from there or is in the first
        or last row. A group that touches such a group of the other side does too.
        """
        left = _spread(self._touching(self.left, self.top, self.bottom), self.left)
        right = _spread(self._touching(self.right, self.top[::-1], self.bottom[::-1]), self.right)
        both, width = (self.left > 0) & (self.right > 0), len(self.top)
        level = both & (self.left + self.right >= width)  # in one row, next to each other
        fall = (self.left[:-1] > 0) & (self.left[:-1] + self.right[1:] > width)  # one above the other in two rows
        rise = (self.right[:-1] > 0) & (self.left[1:] + self.right[:-1] > width)
        while level.any() or fall.any() or rise.any():
            before = left.sum() + right.sum()
            left = left | (level & right)
            left[:-1] |= fall & right[1:]
            left[1:] |= rise & right[:-1]
            left = _spread(left, self.left)
            right = right | (level & left)
            right[1:] |= fall & left[:-1]
            right[:-1] |= rise & left[1:]
            right = _spread(right, self.right)
            if left.sum() + right.sum() == before:
                break
        return left, right

    @staticmethod
    def _touching(
        run: Int[np.ndarray, " H"], top: Int[np.ndarray, " W"], bottom: Int[np.ndarray, " W"]
    ) -> Bool[np.ndarray, " H"]:
        """Whether the run of each row, of the first columns, touches a run of a column or is in the first or last row.

        The deepest run of the first k columns decides, and for a pixel next to it that of k + 1 columns.
        """
        height, width = len(run), len(top)
        row = np.arange(height)
        deepest = [np.concatenate([[0], np.maximum.accumulate(of_column)]) for of_column in (top, bottom)]
        touching = (row == 0) | (row == height - 1)
        for deep, from_border in ((deepest[0], row), (deepest[1], height - 1 - row)):
            within, beside = deep[run], deep[np.minimum(run + 1, width)]
            touching |= (from_border < beside) | ((within > 0) & (from_border <= within))
        return touching & (run > 0)


def _spread(chosen: Bool[np.ndarray, " H"], run: Int[np.ndarray, " H"]) -> Bool[np.ndarray, " H"]:
    """`chosen` for whole groups of consecutive rows that have a run."""
    has_run = run > 0
    starts = has_run.copy()
    starts[1:] &= ~has_run[:-1]
    group = np.cumsum(starts)
    return np.asarray((np.bincount(group, weights=chosen & has_run) > 0)[group] & has_run)


def runs_from_border(full: Bool[np.ndarray, "H W"]) -> tuple[Bool[np.ndarray, "H W"], bool]:
    """(pixels of `full` that a straight run joins to a border; whether the upper and the lower one alone join them)."""
    runs, joined = _BorderRuns.of(full), np.zeros_like(full)
    runs.add_columns(joined)
    every = np.ones(len(full), bool)
    return joined, not runs.add_rows(joined, every, every)


def runs_from_top_and_bottom(full: Bool[np.ndarray, "H W"]) -> Bool[np.ndarray, "H W"]:
    """The connected parts of `runs_from_border` that reach the upper or the lower border."""
    runs, joined = _BorderRuns.of(full), np.zeros_like(full)
    runs.add_columns(joined)
    if runs.left.any() or runs.right.any():
        runs.add_rows(joined, *runs.rows_that_reach())
    return joined


def _white_fill(frame: UInt8[np.ndarray, "H W"], white: int) -> Bool[np.ndarray, "H W"]:
    """White fill with the pixel around it, whether the B-scan was compressed with loss or not.

    `white` is the largest value of the volume; if it is not nearly white, all fill has that very value.
    """
    if white < _NEARLY_WHITE:
        return _dilate(runs_from_top_and_bottom(frame == white))
    nearly = runs_from_top_and_bottom(frame >= _NEARLY_WHITE)
    outline = _dilate(nearly)
    not_white = int(np.count_nonzero(nearly & (frame < 255)))
    if not not_white:
        return outline  # runs of white pixels only: those of a higher limit are the same
    if not_white <= _LOSSY * np.count_nonzero(outline & ~nearly):
        return _dilate(runs_from_top_and_bottom(frame >= _WHITE))
    from scipy.ndimage import binary_dilation

    eight = np.ones((3, 3), bool)
    return _dilate(binary_dilation(nearly, eight, iterations=_RINGING_REACH, mask=frame >= _RINGING))


def _dilate(mask: Bool[np.ndarray, "H W"]) -> Bool[np.ndarray, "H W"]:
    """The mask one pixel wider: interpolation blurs the edge of a fill."""
    grown = mask.copy()
    grown[1:] |= mask[:-1]
    grown[:-1] |= mask[1:]
    grown[:, 1:] |= grown[:, :-1].copy()
    grown[:, :-1] |= grown[:, 1:].copy()
    return grown


def intensity_beside_mask(frame: UInt8[np.ndarray, "H W"], mask: Bool[np.ndarray, "H W"]) -> np.uint8:
    """Median intensity above or below a painted area, whichever is darker, so that its edge disappears."""
    depths = np.flatnonzero(mask.any(axis=1))
    near = slice(max(0, int(depths[0]) - _BESIDE), int(depths[-1]) + 1 + _BESIDE) if len(depths) else slice(0)
    levels = []
    for flip in (False, True):
        pixels, filled = (np.flip(frame[near], 0), np.flip(mask[near], 0)) if flip else (frame[near], mask[near])
        beside = filled.copy()  # with up to _BESIDE pixels below: each step adds a shift of all before it
        for step in (1, 2, 4, _BESIDE - 7):
            beside[step:] |= beside[:-step].copy()
        beside &= ~filled
        if np.count_nonzero(beside) >= _BESIDE:
            levels.append(_median_of_counts(np.bincount(pixels[beside], minlength=256)))
    return np.uint8(min(levels) if levels else np.percentile(frame[~mask], 25))


def _touches_border(pixels: UInt8[np.ndarray, "D H W"], least: int) -> Bool[np.ndarray, " D"]:
    """True where the upper or lower border of a B-scan is white, `least` or more, over a fiftieth of its length.

    Or, for `least` 0, any border is black over so much.
    """
    borders = [pixels[:, 0], pixels[:, -1], *([] if least else [pixels[:, :, 0], pixels[:, :, -1]])]
    full = [((edge >= least) if least else (edge == 0)).mean(axis=1) > 0.02 for edge in borders]
    return np.logical_or.reduce(full)


def percentile_of_counts(counts: Int[np.ndarray, "256"], percent: float) -> float:
    """`np.percentile` of values of which counts[v] are v: sorting a B-scan's pixels takes a hundred times as long."""
    ends = np.cumsum(counts)
    at = (int(ends[-1]) - 1) * (percent / 100)
    share = at - int(at)
    low, high = (int(np.searchsorted(ends, min(rank, int(ends[-1]) - 1), "right")) for rank in (int(at), int(at) + 1))
    # Rounded as NumPy does it: from the nearer of the two values.
    return high - (high - low) * (1 - share) if share >= 0.5 else low + (high - low) * share


def _median_of_counts(counts: Int[np.ndarray, "256"]) -> float:
    """`np.median` of values by their counts."""
    ends = np.cumsum(counts)
    size = int(ends[-1])
    low, high = np.searchsorted(ends, [(size - 1) // 2, size // 2], "right").tolist()
    return (low + high) / 2


def intensity_counts(frame: UInt8[np.ndarray, "H W"]) -> Int[np.ndarray, "256"]:
    """How many pixels have each intensity. Pillow counts four times as fast as NumPy, which widens each to 64 bit."""
    from PIL import Image

    return np.array(Image.fromarray(frame).histogram(), np.int64)


def _is_vitreous(
    frame: UInt8[np.ndarray, "H W"], black: Bool[np.ndarray, "H W"], rest: Int[np.ndarray, "256"]
) -> bool | None:
    """Whether tissue begins right below what is black at the upper border; None if nothing is black there.

    `rest` counts the intensities of all that is neither black nor white fill.
    """
    columns = np.flatnonzero(black[0] & ~black.all(axis=0))
    if len(columns) <= 0.02 * frame.shape[1]:
        return None
    depth_index = _leading_run(black[:, columns]) + np.arange(_BESIDE)[:, None]
    beside = frame[np.minimum(depth_index, len(frame) - 1), columns].mean(axis=0)
    dark, bright = (percentile_of_counts(rest, percent) for percent in (5, 95))
    return bool(np.median(beside) - dark > _TISSUE_BESIDE * max(bright - dark, 1.0))


def _dark_throughout(frame: UInt8[np.ndarray, "H W"], black: int) -> bool:
    """Whether so much of a B-scan is nearly black that, whatever share of its zeros is fill, the rest is dark too.

    `black` is the number of its zeros.
    """
    faint = int(np.count_nonzero(frame <= _FAINT)) - black
    return faint > 0.05 * (frame.size - black) + 1


def _black_fill(pixels: UInt8[np.ndarray, "D H W"], whites: Mapping[int, np.ndarray]) -> dict[int, np.ndarray]:
    """B-scan -> mask [H, W] of its black fill; `whites` are those of its white fill."""
    masks: dict[int, np.ndarray] = {}
    votes: list[bool] = []
    touching = np.flatnonzero(_touches_border(pixels, least=0)).tolist()
    for index in touching:
        frame = pixels[index]
        black = frame == 0
        if index not in whites and _dark_throughout(frame, int(np.count_nonzero(black))):
            continue
        zeros, _ = runs_from_border(black)
        if not zeros.any():
            continue
        # A clean scanner's vitreous is truly zero here and there: black is fill only against a noisy background.
        rest = intensity_counts(frame)
        if index in whites:
            rest -= np.bincount(frame[zeros | whites[index]], minlength=len(rest))
        else:
            rest[0] -= np.count_nonzero(zeros)
        if rest.any() and percentile_of_counts(rest, 5) > _FAINT:
            masks[index] = zeros
            vote = _is_vitreous(frame, zeros, rest)
            votes += [] if vote is None else [vote]
            if sum(votes) > len(touching) / 2:
                return {}  # those still to come cannot outvote these
    return {} if votes and sum(votes) > len(votes) / 2 else masks


def remove_fill(pixels: UInt8[np.ndarray, "D H W"]) -> tuple[UInt8[np.ndarray, "D H W"], float]:
    """(pixels without fill, share of voxels that were fill). The input itself is returned if there is none."""
    cleaned = pixels
    filled = 0
    largest = int(pixels.max())
    least = min(largest, _NEARLY_WHITE)
    with_white = np.flatnonzero(_touches_border(pixels, least)).tolist() if least >= _LEAST_WHITE else []
    masks = {index: _white_fill(pixels[index], largest) for index in with_white}
    for index, black in _black_fill(pixels, masks).items():
        masks[index] = masks[index] | black if index in masks else black
    for index, mask in sorted(masks.items()):
        share = np.count_nonzero(mask) / mask.size
        if not _MIN_SHARE < share < 0.9:
            continue
        if cleaned is pixels:
            cleaned = pixels.copy()
        np.copyto(cleaned[index], intensity_beside_mask(pixels[index], mask), where=mask)
        filled += int(np.count_nonzero(mask))
    return cleaned, filled / pixels.size
