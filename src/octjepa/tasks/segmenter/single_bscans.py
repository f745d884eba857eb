"""Segment single B-scans: pictures and one-frame DICOM files, a table row for each.

In: files or folders of B-scans. Out: for each B-scan its boundaries (`.npz`), its classes (an indexed PNG) and a
picture, and `images.csv` with a row for each, also for those of earlier calls into the same folder. With a known
spacing lengths are in um and areas in mm2, without one in pixels.

The network needs a physical scale. Without a spacing a picture is taken to be 2 mm deep and 6 mm wide. On eight phantom
B-scans of 2.0 x 6.0 mm the boundaries hardly depended on that: with 1.7 to 2.2 mm by 4 to 9 mm the mean error was at
most 0.5 rows (4 um) above that with the true size, except in a single B-scan (1.4 rows at 1.7 mm). The certainty of
the network did not show which scale was true.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Final

import numpy as np
from PIL import Image, ImageColor

from octjepa.canonical.plausibility import DOUBTFUL_NOTE
from octjepa.canonical.quality import looks_inverted
from octjepa.canonical.single_bscan import canonicalise_bscan
from octjepa.errors import OctjepaError, VolumeRejected
from octjepa.files import write_atomic, write_json
from octjepa.ingest.output_names import OutputNames, ShownNames, check_apart, with_position
from octjepa.ingest.refused_scan import RefusedScan, collect_refusals
from octjepa.ingest.results_record import SHARED, ResultsRecord
from octjepa.ingest.source_file import SourceFile
from octjepa.layers import BOUNDARIES, CLASSES, LAYERS
from octjepa.locks import writer_lock
from octjepa.progress import bar
from octjepa.read.personal_data import StatedPerson
from octjepa.read.single_bscan import ASSUMED_MM, SLICE_MM, BScan, find_bscans, read_bscan
from octjepa.read.written_results import BSCAN_ENDINGS, SEGMENTED, TABLE
from octjepa.read.written_results import CLASSES as CLASSES_FILE
from octjepa.reasons import rejection
from octjepa.recipe import Preprocessing
from octjepa.record import Record
from octjepa.tables import format_table
from octjepa.tasks.labels.label_files import SOURCE, made_automatically
from octjepa.tasks.segmenter.inference import Segmentation, Segmenter, load_segmenter
from octjepa.tasks.segmenter.measurement import cut_off, is_unrecognised
from octjepa.tasks.segmenter.scan_picture import CLASS_COLOURS, LINE_COLOURS
from octjepa.volume import OCTVolume, hash_pixels

_UNKNOWN_UM: Final = 60.0  # an A-scan whose ILM or Bruch's membrane is expected to be this far off is not measured
_LEAST_MEASURED: Final = 0.1  # share of A-scans in which the network is sure; a picture with fewer is refused
_UNSURE_UM: Final = 15.0
_TINT: Final = 0.45
_KIND: Final = "bscan"  # of the results in the record of the output folder
_DOUBTFUL: Final = "it may not be a human retina"


@dataclass(frozen=True)
class SegmentedBScan(Record):
    """A B-scan: files and measurements. `unit` is "um" (areas in mm2) or "px" (areas in pixels).

    `thickness` is the mean of each layer, `area` that of each class, and `fluid_share` the share of the retina's area
    that is intraretinal or subretinal fluid. `measured_share` is the share of A-scans that were measured. A-scans that
    were not measured count neither in `area`, unless the retina is cut off there, nor in `fluid_share`. If less than a
    tenth is measured, because the retina is cut off, then only the areas have a value.
    `position` says which file of the call a masked name stands for, such as "file 3 of 4". `made_by` says whether the
    packaged or an adapted network segmented the B-scan.
    """

    image: str
    files: dict[str, str]
    shape: tuple[int, int]
    spacing_um: tuple[float, float] | None
    unit: str
    thickness: dict[str, float | None]
    area: dict[str, float]
    fluid_share: float | None
    expected_error: float | None
    measured_share: float
    notes: tuple[str, ...]
    position: str = ""
    made_by: str = ""

    @property
    def shown(self) -> str:
        """The name and, if it is masked, the position of the file."""
        return with_position(self.image, self.position)


@dataclass
class SegmentedBScans(Record):
    """All B-scans of a call, and the table of them."""

    table: str = ""
    images: list[SegmentedBScan] = field(default_factory=list)
    refused: list[RefusedScan] = field(default_factory=list)

    @property
    def scans(self) -> list[SegmentedBScan]:
        """The segmented B-scans."""
        return self.images

    @property
    def lost_share(self) -> float:
        """Refused B-scans divided by all."""
        return len(self.refused) / max(len(self.refused) + len(self.images), 1)


def segment_bscans(
    sources: Sequence[str], out: Path, spacing_mm: tuple[float, float] | None = None, model: Path | None = None
) -> SegmentedBScans:
    """Segments every B-scan of `sources` into the folder `out`.

    `spacing_mm` (depth, column) takes precedence over the files. Raises UsageError: no such path, no B-scan found,
    `model` is not a network, or `out` is a folder that holds a B-scan of `sources`, or a table or `classes.json` that
    octjepa did not write.
    """
    files = list(_source_files(sources))
    check_apart(files, out)
    segmenter = load_segmenter(model)
    result = SegmentedBScans(table=str(out / TABLE))
    shown = ShownNames(files)
    with writer_lock(out), bar("segment", len(files), "B-scan") as progress:
        record = ResultsRecord(out, SEGMENTED)
        names = OutputNames(files, record)
        record.claim(SHARED, SHARED, (TABLE, CLASSES_FILE))
        made_by = made_automatically(is_adapted=model is not None)
        write_json(out / CLASSES_FILE, {**{str(k): key for k, key in enumerate(CLASSES) if k}, SOURCE: made_by})
        for source in files:
            people: list[StatedPerson] = []
            with collect_refusals(result.refused, partial(shown.of, source, people)):
                bscan = read_bscan(source.path)
                people.append(bscan.person)
                name = names.of(source, people, hash_pixels(bscan.pixels))
                record.check(name, hash_pixels(bscan.pixels), _result_names(name))
                segmented = _segment(segmenter, bscan, spacing_mm, name, _Output(out, record, made_by))
                result.images.append(replace(segmented, position=shown.position(source, people)))
            progress.advance()
        current = {bscan.image: bscan for bscan in result.images}
        _write_table(Path(result.table), record.merged(_KIND, current, SegmentedBScan.from_json))
    return result


def _source_files(sources: Sequence[str]) -> Iterator[SourceFile]:
    """The files of all sources, each once."""
    seen: set[Path] = set()
    for source in map(Path, sources):
        for file in find_bscans(source):
            if file.resolve() not in seen:
                seen.add(file.resolve())
                yield SourceFile(file, file.relative_to(source).as_posix() if source.is_dir() else file.name)


def _result_names(name: str) -> list[str]:
    return [f"{name}{ending}" for ending in BSCAN_ENDINGS]


@dataclass(frozen=True)
class _Output:
    folder: Path
    record: ResultsRecord
    made_by: str


def _segment(
    segmenter: Segmenter, bscan: BScan, stated_mm: tuple[float, float] | None, name: str, to: _Output
) -> SegmentedBScan:
    """Segments one B-scan and writes its files. Raises VolumeRejected: no retina, or too large."""
    height, width = bscan.pixels.shape
    known_mm = stated_mm or bscan.spacing_mm
    depth_mm, column_mm = known_mm or (ASSUMED_MM[0] / height, ASSUMED_MM[1] / width)
    is_doubtful = _check_retina(bscan, depth_mm, column_mm)
    try:
        segmentation = segmenter.predict(bscan.pixels[None], (SLICE_MM, depth_mm, column_mm), sparse=True)
    except OctjepaError as error:
        raise rejection("size_implausible", str(error)) from None
    is_doubtful = is_doubtful or is_unrecognised(segmentation.expected_error_um)
    rows = segmentation.boundaries_px[:, 0]
    seen = np.ptp(bscan.pixels, axis=0) > 0
    sure = (segmentation.expected_error_um[[0, 7], 0].max(0) < _UNKNOWN_UM) & seen
    if sure.mean() < _LEAST_MEASURED:
        raise rejection(
            "no_tissue", f"the network is sure of a retina in {sure.mean():.0%} of the A-scans: expected a B-scan"
        )
    cut = cut_off(rows, height) & seen  # boundaries in blank A-scans have no meaning
    measured = sure & ~cut
    length, area = (1000 * depth_mm, depth_mm * column_mm) if known_mm else (1.0, 1.0)
    digits = 1 if known_mm else 2
    lengths: dict[str, float | None] = dict.fromkeys(name for name, _, _ in LAYERS)
    fluid_share = expected_error = None
    # Areas count the same A-scans as the volumes of `measurement.measure`: measured A-scans, and A-scans whose
    # retina is cut off. The share needs the retina's whole height, so fluid and retina both come from measured A-scans.
    if measured.mean() >= _LEAST_MEASURED:
        for key, high, low in LAYERS:
            lengths[key] = round(float((rows[low] - rows[high])[measured].mean() * length), digits)
        retina = float((rows[7] - rows[0])[measured].sum())
        fluid_share = round(int(np.isin(segmentation.classes[0][:, measured], (1, 2)).sum()) / max(retina, 1.0), 4)
        error_um = float(segmentation.expected_error_um[:, 0, measured].mean())
        expected_error = round(error_um / 1000 / depth_mm * length, digits)
    counted = segmentation.classes[0][:, measured | cut]
    counts = [int(np.count_nonzero(counted == k)) for k in range(len(CLASSES))]
    to.record.claim(name, hash_pixels(bscan.pixels), _result_names(name))
    result = SegmentedBScan(
        image=name,
        files=_write_files(to, name, bscan, segmentation),
        shape=(height, width),
        spacing_um=(round(1000 * depth_mm, 4), round(1000 * column_mm, 4)) if known_mm else None,
        unit="um" if known_mm else "px",
        thickness=lengths,
        area={key: round(counts[k] * area, 5) if known_mm else float(counts[k]) for k, key in enumerate(CLASSES) if k},
        fluid_share=fluid_share,
        expected_error=expected_error,
        measured_share=round(float(measured.mean()), 3),
        notes=_notes(bscan, segmentation, measured, cut, known_mm is not None) + ((_DOUBTFUL,) if is_doubtful else ()),
        made_by=to.made_by,
    )
    to.record.add(name, _KIND, result.to_json())
    return result


def _check_retina(bscan: BScan, depth_mm: float, column_mm: float) -> bool:
    """Whether it is doubtful that this is a retina. Raises VolumeRejected: it is none, or covered with text."""
    line = OCTVolume(bscan.pixels[None], (SLICE_MM, depth_mm, column_mm), {"slice": "option"}, "", "", pattern="line")
    try:
        return DOUBTFUL_NOTE in canonicalise_bscan(line, Preprocessing(), 1).notes
    except VolumeRejected as error:
        if error.reason == "size_implausible":  # too large for a store
            return False
        if error.reason == "no_tissue" and looks_inverted(bscan.pixels[None]):
            raise rejection("no_tissue", "the intensities look inverted: expected a dark background") from None
        raise


def _notes(
    bscan: BScan, segmentation: Segmentation, measured: np.ndarray, cut: np.ndarray, is_known: bool
) -> tuple[str, ...]:
    notes = []
    if not is_known:
        notes.append("spacing unknown: results in pixels, for a picture taken to be 2 x 6 mm (--spacing states it)")
    if "turned_upright" in bscan.notes:
        notes.append("the sclera was on top: the B-scan was turned, and so are its results")
    error = segmentation.expected_error_um[:, 0].mean(0)
    if (error > _UNSURE_UM).mean() > 0.2:
        notes.append(f"low confidence: in {(error > _UNSURE_UM).mean():.0%} of the A-scans boundaries are unsure")
    if measured.mean() < 0.95:
        notes.append(f"{1 - measured.mean():.0%} of the A-scans are not measured")
    if cut.mean() > 0.02:
        notes.append("the retina is cut off above or below")
    return tuple(notes)


def _write_files(to: _Output, name: str, bscan: BScan, segmentation: Segmentation) -> dict[str, str]:
    """Writes boundaries, classes as an indexed PNG, and the picture."""
    arrays = {
        "rows": segmentation.boundaries_px,
        "expected_error_px": segmentation.expected_error_um / np.float32(1000 * segmentation.spacing_mm[1]),
        "names": np.array(BOUNDARIES),
        SOURCE: np.array(to.made_by),
    }
    boundaries, classes, picture = (to.folder / file for file in _result_names(name))
    write_atomic(boundaries, lambda file: np.savez_compressed(file, **arrays))  # type: ignore[arg-type]
    colours = [(0, 0, 0), *(ImageColor.getrgb(CLASS_COLOURS[key]) for key in CLASSES[1:])]
    indexed = Image.fromarray(segmentation.classes[0], "P")
    indexed.putpalette([value for colour in colours for value in colour])
    write_atomic(classes, lambda file: indexed.save(file, "PNG"))
    drawn = Image.fromarray(_drawn(bscan.pixels, segmentation, np.array(colours, np.float32)))
    write_atomic(picture, lambda file: drawn.save(file, "PNG"))
    return {"boundaries": str(boundaries), "classes": str(classes), "picture": str(picture)}


def _drawn(pixels: np.ndarray, segmentation: Segmentation, colours: np.ndarray) -> np.ndarray:
    """The B-scan in grey with tinted classes and a line for each boundary, `[H, W, 3]`."""
    drawn = np.repeat(pixels[..., None], 3, -1).astype(np.float32)
    marked = segmentation.classes[0] > 0
    drawn[marked] = (1 - _TINT) * drawn[marked] + _TINT * colours[segmentation.classes[0][marked]]
    columns = np.arange(pixels.shape[1])
    for rows, colour in zip(segmentation.boundaries_px[:, 0], LINE_COLOURS, strict=True):
        drawn[rows.round().astype(int).clip(0, len(pixels) - 1), columns] = ImageColor.getrgb(colour)
    return drawn.round().clip(0, 255).astype(np.uint8)


def _write_table(path: Path, images: Sequence[SegmentedBScan]) -> None:
    layers, classes = [name for name, _, _ in LAYERS], CLASSES[1:]
    columns = [
        "image",
        "position",
        "rows",
        "columns",
        "depth_um",
        "column_um",
        "unit",
        *(f"{name}_thickness" for name in layers),
    ]
    columns += [
        *(f"{name}_area" for name in classes),
        "fluid_share",
        "expected_error",
        "measured_share",
        "made_by",
        "notes",
    ]
    rows = []
    for bscan in images:
        start = [bscan.image, bscan.position, *bscan.shape, *(bscan.spacing_um or ("", "")), bscan.unit]
        values = [
            *bscan.thickness.values(),
            *bscan.area.values(),
            bscan.fluid_share,
            bscan.expected_error,
            bscan.measured_share,
            bscan.made_by,
        ]
        rows.append([*start, *values, "; ".join(bscan.notes)])
    text = format_table(columns, rows, ",")
    write_atomic(path, lambda file: file.write(text.encode()))
