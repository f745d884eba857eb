"""The job of `octjepa convert`: scans of any format to files of one format, each read back and compared.

In: paths of scans. Out: for each scan a file, a JSON file with what the format cannot hold, and with `layers` a label
file of the packaged segmenter. Every written file is read with octjepa's own reader, and kept only if its pixels are
equal to the bit and spacing, eye, scan pattern, person, device and protocol agree. A conversion that loses something
is refused, not written. A scan is also refused if its file would replace one that octjepa convert did not write, or the
conversion of another scan, or if its JSON file would change what is stated of its conversion to another format.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
from jaxtyping import UInt8

from octjepa.convert.arrays import write_tiff, write_zarr
from octjepa.convert.description import NotPreserved, describe
from octjepa.convert.dicom import LONGEST_TEXT, write_dicom
from octjepa.errors import OctjepaError, VolumeRejected
from octjepa.files import write_json
from octjepa.ingest.output_names import OutputNames, ShownNames, check_apart, refused_by_search, with_position
from octjepa.ingest.read_source import read_source
from octjepa.ingest.refused_scan import RefusedScan, collect_refusals, lost_share
from octjepa.ingest.results_record import OutputExists, ResultsRecord
from octjepa.ingest.source_file import SourceFile
from octjepa.ingest.sources import discover
from octjepa.locks import writer_lock
from octjepa.parsing import Malformed, read_object
from octjepa.progress import bar
from octjepa.read.manifest import find_row
from octjepa.read.orientation import has_slice_direction
from octjepa.read.personal_data import StatedPerson
from octjepa.read.reader import SpacingOption, read_volume
from octjepa.read.written_results import CONVERTED, LAYERS
from octjepa.record import Record
from octjepa.tasks.nifti import write_nifti
from octjepa.volume import OCTVolume

Form = Literal["nifti", "dicom", "tiff", "zarr"]
ENDINGS: dict[Form, str] = {"nifti": ".nii.gz", "dicom": ".dcm", "tiff": ".tif", "zarr": ".zarr"}
LAYERS_FOLDER = "layers"
_UNFINISHED = ".new-scan"  # folder in the output folder for the files of a scan that are not yet read back
_SAME_SPACING = 1e-5  # relative: readers round the distance of positions to 1e-7 mm
_SAME_POSITION_MM = 1e-4


@dataclass(frozen=True)
class ConvertedScan(Record):
    """One scan: the files written, its shape `[D, H, W]`, spacing (dz, dy, dx) in mm, and notes on what is not kept.

    `position` says which file of the search a masked name stands for, such as "file 3 of 4".
    """

    scan: str
    file: str
    description: str
    layers: str
    shape: tuple[int, int, int]
    spacing_mm: tuple[float, float, float]
    eye: str
    device: str
    notes: tuple[str, ...]
    position: str = ""

    @property
    def shown(self) -> str:
        """The name and, if it is masked, the position of the file."""
        return with_position(self.scan, self.position)


@dataclass
class ConvertedScans(Record):
    """All scans of a call. `files`: the converted scans on disk. `lost_share` does not count scans rightly left out."""

    KEYS = ("files", "scans", "refused")
    scans: list[ConvertedScan] = field(default_factory=list)
    refused: list[RefusedScan] = field(default_factory=list)

    @property
    def files(self) -> list[str]:
        """Paths of the converted scans."""
        return [scan.file for scan in self.scans]

    @property
    def lost_share(self) -> float:
        """Lost scans divided by lost and converted scans."""
        return lost_share(self.refused, len(self.scans))


@dataclass(frozen=True)
class _Job:
    """Settings for every scan. `layers` gives the codes of the layers, or is None.

    `record` lists the converted files, `layer_record` those of layers.
    """

    out: Path
    form: Form
    spacing_mm: SpacingOption
    layers: Callable[[OCTVolume], UInt8[np.ndarray, "D H W"]] | None
    record: ResultsRecord
    layer_record: ResultsRecord

    def claim(self, name: str, volume: OCTVolume, file: Path, stated: Mapping[str, object]) -> None:
        """Records the files to write for a scan. Raises OutputExists: one is there that is not of this scan.

        `stated` is the content of the JSON file.
        """
        files = [file.name] if self.form == "zarr" else [file.name, f"{name}.json"]
        if self.layers is not None:
            self.layer_record.check(name, volume.content_hash, [file.name])
        self.record.check(name, volume.content_hash, files)
        if self.form != "zarr":
            self._check_shared(name, file, stated)
        self.record.claim(name, volume.content_hash, files)

    def _check_shared(self, name: str, file: Path, stated: Mapping[str, object]) -> None:
        """Raises OutputExists if a conversion to another format has the JSON file, and it states other facts."""
        description = self.out / f"{name}.json"
        conversions = (self.out / f"{name}{ending}" for form, ending in ENDINGS.items() if form != "zarr")
        others = [each for each in conversions if each != file and each.is_file() and self.record.lists(each)]
        if others and description.is_file() and not _states(description, stated):
            raise OutputExists(
                self.out, f"holds {description.name}, which belongs to {others[0].name} and states other facts"
            )


def convert_sources(
    sources: Sequence[str], out: Path, form: Form, layers: bool = False, spacing_mm: SpacingOption = None
) -> ConvertedScans:
    """Converts every scan of `sources` into the folder `out`; with `layers` also writes the layers of each scan.

    `spacing_mm` (slice, depth, column) takes precedence over the files. Raises UsageError: no such path, no scan found,
    or `out`, or with `layers` its folder "layers", holds a scan of `sources` or other files; highdicom is missing.
    """
    if layers and form == "dicom":
        from octjepa.tasks.labels.dicom_seg import check_highdicom

        check_highdicom()
    discovery = discover(sources)
    files = _without_own(discovery.files, out)
    for folder in (out, *([out / LAYERS_FOLDER] if layers else [])):
        check_apart(files, folder)
    results = ConvertedScans()
    shown = ShownNames([*files, *(refused.source for refused in discovery.refused)])
    results.refused += refused_by_search(discovery, shown)
    codes = _layer_codes() if layers else None
    with writer_lock(out), bar("convert", len(files), "scan") as progress:
        record, layer_record = ResultsRecord(out, CONVERTED), ResultsRecord(out / LAYERS_FOLDER, LAYERS)
        names = OutputNames(files, record)
        if layers:
            _check_layers_folder(out / LAYERS_FOLDER, layer_record)
        job = _Job(out, form, spacing_mm, codes, record, layer_record)
        for source in files:
            people: list[StatedPerson] = []
            with collect_refusals(results.refused, partial(shown.of, source, people)):
                scan = _convert(source, names, people, job)
                results.scans.append(replace(scan, position=shown.position(source, people)))
            progress.advance()
    return results


def _without_own(files: Sequence[SourceFile], out: Path) -> list[SourceFile]:
    """`files` without the results of an earlier call in `out`; all of `files` if they are nothing but such results.

    A search finds these results if `out` lies below a folder of scans.
    """
    record = ResultsRecord(out, CONVERTED)
    others = [file for file in files if not (isinstance(file.location, Path) and record.lists(file.location))]
    return others or list(files)


def _check_layers_folder(folder: Path, record: ResultsRecord) -> None:
    """Raises OutputExists if the folder of layers holds files, and octjepa did not write them."""
    if record.is_empty and folder.is_dir():
        others = sorted(path.name for path in folder.iterdir() if not path.name.startswith("."))
        if others:
            raise OutputExists(folder, f"holds {others[0]}, and octjepa has no record of writing it")


def _convert(source: SourceFile, names: OutputNames, people: list[StatedPerson], job: _Job) -> ConvertedScan:
    """Raises VolumeRejected: the scan cannot be read or segmented. NotPreserved: the format cannot hold it.
    OutputExists: a file would be replaced that is not of this scan.
    """
    volume = read_source(source, job.spacing_mm, people)
    name = names.of(source, people, volume.content_hash)
    file = job.out / f"{name}{ENDINGS[job.form]}"
    description = file / "geometry.json" if job.form == "zarr" else job.out / f"{name}.json"
    stated = describe(volume)
    job.claim(name, volume, file, stated)
    with _unfinished_folder(job.out) as folder:
        new = folder / file.name
        _write(new, volume.pixels, volume, job.form)
        write_json(folder / description.relative_to(job.out), stated)
        written = _read_back(new, file, job.form)
        if lost := _differences(volume, written, job.form):
            raise NotPreserved(f"read back from {job.form}, it has {lost}")
        layers = "" if job.layers is None else str(_write_layers(job.layers(volume), volume, new, job))
        # The JSON file first: without it a scan would have lost its person and eye.
        for path in (file,) if job.form == "zarr" else (description, file):
            _move(folder / path.name, path)
    return ConvertedScan(
        name,
        str(file),
        str(description),
        layers,
        volume.shape,
        volume.spacing_mm,
        volume.laterality or "",
        volume.device,
        _notes(volume, written, job.form),
    )


@contextmanager
def _unfinished_folder(out: Path) -> Iterator[Path]:
    """An empty hidden folder in `out`, removed at the end: a scan that is refused or interrupted leaves nothing.

    Raises OctjepaError: the disk refuses.
    """
    folder = out / _UNFINISHED
    try:
        if folder.is_symlink():  # it came with `out`, and could lead anywhere
            folder.unlink()
        shutil.rmtree(folder, ignore_errors=True)  # what a killed call left
        folder.mkdir()
    except OSError as error:
        raise OctjepaError(f"{folder} cannot be written: {error.strerror or error}") from None
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _move(new: Path, path: Path) -> None:
    """Renames `new` to `path`, also over the folder of an earlier conversion. Raises OctjepaError."""
    try:
        if path.is_dir():
            os.replace(path, new.with_name("replaced"))
        os.replace(new, path)
    except OSError as error:
        raise OctjepaError(f"{path} cannot be written: {error.strerror or error}") from None


def _states(description: Path, stated: Mapping[str, object]) -> bool:
    """Whether a JSON file states the same of a scan as `stated`."""
    try:
        return _facts(read_object(description)) == _facts(json.loads(json.dumps(stated)))
    except (Malformed, OSError):
        return False


def _facts(stated: Mapping[str, object]) -> dict[str, object]:
    """The content of a JSON file that tells scans apart: not the version, nor `axes`, which DICOM files once lacked."""
    converted = stated.get("converted")
    of_source = {key: value for key, value in converted.items() if key != "by"} if isinstance(converted, dict) else {}
    return {**{key: value for key, value in stated.items() if key != "axes"}, "converted": of_source}


def _write(file: Path, values: UInt8[np.ndarray, "D H W"], volume: OCTVolume, form: Form) -> None:
    """Raises NotPreserved: the format cannot hold the scan. OctjepaError: the disk refuses."""
    if form == "dicom":
        write_dicom(file, volume)
    elif form == "nifti":
        write_nifti(file, values, volume.spacing_mm)
    elif form == "tiff":
        write_tiff(file, values, volume.spacing_mm)
    else:
        write_zarr(file, values, volume.spacing_mm)


def _read_back(new: Path, file: Path, form: Form) -> OCTVolume:
    """The scan in `new` as it will be read from `file`. Raises NotPreserved: it cannot be read."""
    try:
        return read_volume(new, find_row(file), dataset_path=file)
    except VolumeRejected as error:
        raise NotPreserved(f"read back from {form}, it has no readable scan ({error.reason}: {error.detail})") from None


def _differences(volume: OCTVolume, written: OCTVolume, form: Form) -> str:
    """The difference between `volume` and the scan that was `written`, in words; "" for none."""
    if written.content_hash != volume.content_hash:
        return "other pixels or another order of B-scans"
    if not np.allclose(written.spacing_mm, volume.spacing_mm, rtol=_SAME_SPACING, atol=0):
        return f"a spacing of {_mm(written.spacing_mm)} mm in place of {_mm(volume.spacing_mm)} mm"
    if written.laterality != volume.laterality:
        by_path = " by its path" if written.laterality_source == "path" else ""
        return f"the eye {written.laterality or 'unknown'}{by_path} in place of {volume.laterality or 'unknown'}"
    if written.pattern != volume.pattern:
        return f"the scan pattern {written.pattern} in place of {volume.pattern}"
    same = {
        "person id": "person_unknown" in volume.notes or volume.person_id.strip() == written.person_id.strip(),
        # Some formats hold the beginning of a protocol, and the maker of a device.
        "device": volume.device == "unknown" or volume.device.startswith(written.device),
        "protocol": _same_text(volume.protocol[:LONGEST_TEXT], written.protocol[:LONGEST_TEXT]),
        "region": form == "dicom" or _same_text(volume.region, written.region),  # DICOM: see `_notes`
    }
    return next((f"another {name}" for name, is_same in same.items() if not is_same), "")


def _same_text(text: str, other: str) -> bool:
    """Whether two texts differ in capitals at most: the reader writes the protocol of a DICOM file in lower case."""
    return text.strip().casefold() == other.strip().casefold()


def _mm(spacing_mm: tuple[float, float, float]) -> str:
    return ", ".join(f"{mm:.6g}" for mm in spacing_mm)


def _notes(volume: OCTVolume, written: OCTVolume, form: Form) -> tuple[str, ...]:
    """Facts that the user of the file has to know, or that are in the JSON file only."""
    notes = []
    if volume.uncertain:
        notes.append(f"the spacing of {', '.join(volume.uncertain)} is uncertain")
    positions = volume.slice_positions_mm
    if form != "dicom" and positions is not None:
        gaps = np.diff(positions)
        if np.abs(gaps - volume.spacing_mm[0]).max() > _SAME_POSITION_MM:
            notes.append("the B-scans are not evenly spaced: their positions are in the JSON file only")
    if volume.region and not _same_text(volume.region, written.region):
        notes.append(f"the region {volume.region} is in the JSON file only")
    if not has_slice_direction(volume):
        notes.append("the source does not state the direction of the B-scans: they stay in its order")
    return tuple(notes)


def _layer_codes() -> Callable[[OCTVolume], UInt8[np.ndarray, "D H W"]]:
    """The packaged segmenter as a function from a scan to the codes of its layers."""
    from octjepa.tasks.segmenter.inference import load_segmenter
    from octjepa.tasks.segmenter.measurement import layer_codes

    segmenter = load_segmenter()

    def codes(volume: OCTVolume) -> UInt8[np.ndarray, "D H W"]:
        try:
            return layer_codes(segmenter.segment(volume))
        except VolumeRejected:
            raise
        except OctjepaError as error:
            raise VolumeRejected("size_implausible", str(error)) from None

    return codes


def _write_layers(codes: UInt8[np.ndarray, "D H W"], volume: OCTVolume, file: Path, job: _Job) -> Path:
    """Writes the layers in the geometry of the converted file, as a label file that `octjepa segment` reads."""
    from octjepa.tasks.labels.dicom_seg import write_segmentation
    from octjepa.tasks.labels.label_files import SOURCE, made_automatically
    from octjepa.tasks.segmenter.measurement import LAYER_NAMES

    folder = job.out / LAYERS_FOLDER
    folder.mkdir(exist_ok=True)
    path = folder / file.name
    job.layer_record.claim(file.name.removesuffix(ENDINGS[job.form]), volume.content_hash, [path.name])
    if job.form == "dicom":
        write_segmentation(path, codes, LAYER_NAMES, volume.spacing_mm, file)
        return path
    classes = {str(code): name for code, name in enumerate(LAYER_NAMES, 1)}
    write_json(folder / "classes.json", {**classes, SOURCE: made_automatically()})
    _write(path, codes, volume, job.form)
    return path
