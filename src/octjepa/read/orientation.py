"""How a scan is oriented: frames that are not B-scans, A-scans stored as rows, B-scans upside down, pattern, direction.

Orientation is found in the pixels, for headers of such files do not state it. The mean intensity varies far more along
depth, across the retinal layers, than along any other axis. Towards the vitreous the tissue ends abruptly, towards the
sclera gradually: the intensity just outside the first bright edge from either end distinguishes top from bottom.

On 24 phantom eyes of four devices and three real scans the axial axis varied at least 2.8 times as much as any other,
and the intensity outside the edge (0 to 1, of an A-scan's contrast) was 0.00 to 0.06 at the top and 0.12 to 0.30 at the
bottom; `tests/read/test_orientation.py` tests every orientation of such eyes.

Which way the B-scans of a raster run across the retina is stated by orientation vectors and by lines on the fundus
image. Columns run as on a fundus image, from the patient's right to the left: temporal to nasal in a right eye, nasal
to temporal in a left one, which the store mirrors. B-scans that run the other way are mirrored here. B-scans that run
up or down have other axes: their columns are what slices are elsewhere. They are noted, and recipes leave them out.
Of the vectors only x, to the patient's left, is used: writers disagree on which of the others points into the eye.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

import numpy as np
from jaxtyping import Bool, Float, UInt8

from octjepa.read.picture_frames import block_sums
from octjepa.read.raw_scan import FrameGeometry
from octjepa.reasons import rejection
from octjepa.volume import OCTVolume, Pattern

_AXIAL_RATIO = 2.0  # variation along depth over that along the other axes, at least
_MIN_VARIATION = 4.0  # intensity levels; below, the pixels do not decide
_FLIPPED_DIFFERENCE = 0.08  # of the intensity above the tissue over that below, in flipped B-scans
_EDGE = 0.45  # share of an A-scan's contrast at which tissue begins
_DEPTH_SAMPLES = 64  # about as many as an A-scan is reduced to
MAX_LOCALIZERS = 2  # frames of another kind that a volume may hold
_SEAM, _FEWEST_COLUMNS = (
    3.0,
    16,
)  # jump between two columns over the next largest, where all rows begin in the middle of a B-scan
_PARALLEL, _ACROSS = 0.99, 0.5  # cosines between the normals of B-scans; of a B-scan and an en face image
_RADIAL_DEGREES = 30.0  # a raster's lines are parallel; a radial scan's turn through 180 degrees
VERTICAL_NOTE = "vertical_lines"
_VERTICAL = 0.5  # cosine between a B-scan and the horizontal: 60 degrees
_SHORTEST_PX = 2.0  # of a line on the fundus image
DIRECTION_UNSTATED = "direction_unstated"  # positions of B-scans without the orientation that says which way they run
ORDER_FROM_POSITIONS = "order_from_positions"  # though the user states the spacing
_CONTRADICTED = "line_direction_disagrees"
_DIRECTED = ("positions", "frame_location")  # sources of a slice spacing that also state the direction of the slices


def is_direction_known(slice_source: str, notes: Collection[str]) -> bool:
    """Whether the source of a scan states how its B-scans lie in space, so that the reader put them in this order.

    The first B-scan of a horizontal raster is then the inferior one. slice_source: provenance of the slice spacing.
    notes: those of the scan.
    """
    is_ordered = slice_source in _DIRECTED or ORDER_FROM_POSITIONS in notes
    return is_ordered and DIRECTION_UNSTATED not in notes and _CONTRADICTED not in notes


def has_slice_direction(volume: OCTVolume) -> bool:
    """`is_direction_known` of a volume."""
    return is_direction_known(volume.provenance.get("slice", ""), volume.notes)


def _variation(pixels: UInt8[np.ndarray, "F H W"]) -> tuple[float, float, float]:
    """Standard deviation of the mean intensity profile along (slice, depth, column), without empty frames."""
    steps = [max(1, count // 64) for count in pixels.shape]
    small = pixels[:: steps[0], :: steps[1], :: steps[2]].astype(np.float32)
    small = small[small.std(axis=(1, 2)) > 1]
    if not len(small):
        return 0.0, 0.0, 0.0
    along = [float(small.mean(axis=axes).std()) for axes in ((1, 2), (0, 2), (0, 1))]
    return along[0], along[1], along[2]


def is_transposed(pixels: UInt8[np.ndarray, "F H W"]) -> bool:
    """Whether depth is stored along the columns.

    Raises VolumeRejected not_b_scans if it is stored along the frames.
    """
    frames, depth, columns = _variation(pixels)
    if frames > max(_MIN_VARIATION, _AXIAL_RATIO * max(depth, columns)):
        raise rejection("not_b_scans", "the layers of the retina run through the frames, not within them")
    return columns > max(_MIN_VARIATION, _AXIAL_RATIO * max(depth, frames))


def _intensity_before_tissue(ascans: Float[np.ndarray, "N H"]) -> float:
    """Median intensity [0, 1] just before the first tissue of the A-scans; NaN where too few have room before it."""
    first = (ascans > _EDGE).argmax(axis=1)[:, None]
    depth_index = np.arange(ascans.shape[1])
    before = (depth_index < first - 1) & (depth_index >= first - 9)
    count = before.sum(axis=1)
    levels = (ascans * before).sum(axis=1)[count > 2] / count[count > 2]
    return float(np.median(levels)) if len(levels) > len(ascans) // 8 else float("nan")


def is_upside_down(pixels: UInt8[np.ndarray, "F H W"]) -> bool:
    """Whether the sclera is on top."""
    frames, height, width = pixels.shape
    across, down = max(1, min(8, width // 8)), max(1, height // _DEPTH_SAMPLES)
    # [F, H, W] -> means of blocks [F, H / down, W / across] -> A-scans [N, H / down]
    blocks = block_sums(pixels[frames // 8 :: max(1, frames // 6)], down, across)
    np.true_divide(blocks, np.intp(down * across), out=blocks, casting="unsafe")  # rounded as a mean of NumPy's
    ascans = blocks.transpose(0, 2, 1).reshape(-1, height // down)
    low = np.percentile(ascans, 10, axis=1, keepdims=True)
    contrast = ascans.max(axis=1, keepdims=True) - low
    ascans = ((ascans - low) / np.maximum(contrast, 1e-6))[contrast[:, 0] > 2 * _MIN_VARIATION]
    if not len(ascans):
        return False
    return _intensity_before_tissue(ascans) > _intensity_before_tissue(ascans[:, ::-1]) + _FLIPPED_DIFFERENCE


def wrapped_column(pixels: UInt8[np.ndarray, "F H W"]) -> int:
    """The column at which the B-scans begin, 0 if they are whole.

    Bytes lost or put in before the pixels shift every row: its end stands before its beginning. Then one jump between
    columns is far larger than all others, and the last column continues in the first.
    """
    if pixels.shape[2] < _FEWEST_COLUMNS:
        return 0
    narrow = np.uint16 if len(pixels) < 257 else np.uint32  # holds the sums, and is fast
    mean = pixels.sum(axis=0, dtype=narrow).astype(np.float32) / np.float32(len(pixels))  # [H, W]
    jumps = np.abs(np.diff(mean, axis=1)).mean(axis=0)
    at = int(jumps.argmax())
    around = float(np.abs(mean[:, 0] - mean[:, -1]).mean())
    wrapped = jumps[at] > _MIN_VARIATION / 2 and around < jumps[at] / 2
    return at + 1 if wrapped and jumps[at] > _SEAM * np.delete(jumps, at).max() else 0


def _angle_spread_degrees(directions: np.ndarray) -> float:
    """Largest angle between undirected lines [N, 2|3] and the first of them."""
    norms = np.linalg.norm(directions, axis=1)
    directions = directions[norms > 1e-6] / norms[norms > 1e-6, None]
    if len(directions) < 3:
        return 0.0
    cosines = np.abs(directions @ directions[0])
    return float(np.degrees(np.arccos(np.clip(cosines.min(), 0, 1))))


def localizer_frames(frame_geometry: FrameGeometry) -> Bool[np.ndarray, " F"]:
    """Whether each frame is not a B-scan by its header: it is called another image, or cuts the others' plane."""
    normals = frame_geometry.normals
    length = np.linalg.norm(normals, axis=1)
    has_length = np.isfinite(length) & (length > 1e-6)
    odd = np.zeros(len(normals), bool)
    if has_length.sum() > 2:
        unit = normals[has_length] / length[has_length, None]
        cosines = np.abs(unit @ unit.T)
        usual = int(np.median(cosines, axis=1).argmax())
        across = cosines[usual] < _ACROSS
        if across.sum() <= MAX_LOCALIZERS and (cosines[usual][~across] > _PARALLEL).all():
            odd[has_length] = across
    return frame_geometry.en_face | odd


def circle_frames(frame_geometry: FrameGeometry) -> Bool[np.ndarray, " F"]:
    """Whether each frame runs along a circle: it is curved, or ends where it begins."""
    has_line = np.isfinite(frame_geometry.lines_px).all(axis=1)
    closed = np.zeros(len(has_line), bool)
    closed[has_line] = (
        np.linalg.norm(frame_geometry.lines_px[has_line, 2:] - frame_geometry.lines_px[has_line, :2], axis=1) < 1.0
    )
    return frame_geometry.curved | closed


def find_scan_pattern(frame_geometry: FrameGeometry, device: str, text: str) -> Pattern:
    """Raster, radial or circle; `text` is protocol and region, lower case.

    The angles between the scan lines on the fundus image or in space decide. Text is used only where geometry is
    missing, and warily: Topcon Triton's "3d radial" is a 12 x 9 mm raster cube.
    """
    circle = circle_frames(frame_geometry)
    if circle.all():
        return "circle"
    lines = frame_geometry.lines_px[~circle]
    known_lines = lines[np.isfinite(lines).all(axis=1)]
    turns = [_angle_spread_degrees(known_lines[:, 2:] - known_lines[:, :2])] if len(known_lines) >= 3 else []
    directions = frame_geometry.row_directions[np.isfinite(frame_geometry.row_directions).all(axis=1)]
    if len(directions) >= 3:
        turns.append(_angle_spread_degrees(directions))
    if turns and max(turns) > _RADIAL_DEGREES:
        return "radial"
    if circle.any():
        return "radial"  # lines and circles in one file: an optic disc programme
    if len(known_lines) >= 3 or "3d" in text or device == "topcon_triton":
        return "raster"
    if "circle" in text:
        return "circle"
    if "radial" in text or (device == "heidelberg_spectralis" and "onh" in text):
        return "radial"
    return "raster"


def _unit(vectors: Float[np.ndarray, "F n"]) -> Float[np.ndarray, "F n"]:
    """Vectors of length 1, NaN if one has none."""
    length = np.linalg.norm(vectors, axis=1, keepdims=True)
    return vectors / np.where(length > 1e-6, length, np.nan)


def _ways(cosines: Float[np.ndarray, " F"]) -> Float[np.ndarray, " F"]:
    """1 to the patient's left, -1 to the right, 0 up or down, NaN where unknown."""
    return np.where(np.isnan(cosines), np.nan, np.where(np.abs(cosines) < _VERTICAL, 0.0, np.sign(cosines)))


def axes_exchanged(frames: FrameGeometry) -> FrameGeometry | None:
    """The geometry of B-scans whose A-scans were stored as rows, after rows and columns were exchanged.

    If the orientation vectors are those of the stored rows, the stored columns run to the patient's left or right.
    After the exchange the rows run there, and the normal is reversed. None for other vectors.
    """
    down_rows = np.cross(_unit(frames.normals), _unit(frames.row_directions))
    if not len(down_rows) or not (np.abs(down_rows[:, 0]) >= _VERTICAL).all():
        return None
    return replace(frames, row_directions=down_rows, normals=-frames.normals)


def rows_turned(frames: FrameGeometry) -> FrameGeometry:
    """The geometry of B-scans that were stored with the sclera on top, after their rows were reversed.

    If the orientation vectors say truly that rows run out of the eye, then the reversal turns the normal as well:
    columns, depth into the eye and normal are right-handed, and the normal orders the B-scans. If they say that rows
    run into the eye, the vectors are not those of the stored rows, and stay. Writers disagree on which axis points into
    the eye: y to the back of the head (DICOM's patient coordinates) or z downwards (AI-READI). Normals of lines on the
    fundus image say nothing of the rows, and stay too.
    """
    down_rows = np.cross(_unit(frames.normals), _unit(frames.row_directions))
    out_of_the_eye = (down_rows[:, 1] < -_VERTICAL) | (down_rows[:, 2] > _VERTICAL)
    if not len(out_of_the_eye) or not (out_of_the_eye & ~frames.by_line).all():
        return frames
    return replace(frames, normals=-frames.normals)


def _ways_by_vectors(frames: FrameGeometry) -> Float[np.ndarray, " F"]:
    along, normal = _unit(frames.row_directions), _unit(frames.normals)
    into_the_eye = np.cross(normal, along)
    return _ways(np.where(np.abs(into_the_eye[:, 0]) < _VERTICAL, along[:, 0], np.nan))


def _ways_on_fundus(frames: FrameGeometry) -> Float[np.ndarray, " F"]:
    lines = frames.lines_px[:, 2:] - frames.lines_px[:, :2]  # [F, (row, column)]
    long = np.linalg.norm(lines, axis=1) >= _SHORTEST_PX
    return _ways(np.where(long & ~frames.curved, _unit(lines)[:, 1], np.nan))


def align_columns(
    pixels: UInt8[np.ndarray, "F H W"], frames: FrameGeometry, notes: list[str]
) -> tuple[UInt8[np.ndarray, "F H W"], FrameGeometry]:
    """The B-scans of a raster, all from the patient's right to the left, and their geometry.

    Adds to `notes`: `columns_mirrored=K` B-scans; `vertical_lines`; `line_direction_disagrees` where vectors and lines
    contradict each other, and nothing is changed.
    """
    by_vectors, on_fundus = _ways_by_vectors(frames), _ways_on_fundus(frames)
    if (np.isfinite(by_vectors) & np.isfinite(on_fundus) & (by_vectors != on_fundus)).any():
        notes.append(_CONTRADICTED)
        return pixels, frames
    ways = np.where(np.isfinite(by_vectors), by_vectors, on_fundus)
    if not np.isfinite(ways).all():
        return pixels, frames
    if not ways.any():
        notes.append(VERTICAL_NOTE)
    backwards = ways < 0
    if not backwards.any() or not ways.all():
        return pixels, frames
    notes.append(f"columns_mirrored={int(backwards.sum())}")
    pixels = pixels.copy()
    pixels[backwards] = pixels[backwards, :, ::-1]
    sign = np.where(backwards, -1.0, 1.0)[:, None]
    lines = np.where(backwards[:, None], frames.lines_px[:, [2, 3, 0, 1]], frames.lines_px)
    return pixels, replace(
        frames, row_directions=frames.row_directions * sign, normals=frames.normals * sign, lines_px=lines
    )
