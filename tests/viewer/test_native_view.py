"""The scan as it came in the viewer: its own voxels, surfaces, thickness, and what to say without it."""

from __future__ import annotations

import io
import json
import shutil
import threading
import time
import weakref
from collections.abc import Callable
from dataclasses import replace
from importlib.metadata import version
from pathlib import Path

import numpy as np
import pydicom
import pytest
from PIL import Image
from pydicom.uid import ExplicitVRLittleEndian, JPEG2000Lossless, RLELossless

import node_page
from oct_dicom import make_dataset, retina, save, use_syntax
from octjepa import load_encoder
from octjepa.checkpoint.boundary_unet import PACKAGED
from octjepa.errors import OctjepaError, UsageError
from octjepa.ingest.build import build_store
from octjepa.layers import BOUNDARIES
from octjepa.phantom import write_cohort
from octjepa.read.one_frame import read_one_frame
from octjepa.read.reader import read_volume
from octjepa.record import to_json
from octjepa.store import Store
from octjepa.tasks.labels.dicom_seg import write_segmentation
from octjepa.tasks.labels.label_files import ScanNames
from octjepa.tasks.labels.layer_labels import LAYER_CLASSES
from octjepa.tasks.nifti import write_nifti
from octjepa.tasks.segmenter.retained_layers import LayerCache, RetainedLayers
from octjepa.tasks.thickness import slice_positions_mm
from octjepa.viewer.listing import MAX_PAGE, VolumeList
from octjepa.viewer.live import Alarm, LiveRun
from octjepa.viewer.scan_layers import LayerState, ScanLayers, measured, sectors
from octjepa.viewer.scans import FirstBscan, NativeFacts, Scans
from octjepa.viewer.server import open_scans
from octjepa.viewer.voxel_classes import ClassMap, VoxelClasses, fluid_map
from octjepa.volume import OCTVolume

pytest.importorskip("starlette")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """eyes/: the two eyes of one person as DICOM; store/: made from them."""
    root = tmp_path_factory.mktemp("native")
    write_cohort(root / "eyes", people=1, seed=3, devices=["heidelberg_spectralis"], size="small", workers=1)
    build_store([root / "eyes"], root / "store", load_encoder("phantom-tiny").recipe.preprocessing)
    return root


@pytest.fixture(scope="module")
def scans(folder: Path) -> Scans:
    return open_scans(folder / "store", encoder="phantom-tiny")


def pixels(body: bytes) -> np.ndarray:
    return np.asarray(Image.open(io.BytesIO(body)))


def test_planes_are_the_files_own_voxels(scans: Scans, folder: Path) -> None:
    name = min(scans.ids)
    about = scans.native_about(name)
    entry = scans.volumes.entry(name)
    volume = read_volume(folder / "eyes" / entry.file)
    assert isinstance(about, NativeFacts)
    assert about.reason == ""
    assert about.shape == volume.shape
    assert about.spacing_mm == volume.spacing_mm
    np.testing.assert_array_equal(pixels(scans.native_plane_png(name, "slice", 3)), volume.pixels[3])
    np.testing.assert_array_equal(pixels(scans.native_plane_png(name, "depth", 5)), volume.pixels[:, 5])
    last = volume.shape[2] - 1
    np.testing.assert_array_equal(pixels(scans.native_plane_png(name, "column", last)), volume.pixels[:, :, last].T)
    with pytest.raises(IndexError):
        scans.native_plane_png(name, "column", last + 1)
    for read in (scans.native_plane_png, scans.surface_lines):
        with pytest.raises(KeyError):
            read(name, "other", 0)
    assert "person" not in json.dumps(about.to_json())


POSITIONS_MM = [0.0, 0.1, 0.2, 1.2, 2.2, 2.3]


def test_positions_of_uneven_b_scans_are_sent(scans: Scans, monkeypatch: pytest.MonkeyPatch) -> None:
    name = min(scans.ids)
    scan = scans.native(name)
    even = scans.native_about(name)
    assert isinstance(even, NativeFacts)
    np.testing.assert_allclose(even.slice_mm, slice_positions_mm(scan.volume), atol=5e-5)
    falling = 5.00001 - np.array(POSITIONS_MM)
    volume = replace(scan.volume, pixels=scan.volume.pixels[: len(falling)], slice_positions_mm=falling)
    uneven = replace(scan, volume=volume, surfaces=scan.surfaces[:, : len(falling)])
    monkeypatch.setattr(scans, "native", lambda _: uneven)
    about = scans.native_about(name)
    assert isinstance(about, NativeFacts)
    assert about.slice_mm == POSITIONS_MM


# A pane whose canvases record what is drawn. Its face has 60 x 60 pixels: a B-scan is ten rows, 0.1 mm ten columns.
PANE = f"""
globalThis.devicePixelRatio = 1;
const lines = [];
const pen = new Proxy({{}}, {{ get: (kept, name) => kept[name] ?? (() => {{}}), set: (kept, name, value) => {{
  kept[name] = value;
  return true;
}} }});
pen.beginPath = () => lines.push([]);
pen.moveTo = pen.lineTo = (x, y) => lines.at(-1).push([x, y]);
pen.ellipse = (x, y, a, b) => {{ for (let t = 0; t <= 144; t++) {{ // as the canvas draws it
  lines.at(-1).push([x + a * Math.cos((t * Math.PI) / 72), y + b * Math.sin((t * Math.PI) / 72)]);
}} }};
const listeners = {{}};
const canvas = () => ({{
  clientWidth: 60, style: {{}}, getContext: () => pen, addEventListener: (name, act) => {{ listeners[name] ??= act; }},
  getBoundingClientRect: () => ({{ left: 0, top: 0, width: 60, height: 60 }}),
}});
const {{ draw }} = await import("./native_drawing.js");
const {{ pointers }} = await import("./native_pointers.js");
const part = () => ({{ canvas: canvas(), caption: {{}} }});
const pane = {{
  facts: {{ shape: [6, 60, 6], spacing_mm: [0.1, 0.01, 0.1], slice_mm: {POSITIONS_MM},
    etdrs: {{ centre: [2, 2.5], nasal: 1, has_rings: false }} }},
  held: {{ face: {{ picture: {{}}, thick: null, kind: "face" }} }},
  scan: part(), cross: part(), face: part(), readout: {{}}, body: {{ hidden: false }}, stretch: {{ value: "1" }},
  etdrs: {{ checked: true }}, place: {{ slice: 0, depth: 0, column: 0 }}, flipped: false,
  zoom: {{ scale: 1, x: 0, y: 0 }},
}};
pointers(pane);
"""


@pytest.mark.skipif(node_page.NODE is None, reason="no node on this machine")
@pytest.mark.parametrize("flipped", [False, True])
def test_etdrs_circles_follow_the_positions_of_uneven_b_scans(tmp_path: Path, flipped: bool) -> None:
    """A circle of 0.5 mm was drawn as if all B-scans were 0.1 mm apart."""
    made = node_page.run_page(
        tmp_path,
        f"""{PANE}
pane.flipped = {str(flipped).lower()};
draw(pane);
made.circle = lines[0];
""",
    )
    circle = np.array(made["circle"])
    index = (60 - circle[:, 1] if flipped else circle[:, 1]) / 10 - 0.5
    inside = (index >= 0) & (index <= 5)
    across_mm = np.interp(index[inside], np.arange(6), POSITIONS_MM) - 0.2
    along_mm = (circle[inside, 0] / 10 - 0.5 - 2.5) * 0.1
    assert inside.sum() > 70
    np.testing.assert_allclose(np.hypot(across_mm, along_mm), 0.5, atol=1e-6)
    assert index.max() == pytest.approx(2.5)  # 0.5 mm are half of the wide gap
    assert index.min() == pytest.approx(-3)  # before the first B-scan the usual spacing goes on


@pytest.mark.skipif(node_page.NODE is None, reason="no node on this machine")
def test_millimetres_under_the_cursor_are_those_of_uneven_b_scans(tmp_path: Path) -> None:
    """The position across the B-scans was the index times the median gap."""
    made = node_page.run_page(
        tmp_path,
        f"""{PANE}
Object.assign(pane.held, {{ face: null, bscan: {{ slice: 3, lines: [] }}, levels: new Uint8Array(4 * 360) }});
listeners.pointermove({{ clientX: 25, clientY: 20.5 }});
made.whole = pane.readout.textContent;
delete pane.facts.slice_mm; // the first B-scan, before the whole file is read
listeners.pointermove({{ clientX: 25, clientY: 20.5 }});
made.first = pane.readout.textContent;
""",
    )
    assert made["whole"] == "slice 4, depth 21, column 3 · 1.20, 0.20, 0.20 mm · intensity 0"
    assert made["first"] == "slice 4, depth 21, column 3 · –, 0.20, 0.20 mm · intensity 0"


def test_the_first_b_scan_is_had_without_the_others(folder: Path, tmp_path: Path) -> None:
    scans = open_scans(folder / "store")
    name = min(scans.ids)
    number = scans.first(name).number
    entry = scans.volumes.entry(name)
    path = folder / "eyes" / entry.file
    volume = read_volume(path)
    assert 0 <= number < volume.shape[0]
    np.testing.assert_array_equal(pixels(scans.first_png(name)), volume.pixels[number])
    for other, notes in ((number, []), (number, ["frames_reversed"]), (number, ["field_outside=0.5", "fill_masked"])):
        frame = read_one_frame(path, other, volume.shape, notes)
        reverse = ("frames_reversed" in notes) != ("frames_reversed" in volume.notes)
        np.testing.assert_array_equal(frame, volume.pixels[-1 - other if reverse else other])
    assert read_one_frame(path, 0, volume.shape, ["axes_transposed"]) is None  # ingest changed its frames
    assert read_one_frame(path, volume.shape[0], volume.shape, []) is None
    assert read_one_frame(path, 0, (volume.shape[0] + 1, *volume.shape[1:]), []) is None  # another scan


def test_a_frame_is_read_alone_from_any_transfer_syntax(tmp_path: Path) -> None:
    frames = retina()
    for syntax in (ExplicitVRLittleEndian, RLELossless, JPEG2000Lossless):
        data = make_dataset(frames)
        use_syntax(data, frames, syntax)
        path = save(data, tmp_path / f"{syntax}.dcm")
        found = read_one_frame(path, 3, frames.shape, [])
        np.testing.assert_array_equal(found, frames[3], err_msg=syntax.name)
    (tmp_path / "scan.npy").write_bytes(b"no DICOM file")
    assert read_one_frame(tmp_path / "scan.npy", 0, frames.shape, []) is None


def test_a_scan_without_a_first_b_scan_is_shown_all_the_same(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder / "store", tmp_path / "deep" / "store")
    alone = open_scans(tmp_path / "deep" / "store")
    assert alone.first(min(alone.ids)) == FirstBscan(None)
    with pytest.raises(KeyError):
        alone.first_png(min(alone.ids))


@pytest.mark.slow
def test_surfaces_and_thickness_are_where_the_retina_is(scans: Scans) -> None:
    name = min(scans.ids)
    scan = scans.native(name)
    ilm, bruch, lower = scan.surfaces[:, scan.opening_slice]
    known = np.isfinite(bruch)
    assert known.mean() > 0.8
    assert (ilm[known] < bruch[known]).all()
    assert (bruch[known] < lower[known]).all()
    frame = scan.volume.pixels[scan.opening_slice].astype(float)
    inside = [
        frame[int(top) + 2 : int(end), column].mean()
        for column, (top, end) in enumerate(zip(ilm, bruch, strict=True))
        if end > top
    ]
    above = [frame[: int(top) - 2, column].mean() for column, top in enumerate(ilm) if top > 12]
    assert np.mean(inside) > 1.5 * np.mean(above)
    answer = scans.etdrs(name)
    assert 150 < answer.sectors["central"] < 500
    assert set(answer.fluid_mm3) == {"intraretinal_fluid", "subretinal_fluid", "sub_rpe"}
    lines = scans.surface_lines(name, "slice", scan.opening_slice)
    assert len(lines) == 8
    assert len(lines[0]) == scan.volume.shape[2]
    np.testing.assert_allclose(
        np.array(lines[0], float), ilm, atol=0.01
    )  # what is shown is what the surface finder found
    rnfl = scans.etdrs(name, layer="rnfl").sectors["central"]
    assert rnfl < answer.sectors["central"] / 2
    assert pixels(scans.thickness_png(name, "rnfl")).shape[:2] == scan.volume.shape[::2]
    for read in (scans.etdrs, scans.thickness_png):
        with pytest.raises(KeyError):
            read(name, layer="other")
    assert scans.etdrs(name, 0.0, 0.0).sectors["central"] is None  # a corner: most of the circle is outside


@pytest.mark.slow
def test_a_sector_beyond_the_field_is_empty_and_a_note_says_so(scans: Scans) -> None:
    name = min(scans.ids)
    volume = scans.native(name).volume
    (_, _, columns), (_, dy, dx) = volume.shape, volume.spacing_mm
    retained = scans.layers.layers(volume)
    rows = np.linspace(20, 90, 8, dtype=np.float32)[:, None, None]
    flat = replace(
        retained,
        boundaries_px=np.broadcast_to(rows, retained.boundaries_px.shape),
        expected_error_um=np.ones_like(retained.expected_error_um),
    )
    entry = scans.volumes.entry(name)
    whole = sectors(measured(volume, flat, entry))
    for sector, share in whole.measured.items():
        assert (whole.sectors[sector] is None) == (share < 0.5)
        assert bool(whole.sector_notes[sector]) == (share < 0.95)
    assert whole.sectors["central"] == pytest.approx(70 * dy * 1000, abs=0.1)
    # The grid about a point 1 mm from the edge of higher columns: the outer ring of that side is beyond the field.
    middle = float(whole.centre[0]) * volume.spacing_mm[0]
    moved = sectors(measured(volume, flat, entry, (middle, (columns - 1) * dx - 1)))
    side = "nasal" if whole.nasal > 0 else "temporal"
    assert moved.centre_from == "chosen"
    assert moved.sectors[f"outer_{side}"] is None
    assert "no value" in moved.sector_notes[f"outer_{side}"]
    unknown = sectors(measured(replace(volume, laterality=None, content_hash=""), flat, entry))
    assert unknown.sectors["inner_nasal"] is None
    assert any("right or left eye is not known" in note for note in unknown.notes)


class SlowCache:
    """Finds layers only when it is let go, and counts how often it is requested."""

    def __init__(self, error: Exception | None = None) -> None:
        self.go, self.requested, self.error = threading.Event(), 0, error

    def layers(self, volume: OCTVolume, advance: Callable[[int], None]) -> RetainedLayers:
        self.requested += 1
        advance(1)
        while not self.go.wait(0.01):
            advance(2)
        if self.error is not None:
            raise self.error
        shape = volume.shape[::2]
        rows = np.zeros((8, *shape), np.float32)
        return RetainedLayers(rows, rows, np.zeros(volume.shape, np.uint8), volume.spacing_mm)


def until(condition: Callable[[], bool]) -> None:
    for _ in range(1000):
        if condition():
            return
        time.sleep(0.01)
    raise AssertionError("it took longer than 10 seconds")


def test_layers_are_found_in_the_background_and_a_scan_that_nobody_asks_for_is_given_up(
    scans: Scans, monkeypatch: pytest.MonkeyPatch
) -> None:
    volume = scans.native(min(scans.ids)).volume
    monkeypatch.setattr("octjepa.viewer.scan_layers._GIVEN_UP_SECONDS", 0.3)
    cache = SlowCache()
    found = ScanLayers(cache)  # type: ignore[arg-type]
    until(lambda: found.state(volume) == LayerState("running", 2, len(volume.pixels)))
    time.sleep(0.6)  # nobody asks
    assert not found._jobs
    until(lambda: found.state(volume).done == 2)
    assert cache.requested == 2
    cache.go.set()
    until(lambda: found.state(volume).state == "ready")
    assert found.layers(volume) is found.layers(volume)
    failing = ScanLayers(SlowCache(OctjepaError("the network cannot be read")))  # type: ignore[arg-type]
    failing._cache.go.set()  # type: ignore[attr-defined]
    until(lambda: failing.state(volume).state == "failed")
    assert failing.state(volume).reason == "the network cannot be read"
    with pytest.raises(UsageError, match="cannot be read"):
        failing.layers(volume)
    failing._cache.error = None  # type: ignore[attr-defined]
    time.sleep(0.6)  # nobody asks
    until(lambda: failing.state(volume).state == "ready")


def test_a_scan_that_is_too_large_is_not_held_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def too_large(*_: object) -> RetainedLayers:
        raise MemoryError

    cache = LayerCache()
    monkeypatch.setattr(cache, "layers", too_large)
    layers = ScanLayers(cache)
    shown = [OCTVolume(np.zeros((3, 20, 20), np.uint8), (0.1, 0.004, 0.02), {}, "someone", "device")]
    until(lambda: layers.state(shown[0]).reason == "the scan is too large for the memory of this machine")
    held = weakref.ref(shown.pop())
    until(lambda: held() is None)


def test_layers_are_retained_for_the_same_pixels_geometry_and_weights(scans: Scans, tmp_path: Path) -> None:
    volume = scans.native(min(scans.ids)).volume
    volume = replace(volume, pixels=volume.pixels[:2], slice_positions_mm=None, content_hash="")
    cache = LayerCache(folder=tmp_path)
    first = cache.layers(volume)
    (file,) = tmp_path.iterdir()
    again = LayerCache(folder=tmp_path).retained(volume)
    assert again is not None
    np.testing.assert_array_equal(again.boundaries_px, first.boundaries_px)
    np.testing.assert_array_equal(again.classes, first.classes)
    assert cache.retained(replace(volume, spacing_mm=(0.2, *volume.spacing_mm[1:]))) is None
    shutil.copytree(PACKAGED, tmp_path / "others")
    with (tmp_path / "others" / "segmenter.json").open("a") as changed:
        changed.write("\n")
    assert LayerCache(tmp_path / "others", tmp_path).retained(volume) is None
    file.write_bytes(file.read_bytes()[:200])
    assert cache.retained(volume) is None


def test_the_caption_of_fluid_names_the_kind_of_network(tmp_path: Path) -> None:
    codes = np.zeros((2, 4, 4), np.uint8)
    for weights, network in ((None, "packaged"), (tmp_path, "adapted")):
        layers = ScanLayers(LayerCache(weights))
        assert fluid_map(codes, layers.is_adapted).caption == f"No fluid was found by the {network} network."
        found = fluid_map(codes + np.uint8(1), layers.is_adapted).caption
        assert found == f"Found by the {network} network: intraretinal fluid."


def test_token_cells_and_similarity_are_drawn_on_the_native_b_scan(scans: Scans) -> None:
    name = min(scans.ids)
    scan = scans.native(name)
    number, column = scan.opening_slice, scan.volume.shape[2] // 2
    depth = int(np.nanmean(scan.surfaces[:2, number, column]))
    position = scans.position(name, number, depth, column)
    assert position.similarity is not None
    assert position.similarity.high == 1.0
    painted = pixels(scans.overlay_png(name, "similarity", number, position.token))
    u, v = painted.shape[0] / scan.volume.shape[1], painted.shape[1] / scan.volume.shape[2]
    there = painted[int(depth * u), int(column * v)]
    assert there[3] > 0
    assert there[:3].tolist() == [253, 231, 37]  # the token clicked is as alike as can be
    assert painted[0, 0, 3] == 0  # vitreous
    assert scans.position(name, number, 0, column).similarity is None
    with pytest.raises(KeyError):
        scans.overlay_png(name, "similarity", number, -1)
    assert pixels(scans.overlay_png(name, "tubes", number)).any()


def test_a_file_that_is_gone_or_changed_is_reported_and_the_rest_goes_on(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder / "store", tmp_path / "deep" / "store")
    alone = open_scans(tmp_path / "deep" / "store")
    first, second = sorted(alone.ids)
    assert "--scans" in alone.native_about(first).reason
    assert alone.slice_png(first, 0)
    shutil.copytree(folder / "eyes", tmp_path / "moved")
    entry = alone.volumes.entry(first)
    other = alone.volumes.entry(second)
    shutil.copy(tmp_path / "moved" / other.file, tmp_path / "moved" / entry.file)
    moved = open_scans(tmp_path / "deep" / "store", [str(tmp_path / "moved")])
    assert "changed since ingest" in moved.native_about(first).reason
    assert moved.native_about(second).reason == ""  # under another path, with the same pixels
    with pytest.raises(UsageError, match="no folder of scans"):
        open_scans(folder / "store", [str(tmp_path / "nothing")])


def test_labels_of_graders_are_laid_over_and_another_shape_is_reported(folder: Path, tmp_path: Path) -> None:
    names = sorted(open_scans(folder / "store").ids)
    shape = open_scans(folder / "store").native(names[0]).volume.shape
    codes = np.zeros(shape, np.uint8)
    codes[:, 4:9] = 1
    for name, labels in zip(names, (codes, codes[:, :-1]), strict=True):
        np.savez(tmp_path / f"{name}.npz", labels=labels, names=np.array(["fluid"]))
    scans = open_scans(folder / "store", labels=tmp_path)
    painted = pixels(scans.overlay_png(names[0], "labels", 0))
    assert (painted[..., 3] > 0).sum() == 5 * shape[2]
    assert scans.legend(names[0], "labels").classes[0].name == "fluid"
    with pytest.raises(UsageError, match="voxels"):
        scans.overlay_png(names[1], "labels", 0)


def captions(scans: Scans, name: str) -> tuple[str, list[str]]:
    legend = scans.legend(name, "labels")
    return legend.caption, [one.name for one in legend.classes]


def test_labels_of_several_keys_are_one_overlay_with_what_was_assumed(tmp_path: Path) -> None:
    entry = ScanNames("1.2.3", "eye.dcm", "0")
    volume = OCTVolume(np.ones((5, 40, 12), np.uint8), (1.0, 1.0, 1.0), {}, "", "")
    rows = np.broadcast_to(np.arange(8)[:, None, None] + 20, (8, 5, 12))
    np.savez(tmp_path / "eye_boundaries.npz", rows=rows, names=np.array(BOUNDARIES), source=np.array("a grader"))
    mask = np.zeros((40, 12), np.uint8)
    mask[4:9] = 1
    (tmp_path / "1.2.3").mkdir()
    for number in (2, 3):
        Image.fromarray(mask).save(tmp_path / "1.2.3" / f"{number}.png")
    (tmp_path / "1.2.3" / "classes.json").write_text('{"1": "fluid"}')

    def shown(format: str) -> ClassMap:
        return VoxelClasses(None, tmp_path).classes("labels", entry, replace(volume, format=format))  # type: ignore[arg-type]

    found = shown("dicom")
    assert set(found.names) == {"fluid", *LAYER_CLASSES}
    assert np.flatnonzero((found.codes == found.names.index("fluid") + 1).any((1, 2))).tolist() == [1, 2]
    assert found.caption == ("Labels, source unknown; a grader. 2 masks for 5 B-scans: their numbers count from 1.")
    with pytest.raises(UsageError, match="holds 2 masks for 5 B-scans that are images"):
        shown("images")


@pytest.mark.slow
def test_the_legend_tells_who_made_the_labels(folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("highdicom")
    plain = open_scans(folder / "store")
    name = min(plain.ids)
    entry, volume = plain.volumes.entry(name), plain.native(name).volume
    codes = np.zeros(volume.shape, np.uint8)
    codes[:, 4:9], codes[:, 12:14] = 1, 2
    classes, octjepa_version = ("fluid", "drusen"), version("octjepa")
    made = f"made automatically by octjepa {octjepa_version}"
    (tmp_path / "nifti").mkdir()
    write_nifti(tmp_path / "nifti" / f"{name}.nii.gz", codes, volume.spacing_mm)
    listed: dict[str, object] = {"1": "fluid", "2": "drusen"}
    for source, caption in (
        ("", "Labels, source unknown."),
        ("two graders\n, masked", "Labels, two graders , masked."),
        (made, f"Labels, {made}."),
        (7, "Labels, source unknown."),
    ):
        named = listed | ({"source": source} if source else {})
        (tmp_path / "nifti" / "classes.json").write_text(json.dumps(named))
        assert captions(open_scans(folder / "store", labels=tmp_path / "nifti"), name) == (caption, [*classes])
    scan = folder / "eyes" / entry.file
    (tmp_path / "dicom").mkdir()
    turned = "frames_reversed" in volume.notes
    write_segmentation(tmp_path / "dicom" / "x.dcm", codes[::-1] if turned else codes, classes, volume.spacing_mm, scan)
    assert captions(open_scans(folder / "store", labels=tmp_path / "dicom"), name) == (f"Labels, {made}.", [*classes])
    file = pydicom.dcmread(tmp_path / "dicom" / "x.dcm")
    file.SegmentSequence[0].SegmentAlgorithmType = "MANUAL"
    file.save_as(tmp_path / "dicom" / "x.dcm")
    both = open_scans(folder / "store", labels=tmp_path / "dicom")
    assert captions(both, name) == (f"Labels, marked by hand; {made}.", [*classes])


@pytest.mark.slow
def test_two_files_of_the_same_labels_give_one_legend_and_others_are_named(folder: Path, tmp_path: Path) -> None:
    pytest.importorskip("highdicom")
    plain = open_scans(folder / "store")
    name = min(plain.ids)
    entry, volume = plain.volumes.entry(name), plain.native(name).volume
    codes = np.zeros(volume.shape, np.uint8)
    codes[:, 4:9], codes[:, 20:] = 1, 255  # a DICOM Segmentation cannot tell unlabelled voxels
    write_nifti(tmp_path / f"{name}.nii.gz", codes, volume.spacing_mm)
    (tmp_path / "classes.json").write_text('{"1": "fluid"}')
    alone = open_scans(folder / "store", labels=tmp_path)
    assert captions(alone, name) == ("Labels, source unknown.", ["fluid"])
    inside = np.where(codes == 255, 0, codes).astype(np.uint8)
    inside = inside[::-1] if "frames_reversed" in volume.notes else inside
    write_segmentation(tmp_path / "x.dcm", inside, ("fluid",), volume.spacing_mm, folder / "eyes" / entry.file)
    made = f"Labels, made automatically by octjepa {version('octjepa')}."
    both = open_scans(folder / "store", labels=tmp_path)
    assert captions(both, name) == (made, ["fluid"])
    assert both.overlay_png(name, "labels", 0) == alone.overlay_png(name, "labels", 0)
    codes[:, 4:9] = 0
    codes[:, 5:7] = 1
    write_nifti(tmp_path / f"{name}.nii.gz", codes, volume.spacing_mm)
    caption, names = captions(open_scans(folder / "store", labels=tmp_path), name)
    assert names == ["fluid"]
    assert caption.startswith(made)
    assert f"are not shown: {name}.nii.gz." in caption


def test_the_list_is_given_out_in_pages(made: Path) -> None:
    volumes = VolumeList(Store.open(made / "store"))
    first, second = volumes.page(limit=5), volumes.page(limit=5, offset=5)
    assert (first.total, first.matching, len(first.volumes)) == (12, 12, 5)
    assert not {row.id for row in first.volumes} & {row.id for row in second.volumes}
    wanted = second.volumes[3].id
    assert volumes.page(limit=5, around=wanted) == second
    assert [row.id for row in volumes.page(search=f"MACULA {wanted}").volumes] == [wanted]
    assert volumes.page(order="doubt").volumes[0].axes[0].uncertain
    assert len(volumes.page(limit=10**9).volumes) <= MAX_PAGE
    others = volumes.same_person(wanted)
    assert len(others) == 1
    shown = volumes.facts(wanted)
    assert [row.person for row in others] == [shown.person]
    person_id = volumes.entry(wanted).person_id
    assert person_id not in json.dumps(to_json([shown, *others]))  # a PatientID may be the number of a record
    of_person = {row.id for row in volumes.page(search=person_id).volumes}
    assert of_person == {wanted, *(row.id for row in others)}


def test_a_run_is_followed_while_it_trains(demo: Path) -> None:
    run = demo / "run"
    shutil.move(run / "checkpoints", demo / "later")
    scans = open_scans(run)
    before = scans.live_answer()
    assert (before.update, before.finished, before.checkpoint) == (2, False, "")
    assert before.charts[0].y == [1.0, 0.5]
    assert scans.about().encoder == ""
    with (run / "metrics.jsonl").open("a") as file:
        file.write(
            json.dumps({"update": 3, "train/loss": 0.25, "monitor/lidar": 1.0, "alarms": {"rankme": "collapse"}}) + "\n"
        )
    shutil.move(demo / "later", run / "checkpoints")
    after = scans.live_answer()
    assert after.update == 3
    assert after.charts[0].y == [1.0, 0.5, 0.25]
    assert after.alarms == [Alarm(3, "rankme", "collapse")]
    assert scans.about().encoder == "tiny_cpu"  # a checkpoint has come
    assert LiveRun(demo).answer().charts == []
