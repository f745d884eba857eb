"""Registration fill: what a scanner or a registration program painted where it had no measurement.

White (255) or black (0) areas that grow from a B-scan's border are not tissue. They are set to the B-scan's own
vitreous level before any percentile or tissue search, and the volume gets a note. Registration shifts and turns a
B-scan, so that white fill always reaches its upper or lower border; a saturated pigment epithelium reaches the sides
alone. Lossy compression rings where fill ends: within its 8 x 8 blocks white falls to 180 at quality 60 of JPEG.
"""

from __future__ import annotations

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


def _white_fill(frame: UInt8[np.ndarray, "H W"]) -> Bool[np.ndarray, "H W"]:
    """White fill with the pixel around it, whether the B-scan was compressed with loss or not."""
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


def _touches_border(pixels: UInt8[np.ndarray, "D H W"], white: bool) -> Bool[np.ndarray, " D"]:
    """True where the upper or lower border of a B-scan is nearly white over more than a fiftieth of its length.

    Or, for black, any border is black over so much.
    """
    borders = [pixels[:, 0], pixels[:, -1], *([] if white else [pixels[:, :, 0], pixels[:, :, -1]])]
    full = [((edge >= _NEARLY_WHITE) if white else (edge == 0)).mean(axis=1) > 0.02 for edge in borders]
    return np.logical_or.reduce(full)


def _dark_throughout(frame: UInt8[np.ndarray, "H W"]) -> bool:
    """Whether so much of a B-scan is nearly black that, whatever share of its zeros is fill, the rest is dark too."""
    nonzero = int(np.count_nonzero(frame))
    faint = int(np.count_nonzero(frame <= _FAINT)) - (frame.size - nonzero)
    return faint > 0.05 * nonzero + 1


def remove_fill(pixels: UInt8[np.ndarray, "D H W"]) -> tuple[UInt8[np.ndarray, "D H W"], float]:
    """(pixels without fill, share of voxels that were fill). The input is returned itself where there is none."""
    cleaned = pixels
    filled = 0
    whites, blacks = _touches_border(pixels, white=True), _touches_border(pixels, white=False)
    for index in np.flatnonzero(whites | blacks):
        frame, white, black = pixels[index], whites[index], blacks[index]
        if not white and _dark_throughout(frame):
            continue
        mask = np.zeros(frame.shape, bool)
        if white:
            mask |= _white_fill(frame)
        if black:
            zeros = _runs_from_border(frame == 0)
            # A clean scanner's vitreous is truly zero: black is fill only against a noisy background.
            rest = frame[~(zeros | mask)]
            if zeros.any() and len(rest) and np.percentile(rest, 5) > _FAINT:
                mask |= zeros
        share = mask.mean()
        if not _MIN_SHARE < share < 0.9:
            continue
        if cleaned is pixels:
            cleaned = pixels.copy()
        cleaned[index][mask] = intensity_beside_mask(frame, mask)
        filled += int(mask.sum())
    return cleaned, filled / pixels.size
