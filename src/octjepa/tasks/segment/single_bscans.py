"""The prediction of a segmentation head for a single B-scan, as files in the geometry of its picture.

In: a head and a picture or one-frame DICOM file. Out: the class of every pixel as an indexed PNG that every image
program shows, and the picture with tinted classes. Names are hashes of the pixels, never the file's. A picture that
was stored with the sclera on top is turned for the head, and its classes are turned back.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
from jaxtyping import UInt8
from PIL import Image

from octjepa.errors import UsageError
from octjepa.files import write_atomic
from octjepa.read.single_bscan import ASSUMED_NOTE
from octjepa.read.written_results import CLASS_PICTURE
from octjepa.record import Record
from octjepa.tasks.labels.label_files import UNLABELLED
from octjepa.tasks.labels.layer_names import CLASS_COLOURS
from octjepa.tasks.thickness import thickness_um
from octjepa.volume import OCTVolume

_TINT: Final = 0.45
_SPACING_UNKNOWN: Final = "spacing unknown: results in pixels, for a picture taken to be 2 x 6 mm (--spacing states it)"


@dataclass(frozen=True)
class SegmentedPicture(Record):
    """A segmented B-scan: the PNG of its classes, the tinted picture, and measurements of each class.

    `thickness` is the mean over columns in `unit` "um" or "px"; `area` is in mm2, or in pixels without a spacing.
    """

    scan: str
    volume_id: str
    classes: str
    picture: str
    unit: str
    thickness: Mapping[str, float]
    area: Mapping[str, float]
    notes: tuple[str, ...]


def write_picture(
    volume: OCTVolume, codes: UInt8[np.ndarray, "1 R C"], classes: tuple[str, ...], name: str, out: Path, scan: str
) -> SegmentedPicture:
    """Writes `NAME_classes.png` and `NAME.png` into `out`; `codes` are those of `volume`, 255 outside the stored depth.

    scan: the name of the picture for the result.

    Raises UsageError: the classes do not fit into a PNG of 8 bit.
    """
    if len(classes) >= UNLABELLED:
        raise UsageError(f"{len(classes)} classes do not fit into a PNG of 8 bit: expected at most {UNLABELLED - 1}")
    is_known = ASSUMED_NOTE not in volume.notes
    depth_mm, column_mm = volume.spacing_mm[1:]
    maps = thickness_um(codes, len(classes), depth_mm if is_known else 0.001)
    area = depth_mm * column_mm if is_known else 1.0
    counts = [float((codes == code).sum() * area) for code in range(1, len(classes) + 1)]
    step = -1 if "turned_upright" in volume.notes else 1
    files = (out / f"{name}{CLASS_PICTURE}", out / f"{name}.png")
    _write(files, volume.pixels[0, ::step], codes[0, ::step], len(classes))
    return SegmentedPicture(
        scan=scan,
        volume_id=name,
        classes=str(files[0]),
        picture=str(files[1]),
        unit="um" if is_known else "px",
        thickness={key: float(np.nanmean(of_class)) for key, of_class in zip(classes, maps, strict=True)},
        area=dict(zip(classes, counts, strict=True)),
        notes=() if is_known else (_SPACING_UNKNOWN,),
    )


def _write(
    files: tuple[Path, Path], pixels: UInt8[np.ndarray, "R C"], codes: UInt8[np.ndarray, "R C"], classes: int
) -> None:
    """The classes as a PNG with a palette, and the picture with tinted classes."""
    colours = np.zeros((256, 3), np.uint8)
    colours[1 : classes + 1] = [CLASS_COLOURS[k % len(CLASS_COLOURS)] for k in range(classes)]
    indexed = Image.fromarray(np.ascontiguousarray(codes), "P")
    indexed.putpalette(colours.reshape(-1).tolist())
    write_atomic(files[0], lambda file: indexed.save(file, "PNG"))
    drawn = np.repeat(pixels[..., None], 3, -1).astype(np.float32)
    marked = (codes != 0) & (codes != UNLABELLED)
    drawn[marked] = (1 - _TINT) * drawn[marked] + _TINT * colours[codes[marked]]
    tinted = Image.fromarray(drawn.round().astype(np.uint8))
    write_atomic(files[1], lambda file: tinted.save(file, "PNG"))
