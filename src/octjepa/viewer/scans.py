"""The answers of the viewer about a volume: as it came and as stored, in pictures (PNG) and JSON.

Pictures are in the voxels of the scan or of the store, so that the page can lay one over the other. Of a person only
the eye's side is given, and which other volumes are of the same one.
"""

from __future__ import annotations

import io
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np

from octjepa.canonical.native_mapping import NativeMap
from octjepa.errors import OctjepaError
from octjepa.ingest.native_files import NativeFiles
from octjepa.layers import BOUNDARY_NAMES
from octjepa.notes import Note
from octjepa.read.file_order import FileOrder
from octjepa.read.orientation import has_slice_direction
from octjepa.record import Record
from octjepa.report.figures import eyes
from octjepa.tasks.segmenter.measurement import Measurement
from octjepa.tasks.segmenter.retained_layers import RetainedLayers
from octjepa.tasks.segmenter.scan_picture import LINE_COLOURS
from octjepa.tasks.thickness import slice_positions_mm
from octjepa.viewer.corrections import Corrections
from octjepa.viewer.listing import VolumeList
from octjepa.viewer.live import LiveAnswer, LiveRun
from octjepa.viewer.misread import CasePredictions
from octjepa.viewer.native_scan import NativeScan, coloured, is_blank
from octjepa.viewer.native_surfaces import found_surfaces, native_surfaces, surface_lines
from octjepa.viewer.neighbours import Neighbours
from octjepa.viewer.scan_layers import LAYER_NAMES, LayerState, ScanLayers, SectorMeans, map_range, measured, sectors
from octjepa.viewer.token_colours import SimilarityRange, TokenColours
from octjepa.viewer.voxel_classes import ClassColour, ClassMap, Legend, VoxelClasses, fluid_map, painted

if TYPE_CHECKING:
    from octjepa.encoders import PretrainedEncoder
    from octjepa.recipe import Recipe
    from octjepa.store import Store
    from octjepa.volume import OCTVolume

FLUID = "fluid"  # the overlay of what the network of `ScanLayers` found
_CACHED = 64  # pictures of each kind
Model = tuple["Recipe | None", "PretrainedEncoder | None", str]  # and why there is no encoder


@dataclass(frozen=True)
class Boundary(Record):
    """A boundary that the page draws and lets the user correct."""

    name: str
    colour: str


@dataclass(frozen=True)
class SourceFacts(Record):
    """The shape, spacing and view that all volumes share, and the layers that can be laid over them.

    `missing` says why there is no encoder. `device` and `split` are the filter values of the list. The token grid, its
    patch and the first voxel of the grid (`corner`) are None without a recipe.
    """

    OMITTED: ClassVar[tuple[str, ...]] = ("grid", "patch", "corner")
    shape: tuple[int, ...]
    spacing_mm: tuple[float, ...]
    layers: list[str]
    voxel_layers: list[str]
    retinal_layers: tuple[str, ...]
    volumes: int
    encoder: str
    missing: str
    checkpoint: str
    live: bool
    boundaries: list[Boundary]
    corrections: bool
    notes: list[str]
    predicted: list[str]
    neighbours: bool
    device: list[str]
    split: list[str]
    grid: tuple[int, ...] | None = None
    patch: tuple[int, ...] | None = None
    corner: tuple[int, ...] | None = None


@dataclass(frozen=True)
class NoNativeScan(Record):
    """Why the file of a volume cannot be shown."""

    reason: str


@dataclass(frozen=True)
class NativeFacts(Record):
    """The geometry of a scan as it came, and the layers that can be laid over it; `reason` is "".

    `slice_mm` are the positions of the B-scans from the first, rising; their gaps may be uneven.
    `superior` is 1 if later B-scans are superior, `nasal` 1 if higher columns are nasal, else -1; `nasal` is 0 of an
    unknown eye. `vertical_known`: the file tells which B-scan is the lowest.
    """

    shape: tuple[int, ...]
    spacing_mm: tuple[float, ...]
    slice_mm: list[float]
    notes: tuple[Note, ...]
    uncertain: tuple[str, ...]
    opening_slice: int
    localizer: bool
    superior: int
    nasal: int
    vertical_known: bool
    layers: list[str]
    reason: str = ""


@dataclass(frozen=True)
class FirstBscan(Record):
    """The B-scan that can be shown before the file is read as a whole; None if there is none."""

    ALIASES: ClassVar[Mapping[str, str]] = {"slice": "number"}
    number: int | None


@dataclass(frozen=True)
class CorrectedSlices(Record):
    """The B-scans whose boundaries were corrected by hand and saved."""

    slices: list[int]


@dataclass(frozen=True)
class Position(Record):
    """A native voxel in the stored volume; its tissue token and the similarities to it, None if there is none."""

    canonical: list[float]
    token: int | None
    similarity: SimilarityRange | None


class Scans:
    """The volumes of `store`. Its methods may be called from threads."""

    def __init__(
        self,
        store: Store,
        model: Callable[[], Model] = lambda: (None, None, ""),
        native: NativeFiles | None = None,
        classes: VoxelClasses | None = None,
        live: LiveRun | None = None,
        cases: CasePredictions | None = None,
        neighbours: Neighbours | None = None,
        notes: Sequence[str] = (),
    ) -> None:
        """`model` reads the encoder; it is called again when `live` has another checkpoint.

        `notes` are shown on the page: what of the folder could not be read.
        """
        self.store, self.volumes, self.live = store, VolumeList(store), live
        self.ids = self.volumes.ids
        self.cases, self.neighbours = cases or CasePredictions(None), neighbours or Neighbours(None)
        self.files, self._classes = native or NativeFiles([]), classes or VoxelClasses(None, None)
        self._notes, self.layers = list(notes), ScanLayers()  # of the packaged network
        self.corrections: Corrections | None = None  # where boundaries that are corrected by hand are saved
        self._model, self._lock = model, threading.Lock()
        self._volume = lru_cache(4)(store.read)
        self._native = lru_cache(2)(self._read_native)
        self._stored_surfaces = lru_cache(8)(self._map_surfaces)
        self._measured = lru_cache(2)(self._measure)
        self._first = lru_cache(8)(self._find_first)
        self.en_face_png = lru_cache(_CACHED)(self._en_face_png)
        self._load()

    def _load(self) -> None:
        self.checkpoint = self.live.newest_checkpoint() if self.live else ""
        recipe, self.encoder, self.missing = self._model()
        self.colours = TokenColours(self.store, self.volumes, recipe, self.encoder)
        self.grid_png = lru_cache(_CACHED)(self._grid_png)

    def add_notes(self, notes: Sequence[str]) -> None:
        """Adds notes that the page shows."""
        self._notes.extend(notes)

    def about(self) -> SourceFacts:
        """The facts that all volumes share."""
        preprocessing, recipe, choices = self.store.preprocessing, self.colours.recipe, self.volumes.choices()
        return SourceFacts(
            shape=preprocessing.stored_size,
            spacing_mm=preprocessing.target_spacing_mm,
            layers=self.colours.layers,
            voxel_layers=[FLUID, *self._classes.layers],
            retinal_layers=LAYER_NAMES,
            volumes=len(self.ids),
            encoder="" if self.encoder is None else self.encoder.name,
            missing=self.missing,
            checkpoint=self.checkpoint,
            live=self.live is not None,
            boundaries=[Boundary(*pair) for pair in zip(BOUNDARY_NAMES, LINE_COLOURS, strict=True)],
            corrections=self.corrections is not None,
            notes=self._notes,
            predicted=self.cases.targets,
            neighbours=self.neighbours.table is not None,
            device=choices["device"],
            split=choices["split"],
            grid=None if recipe is None else recipe.grid,
            patch=None if recipe is None else recipe.tokens.patch_size,
            corner=None if recipe is None else preprocessing.margin,
        )

    def live_answer(self) -> LiveAnswer:
        """The curves of the run; if it has another checkpoint than before, its encoder is read again."""
        if self.live is None:
            raise KeyError("live")
        answer = self.live.answer()
        with self._lock:
            if answer.checkpoint and answer.checkpoint != self.checkpoint:
                self._load()
        return answer

    def slice_png(self, volume_id: str, number: int) -> bytes:
        """A B-scan of the store. Raises IndexError: no such slice."""
        pixels = self._volume(volume_id).pixels
        if not 0 <= number < len(pixels):
            raise IndexError(number)
        return png(np.asarray(pixels[number]))

    def _en_face_png(self, volume_id: str) -> bytes:
        volume = self._volume(volume_id)
        depth_mm = self.store.preprocessing.target_spacing_mm[1]
        return png(eyes.en_face(np.asarray(volume.pixels), np.asarray(volume.band), depth_mm))

    def band(self, volume_id: str) -> list[list[list[int]]]:
        """[ILM, lower edge][slice][column]: depth indices of the store's volume, -1 if there is no tissue."""
        band: list[list[list[int]]] = np.asarray(self._volume(volume_id).band).tolist()
        return band

    def central(self, volume_id: str) -> int:
        """The slice to open a volume on: near the middle, and with tissue where the scan fills a part of the grid."""
        return eyes.central((np.asarray(self._volume(volume_id).band[0]) >= 0).sum(axis=1))

    def _grid_png(self, volume_id: str, layer: str, token: int = -1) -> bytes:
        """A pixel per token, one slab of the grid below the other, as `TokenColours` paints it. Raises KeyError."""
        colours = self.colours.colours(volume_id, layer, token)
        depth, height, width, _ = colours.shape
        return png(colours.reshape(depth * height, width, 4))

    def _map_surfaces(self, volume_id: str) -> tuple[NativeMap, np.ndarray]:
        native = self.store.native_map(volume_id)
        return native, native_surfaces(native, np.asarray(self._volume(volume_id).band))

    def _find_first(self, volume_id: str) -> tuple[int, bytes] | None:
        try:
            tissue = np.isfinite(self._stored_surfaces(volume_id)[1][0]).sum(axis=1)
        except OctjepaError:  # the stored volume is damaged; `native_about` says why
            return None
        number = eyes.central(tissue)
        frame = self.files.frame(self.volumes.entry(volume_id), number) if tissue.any() else None
        return None if frame is None or is_blank(frame) else (number, png(frame))

    def first(self, volume_id: str) -> FirstBscan:
        """The B-scan that can be shown before the file is read as a whole."""
        first = self._first(volume_id)
        return FirstBscan(None if first is None else first[0])

    def first_png(self, volume_id: str) -> bytes:
        """The B-scan that `first` names, not checked yet. Raises KeyError: there is none."""
        first = self._first(volume_id)
        if first is None:
            raise KeyError("first")
        return first[1]

    def _read_native(self, volume_id: str) -> NativeScan:
        volume = self.files.read(self.volumes.entry(volume_id))
        return NativeScan(volume, self.store.native_map(volume_id), found_surfaces(volume))

    def native(self, volume_id: str) -> NativeScan:
        """The scan as it came. Raises UsageError that says why there is none."""
        return self._native(volume_id)

    def native_about(self, volume_id: str) -> NativeFacts | NoNativeScan:
        """The geometry of the scan as it came, or why the file cannot be shown."""
        try:
            scan = self.native(volume_id)
        except OctjepaError as error:
            return NoNativeScan(str(error))
        volume = scan.volume
        return NativeFacts(
            shape=volume.shape,
            spacing_mm=volume.spacing_mm,
            slice_mm=[round(float(mm), 4) for mm in slice_positions_mm(volume)],
            notes=volume.notes,
            uncertain=volume.uncertain,
            opening_slice=scan.opening_slice,
            localizer=volume.localizer is not None,
            superior=scan.signs[0],
            nasal=scan.signs[1],
            vertical_known=has_slice_direction(volume) and scan.lines == "horizontal",
            layers=[FLUID, *self._classes.layers, *self.colours.layers],
        )

    def native_plane_png(self, volume_id: str, plane: Literal["slice", "depth", "column"], index: int) -> bytes:
        """A plane of the scan as it came. Raises IndexError; KeyError: no such plane."""
        return png(self.native(volume_id).plane(plane, index))

    def native_face_png(self, volume_id: str) -> bytes:
        """The en face view of the scan as it came."""
        return png(self.native(volume_id).en_face)

    def localizer_png(self, volume_id: str) -> bytes:
        """The fundus picture in the file. Raises KeyError: there is none."""
        picture = self.native(volume_id).volume.localizer
        if picture is None:
            raise KeyError("localizer")
        return png(picture)

    def layer_state(self, volume_id: str) -> LayerState:
        """How far the layers of the scan as it came are. Starts to find them; does not wait."""
        return self.layers.state(self.native(volume_id).volume)

    def _measure(self, volume_id: str, chosen_mm: tuple[float, float] | None = None) -> Measurement:
        volume = self.native(volume_id).volume
        return measured(volume, self._layers_of(volume_id, volume), self.volumes.entry(volume_id), chosen_mm)

    def _layers_of(self, volume_id: str, volume: OCTVolume) -> RetainedLayers:
        """The layers of a scan, as corrected by hand. Waits for them."""
        layers = self.layers.layers(volume)
        return layers if self.corrections is None else self.corrections.applied(volume_id, volume, layers)

    def corrected(self, volume_id: str) -> CorrectedSlices:
        """The B-scans whose boundaries were saved.

        Raises KeyError: corrections are not saved at all. UsageError: those of this scan would not fit its file.
        """
        if self.corrections is None:
            raise KeyError("corrections")
        volume = self.native(volume_id).volume
        FileOrder.of(volume.notes, volume.shape[0])  # refused before the user corrects anything
        return CorrectedSlices(self.corrections.slices(volume_id, volume))

    def correct(self, volume_id: str, number: int, boundaries: object) -> CorrectedSlices:
        """Saves the boundaries of a B-scan, or with None removes them. The answer is that of `corrected`.

        Raises KeyError, IndexError: no such B-scan, UsageError: they are not boundaries of that B-scan.
        """
        if self.corrections is None:
            raise KeyError("corrections")
        volume = self.native(volume_id).volume
        if boundaries is None:
            slices = self.corrections.remove(volume_id, volume, number)
        else:
            slices = self.corrections.save(volume_id, volume, number, boundaries)
        self._measured = lru_cache(2)(self._measure)  # what is being measured now, of the boundaries before, stays out
        return CorrectedSlices(slices)

    def thickness_png(self, volume_id: str, layer: str = "retina") -> bytes:
        """Thickness of a layer in colours, a pixel per A-scan. Waits for the layers. Raises KeyError: no such layer."""
        if layer not in LAYER_NAMES:
            raise KeyError(layer)
        measured = self._measured(volume_id)
        return png(coloured(measured.layers_um[LAYER_NAMES.index(layer)], *map_range(measured, layer), 255))

    def etdrs(self, volume_id: str, slice_index: float = -1, column: float = -1, layer: str = "retina") -> SectorMeans:
        """ETDRS means of a layer about an A-scan, by default about the fovea, with fluid volumes and notes.

        Waits for the layers. Raises KeyError: no such layer. UsageError: the layers cannot be found.
        """
        measured = self._measured(volume_id)
        if slice_index >= 0 and column >= 0:
            at_slice = np.interp(slice_index, np.arange(len(measured.slice_mm)), measured.slice_mm)
            at_column = np.interp(column, np.arange(len(measured.column_mm)), measured.column_mm)
            measured = self._measured(volume_id, (float(at_slice), float(at_column)))
        corrections, volume = self.corrections, self.native(volume_id).volume
        corrected = 0 if corrections is None else len(corrections.slices(volume_id, volume))
        return replace(sectors(measured, layer), corrected=corrected)

    def surface_lines(
        self, volume_id: str, plane: Literal["slice", "depth", "column"], index: int
    ) -> list[list[float | None]]:
        """Boundaries along a plane of the scan as it came: eight, or ILM and Bruch's membrane until eight are found.

        Waits for nothing.
        """
        scan = self.native(volume_id)
        if self.layers.state(scan.volume).state != "ready":
            return surface_lines(scan.surfaces[:2], plane, index)
        return surface_lines(self._layers_of(volume_id, scan.volume).boundaries_px, plane, index)

    def position(self, volume_id: str, number: int, depth: int, column: int) -> Position:
        """The position in the store and the token of a native voxel, with the range of similarities to that token."""
        canonical = self.native(volume_id).canonical(number, depth, column)
        token = self.colours.token_at(canonical)
        if token is None or self.encoder is None:
            return Position(canonical, token, None)
        try:
            return Position(canonical, token, self.colours.similarity(volume_id, token))
        except KeyError:  # no tissue there
            return Position(canonical, None, None)

    def overlay_png(self, volume_id: str, layer: str, number: int, token: int = -1) -> bytes:
        """A layer over a B-scan as it came. Raises KeyError, IndexError; UsageError: labels that do not fit."""
        scan = self.native(volume_id)
        if layer == FLUID or layer in self._classes.layers:
            classes = self._class_map(volume_id, layer)
            if not 0 <= number < len(classes.codes):
                raise IndexError(number)
            return png(painted(classes.codes[number], classes.colours))
        colours = self.colours.colours(volume_id, layer, token)
        assert self.colours.recipe is not None
        corner, patch = np.array(self.store.preprocessing.margin), self.colours.recipe.tokens.patch_size
        return png(scan.cells(colours, number, corner, patch))

    def _class_map(self, volume_id: str, layer: str) -> ClassMap:
        volume = self.native(volume_id).volume
        if layer == FLUID:
            return fluid_map(self.layers.layers(volume).classes, self.layers.is_adapted)
        return self._classes.classes(layer, self.volumes.entry(volume_id), volume)

    def legend(self, volume_id: str, layer: str) -> Legend:
        """The caption, names and colours of a layer of classes. Raises KeyError; UsageError: labels that do not fit."""
        class_map = self._class_map(volume_id, layer)
        return Legend(
            class_map.caption, [ClassColour(*pair) for pair in zip(class_map.names, class_map.colours, strict=False)]
        )


def png(pixels: np.ndarray) -> bytes:
    """A picture of one or four channels as PNG, packed quickly."""
    from PIL import Image

    stream = io.BytesIO()
    Image.fromarray(np.ascontiguousarray(pixels)).save(stream, "PNG", compress_level=1)
    return stream.getvalue()
