"""Checks whether the surfaces are those of a human retina, from thickness, curvature, and the voxels above.

A search that takes the pigment epithelium for the inner limiting membrane (ILM) may do so over whole B-scans without a
jump. Two signs are independent of its path: a retina as thin as that is none at its place in the scan, and tissue
above the ILM is brighter than vitreous.

A retina lines the back of the eye: in a B-scan, with the vitreous on top, it is flat or its middle is deepest (Bruch's
membrane has a radius of some 38 mm, 12 mm in high myopia). A cornea bulges towards the top with a radius of 6.5 to
8 mm; the retina of a small animal's eye is bent by a radius of 2 to 3 mm. Both surfaces have to be bent: a dome-shaped
macula or a detachment bends one more than the other. Not distinguished: other eyes with the size and the layers of a
human one, and a human eye with an instrument in it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from jaxtyping import Float

from octjepa.canonical.surfaces import RobustSurface, Surfaces
from octjepa.reasons import rejection

_THICKNESS_MM = (
    (0.08, 0.90),
    (0.13, 0.90),
)  # least and most at the centre and elsewhere; healthy 0.22 and 0.25 to 0.40
_CENTRE_MM = 1.0  # from the scan's centre: a thin fovea, the floor of a macular hole, a cup
_ABOVE_MM = (0.10, 0.03)  # above the ILM, where vitreous should be
_VITREOUS_MM = 0.15  # above the ILM and further up: the level of vitreous
_BRIGHT = 0.25  # of the contrast: the darkest layer of the retina has a quarter of the brightest one's
_SMOOTH_MM = 0.25  # along the columns
_FRAMES = 3  # B-scans over which intensities are averaged, and a lone A-scan is passed over
_LEAST = 0.1  # a lower score is refused
# (0 below, 1 from, 1 up to, 0 above) of the curvature per mm, positive where the middle is highest
_CURVATURE = (-0.3, -0.2, 0.07, 0.12)
_MEDIAN_THICKNESS_MM = (0.04, 0.09, 0.75, 1.2)  # median of ILM to Bruch's membrane
DOUBTFUL_NOTE = "retina_doubtful"  # no layers like those of a retina between the surfaces
_DOUBTFUL = 0.25  # similarity below which a volume is noted
_SIMILARITY_SCORE = ((0.0, 0.6), (0.5, 1.0))  # similarity -> highest score
_BLOCK_MM = 0.25  # of columns
_EVIDENCE_FRAMES = 32
_BRIGHT_TISSUE, _NOISE_LEVELS = 0.35, 5.0  # of the contrast, and times the noise: what counts as tissue
# Least excess that counts, and the one that refuses; similarity -> extent that a retina may have.
_EXCESS_MM = (-0.1, 0.05)
_ALLOWED_EXTENT_MM = ((0.3, 0.7, 0.9), (0.9, 1.5, 2.5))
_NARROWEST_MM = 1.0  # a field along the columns that shows no curvature


def _unit_profile() -> Float[np.ndarray, " 16"]:
    """Intensity from ILM to Bruch's membrane as the mean over phantoms of four devices, centred and of norm 1."""
    mean = np.array(
        [0.69, 0.66, 0.67, 0.65, 0.60, 0.55, 0.56, 0.56, 0.45, 0.40, 0.39, 0.44, 0.47, 0.79, 0.72, 1.01], np.float32
    )
    mean -= mean.mean()
    return mean / np.linalg.norm(mean)


_PROFILE = _unit_profile()


def running_sums(image: Float[np.ndarray, "D R C"]) -> Float[np.ndarray, "D R+1 C"]:
    """Sums of what is above each depth index. As `np.cumsum`, which goes through memory A-scan by A-scan."""
    total = np.zeros((image.shape[0], image.shape[1] + 1, image.shape[2]), np.float32)
    for index in range(image.shape[1]):
        np.add(total[:, index], image[:, index], out=total[:, index + 1])
    return total


def _mean_between(
    total: Float[np.ndarray, "D S C"], first: Float[np.ndarray, "D C"], last: Float[np.ndarray, "D C"]
) -> Float[np.ndarray, "D C"]:
    """Mean intensity from depth index `first` to `last` by `running_sums`, NaN if that is above the image."""
    height = total.shape[1] - 1
    low, high = (np.clip(np.rint(end), 0, height).astype(np.int64)[:, None] for end in (first, last))
    count = (high - low)[:, 0]
    summed = (np.take_along_axis(total, high, axis=1) - np.take_along_axis(total, low, axis=1))[:, 0]
    return np.where(count > 0, summed / np.maximum(count, 1), np.nan)


def implausible_share(
    image: Float[np.ndarray, "D R C"],
    surfaces: Surfaces,
    positions_mm: Float[np.ndarray, " D"],
    depth_mm: float,
    column_mm: float,
) -> float:
    """Share of the A-scans whose surfaces cannot be the retina's, of B-scans at `positions_mm` from the centre.

    Every second A-scan is looked at.
    """
    from scipy.ndimage import median_filter, uniform_filter

    column_at_mm = (np.arange(image.shape[2]) - (image.shape[2] - 1) / 2)[::2] * column_mm
    image, ilm, bm = image[..., ::2], surfaces.ilm[:, ::2], surfaces.bm[:, ::2]
    across = max(1, round(_SMOOTH_MM / (2 * column_mm)) | 1)
    central = np.hypot(positions_mm[:, None], column_at_mm) < _CENTRE_MM
    (least, most), (least_elsewhere, most_elsewhere) = _THICKNESS_MM
    thickness = (bm - ilm) * depth_mm
    wrong = (thickness < np.where(central, least, least_elsewhere)) | (
        thickness > np.where(central, most, most_elsewhere)
    )
    total = running_sums(image)
    above = _mean_between(total, ilm - _ABOVE_MM[0] / depth_mm, ilm - _ABOVE_MM[1] / depth_mm)
    vitreous = _mean_between(total, np.zeros_like(ilm), ilm - _VITREOUS_MM / depth_mm)
    has_vitreous = np.isfinite(vitreous).any(axis=1)
    if has_vitreous.any():
        level = np.full(len(image), np.nan)
        # NumPy leaves NaN out row by row in Python: most B-scans have none.
        whole = np.isfinite(vitreous).all(axis=1)
        if whole.any():
            level[whole] = np.percentile(vitreous[whole], 25, axis=1)
        if (partly := has_vitreous & ~whole).any():
            level[partly] = np.nanpercentile(vitreous[partly], 25, axis=1)
        level[~has_vitreous] = np.nanmedian(level)
        bright = np.nan_to_num(above - level[:, None], nan=0.0)
        wrong |= uniform_filter(bright, (_FRAMES, across), mode="nearest") > _BRIGHT * surfaces.contrast
    return float(median_filter(wrong.view(np.uint8), (_FRAMES, across), mode="nearest").mean())


def _trapezoid(value: float, corners: tuple[float, float, float, float]) -> float:
    return float(np.interp(value, corners, (0.0, 1.0, 1.0, 0.0)))


def _curvature_per_mm(depth_mm: Float[np.ndarray, " C"], column_mm: float) -> float:
    """Second derivative of a surface's depth along the columns."""
    position = (np.arange(len(depth_mm)) - (len(depth_mm) - 1) / 2) * column_mm
    return 2 * float(np.polyfit(position, depth_mm, 2)[0])


@dataclass(frozen=True)
class RetinaEvidence:
    """Evidence for a retina in addition to its shape.

    `similarity`: median correlation, over A-scans, of the intensity between ILM and Bruch's membrane with the profile
    of a retina. `extent_mm`: how far bright tissue reaches below the ILM, in the deepest tenth of the A-scans.
    """

    similarity: float
    extent_mm: float


def retina_evidence(
    image: Float[np.ndarray, "D R C"], surfaces: Surfaces, depth_mm: float, column_mm: float
) -> RetinaEvidence:
    """The evidence in means of blocks of columns, of at most `_EVIDENCE_FRAMES` B-scans."""
    width = max(1, min(round(_BLOCK_MM / column_mm), image.shape[2]))
    frames = slice(None, None, -(-len(image) // _EVIDENCE_FRAMES))
    columns = image.shape[2] // width * width

    def blocks(array: np.ndarray) -> np.ndarray:
        """[..., C] -> [..., C / width]"""
        part = array[frames, ..., :columns]
        return np.asarray(part.reshape(*part.shape[:-1], -1, width).mean(axis=-1))

    mean, ilm, bm = blocks(image), blocks(surfaces.ilm), blocks(surfaces.bm)
    last = mean.shape[1] - 1

    share = (np.arange(len(_PROFILE)) + 0.5) / len(_PROFILE)
    at = np.clip(np.rint(ilm[:, None] + (bm - ilm)[:, None] * share[:, None]), 0, last).astype(np.int64)
    profiles = np.take_along_axis(mean, at, axis=1)  # [d, 16, c]
    profiles = profiles - profiles.mean(axis=1, keepdims=True)
    norm = np.linalg.norm(profiles, axis=1)
    products = np.einsum("dpc,p->dc", profiles, _PROFILE, optimize=False)
    similarity = float(np.median(products / np.maximum(norm, 1e-6)))

    level = np.percentile(mean, 20, axis=(1, 2))[:, None, None]
    smooth = (mean[:, :-2] + mean[:, 1:-1] + mean[:, 2:]) / 3  # three depth indices
    bright = smooth - level > max(_BRIGHT_TISSUE * surfaces.contrast, _NOISE_LEVELS * surfaces.noise)
    has_tissue = bright.any(axis=1)
    if not has_tissue.any():
        return RetinaEvidence(similarity, 0.0)
    deepest = last - 1 - bright[:, ::-1].argmax(axis=1)
    highest = np.maximum(bright.argmax(axis=1) + 1, ilm)
    return RetinaEvidence(similarity, float(np.percentile((deepest - highest)[has_tissue], 90)) * depth_mm)


def score_retina(
    surfaces: Surfaces, fit: RobustSurface, evidence: RetinaEvidence, depth_mm: float, column_mm: float
) -> float:
    """0..1. Raises VolumeRejected not_retina where the score is below `_LEAST`, with what speaks against it.

    An object that is not a retina can have two smooth edges. Its tissue between them lacks the dark outer nuclear layer
    above the bright pigment epithelium, and it is bright far below: a lens, an iris, a finger, a fruit. Either sign
    alone is not proof: oedema hides the layers, and choroid and sclera are seen through atrophy. So the depth that
    is allowed rises with the similarity to a retina.
    """
    thickness = float(np.median(surfaces.bm - surfaces.ilm)) * depth_mm
    score, against = _trapezoid(thickness, _MEDIAN_THICKNESS_MM), f"{thickness:.2f} mm thick"
    excess = evidence.extent_mm - float(np.interp(evidence.similarity, *_ALLOWED_EXTENT_MM))
    if (shallow := float(np.interp(excess, _EXCESS_MM, (1.0, 0.0)))) < score:
        score = shallow
        against = (
            f"bright tissue down to {evidence.extent_mm:.1f} mm, and layers that resemble those of a retina by "
            f"{evidence.similarity:.2f} (a retina: 0.7 to 1)"
        )
    if fit.surface.shape[1] * column_mm >= _NARROWEST_MM:
        outer = _curvature_per_mm(fit.surface.mean(axis=0) * depth_mm, column_mm)
        inner = _curvature_per_mm(np.median(surfaces.ilm - fit.offsets[:, None], axis=0) * depth_mm, column_mm)
        bend = min(outer, inner) if outer > 0 else max(outer, inner)
        if (bent := _trapezoid(bend, _CURVATURE)) < score:
            towards = "the vitreous, as a cornea" if bend > 0 else "the sclera, as the retina of a small animal"
            score, against = bent, f"both surfaces bend towards {towards}, by a radius of {1 / abs(bend):.1f} mm"
    score = min(score, float(np.interp(evidence.similarity, *_SIMILARITY_SCORE)))
    if score < _LEAST:
        raise rejection("not_retina", f"it does not look like a human retina (score {score:.2f}): {against}")
    return score


def doubt_notes(evidence: RetinaEvidence) -> list[str]:
    """The note of a volume in which the layers of a retina were not found: severe oedema, or no retina."""
    return [DOUBTFUL_NOTE] if evidence.similarity < _DOUBTFUL else []
