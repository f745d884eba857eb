"""Registration fill: what a scanner or a registration program painted where it had no measurement.

White (255) or black (0) areas that grow from a B-scan's border are not tissue. They are set to the B-scan's own
vitreous level before any percentile or tissue search, and the volume gets a note. Registration shifts and turns a
B-scan, so that white fill always reaches its upper or lower border; a saturated pigment epithelium reaches the sides
alone. Lossy compression rings where fill ends: within its 8 x 8 blocks white falls to 180 at quality 60 of JPEG.
White of a deeper scan may be less than 255 here: it is then the largest value of the volume.

Black is fill where a noisy background lies beside it. Where tissue begins right below it, as in scans whose vitreous
was set to zero by a threshold or a mask, it is the vitreous, and nothing black in the volume is fill.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from jaxtyping import Bool, UInt8

_WHITE = 254
_NEARLY_WHITE = 235  # fill after lossy compression, away from its edge
_RINGING = 160  # fill after lossy compression, at its edge; the vitreous beside it stays below 140
_RINGING_REACH = 4  # pixels from the edge, at most: half a block of JPEG
_LOSSY = 0.05  # of the fill's outline in pixels: so many pixels of a fill that are not white show lossy compression
_MIN_SHARE = 0.002  # of a B-scan's pixels; less is not worth a mask
_BESIDE = 12  # pixels along depth that the level next to a fill is measured on
_FAINT = 4  # a background whose darkest twentieth is no brighter is truly dark
_MIN_RUN = 6  # pixels from the border: the end of a bright A-scan is shorter
_LEAST_WHITE = 100  # the largest value of a volume is no fill below
_TISSUE_BESIDE = 0.3  # from the darkest to the brightest twentieth of what is not black: a background stays below


def _runs_from_border(full: Bool[np.ndarray, "H W"]) -> Bool[np.ndarray, "H W"]:
    """Pixels of `full` that a straight run of `full` pixels joins to a border."""
    joined = np.zeros_like(full)
    for axis_first, into in ((full, joined), (full.T, joined.T)):
        length = len(axis_first)
        position = np.arange(length)[:, None]
        for flip in (False, True):
            run = (~(axis_first[::-1] if flip else axis_first)).argmax(axis=0)
            run[axis_first.all(axis=0)] = length
            run[run < _MIN_RUN] = 0
            into |= (position >= length - run) if flip else (position < run)
    return joined


def _keep_top_and_bottom(mask: Bool[np.ndarray, "H W"]) -> Bool[np.ndarray, "H W"]:
    """The connected parts of `mask` that reach the upper or the lower border."""
    if not mask.any():
        return mask
    from scipy.ndimage import label

    parts, count = label(mask)
    reaching = np.zeros(count + 1, bool)
    reaching[parts[[0, -1]]] = True
    reaching[0] = False
    return np.asarray(reaching[parts])


def _white_fill(frame: UInt8[np.ndarray, "H W"], white: int) -> Bool[np.ndarray, "H W"]:
    """White fill with the pixel around it, whether the B-scan was compressed with loss or not.

    `white` is the largest value of the volume; where it is not nearly white, all fill has that very value.
    """
    if white < _NEARLY_WHITE:
        return _dilate(_keep_top_and_bottom(_runs_from_border(frame == white)))
    nearly = _keep_top_and_bottom(_runs_from_border(frame >= _NEARLY_WHITE))
    outline = _dilate(nearly)
    not_white = int(np.count_nonzero(nearly & (frame < 255)))
    if not_white <= _LOSSY * np.count_nonzero(outline & ~nearly):
        return _dilate(_keep_top_and_bottom(_runs_from_border(frame >= _WHITE)))
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
    levels = []
    for flip in (False, True):
        pixels, filled = (np.flip(frame, 0), np.flip(mask, 0)) if flip else (frame, mask)
        beside = np.zeros_like(filled)
        for distance in range(_BESIDE, 0, -1):
            beside[distance:] |= filled[:-distance]
        beside &= ~filled
        if beside.sum() >= _BESIDE:
            levels.append(np.median(pixels[beside]))
    return np.uint8(min(levels, default=np.percentile(frame[~mask], 25)))


def _touches_border(pixels: UInt8[np.ndarray, "D H W"], least: int) -> Bool[np.ndarray, " D"]:
    """True where the upper or lower border of a B-scan is white, `least` or more, over a fiftieth of its length.

    Or, for `least` 0, any border is black over so much.
    """
    borders = [pixels[:, 0], pixels[:, -1], *([] if least else [pixels[:, :, 0], pixels[:, :, -1]])]
    full = [((edge >= least) if least else (edge == 0)).mean(axis=1) > 0.02 for edge in borders]
    return np.logical_or.reduce(full)


def _is_vitreous(frame: UInt8[np.ndarray, "H W"], black: Bool[np.ndarray, "H W"], rest: np.ndarray) -> bool | None:
    """Whether tissue begins right below what is black at the upper border; None where nothing is black there.

    `rest` are the intensities of all that is neither black nor white fill.
    """
    columns = np.flatnonzero(black[0] & ~black.all(axis=0))
    if len(columns) <= 0.02 * frame.shape[1]:
        return None
    depth_index = (~black[:, columns]).argmax(axis=0) + np.arange(_BESIDE)[:, None]
    beside = frame[np.minimum(depth_index, len(frame) - 1), columns].mean(axis=0)
    dark, bright = np.percentile(rest, (5, 95))
    return bool(np.median(beside) - dark > _TISSUE_BESIDE * max(float(bright - dark), 1.0))


def _dark_throughout(frame: UInt8[np.ndarray, "H W"]) -> bool:
    """Whether so much of a B-scan is nearly black that, whatever share of its zeros is fill, the rest is dark too."""
    nonzero = int(np.count_nonzero(frame))
    faint = int(np.count_nonzero(frame <= _FAINT)) - (frame.size - nonzero)
    return faint > 0.05 * nonzero + 1


def _black_fill(pixels: UInt8[np.ndarray, "D H W"], whites: Mapping[int, np.ndarray]) -> dict[int, np.ndarray]:
    """B-scan -> mask [H, W] of its black fill; `whites` are those of its white fill."""
    found: dict[int, np.ndarray] = {}
    votes: list[bool] = []
    for index in np.flatnonzero(_touches_border(pixels, least=0)).tolist():
        frame = pixels[index]
        if index not in whites and _dark_throughout(frame):
            continue
        zeros = _runs_from_border(frame == 0)
        # A clean scanner's vitreous is truly zero here and there: black is fill only against a noisy background.
        not_rest = zeros | whites[index] if index in whites else zeros
        rest = frame[~not_rest]
        if zeros.any() and len(rest) and np.percentile(rest, 5) > _FAINT:
            found[index] = zeros
            vote = _is_vitreous(frame, zeros, rest)
            votes += [] if vote is None else [vote]
    return {} if votes and sum(votes) > len(votes) / 2 else found


def remove_fill(pixels: UInt8[np.ndarray, "D H W"]) -> tuple[UInt8[np.ndarray, "D H W"], float]:
    """(pixels without fill, share of voxels that were fill). The input is returned itself where there is none."""
    cleaned = pixels
    filled = 0
    largest = int(pixels.max())
    least = min(largest, _NEARLY_WHITE)
    with_white = np.flatnonzero(_touches_border(pixels, least)).tolist() if least >= _LEAST_WHITE else []
    masks = {index: _white_fill(pixels[index], largest) for index in with_white}
    for index, black in _black_fill(pixels, masks).items():
        masks[index] = masks[index] | black if index in masks else black
    for index, mask in sorted(masks.items()):
        share = mask.mean()
        if not _MIN_SHARE < share < 0.9:
            continue
        if cleaned is pixels:
            cleaned = pixels.copy()
        cleaned[index][mask] = intensity_beside_mask(pixels[index], mask)
        filled += int(mask.sum())
    return cleaned, filled / pixels.size
