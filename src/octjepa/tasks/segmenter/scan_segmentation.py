"""`octjepa segment SCAN...`: layers, fluid and thickness of scans with the packaged network, as files.

In: files, folders, globs or lists of scans. Out, in one folder, for every scan: `NAME_boundaries.npz`,
`NAME_classes.nii.gz`, `NAME_classes.dcm` (a DICOM Segmentation), `NAME_thickness.csv`, `NAME_fluid.csv` and `NAME.png`.
NAME is the scan's file name, with what identifies the person masked. Scans are read, segmented and written one after
the other, so memory holds one scan. A scan that is refused does not stop the others. A scan is refused if its results
would replace those of another scan, or a file that octjepa did not write.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from octjepa.canonical.pipeline import canonicalise
from octjepa.canonical.quality import looks_inverted
from octjepa.errors import OctjepaError, UsageError, VolumeRejected
from octjepa.files import write_atomic, write_json
from octjepa.ingest.output_names import OutputNames, ShownNames, check_apart, refused_by_search, with_position
from octjepa.ingest.read_source import read_source
from octjepa.ingest.refused_scan import RefusedScan, collect_refusals, lost_share
from octjepa.ingest.results_record import SHARED, ResultsRecord
from octjepa.ingest.source_file import SourceFile
from octjepa.ingest.sources import discover
from octjepa.layers import BOUNDARIES, CLASSES, LAYERS
from octjepa.locks import writer_lock
from octjepa.progress import Bar, bar
from octjepa.read.personal_data import StatedPerson
from octjepa.read.reader import SpacingOption
from octjepa.read.written_results import BOUNDARY_FILE, CLASS_FILES, FLUID, PAGE, SCAN_ENDINGS, SEGMENTED, THICKNESS
from octjepa.read.written_results import CLASSES as CLASSES_FILE
from octjepa.recipe import Preprocessing
from octjepa.record import Record
from octjepa.tables import format_table
from octjepa.tasks.labels.class_files import Forms, file_order, missing_library, write_classes
from octjepa.tasks.labels.label_files import SOURCE, made_automatically
from octjepa.tasks.segmenter.inference import Segmentation, Segmenter, load_segmenter
from octjepa.tasks.segmenter.measurement import Measurement, Preparation, measure
from octjepa.tasks.segmenter.scan_picture import draw_scan
from octjepa.tasks.thickness import SECTORS
from octjepa.volume import OCTVolume

_KIND = "scan"  # of the results in the record of the output folder
# Notes about files say nothing about thickness; those about the ETDRS grid say nothing about fluid volumes.
_FILE_NOTES = r"DICOM Segmentation|label files"
_GRID_NOTES = r"ETDRS grid|nasal|inferior one|central sector"


@dataclass(frozen=True)
class SegmentedScan(Record):
    """One scan: its name, the files written, and what the page shows.

    `thickness_um` is the total thickness per ETDRS sector and `layers_um` that of every layer, None without a value.
    `fluid_mm3` is None per class for scan patterns without volumes. `centre` is "fovea" or "scan".
    `position` says which file of the search a masked name stands for, such as "file 3 of 4". `made_by` says whether the
    packaged or an adapted network segmented the scan.
    """

    scan: str
    files: dict[str, str]
    thickness_um: dict[str, float | None]
    layers_um: dict[str, dict[str, float | None]]
    sector_notes: dict[str, str]
    fluid_mm3: dict[str, float | None]
    notes: tuple[str, ...]
    eye: str
    device: str
    shape: tuple[int, int, int]
    spacing_mm: tuple[float, float, float]
    centre: str
    centre_certainty: float
    position: str = ""
    made_by: str = ""

    @property
    def shown(self) -> str:
        """The name and, if it is masked, the position of the file."""
        return with_position(self.scan, self.position)

    @classmethod
    def of(
        cls, name: str, volume: OCTVolume, made: Measurement, files: dict[str, str], notes: Sequence[str] = ()
    ) -> SegmentedScan:
        """The displayed part of a measured scan; `notes` are added to those of the measurement."""
        etdrs = {
            layer: {sector: _number(value, 1) for sector, value in zip(SECTORS, means, strict=True)}
            for (layer, _, _), means in zip(LAYERS, made.etdrs_um, strict=True)
        }
        return cls(
            scan=name,
            files=files,
            thickness_um=etdrs["retina"],
            layers_um=etdrs,
            sector_notes=dict(zip(SECTORS, made.sector_notes, strict=True)),
            fluid_mm3={k: None if v is None else _number(v, 4) for k, v in made.fluid_mm3.items()},
            notes=(*made.notes, *notes),
            eye=volume.laterality or "",
            device=volume.device,
            shape=volume.shape,
            spacing_mm=volume.spacing_mm,
            centre=made.centre.kind,
            centre_certainty=made.centre.certainty,
        )


@dataclass
class SegmentedScans(Record):
    """All scans of a call. `lost_share` counts the refused scans that are not rightly left out.

    `notes` are about the whole call, such as a missing library.
    """

    scans: list[SegmentedScan] = field(default_factory=list)
    refused: list[RefusedScan] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @property
    def lost_share(self) -> float:
        """Lost scans divided by lost and segmented scans."""
        return lost_share(self.refused, len(self.scans))


def segment_sources(
    sources: Sequence[str],
    out: Path,
    forms: Forms = ("nifti", "dicom"),
    spacing_mm: SpacingOption = None,
    model: Path | None = None,
) -> SegmentedScans:
    """Segments every scan of `sources` into the folder `out`.

    `spacing_mm` (slice, depth, column) takes precedence over the files. `model` is the folder of an adapted network.
    Raises OctjepaError if it is none. Raises UsageError: no such path, no scan found,
    or `out` is a folder that holds a scan of `sources`, or a page or `classes.json` that octjepa did not write.
    """
    discovery = discover(sources)
    check_apart(discovery.files, out)
    segmenter = load_segmenter(model)
    made = SegmentedScans()
    shown = ShownNames([*discovery.files, *(refused.source for refused in discovery.refused)])
    made.refused += refused_by_search(discovery, shown)
    with writer_lock(out), bar("segment", len(discovery.files), "scan") as progress:
        is_adapted = model is not None
        record = ResultsRecord(out, SEGMENTED)
        names = OutputNames(discovery.files, record)
        record.claim(SHARED, SHARED, (PAGE, CLASSES_FILE))
        write_json(
            out / CLASSES_FILE,
            {**{str(k): name for k, name in enumerate(CLASSES) if k}, SOURCE: made_automatically(is_adapted)},
        )
        for source in discovery.files:
            people: list[StatedPerson] = []
            with collect_refusals(made.refused, partial(shown.of, source, people)):
                volume, preparation = _read(source, spacing_mm, people)
                name = names.of(source, people, volume.content_hash)
                record.check(name, volume.content_hash, _result_names(name))
                if (note := missing_library(volume.format, forms)) and not made.notes:
                    made.notes.append(note)
                output = _Output(out, name, forms, progress, record, is_adapted)
                scan = _segment(segmenter, volume, preparation, source, output)
                made.scans.append(replace(scan, position=shown.position(source, people)))
            progress.advance()
    return made


def recorded_scans(current: Sequence[SegmentedScan], out: Path) -> list[SegmentedScan]:
    """`current` and the scans of earlier calls whose results are still in `out`, with the paths of their files."""

    def parse(stated: Mapping[str, Any]) -> SegmentedScan:
        scan = SegmentedScan.from_json(stated)
        files = {kind: out / Path(path).name for kind, path in scan.files.items()}
        if any(path.is_symlink() for path in files.values()) or not files["picture"].is_file():
            raise UsageError("its files are not there")
        return replace(scan, files={kind: str(path) for kind, path in files.items()})

    return ResultsRecord(out, SEGMENTED).merged(_KIND, {scan.scan: scan for scan in current}, parse)


def _result_names(name: str) -> list[str]:
    return [f"{name}{ending}" for ending in SCAN_ENDINGS]


def _read(source: SourceFile, spacing_mm: SpacingOption, people: list[StatedPerson]) -> tuple[OCTVolume, Preparation]:
    """The scan, and what preparing it for a store says about it. Raises VolumeRejected: it is not a scan of a
    retina.
    """
    volume = read_source(source, spacing_mm, people)
    try:
        result = canonicalise(volume, Preprocessing())
    except VolumeRejected as error:
        if error.reason == "size_implausible":  # too large for a store, not for B-scan after B-scan
            return volume, Preparation()
        if error.reason == "no_tissue" and looks_inverted(volume.pixels):
            raise VolumeRejected(error.reason, "the intensities look inverted: expected a dark background") from None
        raise
    return volume, Preparation(result.measurements["quality"], result.notes)


@dataclass(frozen=True)
class _Output:
    folder: Path
    name: str
    forms: Forms
    progress: Bar
    record: ResultsRecord
    is_adapted: bool

    @property
    def made_by(self) -> str:
        """The source of the labels, as every file of them states it."""
        return made_automatically(self.is_adapted)

    def path(self, ending: str) -> Path:
        """The file of this scan that ends with `ending`."""
        return self.folder / f"{self.name}{ending}"


def _segment(
    segmenter: Segmenter, volume: OCTVolume, preparation: Preparation, source: SourceFile, to: _Output
) -> SegmentedScan:
    """Segments one scan and writes its files. Raises VolumeRejected: its B-scans are too large."""
    slices = volume.shape[0]
    try:
        found = segmenter.segment(volume, lambda done: to.progress.say(f"{to.name}: B-scan {done} of {slices}"))
    except VolumeRejected:
        raise
    except OctjepaError as error:
        raise VolumeRejected("size_implausible", str(error)) from None
    made = measure(volume, found, preparation)
    to.record.claim(to.name, volume.content_hash, _result_names(to.name))
    files, notes = _write_labels(volume, found, source, to)
    result = replace(SegmentedScan.of(to.name, volume, made, files, notes), made_by=to.made_by)
    files["thickness"] = str(write_thickness(to.path(THICKNESS), result, made))
    files["fluid"] = str(write_fluid(to.path(FLUID), result))
    title = f"{to.name}{', ' + result.eye if result.eye else ''}"
    files["picture"] = str(draw_scan(to.path(".png"), title, volume, found, made))
    to.record.add(to.name, _KIND, result.to_json())
    return result


def _number(value: float, digits: int) -> float | None:
    return round(float(value), digits) if np.isfinite(value) else None


def _write_labels(
    volume: OCTVolume, found: Segmentation, source: SourceFile, to: _Output
) -> tuple[dict[str, str], tuple[str, ...]]:
    """Writes boundaries and classes in the order of the file's B-scans and columns; returns the files and notes."""
    order, _ = file_order(volume)
    path = to.path(BOUNDARY_FILE)
    arrays = {
        "rows": order.ascans(found.boundaries_px),
        "um": order.ascans(found.boundaries_um),
        "expected_error_um": order.ascans(found.expected_error_um),
        "names": np.array(BOUNDARIES),
        "spacing_mm": np.array(found.spacing_mm),
        SOURCE: np.array(to.made_by),
    }
    write_atomic(path, lambda file: np.savez_compressed(file, **arrays))  # type: ignore[arg-type]
    written = write_classes(to.path(CLASS_FILES), found.classes, CLASSES[1:], volume, source, to.forms, to.is_adapted)
    files = {"boundaries": str(path), "classes": written.nifti, "dicom_seg": written.dicom}
    return {kind: file for kind, file in files.items() if file is not None}, written.notes


def write_thickness(path: Path, result: SegmentedScan, made: Measurement) -> Path:
    """Writes a row for each layer and sector. Every row holds the notes about the scan; returns `path`."""
    rows: list[Sequence[object]] = []
    scan_notes = [note for note in result.notes if not re.search(_FILE_NOTES, note)]
    for layer, values in result.layers_um.items():
        for sector, share in zip(SECTORS, made.coverage, strict=True):
            value, notes = values[sector], filter(None, (result.sector_notes[sector], *scan_notes))
            rows.append((layer, sector, "" if value is None else value, f"{share:.2f}", "; ".join(notes)))
    centre = [("centre", result.centre, result.centre_certainty)]
    return _write_csv(path, ("layer", "sector", "thickness_um", "measured_share", "note"), rows, centre)


def write_fluid(path: Path, result: SegmentedScan) -> Path:
    """Writes a row for each class with the notes that concern volumes; returns `path`."""
    note = "; ".join(note for note in result.notes if not re.search(f"{_FILE_NOTES}|{_GRID_NOTES}", note))
    rows = [(name, "" if value is None else value, note) for name, value in result.fluid_mm3.items()]
    return _write_csv(path, ("class", "volume_mm3", "note"), rows)


def _write_csv(
    path: Path, columns: Sequence[str], rows: Sequence[Sequence[object]], centre: Sequence[tuple[str, str, float]] = ()
) -> Path:
    if centre:  # what the grid is centred on is part of every row, so that a row can be copied alone
        columns = (*columns, "centre", "centre_certainty")
        rows = [(*row, centre[0][1], centre[0][2]) for row in rows]
    text = format_table(columns, rows, ",")
    write_atomic(path, lambda file: file.write(text.encode()))
    return path
