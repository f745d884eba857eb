"""A folder of label volumes: finds the label file of each scan, and reads the class of each voxel.

A label volume has the shape of the scan's file: B-scans in the file's order, depth, columns. It is one of

    <key>.nii, <key>.nii.gz   whole numbers, their names in `classes.json` next to them: {"1": "fluid"}; 0 is background
    <key>.npz                 `labels` (whole numbers, or one-hot on a fourth axis) and `names` (of 1, 2, ...); or the
                              truth of a phantom; or layers and fluid (`layer_labels`)
    <key>.mat, .xml, .eye     layers and fluid of MATLAB, HEYEX and eyepy (`layer_labels`)
    <key>.mha, <key>.mhd      as NIfTI; or `reference.mhd` (`labels`, `mask`) in the folder of its scan
    <key>/, <key>.tif, .png   masks as images (`mask_images`)
    *.dcm                     binary DICOM Segmentation, found by the SOP instance it references

and <key> is the scan's SOP instance UID, its file name without suffix, or its volume id. A MetaImage called `reference`
belongs to the scan in its folder (`TRAIN001/reference.mhd` next to `TRAIN001/oct.mhd`). Endings such as `_layers` and
`_fluid` may follow the key; such files of one scan are read together. Files under several keys of one scan are read
together if they hold different classes. Of files that share a class, that with more classes is read, or else the
first in the order of the keys above. 255 is "not labelled".

Of single B-scans each file labels one picture, in folders as those of the pictures: `masks/P1/a.png` labels
`pictures/P1/a.png`. A file whose name no other label file has may be in any folder. Masks may lie next to the pictures
if their names have an ending (`a_mask.png`).

Who made the labels is stated by the algorithm type of a DICOM Segmentation, by the entry "source" of `classes.json`, or
by an array `source` of an .npz.
"""

from __future__ import annotations

import re
import zipfile
import zlib
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Bool, Float, UInt8

from octjepa.errors import UsageError, VolumeRejected
from octjepa.notes import Note
from octjepa.parsing import read_object
from octjepa.phantom import LESIONS, SURFACES, read_truth
from octjepa.read.file_order import are_renumbered
from octjepa.read.formats.images import unmasked
from octjepa.store.index import IndexEntry
from octjepa.tasks.labels.dicom_seg import (
    MAX_CLASSES,
    is_segmentation,
    read_segmentation,
    referenced_scan,
    segment_names,
    segmentation_source,
)
from octjepa.tasks.labels.layer_labels import UNLABELLED as UNLABELLED
from octjepa.tasks.labels.layer_labels import (
    LayerLabels,
    boundaries_of_codes,
    has_layers,
    layers_of_arrays,
    read_layers,
)
from octjepa.tasks.labels.layer_names import NOT_LABELLED, layer_edges
from octjepa.tasks.labels.mask_images import (
    MASK_SUFFIXES,
    Masks,
    MaskTable,
    is_mask_folder,
    mask_files,
    mask_names,
    read_mask_file,
    read_masks,
    read_table,
)

# Layers of a phantom's truth, each between two of its surfaces. Its lesions take precedence if both are learned.
PHANTOM_LAYERS: Mapping[str, tuple[str, str]] = {
    "inner": ("ilm", "ipl_inl"),
    "inl_opl": ("ipl_inl", "opl_onl"),
    "onl": ("opl_onl", "elm"),
    "photoreceptors_rpe": ("elm", "bm"),
    "choroid": ("bm", "choroid_sclera"),
}
SOURCE = "source"  # the entry of classes.json and the array of an .npz that state who made the labels
_EXAMPLE = 'expected {"1": "rnfl", "2": "gcl"}'
_MAX_SOURCE = 120  # characters that are shown
_SPACING_DIFFERS = 0.05
_LAYER_SUFFIXES = (".mat", ".xml", ".eye")
_META_SUFFIXES = (".mha", ".mhd")
_NAMED_AS_LABELS = {"reference", "label", "labels", "mask", "masks", "segmentation"}  # not after their scan
_ENDING = re.compile(
    r"([_-](layers?|fluid|masks?|labels?|seg|segmentation|annotations?|boundaries|classes|\d+x\d+x\d+))+$",
    re.IGNORECASE,
)


@dataclass(frozen=True, eq=False)
class LabelVolume:
    """`codes` 0 background, k = `names[k - 1]`, 255 not labelled; in the order of the scan's file.

    `spacing_mm` and `fovea_mm` ((slice, column) from the first voxel's centre) where the file holds them, and
    `boundaries_px` if it holds layers: fractional rows of `BOUNDARIES`, NaN where unknown.
    """

    codes: UInt8[np.ndarray, "N R C"]
    names: tuple[str, ...]
    spacing_mm: tuple[float, float, float] | None = None
    fovea_mm: tuple[float, float] | None = None
    boundaries_px: Float[np.ndarray, "8 N C"] | None = None
    notes: tuple[str, ...] = ()

    @property
    def is_empty(self) -> bool:
        """Whether no voxel has a class and no boundary is known: an eye without marks, or an eye that was not
        labelled."""
        lacks_boundaries = self.boundaries_px is None or not np.isfinite(self.boundaries_px).any()
        return lacks_boundaries and not ((self.codes != 0) & (self.codes != UNLABELLED)).any()

    def check(self, shape: tuple[int, int, int], spacing_mm: tuple[float, float, float], where: str) -> None:
        """Raises UsageError: not the scan's shape, or another spacing."""
        if self.codes.shape != shape:
            raise UsageError(
                f"{where} has {_shape_text(self.codes.shape)} voxels, its scan {_shape_text(shape)} "
                "(B-scans, depth, columns): labels must have the geometry of the scan's own file"
            )
        for axis, actual, expected in zip(
            ("slice", "depth", "column"), self.spacing_mm or spacing_mm, spacing_mm, strict=True
        ):
            if (
                abs(actual / expected - 1) > _SPACING_DIFFERS and actual != 1.0
            ):  # 1 is what writers without a spacing put
                raise UsageError(
                    f"{where} has {actual:.4g} mm between {axis}s, its scan {expected:.4g} mm: the labels are of "
                    "another scan or were resampled; give them in the geometry of the scan's own file"
                )

    def turned(self) -> LabelVolume:
        """The labels of voxels upside down, with the boundaries at their edges."""
        codes = self.codes[:, ::-1]
        return replace(self, codes=codes, boundaries_px=boundaries_of_codes(codes, self.names))

    def known_layers(self, classes: Sequence[str]) -> Bool[np.ndarray, "K N C"]:
        """Whether a class is a layer whose boundaries and voxels are all labelled, by A-scan."""
        count, depth, columns = self.codes.shape
        known_ascans = np.zeros((len(classes), count, columns), bool)
        row, unlabelled = np.arange(depth)[:, None], self.codes == UNLABELLED
        for of_class, name in zip(known_ascans, classes, strict=True):
            upper, lower = layer_edges(name)
            if self.boundaries_px is None or upper is None or lower is None:
                continue
            top, bottom = self.boundaries_px[upper][:, None], self.boundaries_px[lower][:, None]
            hidden = unlabelled & (row >= top) & (row < bottom)
            of_class[:] = np.isfinite(top - bottom)[:, 0] & ~hidden.any(axis=1)
        return known_ascans

    def as_classes(self, classes: Sequence[str]) -> UInt8[np.ndarray, "N R C"]:
        """Codes by `classes`: 1 for the first; what is not among them is background."""
        table = np.zeros(256, np.uint8)
        table[UNLABELLED] = UNLABELLED
        for code, name in enumerate(self.names, start=1):
            table[code] = classes.index(name) + 1 if name in classes else 0
        return table[self.codes]


def _shape_text(shape: Sequence[int]) -> str:
    return " x ".join(map(str, shape))


@dataclass(frozen=True)
class ScanNames:
    """The names that a label file of a scan may have, of a scan that is in no store."""

    sop_instance_uid: str
    file: str
    volume_id: str


class LabelFolder:
    """The label files below `path`, or one file. With `of_bscans` each file labels one single B-scan.

    Raises UsageError: no such path, nothing in it.
    """

    def __init__(self, path: str | Path, of_bscans: bool = False) -> None:
        self.path = Path(path)
        self._of_bscans = of_bscans
        self._one_file = self.path.is_file()
        if not self._one_file and not self.path.is_dir():
            raise UsageError(f"no folder of labels at {path}: expected label volumes in it (docs/segment.md)")
        self.files: dict[str, Path] = {}
        self._parts: dict[Path, list[Path]] = {}  # of the files with endings, those that are read together
        self._keys_parts: dict[Path, list[Path]] = {}  # of the files under several keys of a scan, the same
        self.passed_over: set[Path] = set()  # files whose classes another file of their scan also holds
        ending: dict[str, list[Path]] = {}
        for file in [self.path] if self._one_file else self._label_files():
            key = _key(file)
            if not key:
                continue
            if of_bscans and not self._one_file:
                key = "/".join([*file.relative_to(self.path).parts[:-1], key])
            if key in self.files:
                raise UsageError(f"{self.path} holds two label files for {key}: keep one")
            self.files[key] = file
            if (plain := self._plain(key)) != key:
                ending.setdefault(plain, []).append(file)
        for key, files in ending.items():
            if key not in self.files:
                self.files[key] = files[0]
                self._parts[files[0]] = files
        if of_bscans:
            counts = Counter(key.rpartition("/")[2] for key in self.files)
            for key, file in list(self.files.items()):
                if counts[name := key.rpartition("/")[2]] == 1:
                    self.files[name] = file
        if not self.files:
            raise UsageError(
                f"{self.path} holds no label volume: expected .nii, .nii.gz, .mha, .mhd, .npz, .mat, .xml, .eye, masks "
                "as PNG or TIFF, or DICOM-SEG .dcm files"
            )

    def _plain(self, key: str) -> str:
        """The key without endings such as `_layers`; of single B-scans also without other endings of masks."""
        return label_key((unmasked(key) or key) if self._of_bscans else key)

    def _bscan_label_files(self) -> list[Path]:
        """Files in the order of their names; of images only those with an ending, if there are such."""
        files = [file for file in sorted(self.path.rglob("*")) if file.is_file() and file.name[0] != "."]
        images = [file for file in files if file.suffix.lower() in MASK_SUFFIXES]
        pictures = {file for file in images if self._plain(file.stem) == file.stem}
        return [file for file in files if file not in pictures or len(pictures) == len(images)]

    def _label_files(self) -> list[Path]:
        """Files, and folders of masks, in the order of their names."""
        if self._of_bscans:
            return self._bscan_label_files()
        files: dict[Path, None] = {}
        images: list[Path] = []  # masks of scans of one B-scan, or pictures that lie next to label files
        for file in sorted(self.path.rglob("*")):
            parts = file.relative_to(self.path).parts
            if file.suffix.lower() in MASK_SUFFIXES and len(parts) > 1 and file.is_file():
                depth = 1 if len(parts) == 2 else len(parts) - 2  # KEY/mask, or KEY/CLASS/mask
                files[self.path.joinpath(*parts[:depth])] = None
            elif file.suffix.lower() in MASK_SUFFIXES and file.is_file():
                images.append(file)
            elif not file.is_dir() and _key(file):
                files[file] = None
        if any(map(_named_as_labels, files)):  # the other MetaImages are the scans
            return [file for file in files if _named_as_labels(file) or file.suffix.lower() not in _META_SUFFIXES]
        return list(files) or images

    def file_for(self, scan: IndexEntry | ScanNames) -> Path | None:
        """The label file of a scan; `parts` tells which files under other keys of the scan are read with it.

        Raises UsageError: there are several files, and one is damaged.
        """
        files = self.files_for(scan)
        if self._of_bscans or len(files) < 2:
            return files[0] if files else None
        chosen: dict[Path, set[str]] = {}  # with the names of their classes
        for file in files:
            names = set(self._names_of(self._parts.get(file, [file])))
            held = set[str]().union(*chosen.values())
            if held < names:
                chosen = {}
                held = set()
            if not held & names:
                chosen[file] = names
        first = next(iter(chosen))
        self._keys_parts[first] = [part for file in chosen for part in self._parts.get(file, [file])]
        self.passed_over = (self.passed_over | set(files)) - set(chosen)
        return first

    def files_for(self, scan: IndexEntry | ScanNames) -> list[Path]:
        """The label files of a scan, one for each of its keys."""
        folder, _, name = scan.file.rpartition("/")
        stem = _stem(name)
        by_name = stem if stem in self.files else label_key(stem)
        keys: list[str] = [scan.sop_instance_uid, by_name, scan.volume_id, folder_key(folder)]
        if self._of_bscans:  # the longest end of the picture's path that is a path of a label file
            parents = [part for part in folder.split("/") if part]
            ends = ["/".join(parents[k:]) for k in range(len(parents))]
            keys = [*(f"{end}/{name}" for end in ends for name in (stem, label_key(stem))), *keys]
        files = [self.files[key] for key in dict.fromkeys(keys) if key and key in self.files]
        return list(dict.fromkeys(files))

    def only_file(self, scan: str) -> Path | None:
        """The label file or folder of masks if there is only one, for a scan that has another name.

        Masks that lie in the folder itself belong to one scan. Raises UsageError: several label files, none called
        after `scan`.
        """
        if self._one_file:
            return self.path
        files = list(dict.fromkeys(self.files.values()))
        if len(files) == 1:
            return files[0]
        if mask_files(self.path) and all(file.parent == self.path for file in files):
            return self.path
        if all(file.is_dir() for file in files) and not (self.path / files[0].name / "classes.json").is_file():
            return self.path  # a folder for each class
        raise UsageError(f"{self.path} holds {len(files)} label files, and none has a name that begins with {scan}")

    def source(self, file: Path) -> str:
        """The author of the labels of `file`, as the file or `classes.json` states it; "" if neither does."""
        if file.suffix.lower() == ".npz":
            with _arrays(file) as arrays:
                if "surfaces" in arrays:
                    return "true classes of a phantom"
                return _one_line(str(arrays[SOURCE])) if SOURCE in arrays else ""
        if file.suffix.lower() == ".dcm":
            return segmentation_source(file)
        if file.suffix.lower() in _LAYER_SUFFIXES:
            return ""
        table = self._nearest_table(file)
        stated = "" if table is None else _mapping(table).get(SOURCE, "")
        return _one_line(stated) if isinstance(stated, str) else ""

    def _nearest_table(self, file: Path) -> Path | None:
        """The `classes.json` in a folder of masks or next to `file`, else in the nearest folder above it."""
        top = self.path.parent if self._one_file else self.path
        folders = [folder for folder in (file, *file.parents) if folder == top or top in folder.parents]
        return next((table for folder in folders if (table := folder / "classes.json").is_file()), None)

    @property
    def _classes_path(self) -> Path:
        return (self.path.parent if self._one_file else self.path) / "classes.json"

    def _classes_file(self) -> dict[str, object]:
        """`classes.json`. Raises UsageError: it is absent or not a mapping."""
        file = self._classes_path
        if not file.is_file():
            raise UsageError(
                f"{self.path} holds labels as numbers and no classes.json that names their numbers: {_EXAMPLE}"
            )
        return _mapping(file)

    @cached_property
    def nifti_names(self) -> tuple[str, ...]:
        """Names of 1, 2, ... in `classes.json`; "" for a number without one. Raises UsageError."""
        file = self._classes_path
        try:
            entries = [(code, str(name)) for code, name in self._classes_file().items()]
            named = {int(code): name for code, name in entries if code != SOURCE and code[:1] != "#"}
        except ValueError:
            raise UsageError(f"{file} is not a mapping of whole numbers to names: {_EXAMPLE}") from None
        named = {code: name for code, name in named.items() if code and name.casefold() not in NOT_LABELLED}
        if not named or min(named) < 1 or max(named) > MAX_CLASSES or len(set(named.values())) < len(named):
            raise UsageError(f"{file}: expected a separate name for each of 1 to at most {MAX_CLASSES}; {_EXAMPLE}")
        return tuple(named.get(code, "") for code in range(1, max(named) + 1))

    def names(self, file: Path) -> tuple[str, ...]:
        """Names of the file's classes. Voxels are read only if the names need them."""
        return self._names_of(self.parts(file))

    def _names_of(self, files: Sequence[Path]) -> tuple[str, ...]:
        """Names of the classes of `files`, in their order."""
        return tuple(dict.fromkeys(name for file in files for name in self._names_in_one(file)))

    def _names_in_one(self, file: Path) -> tuple[str, ...]:
        if file.is_dir():
            return mask_names(file)
        if file.suffix.lower() == ".npz":
            with _arrays(file) as arrays:
                if "surfaces" in arrays:
                    return (*PHANTOM_LAYERS, *LESIONS)
                return layers_of_arrays(arrays, file).names if has_layers(arrays) else _names_in(arrays, file)
        if file.suffix.lower() == ".dcm":
            return segment_names(file)
        if file.suffix.lower() in _LAYER_SUFFIXES:
            return read_layers(file).names
        if file.suffix.lower() in MASK_SUFFIXES:
            return self._table(file).names
        return tuple(name for name in self.nifti_names if name)

    def _table(self, file: Path) -> MaskTable:
        """The names of a mask's values: `classes.json` next to it, or in a folder above it. Raises UsageError."""
        table = self._nearest_table(file)
        return read_table(file.parent if table is None else table.parent)

    @property
    def label_count(self) -> int:
        """The number of scans that the label files are for; files that are read together count as one."""
        return len(self._first_files())

    def unused(self, used: Collection[Path]) -> int:
        """The number of label files that belong to no scan, if those in `used` do; counted as in `label_count`."""
        others = {part for parts in self._keys_parts.values() for part in parts[1:]}
        return len(self._first_files() - others - self.passed_over - set(used))

    def _first_files(self) -> set[Path]:
        return set(self.files.values()) - {part for parts in self._parts.values() for part in parts[1:]}

    def parts(self, file: Path) -> list[Path]:
        """`file` and the label files that are read together with it."""
        return self._keys_parts.get(file) or self._parts.get(file, [file])

    def check_frames(self, file: Path, notes: Sequence[Note]) -> None:
        """Checks that the frames that `file` references are B-scans of the same numbers; `notes` are the scan's.

        Raises UsageError: a DICOM Segmentation of a scan with a localizer, whose labels would lie on other B-scans.
        """
        referencing = [part.name for part in self.parts(file) if part.suffix.lower() == ".dcm"]
        if referencing and are_renumbered(notes):
            raise UsageError(
                f"{referencing[0]} references frames of its scan, and one of these is a localizer, so that B-scans "
                "have other numbers: give the labels as NIfTI or as masks"
            )

    def read(
        self,
        file: Path,
        classes: Sequence[str],
        shape: tuple[int, int, int],
        bscans: Sequence[str] | None = (),
        is_turned: bool = False,
    ) -> LabelVolume:
        """The labels of a scan of `shape`.

        bscans: names of the images of the B-scans; () for a scan of one file, None for images of unknown names.
        is_turned: the reader turned the picture upright, and the labels are turned with it. Boundaries that are upright
        already, as octjepa writes them, tell that their labels are too.

        Raises UsageError: damaged, another shape, no whole numbers, a value without a name.
        """
        layers = {part: self._layers_of(part) for part in self.parts(file)}
        turns = is_turned and not any(
            held_layers is not None and held_layers.has_vitreous_on_top for held_layers in layers.values()
        )
        labels = []
        for part, held_layers in layers.items():
            if held_layers is not None:
                labels.append(_of_layers(held_layers.turned(shape[1]) if turns else held_layers, shape, part))
            else:
                read = self._read_voxels(part, classes, shape, bscans)
                labels.append(read.turned() if turns else read)
        return joined(labels)

    def _layers_of(self, file: Path) -> LayerLabels | None:
        """The boundaries and fluid of a file that holds such; None for other label files."""
        if file.is_file() and file.suffix.lower() == ".npz":
            with _arrays(file) as arrays:
                return layers_of_arrays(arrays, file) if "surfaces" not in arrays and has_layers(arrays) else None
        return read_layers(file) if file.suffix.lower() in _LAYER_SUFFIXES and file.is_file() else None

    def _read_voxels(
        self, file: Path, classes: Sequence[str], shape: tuple[int, int, int], bscans: Sequence[str] | None
    ) -> LabelVolume:
        if file.is_dir():
            return _of_masks(read_masks(file, shape, bscans))
        if file.suffix.lower() == ".npz":
            with _arrays(file) as arrays:
                is_phantom = "surfaces" in arrays
            return _phantom(file, classes) if is_phantom else _npz(file)
        if file.suffix.lower() == ".dcm":
            segmentation = read_segmentation(file, shape[0])
            return LabelVolume(segmentation.codes, segmentation.names, segmentation.spacing_mm)
        if file.suffix.lower() in MASK_SUFFIXES:
            return _of_masks(read_mask_file(file, shape, self._table(file)))
        return _numbered(file, self.nifti_names)


def made_automatically(is_adapted: bool = False) -> str:
    """The source of labels that a network of octjepa made: the packaged network, or an adapted one."""
    return f"made automatically by octjepa {version('octjepa')}{', adapted network' if is_adapted else ''}"


def default_classes(names: Sequence[str]) -> tuple[str, ...]:
    """The classes if none were named: all; of a phantom's truth its layers."""
    distinct = tuple(dict.fromkeys(names))
    return tuple(PHANTOM_LAYERS) if set(distinct) == {*PHANTOM_LAYERS, *LESIONS} else distinct


def _mapping(file: Path) -> dict[str, object]:
    """The entries of a `classes.json`. Raises UsageError: it is not a mapping."""
    try:
        named: object = read_object(file)
    except (ValueError, OSError):
        named = None
    if not isinstance(named, dict):
        raise UsageError(f"{file} is not a mapping of whole numbers to names: {_EXAMPLE}")
    return named


def _one_line(text: str) -> str:
    """The printable characters of `text`, at most `_MAX_SOURCE`."""
    return "".join(letter for letter in " ".join(text.split()) if letter.isprintable())[:_MAX_SOURCE]


def _stem(name: str) -> str:
    lower = name.lower()
    return name[: -len(".nii.gz")] if lower.endswith(".nii.gz") else name.rpartition(".")[0] or name


def label_key(stem: str) -> str:
    """The name of a scan or of its labels without endings such as `_layers` or `_11x496x768`."""
    return _ENDING.sub("", stem) or stem


def folder_key(folder: str) -> str:
    """The key of a label file that is named after what it is, in the folder of its scan; "" without a folder."""
    name = folder.rpartition("/")[2]
    return f"{name}/" if name else ""


def joined(parts: Sequence[LabelVolume]) -> LabelVolume:
    """Label volumes of one scan as one, such as layers and fluid of two files.

    A mark of a later part takes precedence over layers and background of an earlier one. The part with boundaries comes
    first. If it has no label, an absent mark of another part means nothing, but a mark counts.
    """
    first, *others = sorted(parts, key=lambda part: part.boundaries_px is None)
    for other in others:
        if other.codes.shape != first.codes.shape:
            raise UsageError(
                f"two label files of one scan have {_shape_text(first.codes.shape)} and "
                f"{_shape_text(other.codes.shape)} voxels: keep the file that fits the scan"
            )
        names = tuple(dict.fromkeys([*first.names, *other.names]))
        old, new = first.as_classes(names), other.as_classes(names)
        codes = np.where((new != 0) & (new != UNLABELLED), new, old)
        if first.boundaries_px is None:
            codes = np.where((codes == UNLABELLED) & (new != UNLABELLED), new, codes)
        first = LabelVolume(
            codes,
            names,
            first.spacing_mm or other.spacing_mm,
            first.fovea_mm or other.fovea_mm,
            first.boundaries_px if first.boundaries_px is not None else other.boundaries_px,
            (*first.notes, *other.notes),
        )
    return first


def _of_layers(labels: LayerLabels, shape: tuple[int, int, int], file: Path) -> LabelVolume:
    try:
        codes = labels.codes(shape)
    except ValueError as error:
        raise UsageError(
            f"{file} holds {error}, its scan {_shape_text(shape)} (B-scans, depth, columns): labels must have the "
            "geometry of the scan's own file"
        ) from None
    return LabelVolume(codes, labels.names, boundaries_px=labels.boundaries_px)


def _of_masks(masks: Masks) -> LabelVolume:
    boundaries = boundaries_of_codes(masks.codes, masks.names)
    return LabelVolume(masks.codes, masks.names, boundaries_px=boundaries, notes=masks.notes)


def _key(file: Path) -> str:
    if not file.is_file():
        return file.name if file.is_dir() and is_mask_folder(file) else ""
    if _named_as_labels(file):
        return folder_key(str(file.parent))
    if file.name.lower().endswith((".nii", ".nii.gz", ".npz", *_META_SUFFIXES, *_LAYER_SUFFIXES, *MASK_SUFFIXES)):
        return _stem(file.name)
    return referenced_scan(file) if file.suffix.lower() == ".dcm" and is_segmentation(file) else ""


def _named_as_labels(file: Path) -> bool:
    """Whether a MetaImage is named after what it is, and not after its scan."""
    return file.suffix.lower() in _META_SUFFIXES and file.stem.casefold() in _NAMED_AS_LABELS


@contextmanager
def _arrays(file: Path) -> Iterator[Any]:
    """The arrays of an .npz. Raises UsageError: none, or damaged."""
    _check_size(file)
    try:
        with file.open("rb") as opened, np.load(opened, allow_pickle=False) as arrays:
            yield arrays
    except (OSError, ValueError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise UsageError(f"{file} is not a label file: it cannot be read as .npz ({type(error).__name__})") from None


def _check_size(file: Path) -> None:
    """Raises UsageError where an .npz declares more than the memory budget, or more than its bytes can hold."""
    from octjepa.read.formats.arrays import check_npz

    try:
        check_npz(file)
    except VolumeRejected as error:
        raise UsageError(f"{file} is not a label file: {error.detail}") from None
    except (OSError, ValueError, EOFError, NotImplementedError, zipfile.BadZipFile, zlib.error) as error:
        raise UsageError(f"{file} is not a label file: it cannot be read as .npz ({type(error).__name__})") from None


def _names_in(arrays: Any, file: Path) -> tuple[str, ...]:
    if "labels" not in arrays or "names" not in arrays:
        raise UsageError(
            f"{file} holds {', '.join(arrays) or 'nothing'}: expected the arrays `labels` and `names`, or `layers` or "
            "`fluid`"
        )
    names = tuple(map(str, np.atleast_1d(arrays["names"])))
    if not names or len(set(names)) < len(names) or len(names) > MAX_CLASSES:
        raise UsageError(f"{file}: `names` has {len(names)} entries; expected 1 to {MAX_CLASSES}, each once")
    return names


def _npz(file: Path) -> LabelVolume:
    with _arrays(file) as arrays:
        names, values = _names_in(arrays, file), arrays["labels"]
        spacing = _numbers(arrays, "spacing_mm", ("slice", "depth", "column"), file)
        fovea = _numbers(arrays, "fovea_mm", ("slice", "column"), file)
    if values.ndim == 4:
        values = _indexed(values, len(names), file)
    codes = _codes(values, names, file)
    boundaries = boundaries_of_codes(codes, names)
    return LabelVolume(codes, names, spacing, fovea, boundaries)  # type: ignore[arg-type]


def _numbers(arrays: Any, name: str, axes: Sequence[str], file: Path) -> tuple[float, ...] | None:
    """The numbers of an optional array, one for each of `axes`. Raises UsageError: another shape, no numbers."""
    if name not in arrays:
        return None
    values = arrays[name]
    if values.shape != (len(axes),) or values.dtype.kind not in "iuf":
        raise UsageError(
            f"{file}: `{name}` has the shape {values.shape} and the type {values.dtype}: expected {len(axes)} numbers "
            f"({', '.join(axes)})"
        )
    return tuple(map(float, values))


def _indexed(one_hot: np.ndarray, count: int, file: Path) -> np.ndarray:
    """Whole numbers of a one-hot array `[N, R, C, K]` or `[N, R, C, 1 + K]` with the background first.

    A voxel without any class is background, or not labelled if the background has a separate channel.
    """
    channels = one_hot.shape[3]
    if channels not in (count, count + 1):
        raise UsageError(f"{file}: `labels` has {channels} channels for {count} names: expected {count} or {count + 1}")
    marked = one_hot != 0
    if (marked.sum(3) > 1).any():
        raise UsageError(f"{file}: `labels` marks voxels as two classes: expected one class a voxel")
    index = marked.argmax(3) + (channels == count)
    return np.where(marked.any(3), index, 0 if channels == count else UNLABELLED)


def _codes(values: np.ndarray, names: Sequence[str], file: Path) -> UInt8[np.ndarray, "N R C"]:
    """Raises UsageError: not three axes, no whole numbers, a number without a name."""
    if values.ndim != 3:
        raise UsageError(f"{file} has {values.ndim} axes; expected B-scans, depth, columns")
    if values.dtype.kind == "b":
        values = values.astype(np.uint8)
    codes = np.unique(values)
    if values.dtype.kind not in "iuf" or not np.isfinite(codes).all() or (codes != np.rint(codes)).any():
        raise UsageError(f"{file} holds values that are not whole numbers: a label volume numbers its classes")
    known_codes = {0, UNLABELLED, *(code for code, name in enumerate(names, start=1) if name)}
    strange = [int(code) for code in codes if int(code) not in known_codes]
    if strange:
        shown = ", ".join(map(str, strange[:5])) + (", ..." if len(strange) > 5 else "")
        named = ", ".join(f"{code} {name}" for code, name in enumerate(names, start=1) if name)
        raise UsageError(
            f"{file} holds the unknown classes {shown}: named are {named}; 0 is background, 255 unlabelled"
        )
    return values.astype(np.uint8)


def _numbered(file: Path, names: tuple[str, ...]) -> LabelVolume:
    """The whole numbers of a NIfTI file or MetaImage."""
    from octjepa.read.formats.metaimage import read_metaimage_values
    from octjepa.read.formats.nifti import read_nifti_volume

    try:
        if file.suffix.lower() in _META_SUFFIXES:
            values, spacing_mm = read_metaimage_values(file)
        else:
            volume = read_nifti_volume(file)
            values, spacing_mm = volume.values, volume.spacing_mm
    except VolumeRejected as error:
        raise UsageError(f"{file} cannot be read as a label volume: {error}") from None
    dz, dy, dx = (1.0 if mm is None else mm for mm in spacing_mm)  # 1: what writers without a spacing put
    codes = _codes(values, names, file)
    return LabelVolume(codes, names, (dz, dy, dx), boundaries_px=boundaries_of_codes(codes, names))


def _phantom(file: Path, classes: Sequence[str]) -> LabelVolume:
    """Layers between true surfaces, then lesions, each in place of what was there."""
    truth = read_truth(file)
    names = [name for name in (*PHANTOM_LAYERS, *LESIONS) if name in classes]
    with _arrays(file) as arrays:
        _, depth, _ = map(int, arrays["shape"])
        dz, dy, dx = map(float, arrays["spacing_mm"])
    frames, columns = truth.surfaces_px.shape[1:]
    codes = np.zeros((frames, depth, columns), np.uint8)
    depth_index = np.arange(depth)[None, :, None]
    for code, name in enumerate(names, start=1):
        if name in PHANTOM_LAYERS:
            top, bottom = (truth.surfaces_px[SURFACES.index(edge)][:, None] for edge in PHANTOM_LAYERS[name])
            codes[(depth_index >= top) & (depth_index < bottom)] = code
        elif name in truth.masks:
            codes[truth.masks[name]] = code
    return LabelVolume(codes, tuple(names), (dz, dy, dx), truth.fovea_mm)
